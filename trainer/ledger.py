"""Where the time goes."""

import contextlib
import time
from collections.abc import Callable, Iterator


class Ledger:
    """Where the time of this process went, in seconds, by purpose.

    Args:
      turns_to: is told each purpose as it begins.
    """

    def __init__(self, turns_to: Callable[[str], None]) -> None:
        self._turns_to = turns_to
        self.seconds: dict[str, float] = {}
        self._start = time.monotonic()

    @contextlib.contextmanager
    def __call__(self, purpose: str) -> Iterator[None]:
        """Books the time of a `with` block."""
        self._turns_to(purpose)
        start = time.monotonic()
        try:
            yield
        finally:
            self.book(purpose, time.monotonic() - start)

    def book(self, purpose: str, seconds: float) -> None:
        """Adds seconds to a purpose."""
        self.seconds[purpose] = self.seconds.get(purpose, 0.0) + seconds

    @property
    def elapsed(self) -> float:
        """Seconds since the ledger was opened."""
        return time.monotonic() - self._start

    def table(self) -> dict[str, float]:
        """Seconds by purpose, with what is booked nowhere as 'other'; they sum to the elapsed time."""
        other = self.elapsed - sum(self.seconds.values())
        return {k: round(v, 3) for k, v in [*self.seconds.items(), ("other", max(0.0, other))]}
