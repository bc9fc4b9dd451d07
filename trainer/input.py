"""The verb input: how fast the data come, without a model, beside what this machine can do at most."""

import contextlib
import dataclasses
import itertools
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from input_pipeline import order
from input_pipeline.ahead import in_order
from input_pipeline.blocks import block_steps
from input_pipeline.cores import cores
from input_pipeline.pipeline import Pipeline
from input_pipeline.source import ids_at, read
from input_pipeline.structure import flatten
from trainer.config import Config
from trainer.errors import OK
from trainer.loading import load_dataset
from trainer.monitoring.readable import size

_ONE, _SEVERAL = "source, one thread", "source, a thread a core"
_SECONDS = 3.0  # that each stage is measured for
_CEILING = 2**26  # bytes that are copied and read to measure the machine


def run(config: Config) -> int:
    """Prints a table of stages. Returns the exit code."""
    begin = time.perf_counter()
    data = load_dataset(config)
    opened = time.perf_counter() - begin
    replicas = config.replicas or 1
    pace = data.pace()
    block = block_steps(data.train, config.global_batch, pace)
    pipeline = Pipeline(
        data.train,
        config.seed,
        config.global_batch,
        replicas,
        [range(replicas)],
        block,
        data.labels,
        prefetch=config.prefetch,
        augment=data.augment,
        pace=pace,
    )
    examples = block * config.global_batch
    element = pipeline.read_block(0)
    bytes_ = sum(leaf.nbytes for leaf in flatten(element)) / examples
    positions = np.arange(examples)
    ids = ids_at(data.train, config.seed, positions)
    of_tensorflow = keras.config.backend() == "tensorflow"
    blocks = pipeline.dataset().as_numpy_iterator() if of_tensorflow else pipeline.blocks()
    rates = {
        "order of the examples": _rate(
            lambda i: order.order(config.seed, positions + i * examples, len(data.train)),
        ),
        _ONE: _rate(lambda _: read(data.train, ids)),
        _SEVERAL: _rate_of_threads(lambda _: read(data.train, ids)),
        "a block, one thread": _rate(dataclasses.replace(pipeline, pace=0.0).read_block),
        "pipeline": _rate(lambda _: next(blocks)),
    }
    speeds = {name: rate * examples for name, rate in rates.items()}
    ceilings = {f"machine: {name}": rate / bytes_ for name, rate in _machine().items()}
    print(f"--dataset={config.dataset}: {len(data.train):,} examples of {size(bytes_)}, opened in {opened:.1f}s;")
    print(f"blocks of {block} steps of {config.global_batch} examples, --prefetch={config.prefetch}\n")
    print(f"{'stage':<26} {'examples/s':>14} {'bytes/s':>10} {'of memcpy':>10}")
    most = ceilings["machine: memcpy"]
    for name, speed in (speeds | ceilings).items():
        print(f"{name:<26} {speed:>14,.0f} {size(speed * bytes_):>10} {speed / most:>10.1%}")
    print("\n" + _advice(config, speeds, most))
    return OK


def _rate(stage: Callable[[int], Any]) -> float:
    """Calls per second, after the first: a pipeline's start is not its speed."""
    stage(0)
    begin = time.perf_counter()
    for calls in itertools.count(1):
        stage(calls)
        seconds = time.perf_counter() - begin
        if seconds > _SECONDS:
            return calls / seconds
    raise AssertionError  # count() does not end


def _rate_of_threads(stage: Callable[[int], Any]) -> float:
    """The same of a thread a core; they read no further when the next is measured."""
    with contextlib.closing(in_order(stage, itertools.count(), 0)) as several:
        return _rate(lambda _: next(several))


def _machine() -> dict[str, float]:
    """Bytes per second of a copy in memory, and of reading a file that the system has in memory."""
    source = np.random.default_rng(0).integers(0, 255, _CEILING, np.uint8)
    target = np.zeros_like(source)
    copies = _rate(lambda _: np.copyto(target, source)) * _CEILING
    with tempfile.NamedTemporaryFile() as file:
        source.tofile(file.name)
        descriptor = os.open(file.name, os.O_RDONLY)
        reads = _rate(lambda _: os.preadv(descriptor, [target.data], 0)) * _CEILING
        os.close(descriptor)
    return {"memcpy": copies, "page-cache read": reads}


def _advice(config: Config, speeds: dict[str, float], most: float) -> str:
    step = config.global_batch / speeds["pipeline"]
    advice = f"Steps of less than {1e3 * step:.2f} ms would wait for these data."
    source, block = speeds[_ONE], speeds["a block, one thread"]
    if source < 2 * block and config.cache == "none" and source < 0.5 * speeds["order of the examples"]:
        advice += (
            " Most of the time is the source's own: --cache=memory, or a file, keeps what it has decoded; "
            "--prefetch=16 has as many blocks read at once, should it wait for disks or networks."
        )
        if cores() > 1 and speeds[_SEVERAL] < 1.3 * source < 0.1 * most:  # it is not the memory that is slow
            advice += (
                " Several threads read hardly faster than one, as where read() is Python code: "
                "input_pipeline.processes.Processes(source) has processes read it."
            )
        return advice
    if block < 0.5 * source:
        return f"{advice} Most of the time is spent around the reading: the order, checks of labels, augment."
    return advice
