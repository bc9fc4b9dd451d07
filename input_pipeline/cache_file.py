"""The file of a cache: whose examples it keeps, the examples, and checksums by which what a disk spoils is found."""

import json
import os
import pathlib
from typing import Any

import numpy as np

from input_pipeline import checksums
from input_pipeline.checksums import Checked
from input_pipeline.source import DataError, Source, example_spec, fingerprint
from input_pipeline.structure import flatten

_BEGIN = b'{"fingerprint": "'  # of any cache


class CacheFile:
    """A line of JSON, then an array (examples, ...) for each leaf of an example, then uint32 checksums of their blocks.

    Args:
      source: whose examples they are.
      path: the file; it need not be there.
    """

    def __init__(self, source: Source, path: pathlib.Path) -> None:
        self.path, self._length = path, len(source)
        self._specs = flatten(example_spec(source))
        header = {"fingerprint": fingerprint(source), "arrays": repr(self._specs)}
        self._header = json.dumps(header).encode() + b"\n"
        rows = [int(np.prod(s.shape)) * s.dtype.itemsize for s in self._specs]  # bytes
        self._blocks = [checksums.count(self._length, size) for size in rows]
        *self._offsets, self._end = np.cumsum([len(self._header), *(self._length * size for size in rows)]).tolist()
        self._size = self._end + 4 * sum(self._blocks)

    def is_of_source(self) -> bool:
        """Whether a file is there, of this source, and of its length."""
        if not self.path.exists() or self.path.stat().st_size != self._size:
            return False
        with open(self.path, "rb") as file:
            return file.readline() == self._header

    def is_foreign(self) -> bool:
        """Whether a file is there that is no cache, which is not to be replaced by one."""
        if not self.path.exists() or not self.path.stat().st_size:
            return False
        with open(self.path, "rb") as file:
            return file.read(len(_BEGIN)) != _BEGIN

    def make(self) -> None:
        """Makes it, with room on the disk for all of it: where a map meets a full disk, the process dies."""
        try:
            with open(self.path, "wb") as file:
                file.write(self._header)
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, self._size)
                else:  # macOS
                    file.truncate(self._size)
        except OSError as error:
            self.path.unlink(missing_ok=True)
            raise DataError(
                f"{self.path} can't be given {self._size:,} bytes ({error}): give --cache another place"
            ) from None

    def arrays(self, mode: Any) -> list[np.memmap]:
        """Its arrays, 'r' to be read, 'r+' to be written as well."""
        return [
            np.memmap(self.path, s.dtype, mode, offset, (self._length, *s.shape))
            for s, offset in zip(self._specs, self._offsets, strict=True)
        ]

    def seal(self) -> None:
        """Writes the checksums of its arrays as they are."""
        sums = [checksums.sums(array, "cached examples") for array in self.arrays("r")]
        with open(self.path, "r+b") as file:
            file.seek(self._end)
            file.write(np.concatenate(sums).tobytes())
            file.flush()
            os.fsync(file.fileno())

    def checked(self) -> list[Checked]:
        """Its arrays, to be read, and compared with their checksums."""
        sums = np.split(np.fromfile(self.path, np.uint32, offset=self._end), np.cumsum(self._blocks[:-1]))
        return [Checked(self.path, *pair, "examples") for pair in zip(self.arrays("r"), sums, strict=True)]
