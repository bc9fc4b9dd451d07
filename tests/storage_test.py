"""Storage that is full, slow, or loses power; a clock that is set to and fro: nothing that was saved is lost."""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.conftest import need
from tests.forks import trainer
from tests.running import REPOSITORY, curve, environment, lines, start, summary, wait_for_checkpoint
from tests.shim import shim
from trainer import checkpoint

FLAGS = ("--backend=jax", "--model=dense", "--save_every=20", "--log_every=20", "--evaluate_every=never")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one megabyte."""
    directory = tmp_path / "disk"
    directory.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(directory)], capture_output=True, check=False
    )
    need(made.returncode == 0, "a file system of its own can't be mounted: that needs root")
    yield directory
    subprocess.run(["umount", "--lazy", str(directory)], check=False)


def test_a_full_disk_ends_the_run_with_its_state_whole(small_disk, tmp_path):
    run = small_disk / "run"
    trainer(*FLAGS, "--steps=40", "--keep=2", f"--run_dir={run}")
    filler = small_disk / "filler"
    free = shutil.disk_usage(small_disk).free
    filler.write_bytes(bytes(max(0, free - 50_000)))
    ran = trainer(*FLAGS, "--steps=400", "--keep=2", f"--run_dir={run}", code=73)
    assert ran.stderr.count("a checkpoint could not be written and is left out") == 2
    assert "3 times in a row" in ran.stderr and "No space left on device" in ran.stderr
    assert sorted(p.name for p in (run / "checkpoints").glob("0*"))[-1] == "00000040"
    filler.unlink()
    trainer(*FLAGS, "--steps=400", "--keep=2", f"--run_dir={run}")
    trainer(*FLAGS, "--steps=400", f"--run_dir={tmp_path / 'whole'}")
    assert summary(run)["weights_sha256"] == summary(tmp_path / "whole")["weights_sha256"]


FILLS = """
import pathlib
import shutil

import keras


