"""A tf.data.Dataset of the user's as a source: read in its own order, its position known by counting."""

import sys
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from input_pipeline.source import DataError, Example, flatten, map_structure, merged

_CHUNK = 512  # examples that are read at once
# tf.data's operations that make no single examples of batches.
_LEAVING = (
    "Map",
    "ParallelMap",
    "Shuffle",
    "Cache",
    "Prefetch",
    "Repeat",
    "Take",
    "Skip",
    "AssertCardinality",
    "Options",
)
_MANY = 100_000  # examples to read past, of which people are told


class Stream:
    """Examples that come one after another.

    To go on at a position, what lies before it is read again, by every process; `--cache` reads all once.

    Args:
      dataset: a tf.data.Dataset of single examples (x, y), (x, y, weight), or x alone, the same at each pass over it.

    Raises:
      DataError: it does not tell its length, or gives batches.
    """

    streamed = True

    def __init__(self, dataset: Any) -> None:
        self._dataset, self._length = dataset, int(dataset.cardinality())
        if self._length < 0:
            kind = "is endless" if self._length == -1 else "does not know its length"
            fix = "end it by .take(n)" if self._length == -1 else "apply tf.data.experimental.assert_cardinality(n)"
            raise DataError(f"the tf.data.Dataset {kind}, and passes are counted: {fix}")
        if _gives_batches(dataset):
            raise DataError(
                "the tf.data.Dataset gives batches: leave .batch() out (what Keras makes of folders: batch_size=None), "
                "for a run makes its own; where it makes sequences, give it drop_remainder=True"
            )
        self._lock = threading.Lock()
        self._chunks: Any = iter(())
        self._held: Example = ()  # examples from `_start` to before `_end`
        self._start = self._end = -1
        self._first: Example = None

    def __len__(self) -> int:
        return self._length

    def read(self, ids: npt.NDArray[np.int64]) -> Example:
        """Reads examples, quickly where each id is the one after the last."""
        cuts = np.flatnonzero(np.diff(ids) != 1) + 1
        with self._lock:
            parts = [self._range(int(run[0]), int(run[-1]) + 1) for run in np.split(np.asarray(ids), cuts)]
        return merged(parts, np.concatenate) if len(parts) > 1 else parts[0]

    def _range(self, first: int, end: int) -> Example:
        if (first, end) == (0, 1) and self._first is not None:
            return self._first  # asked for its shape again and again
        if first == 0 or not self._start <= first <= self._end:
            self._seek(first)
        while self._end < end:
            self._grow(first)
        found = map_structure(lambda a: a[first - self._start : end - self._start], self._held)
        if (first, end) == (0, 1):
            self._first = found
        return found

    def _seek(self, first: int) -> None:
        if first > _MANY:
            print(f"streamed data: reading {first:,} examples again, to go on after them", file=sys.stderr, flush=True)
        self._chunks = self._dataset.skip(first).batch(_CHUNK).prefetch(2).as_numpy_iterator()
        self._held, self._start, self._end = (), first, first

    def _grow(self, first: int) -> None:
        """Reads the next chunk, and drops what lies before `first`."""
        try:
            chunk = next(self._chunks, None)
        except Exception as error:  # of the user's functions, by way of TensorFlow
            raise DataError(f"the tf.data.Dataset failed after {self._end} examples: {error}") from error
        if chunk is None:
            raise DataError(f"the tf.data.Dataset ended after {self._end} examples, and said {self._length}")
        past = max(0, min(first, self._end) - self._start)
        kept = self._end - self._start - past
        self._held = merged([map_structure(lambda a: a[past:], self._held), chunk], np.concatenate) if kept else chunk
        self._start += past
        self._end += _rows(chunk)


def _gives_batches(dataset: Any) -> bool:
    """Whether a dataset's elements are what .batch() gives; where that makes sequences, it drops what is left over."""
    specs = flatten(dataset.element_spec)
    while _kind(dataset) in _LEAVING:
        dataset = dataset._input_dataset
    return _kind(dataset).endswith("Batch") and all(spec.shape.rank and spec.shape[0] is None for spec in specs)


def _kind(dataset: Any) -> str:
    return type(dataset).__name__.strip("_").removesuffix("Dataset")


def _rows(example: Example) -> int:
    while isinstance(example, dict | tuple | list):
        example = next(iter(example.values())) if isinstance(example, dict) else example[0]
    return len(example)
