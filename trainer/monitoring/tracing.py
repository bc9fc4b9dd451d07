"""A profiler's trace of some steps, --profile_steps, as TensorBoard's Profile page shows it."""

import pathlib
import sys

from trainer.config import Config
from trainer.strategies.base import Strategy


class Tracing:
    """Starts and ends the trace of this process; a run that the profiler fails goes on without.

    Args:
      config: names the steps.
      strategy: whose devices are watched.
      tensorboard: the run's folder for TensorBoard.
      process: this one's number; each has a folder of its own, for a host's file has one name.
    """

    def __init__(self, config: Config, strategy: Strategy, tensorboard: pathlib.Path, process: int) -> None:
        self._first, self._last = config.profile_range() or (0, 0)
        self._strategy = strategy
        self._folder = tensorboard / f"process-{process}" if process else tensorboard
        self._on = False

    def at(self, step: int, ended: bool) -> None:
        """When `step` steps are done; ended: whether no more will be."""
        if self._on == (on := self._first <= step < self._last and not ended):
            return
        self._on = on
        try:
            self._strategy.trace(str(self._folder), on)
        except Exception as error:
            print(f"no trace of steps {self._first} to {self._last}: {error}", file=sys.stderr, flush=True)
            self._first, self._on = self._last, False  # it is not tried again


def words(config: Config, steps: int, tensorboard: pathlib.Path) -> str:
    """What a run of so many steps says of it at its start; '' where none is asked for."""
    if not (asked := config.profile_range()):
        return ""
    first, last = asked
    if first >= steps:
        return f"none: --profile_steps={first},{last} are not among the run's {steps} steps"
    return f"steps {first} to {min(last, steps)} to {tensorboard}"
