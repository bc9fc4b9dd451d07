"""Decoded examples kept in memory or in a file, so that a source is read once only."""

import json
import os
import pathlib
from typing import Any

import numpy as np

from input_pipeline.memory import gather
from input_pipeline.source import Arrays, Source, example_spec, fingerprint, flatten, is_streamed, read

_BATCH = 1024


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
        return _Cached(source, [np.empty((len(source), *s.shape), s.dtype) for s in _specs(source)])
    return _from_file(source, pathlib.Path(where))


def _specs(source: Source) -> list[Any]:
    return flatten(example_spec(source))


class _Cached:
    """Examples of a source, held in arrays (examples, ...), one per leaf of an example."""

    def __init__(self, source: Source, arrays: list[Any], filled: bool = False) -> None:
        self._arrays, self._structure, self._length = arrays, example_spec(source), len(source)
        self.streamed = is_streamed(source)  # the order of examples does not depend on the cache
        for first in range(0, 0 if filled else len(source), _BATCH):
            ids = np.arange(first, min(first + _BATCH, len(source)))
            for array, values in zip(arrays, flatten(read(source, ids)), strict=True):
                array[ids] = values

    def __len__(self) -> int:
        return self._length

    def read(self, ids: Any) -> Any:
        leaves = iter([gather(array, ids) for array in self._arrays])
        return _pack(self._structure, leaves)


def _pack(structure: Any, leaves: Any) -> Any:
    if isinstance(structure, dict):
        packed = {k: _pack(structure[k], leaves) for k in sorted(structure)}
        return {k: packed[k] for k in structure}
    if isinstance(structure, tuple | list) and not hasattr(structure, "dtype"):
        return type(structure)(_pack(s, leaves) for s in structure)
    return next(leaves)


def _from_file(source: Source, path: pathlib.Path) -> Source:
    """One file: a line of JSON that says whose examples these are, then the arrays one after the other."""
    header = json.dumps({"fingerprint": fingerprint(source), "arrays": repr(_specs(source))}).encode() + b"\n"
    sizes = [len(source) * int(np.prod(s.shape)) * s.dtype.itemsize for s in _specs(source)]
    valid = path.exists() and path.stat().st_size == len(header) + sum(sizes)
    if valid:
        with open(path, "rb") as file:
            valid = file.readline() == header
    target = path if valid else path.with_name(f".{path.name}.{os.getpid()}")
    if not valid:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(target, "wb") as file:
            file.write(header)
            file.truncate(len(header) + sum(sizes))
    offsets = np.cumsum([len(header), *sizes])
    arrays = [
        np.memmap(target, s.dtype, "r" if valid else "r+", offset=int(offset), shape=(len(source), *s.shape))
        for s, offset in zip(_specs(source), offsets[:-1], strict=True)
    ]
    result = _Cached(source, arrays, filled=valid)
    if not valid:
        for array in arrays:
            array.flush()
        os.replace(target, path)  # a killed run leaves no half-filled cache behind
    return result
