"""Decoded examples kept in memory or in a file, so that a source is read once only."""

import json
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from input_pipeline import lengthy
from input_pipeline.ahead import in_order
from input_pipeline.memory import gather
from input_pipeline.source import Arrays, DataError, Source, example_spec, fingerprint, flatten, is_streamed, pack, read

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
        arrays = [np.empty((len(source), *s.shape), s.dtype) for s in _specs(source)]
        _fill(arrays, source)
        return _Cached(source, arrays)
    return _from_file(source, pathlib.Path(where))


def _specs(source: Source) -> list[Any]:
    return flatten(example_spec(source))


class _Cached:
    """Examples of a source, held in arrays (examples, ...), one per leaf of an example."""

    def __init__(self, source: Source, arrays: list[Any]) -> None:
        self._arrays, self._structure, self._length = arrays, example_spec(source), len(source)
        self.streamed = is_streamed(source)  # the order of examples does not depend on the cache

    def __len__(self) -> int:
        return self._length

    def read(self, ids: Any) -> Any:
        leaves = iter([gather(array, ids) for array in self._arrays])
        return pack(self._structure, leaves)


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


def _make(path: pathlib.Path, header: bytes, size: int) -> None:
    """A file of a size, with room on the disk for all of it: where a map meets a full disk, the process dies."""
    try:
        with open(path, "wb") as file:
            file.write(header)
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise DataError(f"{path} can't be given {size:,} bytes ({error}): give --cache another place") from None


def _from_file(source: Source, path: pathlib.Path) -> Source:
    """One file: a line of JSON that says whose examples these are, then the arrays one after the other.

    It gets its name when it is whole. Until then it is .NAME.part, and .NAME.filled says how many examples it has.
    """
    specs = _specs(source)
    header = json.dumps({"fingerprint": fingerprint(source), "arrays": repr(specs)}).encode() + b"\n"
    sizes = [len(source) * int(np.prod(s.shape)) * s.dtype.itemsize for s in specs]
    offsets = np.cumsum([len(header), *sizes])

    def is_of_source(file: pathlib.Path) -> bool:
        if not file.exists() or file.stat().st_size != offsets[-1]:
            return False
        with open(file, "rb") as opened:
            return opened.readline() == header

    def arrays(file: pathlib.Path, mode: Any) -> list[Any]:
        return [
            np.memmap(file, s.dtype, mode, offset=int(offset), shape=(len(source), *s.shape))
            for s, offset in zip(specs, offsets[:-1], strict=True)
        ]

    part, filled, lock = (path.with_name(f".{path.name}.{kind}") for kind in ("part", "filled", "lock"))

    def done() -> int:
        try:
            return int(filled.read_text())
        except (OSError, ValueError):
            return 0

    if is_of_source(path):
        return _Cached(source, arrays(path, "r"))
    with lengthy.alone(lock, lambda: f"caching examples: {done():,} of {len(source):,}"):
        if is_of_source(path):  # another process has filled it meanwhile
            return _Cached(source, arrays(path, "r"))
        if not is_of_source(part):
            filled.unlink(missing_ok=True)
            _make(part, header, int(offsets[-1]))
        parts = arrays(part, "r+")

        def save(count: int) -> None:
            for array in parts:
                array.flush()
            filled.write_text(str(count))

        _fill(parts, source, done(), save)
        save(len(source))
        os.replace(part, path)
        filled.unlink()
    return _Cached(source, arrays(path, "r"))
