"""How long does a whole checkpoint take, to write and to read? Beside the same bytes alone, and Keras's own files.

python -m benchmarks.save [millions of parameters]

Ours holds a digest of each variable and of the file, and is on the disk before it has its name; it is checked before it
is read, or as it arrives. Keras's files are not checked. How long a save holds the training up is another
question: benchmarks.save_stall.
"""

import itertools
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import page, paired
from trainer import backend
from trainer.config import Config

# 0.85 of the bandwidth of a write with fsync; 1.3 of the time to read and to copy; 1 % beside the variables.
_SAVE, _RESTORE, _SIZE = 1 / 0.85, 1.3, 1.01


def main(millions: float) -> None:
    """Saves and restores the same variables, in turn with each rival."""
    backend.prepare("jax")
    with backend.quiet():
        from trainer import assembly, checkpoint
        from trainer.storage import saving
    from trainer.peers import Peers

    config = Config(backend="jax", model=f"benchmarks.save_stall:build(millions={millions})")
    program = assembly.assemble(config, Peers()).program
    model = program.model
    model.compile(program.optimizer)  # Keras saves the optimizer of a compiled model alone
    values = program.values()
    state = np.concatenate([value.reshape(-1).view(np.uint8) for value in values.values()])
    with tempfile.TemporaryDirectory() as scratch:
        raw, of_keras, own = (pathlib.Path(scratch, name) for name in ("raw", "keras.weights.h5", "own"))
        own.mkdir()
        steps = itertools.count(1)

        def write_raw() -> None:
            with open(raw, "wb") as file:
                file.write(state.data)
                file.flush()
                os.fsync(file.fileno())

        def read() -> None:
            path = own / f"{checkpoint.steps(own)[-1]:08d}"
            saving.read(path, program, checkpoint.verify(path, arrays=False))  # as a start does

        def write() -> None:
            saving.write(own, program, values, {"step": next(steps)})
            for step in checkpoint.steps(own)[:-1]:  # as the rivals' files, which are written over
                shutil.rmtree(own / f"{step:08d}")

        def write_keras() -> None:
            model.save_weights(of_keras)
            with open(of_keras, "rb+") as file:  # or whoever comes next would wait for the disk
                os.fsync(file.fileno())

        saves = {"own": write, "raw": write_raw, "keras": write_keras}
        saved = paired.in_turn({name: _side(work) for name, work in saves.items()})
        written = sum(file.stat().st_size for file in (own / f"{checkpoint.steps(own)[-1]:08d}").iterdir())

        loads = {"own": read, "raw": lambda: np.fromfile(raw, np.uint8).copy()}
        loads |= {"keras": lambda: model.load_weights(of_keras)}
        for name in ("own", "keras"):
            _check(program, values, loads[name])
        loaded = paired.in_turn({name: _side(work) for name, work in loads.items()})
    size = f"{state.size / 1e6:.0f} MB of variables"
    rows = []
    for what, found, bare, target, rival in (
        ("written", saved, "write and fsync of as many bytes", _SAVE, "save_weights and fsync"),
        ("read and checked", loaded, "read and copy of as many bytes", _RESTORE, "load_weights, not checked"),
    ):
        for name, theirs, limit in ((bare, found["raw"], target), (rival, found["keras"], None)):
            ratio = paired.ratio(found["own"], theirs)
            rows.append(page.compared(f"{size}, {what}", name, found["own"], theirs, ratio, 1e-3, "ms", limit))
    value, own_size = written / state.size, f"{written / 1e6:.1f} MB"
    theirs_size = f"{state.size / 1e6:.1f} MB"
    rows.append(page.Row(f"{size}, on the disk", "their bytes", own_size, theirs_size, f"{value:.4f}", value, _SIZE))
    page.record(
        "checkpoint",
        "How long does a whole checkpoint take?",
        "A model of a few large layers and Adam's state; ours with digests of the file and of each variable, on the "
        "disk before it has its name",
        rows,
    )


def _side(work: Callable[[], object]) -> Callable[[], float]:
    """What both sides did is compared by `_check`."""

    def once() -> float:
        work()
        return 1.0

    return once


def _check(program: Any, values: dict[str, np.ndarray], load: Callable[[], object]) -> None:
    """What was saved comes back."""
    for variable in program.variables.values():
        variable.assign(np.zeros_like(variable))
    load()
    if any((now != values[path]).any() for path, now in program.values().items()):
        raise SystemExit("variables are not what was saved")


if __name__ == "__main__":
    main(float([*sys.argv[1:], "20"][0]))
