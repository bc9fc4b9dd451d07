"""The file that HDF5 writes to: errors of the disk are raised, and large arrays digested on their way."""

import bisect
import concurrent.futures
import io
import os
import pathlib
from collections.abc import Callable
from typing import Any

from trainer.digests import Region

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
