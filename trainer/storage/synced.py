"""Large files that are on the disk when they are whole."""

import concurrent.futures
import contextlib
import ctypes
import os
import pathlib
import threading
from collections.abc import Iterator

_BETWEEN_SYNCS = 0.01  # seconds; a small file is written in less, and synced once
_SYNC_FILE_RANGE_WRITE = 2  # of Linux: fsync would hold up whoever still writes


def _begin_to_write(descriptor: int) -> None:
    """Gives what is in the page cache of a file to the disk, and waits for nothing where the system can do that."""
    try:
        begin = ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError, TypeError):  # not Linux
        os.fsync(descriptor)
        return
    begin(descriptor, ctypes.c_int64(0), ctypes.c_int64(0), _SYNC_FILE_RANGE_WRITE)


@contextlib.contextmanager
def synced(path: pathlib.Path) -> Iterator[None]:
    """What is written to a file meanwhile is on the disk at the end; the disk begins with it at once.

    Raises:
      OSError: the storage is full, or fails.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    written = threading.Event()

    def sync() -> None:
        while not written.wait(_BETWEEN_SYNCS):
            _begin_to_write(descriptor)

    try:
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            beside = thread.submit(sync)
            try:
                yield
            finally:
                written.set()
            beside.result()
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
