"""Where examples are gathered: memory that was used before, at an address at which XLA takes it without a copy.

New memory costs as much as what is written into it, for the system clears it page by page.
"""

import collections
import math
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

_ALIGNMENT = 64  # bytes at whose multiples XLA wants an array on a CPU to begin; others it copies
_LARGE = 2**20  # bytes that are worth it
_MOST = 8  # of one size that are kept
_free: dict[int, list[npt.NDArray[np.uint8]]] = collections.defaultdict(list)


def gather(array: npt.NDArray[Any], ids: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """array[ids]. Its memory is used again when nothing refers to it any more.

    Raises:
      IndexError: an id is not in [0, len(array)).
    """
    if ids.size and not 0 <= ids.min() <= ids.max() < len(array):
        raise IndexError(f"ids from {ids.min()} to {ids.max()} of {len(array)} examples")
    shape = (len(ids), *array.shape[1:])
    size = math.prod(shape) * array.dtype.itemsize
    if size < _LARGE or array.dtype.hasobject:
        return np.take(array, ids, axis=0)
    found = np.asarray(_Lease(size)).view(array.dtype).reshape(shape)
    return np.take(array, ids, axis=0, out=found, mode="clip")  # in other modes it takes into a copy first


class _Lease:
    """Aligned memory, to which numpy's arrays of it refer; it is free again with the last of them."""

    def __init__(self, size: int) -> None:
        try:
            memory = _free[size].pop()
        except IndexError:
            memory = np.empty(size + _ALIGNMENT, np.uint8)
            begin = -memory.ctypes.data % _ALIGNMENT
            memory = memory[begin : begin + size]
        self.__array_interface__ = memory.__array_interface__
        weakref.finalize(self, _give_back, memory).atexit = False


def _give_back(memory: npt.NDArray[np.uint8]) -> None:
    if len(_free[memory.size]) < _MOST:
        _free[memory.size].append(memory)
