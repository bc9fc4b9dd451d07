"""Writes checkpoints beside the training, one at a time."""

import sys
import threading
from collections.abc import Callable

from trainer.errors import STORAGE, UserError

_MOST_FAILURES = 3  # in a row; a full disk may be emptied in time
_SMALL = 2**26  # bytes that a disk takes in a tenth of a second or so
_SOON = 1.0  # seconds that a small write is waited for
_PATIENCE = 10.0  # seconds that a save waits for the one before; storage that is slower costs saves, not steps


class Writer:
    """Runs one write in a thread of its own; what goes wrong in it is told in the thread that trains.

    Args:
      where: the directory that is written to, for messages.
    """

    def __init__(self, where: object) -> None:
        self._where = where
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._failures = self._left_out = 0

    def is_ready(self) -> bool:
        """Waits for the write before, but not for long; whether it has ended."""
        if self._thread is not None:
            self._thread.join(_PATIENCE)
            if self._thread.is_alive():
                self._left_out += 1
                print(
                    f"a checkpoint is left out, the {self._left_out}. so far: the one before is still being written "
                    f"to {self._where}",
                    file=sys.stderr,
                    flush=True,
                )
                return False
        return True

    def submit(self, write: Callable[[], None], size: int) -> None:
        """Starts a write once the one before has ended.

        A small write is waited for, so that a kill loses no step beyond the save interval. A large one, or slow
        storage, would hold the training up: it goes on beside the next steps, which a kill meanwhile loses, too.

        Args:
          write: what to do.
          size: bytes to be written.
        """
        self.wait()

        def run() -> None:
            try:
                write()
                self._failures = 0
            except Exception as error:
                self._error = error

        self._thread = threading.Thread(target=run, name="checkpoint")
        self._thread.start()
        if size < _SMALL:
            self._thread.join(_SOON)

    def wait(self, last: bool = False) -> None:
        """Waits until nothing is being written, and tells what went wrong, as `check` does."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check(last)

    def check(self, last: bool = False) -> None:
        """Tells what went wrong in a write that has ended.

        Storage that fails is told, and may fail again, but not three times in a row, nor at the end of a run.

        Args:
          last: whether no further write will come.

        Raises:
          UserError: storage failed too often.
        """
        error, self._error = self._error, None
        if error is None:
            return
        if not isinstance(error, OSError):
            raise error
        self._failures += 1
        if last or self._failures == _MOST_FAILURES:
            raise UserError(
                "run_dir",
                self._where,
                f"can't be written, {self._failures} times in a row: {error}; older checkpoints are whole",
                "make room or mend the disk; the same command then continues the run",
                STORAGE,
            ) from error
        print(f"a checkpoint could not be written and is left out: {error}", file=sys.stderr, flush=True)
