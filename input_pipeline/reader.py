"""Examples by their ids, read and changed by several threads beside each other where that takes long."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from input_pipeline.cores import cores
from input_pipeline.source import DataError, Example, Source, is_streamed, read
from input_pipeline.structure import Spec, flatten, map_structure, pack, words

_PART = 0.1  # seconds of reading that are worth a thread's while


class Reader:
    """Reads examples, all of one shape and dtype.

    Args:
      source: the examples.
      example: the structure of one.
      augment: as in Dataset.
      pace: seconds that an example takes; 0: not known.
    """

    def __init__(
        self, source: Source, example: Example, augment: Callable[[Any, Any], Any] | None, pace: float
    ) -> None:
        self._source, self._example, self._augment, self._pace = source, example, augment, pace
        self._pool = ThreadPoolExecutor(cores(), "part")

    def __call__(self, ids: npt.NDArray[np.int64], keys: npt.NDArray[np.uint64] | None = None) -> Example:
        """Examples (n, ...) by ids (n,), changed by keys (n,) where there are some."""
        threads = self.threads(len(ids))
        if threads == 1:
            return self.read_part(ids, keys)
        their_keys = [None] * threads if keys is None else np.array_split(keys, threads)
        parts = list(self._pool.map(self.read_part, np.array_split(ids, threads), their_keys))
        return pack(parts[0], map(np.concatenate, zip(*map(flatten, parts), strict=True)))

    def threads(self, examples: int) -> int:
        """How many share in reading so many examples."""
        worth = 1 if is_streamed(self._source) else int(examples * self._pace / _PART)
        return max(1, min(worth, cores(), examples))

    def read_part(self, ids: npt.NDArray[np.int64], keys: npt.NDArray[np.uint64] | None) -> Example:
        """What one thread reads. By this name the stack of one that a source keeps waiting is found."""
        example = read(self._source, ids)
        if self._augment and keys is not None:
            example = self._augment(example, keys)
        # One shape and one dtype for all: a program is compiled for them.
        found = map_structure(lambda a: Spec(a.shape[1:], a.dtype), example)
        if found != self._example:
            raise DataError(
                f"examples {', '.join(map(str, ids[:4]))}, ... are {words(found)}, but example 0 is "
                f"{words(self._example)}: give all one shape and dtype, by padding or resizing; another shape would be "
                "compiled anew"
            )
        return example
