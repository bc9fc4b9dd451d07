"""How many steps are read as one block: as many as make a large read, and take no longer than a second."""

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from input_pipeline import order
from input_pipeline.source import Example, Source, example_spec, is_streamed, read
from input_pipeline.structure import flatten

_BYTES = 32 * 2**20
_READING = 1.0  # seconds
_STREAMED = 1024  # examples


def block_steps(source: Source, global_batch: int, pace: float = 0.0, most: int = 1024, logged: int = 0) -> int:
    """How many steps a block holds: 2 to `most`, of 32 MB at most, if it can be.

    A power of two, or a number that lines of the log fall between: steps that the log cuts are computed by a call more.

    Args:
      source: the examples.
      global_batch: examples of a step.
      pace: seconds that an example takes to be read. A block is read in a second, if it can be, for until it is
        there no step is done, and no signal obeyed.
      most: how many steps it may hold.
      logged: steps between two lines of the log; 0: not known.
    """
    examples = _most(source)
    if pace:
        examples = min(examples, _READING / pace)
    if is_streamed(source):  # whose pace is not known before it is read
        examples = min(examples, _STREAMED)
    limit = max(2, min(most, int(examples / global_batch)))
    powers = [2**i for i in range(limit.bit_length())]
    lengths = powers[1:]
    if logged:
        lengths += [n for n in range(2, limit + 1) if logged % n == 0]
        lengths += [logged * n for n in powers if 2 <= logged * n <= limit]

    def calls(steps: int) -> float:
        """That the steps between two lines of the log take."""
        return logged / steps + 1 - math.gcd(logged, steps) / steps

    return max(lengths, key=lambda steps: (-calls(steps), steps))


def pace(source: Source, augment: Callable[[Example, Any], Example] | None = None) -> float:
    """Seconds by which a read takes longer for each example more; 0 of a stream, which can't be read here and there.

    Args:
      source: the examples.
      augment: what changes them.
    """

    def seconds_of(first: int, size: int) -> float:
        begin, ids = time.perf_counter(), np.arange(first, first + size) % len(source)
        example = read(source, ids)
        if augment:
            augment(example, order.fold(0, ids))
        return time.perf_counter() - begin

    most, found, before, smaller, first = _most(source), 0.0, 0.0, 0, 0
    for size in () if is_streamed(source) else (2, 8, 32, 128, 512):
        seconds = seconds_of(first, size)
        if seconds > 0.05:  # perhaps by chance
            seconds = min(seconds, seconds_of(first + size, size))
        found = max(0.0, (seconds - before) / (size - smaller))
        fast = seconds / size * most < _READING / 4  # so that it does not matter
        clear = seconds > max(0.05, 2 * before) or seconds > _READING / 2
        if fast or (before and clear):
            break
        before, smaller, first = seconds, size, first + 2 * size
    return found


def _most(source: Source) -> float:
    """How many examples a block may hold, by their size."""
    size = sum(int(np.prod(spec.shape)) * spec.dtype.itemsize for spec in flatten(example_spec(source)))
    return _BYTES / max(1, size)
