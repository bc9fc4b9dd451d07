"""The faults of the drill, each caused for real."""

import contextlib
import os
import pathlib
import random
import signal
import time
from collections.abc import Callable, Iterator

from trainer import checkpoint
from trainer.errors import OK, PREEMPTED, STORAGE
from trainer.patient import ENOUGH, NotCaused, Patient

Fault = Callable[[Patient], str]  # causes a fault; returns what it did


def _killed_at_start(patient: Patient) -> str:
    moments = [random.Random(i).uniform(0.0, 3.0) for i in range(3)]
    for moment in moments:
        patient.start()
        time.sleep(moment)
        patient.kill()
    return f"SIGKILL after {', '.join(f'{m:.1f}s' for m in moments)}"


def _killed_in_steps(patient: Patient) -> str:
    at = []
    for _ in range(2):
        done = patient.saved()
        patient.start()
        _wait_for_next(patient, done)
        patient.kill()
        at.append(patient.saved()[-1])
    return f"SIGKILL after the checkpoints of steps {', '.join(map(str, at))}"


def _wait_for_next(patient: Patient, done: list[int]) -> None:
    patient.wait_for(lambda: patient.saved()[-1:] > done[-1:], "the next checkpoint")


def _killed_in_saves(patient: Patient) -> str:
    for i in range(3):
        patient.start()
        patient.wait_for(lambda: any(patient.checkpoints.glob(".0*")), "a save")
        time.sleep(i * 0.002)
        patient.kill()
    return "3 times SIGKILL while a checkpoint was being written"


def _told_to_stop(patient: Patient) -> str:
    patient.start()
    patient.wait_for(lambda: len(patient.saved()) > 1, "a checkpoint")
    patient.kill(signal.SIGTERM)
    code = patient.ended()
    if code != PREEMPTED:
        raise NotCaused(f"ended with {code}")
    return f"SIGTERM; ended with {code} at step {patient.saved()[-1]}"


def _frozen(patient: Patient) -> str:
    patient.start()
    patient.wait_for(lambda: len(patient.saved()) > 1, "a checkpoint")
    patient.kill(signal.SIGSTOP)
    time.sleep(2)
    patient.kill(signal.SIGCONT)
    time.sleep(0.5)
    patient.kill()
    return "SIGSTOP for 2s, SIGCONT, SIGKILL"


def _slowed(patient: Patient) -> str:
    process = patient.start()
    patient.wait_for(lambda: bool(patient.saved()), "a checkpoint")
    for _ in range(20):
        patient.kill(signal.SIGSTOP)
        time.sleep(0.05)
        patient.kill(signal.SIGCONT)
        time.sleep(0.05)
    process.wait(ENOUGH)
    return "half of the time stopped, for 2s"


def _damaged(harm: Callable[[pathlib.Path], str]) -> Fault:
    def fault(patient: Patient) -> str:
        patient.start()
        patient.wait_for(lambda: len(patient.saved()) > 2, "3 checkpoints")
        patient.kill()
        newest = patient.checkpoints / f"{patient.saved()[-1]:08d}"
        return f"SIGKILL; {harm(newest)} of step {int(newest.name)}"

    return fault


def _truncate(path: pathlib.Path) -> str:
    file = path / checkpoint.WEIGHTS
    os.truncate(file, file.stat().st_size // 2)
    return f"{file.name} cut to half"


def _flip(path: pathlib.Path) -> str:
    file = path / checkpoint.WEIGHTS
    with open(file, "r+b") as opened:
        opened.seek(file.stat().st_size * 2 // 3)
        byte = opened.read(1)[0]
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([byte ^ 1]))
    return f"one bit flipped in {file.name}"


def _manifest(path: pathlib.Path) -> str:
    (path / checkpoint.MANIFEST).unlink()
    return "manifest deleted"


def _full_disk(patient: Patient) -> str:
    patient.start()
    patient.wait_for(lambda: len(patient.saved()) > 1, "2 checkpoints")
    patient.kill()
    saved = patient.checkpoints / f"{patient.saved()[-1]:08d}" / checkpoint.WEIGHTS
    code = patient.start(limit=saved.stat().st_size // 2).wait(ENOUGH)
    if code != STORAGE:
        raise NotCaused(f"with no room, it ended with {code}: {patient.last_words()}")
    return f"no room for a checkpoint: ended with {code}"


def _read_only(patient: Patient) -> str:
    if os.getuid() == 0:
        raise NotCaused("user 0 may write everywhere")
    patient.start()
    patient.wait_for(lambda: len(patient.saved()) > 1, "2 checkpoints")
    patient.kill()
    with _unwritable(patient.checkpoints.parent):
        begin = time.monotonic()
        code = patient.start().wait(ENOUGH)
    if code == OK:
        raise NotCaused("it wrote all the same")
    return f"may not write: ended with {code} after {time.monotonic() - begin:.0f}s"


@contextlib.contextmanager
def _unwritable(directory: pathlib.Path) -> Iterator[None]:
    paths = [directory, *(p for p in directory.rglob("*") if p.is_dir()), directory / "lock"]
    modes = {path: path.stat().st_mode for path in paths}
    for path in paths:
        path.chmod(0o444 if path.is_file() else 0o555)
    try:
        yield
    finally:
        for path, mode in modes.items():
            if path.exists():
                path.chmod(mode)


FAULTS: dict[str, Fault] = {
    "killed at the start": _killed_at_start,
    "killed between steps": _killed_in_steps,
    "killed while saving": _killed_in_saves,
    "told to stop": _told_to_stop,
    "frozen, then killed": _frozen,
    "slowed": _slowed,
    "newest checkpoint cut": _damaged(_truncate),
    "newest checkpoint flipped": _damaged(_flip),
    "newest manifest deleted": _damaged(_manifest),
    "disk full": _full_disk,
    "permission lost": _read_only,
}
