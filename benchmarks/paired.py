"""Times several ways of doing the same thing, in turn, and tells how sure the ratios are."""

import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

K = TypeVar("K")
ROUNDS, WARM_UP = 9, 2
_DISAGREEMENT = 0.15  # between the three ratios, above which none of them is believed


class Side(NamedTuple):
    """Seconds of each round of one way of doing it.

    Attributes:
      wall: by the clock.
      cpu: of all threads of this process.
    """

    wall: list[float]
    cpu: list[float]

    @property
    def median(self) -> float:
        """Of the wall times."""
        return statistics.median(self.wall)

    @property
    def least(self) -> float:
        """Of the wall times."""
        return min(self.wall)


class Ratio(NamedTuple):
    """How many times as long one side takes as another.

    Attributes:
      paired: median of the ratios of each round.
      least: of the fastest rounds.
      cpu: of the processors' time, median of the ratios of each round.
    """

    paired: float
    least: float
    cpu: float

    @property
    def noisy(self) -> bool:
        """Whether wall times disagree, or other jobs were running."""
        return abs(self.paired / self.least - 1) > _DISAGREEMENT


def in_turn(
    sides: Mapping[K, Callable[[], float]], rounds: int = ROUNDS, warm_up: int = WARM_UP, tolerance: float = 1e-3
) -> dict[K, Side]:
    """Runs A B C A B C ..., the first rounds to warm up.

    Args:
      sides: each does the whole work once and returns what came of it, a loss or a sum.
      rounds: that count.
      warm_up: rounds before them, that do not.
      tolerance: relative, within which all sides must return the same.

    Raises:
      SystemExit: they compute different things.
    """
    measured = {name: Side([], []) for name in sides}
    for turn in range(warm_up + rounds):
        results = {}
        for name, side in sides.items():
            wall, cpu = time.perf_counter(), time.process_time()
            results[name] = side()
            if turn >= warm_up:
                measured[name].wall.append(time.perf_counter() - wall)
                measured[name].cpu.append(time.process_time() - cpu)
        if turn == 0:
            first = next(iter(results.values()))
            if any(abs(result - first) > tolerance * abs(first) for result in results.values()):
                raise SystemExit(f"the sides compute different things: {results}")
    return measured


def ratio(side: Side, other: Side) -> Ratio:
    """Of a side to another of the same rounds."""
    pairs = [a / b for a, b in zip(side.wall, other.wall, strict=True)]
    of_cpu = statistics.median(a / max(1e-9, b) for a, b in zip(side.cpu, other.cpu, strict=True))
    return Ratio(statistics.median(pairs), side.least / other.least, of_cpu)


def busy() -> bool:
    """Whether other jobs keep the processors from us."""
    return os.getloadavg()[0] > (os.cpu_count() or 1) + 0.5
