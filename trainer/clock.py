"""The step is the only clock: what is due at a step, and how far to run until the next thing is.

Epoch k ends with step ceil(k * examples / global batch): the step that uses the last example of the
k-th pass over the data.
"""

import dataclasses
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # which reads intervals by this module
    from trainer.config import Config

_BETWEEN_STOPS = 1.0  # seconds, about
_TELL_EVERY = "1s"  # until then, lines of the log may wait
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}


class Interval(NamedTuple):
    """A cadence: a positive amount of steps, epochs or seconds, or never (amount 0)."""

    amount: Fraction
    unit: str  # 'step', 'epoch' or 'second'

    @classmethod
    def parse(cls, text: str) -> "Interval":
        """Reads '100', '1epoch', '10min', '30s', '1h' or 'never'.

        Raises:
          ValueError: any other text, with the forms that are known.
        """
        if text.strip() in ("never", "0"):
            return cls(Fraction(0), "step")
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(steps?|epochs?|s|min|h)?", text.strip())
        if not match or not Fraction(match[1]):
            raise ValueError("is not an interval such as 100, 1epoch, 10min or never")
        amount, unit = Fraction(match[1]), match[2] or "step"
        if unit in _SECONDS:
            return cls(amount * Fraction(_SECONDS[unit]), "second")
        if unit.startswith("step") and amount.denominator != 1:
            raise ValueError("counts steps, which must be a whole number")
        return cls(amount, unit.rstrip("s"))


@dataclasses.dataclass
class Clock:
    """Tells what is due.

    Args:
      steps: the step at which the run ends.
      examples: training examples in a pass over the data.
      global_batch: examples per step.
      intervals: name -> cadence. A cadence in seconds is looked at wherever the run stops anyway.
      marks: further steps to stop at.
      now: the time in seconds.
      most: steps between two stops at most; `pace` tells how many are right.
    """

    steps: int
    examples: int
    global_batch: int
    intervals: Mapping[str, Interval]
    marks: Sequence[int] = ()
    now: Callable[[], float] = time.monotonic
    most: int = 1

    @classmethod
    def of(cls, config: "Config", steps: int, examples: int) -> "Clock":
        """The clock of a run of so many steps and training examples."""
        cadences = {name: getattr(config, f"{name}_every") for name in ("log", "evaluate", "save", "keep")}
        cadences["tell"] = _TELL_EVERY
        if config.callbacks:
            cadences["epoch"] = "1epoch"
        intervals = {name: Interval.parse(text) for name, text in cadences.items()}
        return cls(steps, examples, config.global_batch, intervals, config.profile_range() or ())

    def __post_init__(self) -> None:
        self._last = dict.fromkeys(self.intervals, self.now())

    def epochs_ended(self, step: int) -> int:
        """Number of epochs that have ended when `step` steps are done."""
        return step * self.global_batch // self.examples

    @property
    def epoch_steps(self) -> int:
        """Steps that use some of the examples of a pass."""
        return math.ceil(self.examples / self.global_batch)

    def _next(self, interval: Interval, step: int) -> int:
        """First step after `step` at which a cadence in steps or epochs is due."""
        if not interval.amount or interval.unit == "second":
            return self.steps
        period = interval.amount
        if interval.unit == "epoch":
            period *= Fraction(self.examples, self.global_batch)
        periods = math.floor(Fraction(step) / period)
        while (due := math.ceil(periods * period)) <= step:
            periods += 1
        return due

    def pace(self, steps: int, since: float) -> int:
        """How many steps to do until the next stop, so that signals and clocks are obeyed within seconds.

        Args:
          steps: that were done.
          since: when they began.
        """
        return max(1, min(2 * self.most, int(steps * _BETWEEN_STOPS / max(1e-9, self.now() - since))))

    def chunks(self, step: int, block_end: int) -> Iterator[int]:
        """Ends of the pieces into which steps `step` to `block_end` fall, cut where something is due."""
        while step < min(block_end, self.steps):
            next_due = [self._next(interval, step) for interval in self.intervals.values()]
            next_due += [mark for mark in self.marks if mark > step]
            step = min(*next_due, block_end, self.steps, step + self.most)
            yield step

    def due(self, step: int) -> set[str]:
        """Names of what is due when `step` steps are done."""
        return {name for name, interval in self.intervals.items() if self._is_due(name, interval, step)}

    def falls_on(self, name: str, step: int) -> bool:
        """Whether a cadence in steps or epochs is due at a step."""
        interval = self.intervals[name]
        return bool(interval.amount and step) and interval.unit != "second" and self._next(interval, step - 1) == step

    def _is_due(self, name: str, interval: Interval, step: int) -> bool:
        if interval.unit != "second":
            return self.falls_on(name, step)
        if self.now() - self._last[name] < interval.amount:
            return False
        self._last[name] = self.now()
        return True
