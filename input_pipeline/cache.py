"""Decoded examples kept in memory or in a file, so that a source is read once only."""

import functools
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from input_pipeline import lengthy
from input_pipeline.ahead import in_order
from input_pipeline.cache_file import CacheFile
from input_pipeline.checksums import Checked
from input_pipeline.memory import gather
from input_pipeline.source import Arrays, DataError, Source, example_spec, is_streamed, read
from input_pipeline.structure import flatten, pack

_BATCH, _BYTES = 256, 2**25  # examples that a thread decodes at once, and how large they may be
_SAVE_EVERY = 10.0  # seconds after which a kill need not begin anew


def cached(source: Source, where: str) -> Source:
    """The source, or a copy of all its examples.

    Args:
      source: the examples.
      where: 'none', 'memory', or the path of a file; a file of the same source is used again.

    Returns:
      A source of the same examples.
    """
    if where == "none" or isinstance(source, Arrays):
        return source
    if where == "memory":
        arrays = [np.empty((len(source), *s.shape), s.dtype) for s in flatten(example_spec(source))]
        _fill(arrays, source)
        return _Cached(source, [functools.partial(gather, array) for array in arrays])
    return _from_file(source, pathlib.Path(where))


class _Cached:
    """Examples of a source, kept elsewhere: for each leaf of an example a function, ids (n,) -> values (n, ...)."""

    def __init__(self, source: Source, leaves: Sequence[Callable[[Any], np.ndarray]]) -> None:
        self._leaves, self._structure, self._length = leaves, example_spec(source), len(source)
        self.streamed = is_streamed(source)  # the order of examples does not depend on the cache

    def __len__(self) -> int:
        return self._length

    def read(self, ids: Any) -> Any:
        return pack(self._structure, iter([gathered(ids) for gathered in self._leaves]))


def _looked_at(kept: Checked, ids: Any) -> Any:
    values = gather(kept.array, ids)  # which refuses other ids
    kept.check(ids, ids)
    return values


def _fill(arrays: list[Any], source: Source, first: int = 0, save: Callable[[int], object] = lambda done: None) -> None:
    """Reads the examples from `first` on into arrays (examples, ...).

    Args:
      arrays: one per leaf of an example.
      source: the examples; read by as many threads as there are cores, unless it is streamed.
      first: how many are there already.
      save: now and then called with how many are there.
    """
    n, since = len(source), time.monotonic()
    batch = max(1, min(_BATCH, _BYTES // max(1, sum(array[:1].nbytes for array in arrays))))

    def fill(begin: int) -> int:
        ids = np.arange(begin, min(begin + batch, n))
        for array, values in zip(arrays, flatten(read(source, ids)), strict=True):
            array[ids] = values
        return begin + len(ids)

    for done in in_order(fill, range(first, n, batch), 0, int(is_streamed(source))):
        lengthy.tell(f"caching examples: {done:,} of {n:,}")
        if time.monotonic() - since > _SAVE_EVERY:
            save(done)
            since = time.monotonic()


def _from_file(source: Source, path: pathlib.Path) -> Source:
    """Examples in a file, which gets its name when it is whole.

    Until then it is .NAME.part, and .NAME.filled says how many examples it has.
    """
    if path.is_dir():
        raise DataError(f"{path} is a directory: give --cache the name of a file, which need not be there")
    part, filled, lock = (path.with_name(f".{path.name}.{kind}") for kind in ("part", "filled", "lock"))
    whole, begun = CacheFile(source, path), CacheFile(source, part)

    def opened() -> Source:
        return _Cached(source, [functools.partial(_looked_at, array) for array in whole.checked()])

    def done() -> int:
        try:
            return int(filled.read_text())
        except (OSError, ValueError):
            return 0

    if whole.is_of_source():
        return opened()
    if whole.is_foreign():
        raise DataError(f"{path} exists and is no cache: give --cache the name of a file that need not be there")
    with lengthy.alone(lock, lambda: f"caching examples: {done():,} of {len(source):,}"):
        if whole.is_of_source():  # another process has filled it meanwhile
            return opened()
        if not begun.is_of_source():
            filled.unlink(missing_ok=True)
            begun.make()
        arrays = begun.arrays("r+")

        def save(count: int) -> None:
            for array in arrays:
                array.flush()
            filled.write_text(str(count))

        _fill(arrays, source, done(), save)
        save(len(source))
        begun.seal()
        os.replace(part, path)
        filled.unlink()
    return opened()
