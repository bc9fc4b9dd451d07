"""The files of a checkpoint whose variables no process holds whole: each writes what lies on its own devices.

  shards-00003.bin   process 3's pieces of the variables, one after the other, in C order, little-endian
  .shards-00003.json until the checkpoint is whole: where each piece is, and its digest; then in the manifest

A piece is a box of a variable; each element is in one piece of one process. Any other mesh, number of processes or
strategy reads the regions that it needs, from whichever pieces hold them.
"""

import concurrent.futures
import json
import math
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from trainer.storage import digests
from trainer.storage.replacing import replace
from trainer.storage.synced import synced

_DTYPES = {"int": "<i8", "bfloat16": ml_dtypes.bfloat16}  # by kind, where numpy's name is another
Index = tuple[slice, ...]


class Piece(NamedTuple):
    """A box of a variable.

    Attributes:
      start: index of its first element, one number for each dim; (): the whole is meant.
      values: its elements, an array of numpy, or of the backend's while it is being copied.
    """

    start: tuple[int, ...]
    values: Any


def write(directory: pathlib.Path, process: int, kinds: Mapping[str, str], pieces: Mapping[str, list[Piece]]) -> None:
    """Writes a process's pieces, and then the list of them.

    Args:
      directory: shared by all processes.
      process: this one's number.
      kinds: of each variable, by path.
      pieces: this process's, by path of the variable.
    """
    name = f"shards-{process:05d}.bin"
    listed: dict[str, list[dict[str, Any]]] = {}  # digests that are still being made among them
    with concurrent.futures.ThreadPoolExecutor(1) as thread, synced(directory / name):
        with open(directory / name, "wb") as file:
            for path, of_variable in pieces.items():
                listed[path] = []
                for piece in of_variable:
                    data = np.ascontiguousarray(piece.values, dtype(kinds[path]))
                    facts = {"file": name, "offset": file.tell(), "start": piece.start, "shape": piece.values.shape}
                    listed[path].append(facts | {"blake3": thread.submit(digests.of_array, data)})
                    file.write(data.reshape(-1).view(np.uint8).data)
        files = {name: digests.of_file(directory / name)}
    text = json.dumps({"file": files, "pieces": listed}, default=lambda digest: digest.result())
    replace(directory / _list_name(process), text)


def collect(directory: pathlib.Path, processes: int, patience: float) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Waits for the lists of all processes.

    Returns:
      (facts of the files by name, pieces by path of the variable).

    Raises:
      OSError: one did not come within `patience` seconds.
    """
    files: dict[str, Any] = {}
    pieces: dict[str, list[Any]] = {}
    deadline = time.monotonic() + patience
    for process in range(processes):
        path = directory / _list_name(process)
        while not path.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {process} has not written its part of {directory} in {patience:g}s")
            time.sleep(0.01)
        facts = json.loads(path.read_text())
        path.unlink()
        files |= facts["file"]
        for variable, of_variable in facts["pieces"].items():
            pieces.setdefault(variable, []).extend(of_variable)
    return files, pieces


def region(directory: pathlib.Path, facts: Mapping[str, Any], index: Index) -> np.ndarray:
    """Some elements of a variable, put together from its pieces.

    Args:
      directory: the checkpoint.
      facts: the variable's entry in the manifest.
      index: a slice for each dim.

    Raises:
      ValueError: pieces are missing, or lie outside of the variable.
    """
    shape = facts["shape"]
    bounds = [slice_.indices(size)[:2] for slice_, size in zip(index, shape, strict=True)]
    _check(directory, facts)
    found = np.empty([end - begin for begin, end in bounds], dtype(facts["dtype"]))
    left = found.size
    for piece in facts["pieces"]:
        start, size = piece["start"], piece["shape"]
        common = [(max(begin, a), min(end, a + n)) for (begin, end), a, n in zip(bounds, start, size, strict=True)]
        if any(begin >= end for begin, end in common):
            continue
        mapped = _mapped(directory / piece["file"], found.dtype, piece["offset"], size)
        source = tuple(slice(begin - a, end - a) for (begin, end), a in zip(common, start, strict=True))
        target = tuple(slice(b - first, e - first) for (b, e), (first, _) in zip(common, bounds, strict=True))
        found[target] = mapped[source]
        left -= found[target].size
    if left:
        raise ValueError(f"{left} of {found.size} elements are in no piece")
    return found


def _check(directory: pathlib.Path, facts: Mapping[str, Any]) -> None:
    """Raises ValueError, before anything is allocated, if the pieces are not just the variable, or not in the files."""
    shape, item = facts["shape"], dtype(facts["dtype"]).itemsize
    for piece in facts["pieces"]:
        start, size = piece["start"], piece["shape"]
        if any(a < 0 or n < 0 or a + n > most for a, n, most in zip(start, size, shape, strict=True)):
            raise ValueError(f"a piece at {start} of shape {size} lies outside of {shape}")
        file = directory / piece["file"]
        if file.parent != directory or piece["offset"] < 0:
            raise ValueError(f"a piece lies outside of the checkpoint, in {file}")
        if piece["offset"] + math.prod(size) * item > file.stat().st_size:
            raise ValueError(f"a piece of shape {size} is larger than {file}")
    held = sum(math.prod(piece["shape"]) for piece in facts["pieces"])
    if held != math.prod(shape):
        raise ValueError(f"its pieces have {held} elements, and it has {math.prod(shape)}")


def everything(shape: Sequence[int]) -> Index:
    """The index of a whole variable."""
    return (slice(None),) * len(shape)


def dtype(kind: str) -> np.dtype[Any]:
    """What variables of a kind are in a file."""
    return np.dtype(_DTYPES.get(kind, kind)).newbyteorder("<")


def _mapped(path: pathlib.Path, type_: np.dtype[Any], offset: int, shape: Sequence[int]) -> np.ndarray:
    if not shape:
        return np.fromfile(path, type_, 1, offset=offset).reshape(())
    return np.memmap(path, type_, "r", offset=offset, shape=tuple(shape))


def _list_name(process: int) -> str:
    return f".shards-{process:05d}.json"


def not_finite(pieces: Mapping[str, Sequence[Piece]]) -> str:
    """Which variable of path -> pieces is not finite, in words; '' if all are."""
    for path, of_variable in pieces.items():
        for _, value in of_variable:
            numbers = value if value.dtype.kind in "iufb" else value.astype(np.float32)  # numpy has no bfloat16
            if not np.isfinite(numbers).all():
                return f"{path} was not finite"
    return ""
