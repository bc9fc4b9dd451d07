"""Files that grow by records, each of which is there whole or not at all."""

import os
import pathlib
import sys


class Appender:
    """Appends records to a file. What can't be written, on a full disk, is left out and said once: training goes on.

    Args:
      path: the file; made if it is not there.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._told = False

    def write(self, record: bytes) -> None:
        """Appends a record."""
        before = os.fstat(self._file).st_size
        try:
            if os.write(self._file, record) == len(record):
                return
            error = OSError(f"only a part of {len(record)} bytes found room")
        except OSError as caught:
            error = caught
        os.ftruncate(self._file, before)
        if not self._told:
            print(f"{self._path} can't be written, and lacks what follows: {error}", file=sys.stderr, flush=True)
            self._told = True

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)
