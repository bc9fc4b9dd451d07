"""What takes long before the first step is done by one process of a host, and told, lest it be taken for hung."""

import contextlib
import fcntl
import pathlib
import time
from collections.abc import Callable, Iterator

from input_pipeline.source import DataError

_LOOK = 0.2  # seconds between two looks at whether another process is done


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
      DataError: its file system has no locks.
    """
    with open(path, "w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                tell(f"{told()}, by another process of this host")
                time.sleep(_LOOK)
            except OSError as error:
                raise DataError(f"{path} can't be locked ({error}): give a place on a local disk") from None
        yield
