"""A lock on a file, which the kernel drops with the process that has it: who was killed leaves none behind."""

import errno
import fcntl
import os
import pathlib
import socket
import sys

_UNKNOWN = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # where there are none: Lustre and NFS, as some are mounted


class Lock:
    """One that a process may have at a time.

    Args:
      path: the file, in which stands who has it, or had it last.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._file: int | None = None

    def acquire(self) -> str:
        """Takes it, unless another has it: who that is, in words, or ''. A file system without locks is told of.

        Raises:
          OSError: the file can't be made.
        """
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.register_at_fork(after_in_child=self.release)  # or a fork that lives on would keep it
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return os.read(self._file, 200).decode(errors="replace").strip() or "another process"
        except OSError as error:
            if error.errno not in _UNKNOWN:
                raise
            words = f"{self._path} lies on a file system without locks ({error.strerror})"
            print(f"{words}: nothing keeps a second run out of {self._path.parent}", file=sys.stderr, flush=True)
        os.ftruncate(self._file, 0)
        os.write(self._file, f"process {os.getpid()} on {socket.gethostname()}".encode())
        os.fsync(self._file)
        return ""

    def release(self) -> None:
        """Gives it back, if this process has it."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def is_held(self) -> bool:
        """Whether a process has it, as far as this host's kernel knows."""
        if not self._path.exists():
            return False
        with open(self._path) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            except OSError:
                return False
        return False
