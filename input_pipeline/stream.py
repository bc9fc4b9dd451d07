"""A tf.data.Dataset of the user's as a source: read in its own order, its position known by counting."""

import sys
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from input_pipeline.merging import merged
from input_pipeline.source import DataError, Example
from input_pipeline.structure import flatten, map_structure

_CHUNK = 128  # examples that are read at once
_CURSORS = 2
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
        self._cursors: list[_Cursor] = []  # the one used last comes last

    def __len__(self) -> int:
        return self._length

    def read(self, ids: npt.NDArray[np.int64]) -> Example:
        """Reads examples, quickly where each id is the one after the last."""
        cuts = np.flatnonzero(np.diff(ids) != 1) + 1
        parts = [self._range(int(run[0]), int(run[-1]) + 1) for run in np.split(np.asarray(ids), cuts)]
        return merged(parts, np.concatenate) if len(parts) > 1 else parts[0]

    def _range(self, first: int, end: int) -> Example:
        found = None
        while found is None:
            cursor = self._cursor(first)
            with cursor.lock:
                if cursor.is_at(first):  # nobody has moved it on meanwhile
                    found = cursor.read(first, end)
        return found

    def _cursor(self, first: int) -> "_Cursor":
        """One that is there. Whoever begins a pass has his own, and training keeps its place while others look in."""
        with self._lock:
            near = (cursor for cursor in self._cursors if first and cursor.is_at(first))
            cursor = next(near, None) or _Cursor(self._dataset, self._length, first)
            self._cursors = [*(other for other in self._cursors if other is not cursor), cursor][-_CURSORS:]
        return cursor


class _Cursor:
    """A place in a pass over a dataset, and the examples around it."""

    def __init__(self, dataset: Any, length: int, first: int) -> None:
        if first > _MANY:
            print(f"streamed data: reading {first:,} examples again, to go on after them", file=sys.stderr, flush=True)
        self._chunks = dataset.skip(first).batch(_CHUNK).prefetch(2).as_numpy_iterator()
        self._length, self._held = length, list[Example]()  # chunks
        self._start = self._end = first  # ids of the first example that is held, and of the first that was not read
        self.lock = threading.Lock()

    def is_at(self, first: int) -> bool:
        """Whether an example is held, or the next."""
        return self._start <= first <= self._end

    def read(self, first: int, end: int) -> Example:
        """Examples `first` to before `end`; what lies before is dropped."""
        while self._end < end:
            self._held.append(self._next())
            self._end += _rows(self._held[-1])
        while self._start + _rows(self._held[0]) <= first:
            self._start += _rows(self._held.pop(0))
        held = merged(self._held, np.concatenate) if len(self._held) > 1 else self._held[0]
        return map_structure(lambda a: a[first - self._start : end - self._start], held)

    def _next(self) -> Example:
        try:
            chunk = next(self._chunks, None)
        except Exception as error:  # of the user's functions, by way of TensorFlow
            raise DataError(f"the tf.data.Dataset failed after {self._end} examples: {error}") from error
        if chunk is None:
            raise DataError(f"the tf.data.Dataset ended after {self._end} examples, and said {self._length}")
        return chunk


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
