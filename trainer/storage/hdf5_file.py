"""Files of HDF5: errors of the disk are raised, large arrays digested on their way, and no other file is read."""

import bisect
import concurrent.futures
import io
import os
import pathlib
from collections.abc import Callable
from typing import Any

import h5py
import numpy as np

from trainer.storage.digests import Region

LARGE = 2**20  # bytes, from which on an array has a digest of its own, made while it is written


class File(io.BytesIO):
    """A file on the disk for HDF5, which does not raise but crash where a write fails: we raise at the end.

    A BytesIO to Keras, which takes nothing else that is not a path.

    Attributes:
      arrays: what was written at once and is large, in the order of the file. HDF5 does so with arrays alone.
    """

    def __init__(self, path: pathlib.Path, digest: Callable[[memoryview], str]) -> None:
        super().__init__()
        self._file = io.FileIO(path, "w+")
        self._error: OSError | None = None
        self._digest, self._thread = digest, concurrent.futures.ThreadPoolExecutor(1)
        self.arrays: list[Region] = []

    def write(self, data: Any) -> int:
        view, offset = memoryview(data).cast("B"), self._file.tell()
        self._forget(offset, offset + len(view))
        if len(view) < LARGE:
            return self._write(view)
        digest = self._thread.submit(self._digest, view)  # beside the writing
        self._write(view)
        bisect.insort(self.arrays, Region(offset, len(view), digest.result()))
        return len(view)

    def _write(self, view: memoryview) -> int:
        done = 0
        while done < len(view) and not self._error:
            try:
                done += self._file.write(view[done:])
            except OSError as error:
                self._error = error
        return len(view)

    def _forget(self, begin: int, end: int) -> None:
        """Of the arrays, those that something is written over."""
        after = bisect.bisect_left(self.arrays, (end,))
        while after and self.arrays[after - 1].offset + self.arrays[after - 1].bytes > begin:
            after -= 1
            del self.arrays[after]

    def truncate(self, size: int | None = None) -> int:
        try:
            return self._file.truncate(size)
        except OSError as error:
            self._error = self._error or error
            return size or 0

    def read(self, size: int | None = -1) -> bytes:
        return self._file.read(-1 if size is None else size)

    def readinto(self, buffer: Any) -> int:
        return self._file.readinto(buffer)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        pass  # nothing is buffered here

    def __exit__(self, *exception: Any) -> None:
        self._thread.shutdown()
        self._file.close()
        if self._error:
            raise self._error


def arrays(path: pathlib.Path) -> dict[str, np.ndarray]:
    """All arrays of a file by their place in it.

    Raises:
      ValueError: as `datasets` does.
    """
    with h5py.File(path) as file:
        return {name: np.asarray(node) for name, node in datasets(file).items()}


def datasets(file: h5py.File) -> dict[str, h5py.Dataset]:
    """All arrays of a file by their place in it, not yet read.

    Raises:
      ValueError: one refers to another file, or declares more than this one holds.
    """
    links: list[tuple[str, Any]] = []
    file.visititems_links(lambda name, link: links.append((name, link)))  # which must not raise
    found, size = {}, os.path.getsize(file.filename)
    for name, link in links:
        if not isinstance(link, h5py.HardLink):
            raise ValueError(f"{name} is a link to elsewhere")
        node = file[name]
        if isinstance(node, h5py.Dataset):
            if node.external or node.is_virtual or node.nbytes > size:
                raise ValueError(f"{name} lies outside of the file, or is larger than it")
            found[name] = node
    return found
