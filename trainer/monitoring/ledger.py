"""Where the time of one start goes."""

import contextlib
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator

OTHERS_DATA = "others' data"  # a purpose: this process has what it needs, another waits for its own


class Ledger:
    """Where the time of this process went, in seconds, by purpose; what came before it is 'import'.

    Args:
      turns_to: is told each purpose as it begins, or goes on.
    """

    def __init__(self, turns_to: Callable[[str], None]) -> None:
        self._turns_to = turns_to
        self._open: list[str] = []  # purposes of the `with` blocks that we are in
        self._since = time.monotonic()
        self.seconds: dict[str, float] = {"import": _age()}
        self._began = self._since - self.seconds["import"]

    @contextlib.contextmanager
    def __call__(self, purpose: str) -> Iterator[None]:
        """Books the time of a `with` block; one inside of another takes its time from it."""
        self._book()
        self._open.append(purpose)
        self._turns_to(purpose)
        try:
            yield
        finally:
            self._book()
            self._open.pop()
            if self._open:
                self._turns_to(self._open[-1])

    def _book(self) -> None:
        now = time.monotonic()
        purpose = self._open[-1] if self._open else "other"
        self.seconds[purpose] = self.seconds.get(purpose, 0.0) + now - self._since
        self._since = now

    @property
    def elapsed(self) -> float:
        """Seconds since the process began."""
        return time.monotonic() - self._began

    def table(self) -> dict[str, float]:
        """Seconds by purpose until now; they sum to the elapsed time."""
        self._book()
        return {purpose: round(seconds, 6) for purpose, seconds in self.seconds.items()}


def _age() -> float:
    """Seconds since this process began; 0 where the system does not tell.

    A new thread's start minus the process's: containers may show an uptime that is of another clock than these.
    """
    starts: list[int] = []

    def note() -> None:
        with contextlib.suppress(OSError, ValueError, IndexError):
            for task in (os.getpid(), threading.get_native_id()):
                stat = pathlib.Path(f"/proc/self/task/{task}/stat").read_text()
                starts.append(int(stat.rpartition(")")[2].split()[19]))

    thread = threading.Thread(target=note)
    thread.start()
    thread.join()
    return (starts[1] - starts[0]) / os.sysconf("SC_CLK_TCK") if len(starts) == 2 else 0.0
