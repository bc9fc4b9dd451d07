"""Callbacks with which processes fail, and models and data by which they do."""

import json
import multiprocessing
import os
import pathlib
import time
from concurrent import futures

import keras
import numpy as np


class Uneven:
    """Images that are larger from example 300 on."""

    def __len__(self):
        return 600

    def read(self, ids):
        side = 16 if (ids >= 300).any() else 8
        return np.zeros((len(ids), side, side, 1), np.uint8), np.zeros(len(ids), np.int32)


def uneven():
    return type("Data", (), {"train": Uneven(), "evaluation": Uneven(), "classes": 10})


def rare():
    """Of 2,000 inputs each example has one, so that most of a kernel's gradient is zero; labels are large."""
    ids = np.random.default_rng(0).integers(0, 2000, 3200)
    examples = np.eye(2000, dtype=np.float32)[ids], np.where(ids % 2, 1e3, -1e3).astype(np.float32)[:, None]
    return type("Data", (), {"train": examples})


def linear(input_shape):
    model = keras.Sequential([keras.Input(input_shape), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model


def unseeded(input_shape, classes):
    model = keras.Sequential([keras.Input(input_shape), keras.layers.Flatten(), keras.layers.Dense(classes)])
    model.set_weights([np.random.default_rng().normal(size=weight.shape) for weight in model.weights])
    return model


def in_any_order(input_shape, classes):
    model = keras.Sequential([keras.Input(input_shape), keras.layers.Flatten()])
    for activation in {"relu", "sigmoid", "softplus", "tanh"}:
        model.add(keras.layers.Activation(activation, name=activation))
    model.add(keras.layers.Dense(classes))
    return model


def of_any_width(input_shape, classes):
    widths = {"few": 4, "some": 8, "many": 16, "more": 32}
    layers = [keras.layers.Dense(widths[name]) for name in {*widths}]
    return keras.Sequential([keras.Input(input_shape), keras.layers.Flatten(), *layers, keras.layers.Dense(classes)])


def says_cores():
    """The digits, and how many cores are there to read them."""
    from input_pipeline.cores import cores
    from input_pipeline.digits import load

    print(f"cores: {cores()}", flush=True)
    return load()


def slowly_built(input_shape, classes):
    print("building", flush=True)
    for _ in range(100):  # in Python, where signals are handled
        time.sleep(0.1)
    return keras.Sequential([keras.Input(input_shape), keras.layers.Flatten(), keras.layers.Dense(classes)])


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


class EndsOne(keras.callbacks.Callback):
    """Ends the run at a logged step, but in process 1 alone, as one that looks at its clock may."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._step = step

    def on_train_batch_end(self, batch, logs=None):
        index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
        self.model.stop_training = index == 1 and batch + 1 >= self._step


class Always(keras.callbacks.Callback):
    """Fails at a logged step, in every start."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._step = step

    def on_train_batch_end(self, batch, logs=None):
        if batch + 1 >= self._step:
            raise RuntimeError("the planted fault")


class Touch(keras.callbacks.Callback):
    """Makes a file at a logged step."""

    def __init__(self, step: int, file: str) -> None:
        super().__init__()
        self._step, self._file = step, pathlib.Path(file)

    def on_train_batch_end(self, batch, logs=None):
        if batch + 1 == self._step:
            self._file.touch()


class Greedy(keras.callbacks.Callback):
    """Takes memory without end from a logged step on."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._step, self._taken = step, []

    def on_train_batch_end(self, batch, logs=None):
        while batch + 1 >= self._step:
            self._taken.append(b"x" * 2**24)


class Flip(keras.callbacks.Callback):
    """Flips the lowest bit of one weight in the copy of the last device, at a logged step, in the first start."""

    def __init__(self, step: int, once: str) -> None:
        super().__init__()
        self._step, self._once = step, pathlib.Path(once)

    def on_train_batch_end(self, batch, logs=None):
        if batch + 1 != self._step or self._once.exists():
            return
        self._once.touch()
        variable = self.model.trainable_variables[0].value
        if keras.config.backend() == "tensorflow":
            copy = variable.values[-1]
            copy.assign(_flipped(copy.numpy()))
            return
        import jax

        copies = [shard.data for shard in variable.addressable_shards]
        copies[-1] = jax.device_put(_flipped(np.array(copies[-1])), copies[-1].device)
        changed = jax.make_array_from_single_device_arrays(variable.shape, variable.sharding, copies)
        self.model.trainable_variables[0]._value = changed


def _flipped(values: np.ndarray) -> np.ndarray:
    values.reshape(-1).view(np.uint32)[-1] ^= 1
    return values


class Sleep(keras.callbacks.Callback):
    """Sleeps at each logged step."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(self._seconds)


class SlowSource:
    """The digits, each of which takes its time."""

    def __init__(self, source, seconds: float) -> None:
        self._source, self._seconds = source, seconds

    def __len__(self):
        return len(self._source)

    def read(self, ids):
        time.sleep(self._seconds * len(ids))
        return self._source.read(ids)


def slow_data(seconds: float = 0.0, evaluation: float = 0.0):
    """Digits that are read slowly, each in so many seconds, but by processes with $FAST."""
    from input_pipeline import digits

    data = digits.load()
    if os.environ.get("FAST"):
        seconds = evaluation = 0.0
    sources = SlowSource(data.train, seconds), SlowSource(data.evaluation, evaluation)
    return type("Data", (), {"train": sources[0], "evaluation": sources[1], "classes": 10})


class ReadByProcesses:
    """Examples that come by way of a process beside."""

    def __init__(self, source, how: str, seconds: float) -> None:
        self._source, self._seconds = source, seconds
        self._processes = futures.ProcessPoolExecutor(1, multiprocessing.get_context(how))

    def __len__(self):
        return len(self._source)

    def read(self, ids):
        seconds = self._seconds if len(ids) > 512 else 0.0
        return self._processes.submit(_hand_on, self._source.read(ids), seconds).result()


def _hand_on(examples, seconds: float):
    time.sleep(seconds)
    return examples


def read_by_processes(how: str, seconds: float = 0.0):
    """Digits that a process hands on, after so many seconds; `how` it is started: fork, spawn, or as Processes does."""
    from input_pipeline import digits, processes

    train = digits.load().train
    train = processes.Processes(train) if how == "ours" else ReadByProcesses(train, how, seconds)
    return {"train": train, "classes": 10}


class StallingSource:
    """The digits, whose reads wait while there is a file, as of a disk that does not answer; `.met` tells."""

    def __init__(self, source, file: str) -> None:
        self._source, self._file = source, pathlib.Path(file)

    def __len__(self):
        return len(self._source)

    def read(self, ids):
        while self._file.exists():
            self._file.with_suffix(".met").touch()
            time.sleep(0.01)
        return self._source.read(ids)


def stalling_data():
    """Digits that stall while the file that $STALLS names is there."""
    from input_pipeline import digits

    data, file = digits.load(), os.environ.get("STALLS", "/nothing")
    sources = StallingSource(data.train, file), StallingSource(data.evaluation, file)
    return type("Data", (), {"train": sources[0], "evaluation": sources[1], "classes": 10})


class StallingHereAndThere(StallingSource):
    """Only reads of examples that don't follow on one another stall, such as those that pictures are made of."""

    def read(self, ids):
        return super().read(ids) if (np.diff(ids) > 1).any() else self._source.read(ids)


def stalling_pictures():
    """Images; reads for pictures stall while the file that $STALLS names is there."""
    from input_pipeline import synthetic

    data = synthetic.load(evaluation_examples=1100)
    evaluation = StallingHereAndThere(data.evaluation, os.environ.get("STALLS", "/nothing"))
    return type("Data", (), {"train": data.train, "evaluation": evaluation, "classes": 10})


class Heavy(keras.layers.Layer):
    """Nothing but work, of a second or so, in evaluation."""

    def call(self, x, training=False):
        if training:
            return x
        square = keras.ops.full((2500, 2500), 1e-4) + keras.ops.mean(x)
        return x + 0.0 * keras.ops.mean(keras.ops.matmul(square, square))


def slow_to_evaluate(input_shape, classes):
    layers = [
        keras.Input(input_shape),
        keras.layers.Rescaling(1 / 255),
        keras.layers.Flatten(),
        Heavy(),
        keras.layers.Dense(classes),
    ]
    return keras.Sequential(layers)
