"""A source that processes read: for one whose read() is Python code, of which a process runs one thread at a time."""

import multiprocessing
import os
import pickle
import signal
import threading
from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from input_pipeline.cores import cores
from input_pipeline.given import adapted
from input_pipeline.source import DataError, Example, Source, is_streamed

_OF_THE_TRAINER = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}  # accelerators are its alone
_READ: list[Source] = []  # in a process that reads: what it reads


class Processes:
    """Examples of another source, read by processes beside the trainer's, as many at once as threads ask for some.

    They are spawned, not forked, and import the source's module; each has its own copy of the source.

    Args:
      source: names of files, say: small, and pickle can write it down. Whatever may be a part of a dataset will do.
      count: processes at most; 0: one for each core.

    Raises:
      DataError: it is a stream, or can't be pickled.
    """

    def __init__(self, source: Any, count: int = 0) -> None:
        source = adapted(source)
        self._length = len(source)
        if is_streamed(source):
            raise DataError("a tf.data.Dataset is read in its own order, by one process")
        try:
            packed = pickle.dumps(source)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise DataError(
                f"its {type(source).__name__} can't be handed to processes: {error}. Open files and make locks in "
                "read(), and define functions and classes at the top of a module"
            ) from None
        context = multiprocessing.get_context("spawn")
        self._processes = ProcessPoolExecutor(count or cores(), context, _begin, (packed,))

    def __len__(self) -> int:
        return self._length

    def read(self, ids: npt.NDArray[np.int64]) -> Example:
        try:
            return self._processes.submit(_read, ids).result()
        except BrokenProcessPool as error:
            raise RuntimeError(
                "a process that reads was ended, as for lack of memory (give Processes a smaller count), or could not "
                "begin, as it has said"
            ) from error


def _begin(packed: bytes) -> None:
    """In a process that reads."""
    parent = multiprocessing.parent_process()
    assert parent
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's, which still has a step to finish
    os.environ |= _OF_THE_TRAINER
    _READ.append(pickle.loads(packed))


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _read(ids: npt.NDArray[np.int64]) -> Example:
    return _READ[0].read(ids)
