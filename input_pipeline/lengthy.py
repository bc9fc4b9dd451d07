"""What takes long before the first step is done by one process of a host, and told, lest it be taken for hung."""

import contextlib
import fcntl
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from input_pipeline.source import DataError

_LOOK = 1.0  # seconds between two looks at how far another process is, which may have to look at many files


def _nobody(words: str) -> None:
    pass


listener: Callable[[str], None] = _nobody  # whoever starts a run sets it


def tell(words: str) -> None:
    """Tells how far something is: other words are progress. It may be called often."""
    listener(words)


@contextlib.contextmanager
def alone(path: pathlib.Path, told: Callable[[], str]) -> Iterator[None]:
    """Lets one process of the host in at a time.

    Args:
      path: a file to be locked, which is made.
      told: what another process has done so far, in words.

    Raises:
      DataError: it can't be made, or its file system has no locks.
    """
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(path, "w"))
            while not _locked(lock):
                tell(f"{told()}, by another process of this host")
                time.sleep(_LOOK)
        except OSError as error:
            fix = "give a place that can be written, on a file system with locks"
            raise DataError(f"{path} can't be locked ({error}): {fix}") from None
        yield


def _locked(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
