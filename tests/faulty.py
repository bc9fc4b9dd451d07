"""A callback with which process 1 fails once: raises, or is stuck."""

import json
import os
import pathlib
import time

import keras


class Fail(keras.callbacks.Callback):
    """Fails in process 1 at the first logged step from `step` on, unless the file `once` exists; it then does."""

    def __init__(self, step: int, once: str, stuck: bool = False) -> None:
        super().__init__()
        self._step, self._once, self._stuck = step, pathlib.Path(once), stuck
        self._index = json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"]["index"]

    def on_train_batch_end(self, batch, logs=None):
        if self._index == 1 and batch >= self._step and not self._once.exists():
            self._once.touch()
            if self._stuck:
                time.sleep(3600)
            raise RuntimeError("the planted fault")


class Always(keras.callbacks.Callback):
    """Fails at a logged step, in every start."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._step = step

    def on_train_batch_end(self, batch, logs=None):
        if batch + 1 >= self._step:
            raise RuntimeError("the planted fault")


class Greedy(keras.callbacks.Callback):
    """Takes memory without end from a logged step on."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._step, self._taken = step, []

    def on_train_batch_end(self, batch, logs=None):
        while batch + 1 >= self._step:
            self._taken.append(b"x" * 2**24)