class Fills(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        filler = pathlib.Path("filler")
        if epoch == 2:
            filler.write_bytes(bytes(shutil.disk_usage(".").free - 20_000))
            self.model.optimizer.learning_rate = 100.0  # it gets no better
        else:
            filler.unlink(missing_ok=True)
"""


def test_the_best_is_the_best_that_could_be_written(small_disk):
    """The disk is full when the best is to be saved, and not later; the best before that stays."""
    (small_disk / "fills.py").write_text(FILLS)
    flags = ("--backend=jax", "--model=dense", "--epochs=5", "--keep=1", "--callbacks=fills:Fills", "--run_dir=run")
    ran = trainer(*flags, cwd=small_disk)
    assert ran.stderr.count("a checkpoint could not be written and is left out") == 1
    best = summary(small_disk / "run")["best"]["step"]
    losses = [line["val_loss"] for line in lines(small_disk / "run") if "val_loss" in line]
    assert best == 45 and min(losses) == losses[2]
    assert sorted(p.name for p in (small_disk / "run" / "checkpoints").glob("0*")) == ["00000045", "00000113"]


def test_a_disk_without_a_byte_left(small_disk):
    """Filled while a run goes on, and full at the next start: what a run can be without is left out, once said."""
    run, filler = small_disk / "run", small_disk / "filler"
    flags = (*FLAGS, "--save_every=1s", f"--run_dir={run}")
    process = start(*flags, "--steps=1000000")
    wait_for_checkpoint(process, run, 1)
    with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    err = process.communicate(timeout=60)[1]
    assert process.returncode == 73 and "3 times in a row" in err, err
    assert err.count("metrics.jsonl can't be written") == err.count("000000.json can't be written, and stays") == 1
    done = max(int(path.name) for path in (run / "checkpoints").glob("0*"))
    err = trainer(*flags, f"--steps={done + 10}", code=73).stderr
    assert "No space left on device" in err and "Fix: make room" in err and "Traceback" not in err
    filler.unlink()
    assert f"restored from {run}" in trainer(*flags, f"--steps={done + 10}").stdout
    assert summary(run)["step"] == done + 10


@pytest.mark.parametrize("then", ["delete", "move"])
def test_a_run_directory_that_goes_away(then, tmp_path):
    run = tmp_path / "run"
    process = start(*FLAGS, "--steps=10000000", f"--run_dir={run}")
    wait_for_checkpoint(process, run, 20)
    if then == "move":
        run.rename(tmp_path / "moved")
    while run.exists():  # it may be writing
        shutil.rmtree(run, ignore_errors=True)
    err = process.communicate(timeout=60)[1]
    assert process.returncode == 73 and "put back what was moved or deleted" in err, err
    if then == "move":
        (tmp_path / "moved").rename(run)
        newest = max(int(path.name) for path in (run / "checkpoints").glob("0*"))
        assert "restored from" in trainer(*FLAGS, f"--steps={newest + 20}", f"--run_dir={run}").stdout


@pytest.mark.long
def test_compiled_programs_that_were_cut_are_kept_anew(tmp_path):
    """As by a kill while JAX writes them, or changed on the disk: said once, and the next start is as fast as ever."""
    kept = tmp_path / "compiled"
    flags = (*FLAGS, "--steps=3")
    weights = set()
    for start_number in range(4):
        run = tmp_path / f"run{start_number}"
        err = trainer(*flags, f"--run_dir={run}", JAX_COMPILATION_CACHE_DIR=str(kept)).stderr
        weights.add(summary(run)["weights_sha256"])
        damaged = start_number % 2
        files = sorted(kept.glob("*-cache"))
        assert len(files) > 3 and err.count("can't be read, and is compiled anew") == len(files) * damaged
        assert "persistent compilation cache" not in err
        if not damaged:
            for number, file in enumerate(files):
                content = bytearray(file.read_bytes())
                content[len(content) // 2] ^= 1
                file.write_bytes(content if number % 2 else content[: len(content) // 3])
    assert len(weights) == 1


def test_a_program_is_compiled_once_for_all_devices(tmp_path):
    """Of a device each, as --exact has them; XLA takes as long for each as for the first."""
    flags = ("--strategy=device_mesh", "--devices=4", "--replicas=4", "--steps=2", f"--run_dir={tmp_path / 'run'}")
    trainer(*flags, JAX_COMPILATION_CACHE_DIR=str(tmp_path / "compiled"))
    kept = [path.name.partition("-")[0] for path in (tmp_path / "compiled").glob("*-cache")]
    assert kept.count("jit__finish_step") == 2  # of training and of evaluation


def test_a_death_at_every_call_of_a_save(tmp_path):
    """Whatever a save has done when the process dies, the checkpoint before or the new one is whole."""
    ran = subprocess.run(
        [sys.executable, REPOSITORY / "tests" / "crashes.py", tmp_path],
        env=environment(LD_PRELOAD=shim(), PYTHONPATH=str(REPOSITORY)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    deaths, lost = map(int, ran.stdout.split())
    assert deaths > 40 and lost == 0, ran.stdout

    # What a loss of power may drop is what was not synced: each file, then the directory of the files, before it is
    # given its name; and the directory of that name before an older checkpoint goes.
    log = [line.split(" ", 1) for line in (tmp_path / "log").read_text().splitlines()]
    parent = str(tmp_path / "checkpoints")
    named = log.index(["rename", f"{parent}/00000003"])
    for name in ("model.weights.h5", "manifest.json"):
        written = max(i for i, (call, path) in enumerate(log) if call == "write" and name in path)
        synced = [i for i, (call, path) in enumerate(log) if call == "fsync" and name in path]
        assert written < synced[-1] < named
    temporary = [i for i, (call, path) in enumerate(log) if call == "fsync" and path.startswith(f"{parent}/.00000003")]
    removed = [i for i, (call, path) in enumerate(log) if call == "unlink" and "/00000001" in path]
    assert temporary[-1] < named < log.index(["fsync", parent]) < min(removed)


@pytest.mark.long
def test_slow_storage_costs_saves_and_not_steps(tmp_path):
    """A write takes 20 s: the save that comes meanwhile waits for 10 s and is left out; the last one is not."""
    flags = (*FLAGS, "--steps=60", f"--run_dir={tmp_path}")
    ran = trainer(*flags, LD_PRELOAD=shim(), SHIM_SLOW_FSYNC="20")
    assert "a checkpoint is left out, the 1. so far: the one before is still being written" in ran.stderr
    saved = sorted(p.name for p in (tmp_path / "checkpoints").glob("0*"))
    assert saved[-1] == "00000060" and len(saved) < 4
    assert summary(tmp_path)["bottleneck"].startswith("checkpoints: saves hold the training up")


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_output_that_nobody_can_take_stops_nothing(processes, tmp_path):
    """Standard output and the logs of the processes lie on a full device.

    More is printed than a pipe holds: if nobody read it, who writes would wait for ever.
    """
    flags = (*FLAGS, "--steps=1000", "--log_every=1", "--replicas=2", f"--run_dir={tmp_path / 'run'}")
    command = ["-m", "trainer", *flags]
    if processes > 1:
        for index in range(processes):
            (tmp_path / f"process-{index}.log").symlink_to("/dev/full")
        command = ["-m", "launch.local", "--processes=2", f"--logs={tmp_path}", "--", *flags, "--strategy=device_mesh"]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, *command],
            stdout=full,
            stderr=full,
            cwd=REPOSITORY,
            env=environment(),
            timeout=120,
            check=False,
        )
    assert ended.returncode == 0
    assert len(curve(tmp_path / "run")) == 1000


def test_a_terminal_that_is_closed_saves(tmp_path):
    """A run in the foreground of a terminal gets SIGHUP, can print no more, and is saved all the same."""
    run, (ours, theirs) = tmp_path / "run", os.openpty()
    flags = (*FLAGS, "--steps=100000000", "--save_every=never", "--log_every=100", f"--run_dir={run}")

    # With the terminal for its own, and SIGHUP not ignored, as it is where tests are started by nohup.
    alone = ("env", "--default-signal=HUP", "setsid", "--ctty")
    process = subprocess.Popen(
        [*alone, sys.executable, "-m", "trainer", *flags],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=REPOSITORY,
        env=environment(),
    )
    os.close(theirs)
    while not (run / "metrics.jsonl").exists() or not lines(run):
        assert process.poll() is None
        if select.select([ours], [], [], 0.05)[0]:
            os.read(ours, 2**16)
    os.close(ours)
    try:
        assert process.wait(timeout=60) == 75
    finally:
        process.kill()
    assert max(int(p.name) for p in (run / "checkpoints").glob("0*")) >= 100


def test_a_file_system_without_locks(tmp_path):
    """As Lustre may be mounted: nobody else is kept out of the run, which is said."""
    flags, without = (*FLAGS, "--steps=3", f"--run_dir={tmp_path}"), {"LD_PRELOAD": shim(), "SHIM_NO_LOCKS": "1"}
    assert "lies on a file system without locks (Function not implemented)" in trainer(*flags, **without).stderr
    assert "report.html" in trainer("report", f"--run_dir={tmp_path}", **without).stdout


@pytest.mark.long
def test_a_clock_that_is_set_to_and_fro_changes_nothing(tmp_path):
    flags = (*FLAGS, "--steps=100", "--save_every=1s")
    trainer(*flags, f"--run_dir={tmp_path / 'whole'}")
    for steps in ("--steps=50", "--steps=100"):
        out = trainer(*flags, steps, f"--run_dir={tmp_path / 'run'}", LD_PRELOAD=shim(), SHIM_CLOCK="1").stdout
        assert "h" not in out.partition("eta ")[2].partition(" ")[0]  # no hours are foretold
    assert summary(tmp_path / "run")["weights_sha256"] == summary(tmp_path / "whole")["weights_sha256"]
    assert curve(tmp_path / "run")[-1] == curve(tmp_path / "whole")[-1]
    assert sum(summary(tmp_path / "run")["seconds"].values()) < 120


def test_ctrl_c_saves_and_a_second_one_leaves_at_once(tmp_path):
    """The second comes while the first is being obeyed: in the last save, which slow storage draws out.

    A scheduler's SIGTERMs, which come then, leave it its time.
    """
    flags = ("--backend=jax", "--model=dense", "--save_every=never", "--log_every=100", "--evaluate_every=never")
    run = tmp_path / "run"
    for second in (True, False):
        slow = {"LD_PRELOAD": shim(), "SHIM_SLOW_FSYNC": "2"}
        process = start(*flags, "--steps=100000000", f"--run_dir={run}", **slow)
        wait_for_checkpoint(process, run, 0)
        lines_before = len(lines(run)) if (run / "metrics.jsonl").exists() else 0
        while len(lines(run)) == lines_before:
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        time.sleep(1)
        begin = time.monotonic()
        for number in (signal.SIGINT,) if second else (signal.SIGTERM, signal.SIGTERM):
            process.send_signal(number)
            time.sleep(0.1)
        out, err = process.communicate(timeout=60)
        assert process.returncode == (-signal.SIGINT if second else 75), err
        assert not second or time.monotonic() - begin < 2
        assert second or "Stopped by SIGINT after step" in out
    step = max(int(p.name) for p in (run / "checkpoints").glob("0*")) + 100
    for directory in (run, tmp_path / "whole"):
        trainer(*flags, f"--steps={step}", f"--run_dir={directory}")
    assert summary(run)["weights_sha256"] == summary(tmp_path / "whole")["weights_sha256"]


def test_a_full_disk_is_told_by_verbs_that_write(small_disk):
    run = small_disk / "run"
    trainer("--backend=jax", "--model=mlp(units=8)", "--steps=3", f"--run_dir={run}")
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free))
    for verb in ("export", "report"):
        said = trainer(verb, f"--run_dir={run}", code=73).stderr
        assert "can't be written" in said and "No space left" in said and "Traceback" not in said
        assert not (run / ".export").exists()


def test_a_checkpoint_that_a_run_removes_is_not_taken_for_a_damaged_one(tmp_path):
    trainer("--backend=jax", "--steps=3", "--save_every=1", "--keep=4", f"--run_dir={tmp_path}")
    found = checkpoint.newest(tmp_path / "checkpoints")
    assert next(found)[0].name == "00000003"
    checkpoint.remove(tmp_path / "checkpoints" / "00000002")  # as a run does that goes on
    assert [path.name for path, _ in found] == ["00000001", "00000000"]
