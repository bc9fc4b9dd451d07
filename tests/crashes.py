"""Dies at each call to the system that a save makes, and looks what is left. Run under tests/shim.c.

python tests/crashes.py DIRECTORY: prints the number of deaths, and of those after which nothing could be restored.
"""

import ctypes
import itertools
import os
import pathlib
import shutil
import sys

os.environ["KERAS_BACKEND"] = "numpy"  # holds no threads and no device, so that a process can be forked

import keras

from trainer import checkpoint
from trainer.checkpoint import Damaged
from trainer.storage import saving


class Saved:
    """What saving.py needs of a program."""

    def __init__(self) -> None:
        self.model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, name="a"), keras.layers.Dense(2)])
        self.model.compile("adam")
        self.optimizer = self.model.optimizer
        self.optimizer.build(self.model.trainable_variables)
        optimizer = {f"optimizer/{v.path}": v for v in self.optimizer.variables}
        self.variables = {v.path: v for v in self.model.variables} | optimizer

    def values(self):
        return {path: keras.ops.convert_to_numpy(v.value) for path, v in self.variables.items()}


def save(program, parent, step):
    """As recovery.py does: commits one, and removes the one before the last."""
    saving.write(parent, program, program.values(), {"step": step})
    for old in checkpoint.steps(parent)[:-2]:
        shutil.rmtree(parent / f"{old:08d}")


def deaths(program, shim, parent, step):
    """(deaths, those after which nothing good is left of the step or the one before) of saves of a step."""
    before = max(checkpoint.steps(parent))
    copy = parent.with_name("copy")
    lost = 0
    for calls in itertools.count():
        shutil.copytree(parent, copy)
        child = os.fork()
        if not child:
            shim.shim_die_after(ctypes.c_long(calls))
            save(program, copy, step)
            os._exit(0)
        ended = os.waitpid(child, 0)[1]
        checkpoint.tidy(copy)  # as the next start does
        verdicts = [manifest for _, manifest in checkpoint.newest(copy)]
        good = [m["step"] for m in verdicts if not isinstance(m, Damaged)]
        # Whatever the moment: the newest is whole, and it is the last one or the one before.
        lost += not good or good[0] < before or isinstance(verdicts[0], Damaged)
        shutil.rmtree(copy)
        if ended != 9:
            return calls, lost


def main(directory: pathlib.Path) -> None:
    program, shim = Saved(), ctypes.CDLL(None)
    parent, alone = directory / "checkpoints", directory / "alone"
    for folder, steps in ((parent, (1, 2)), (alone, (3,))):
        folder.mkdir()
        for step in steps:
            save(program, folder, step)
    counts = [deaths(program, shim, folder, 3) for folder in (parent, alone)]
    shim.shim_log(str(directory / "log").encode())
    save(program, parent, 3)
    shim.shim_log(None)
    print(*(sum(each) for each in zip(*counts, strict=True)))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
