"""Checksums of an array's blocks in a file, by which what a disk spoils is found when it is first read."""

import pathlib
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from input_pipeline import lengthy
from input_pipeline.source import DataError

_BLOCK = 2**20  # bytes of an array that have a checksum of their own


class Checked:
    """An array in a file, whose blocks are compared with their checksums, each when some of it is first read.

    Args:
      path: the file that it is in.
      array: (rows, ...).
      sums: uint32 (blocks,).
      rows: what its rows are called.
    """

    def __init__(self, path: pathlib.Path, array: npt.NDArray[Any], sums: npt.NDArray[np.uint32], rows: str) -> None:
        self.array = array
        self._path, self._sums, self._name = path, sums, rows
        self._rows, self._good = _rows(array), np.zeros(len(sums), bool)

    def __len__(self) -> int:
        return len(self.array)

    def check(self, first: npt.NDArray[np.int64], last: npt.NDArray[np.int64]) -> None:
        """Looks at ranges of rows, of which these are the first and the last ones.

        Raises:
          DataError: some of their blocks are not what was written.
        """
        if self._good.all():
            return
        begins, ends = first // self._rows, last // self._rows
        unseen = np.concatenate([[0], np.cumsum(~self._good)])
        new = unseen[ends + 1] > unseen[begins]
        for ranges in np.unique(begins[new] * len(self._sums) + ends[new]).tolist():  # a number for both, sorted fast
            begin, end = divmod(ranges, len(self._sums))
            for block in range(begin, end + 1):
                self._check(block)

    def _check(self, block: int) -> None:
        if not self._good[block] and _sum(self.array, block) != self._sums[block]:
            first, end = block * self._rows, min((block + 1) * self._rows, len(self.array))
            raise DataError(
                f"{self._path} is damaged: what it keeps of {self._name} {first:,} to {end - 1:,} is not what was "
                "written; delete it, and it is made anew"
            )
        self._good[block] = True


def count(length: int, size: int) -> int:
    """How many checksums an array has, of so many rows of so many bytes."""
    return -(-length // _rows_of(size))


def sums(array: npt.NDArray[Any], rows: str) -> npt.NDArray[np.uint32]:
    """Checksums of an array as it is."""
    blocks, found = count(len(array), array[:1].nbytes), list[int]()
    for block in range(blocks):
        lengthy.tell(f"making checksums of {rows}: {block:,} of {blocks:,}")
        found.append(_sum(array, block))
    return np.array(found, np.uint32)


def _rows(array: npt.NDArray[Any]) -> int:
    return _rows_of(array[:1].nbytes)


def _rows_of(size: int) -> int:
    """Rows in a block, of an array of which one has so many bytes."""
    return max(1, _BLOCK // max(1, size))


def _sum(array: npt.NDArray[Any], block: int) -> int:
    """CRC-32C of a block."""
    rows = _rows(array)
    return int(google_crc32c.value(np.ascontiguousarray(array[block * rows :][:rows]).view(np.uint8)))
