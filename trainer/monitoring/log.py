"""Lines of the log: what the steps since the line before come to."""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from input_pipeline.pipeline import Pipeline
from trainer.assembly import Assembly
from trainer.monitoring.ledger import Ledger
from trainer.storage.progress import Progress
from trainer.sums import Totals

_MOST = 100  # lines that wait


class Line(NamedTuple):
    """What is known of some steps.

    Attributes:
      step: steps done.
      totals: of the steps since the line before.
      ids: checksums of their examples: of all processes before this start, and of this one since.
      stalls: seconds that saves since the line before held the training up.
      seconds: of this start so far, by purpose.
      metrics: what the totals come to; {} of no steps.
    """

    step: int
    totals: Totals
    ids: tuple[int, int]
    stalls: Sequence[float]
    seconds: dict[str, float]
    metrics: dict[str, float] = {}


class Log:
    """The steps since the last line, and the lines that wait to be told together.

    A line told alone takes two or three times as long as one of many, and the devices stand still for it.

    Args:
      parts: of the run.
      pipeline: what the steps are fed by.
      ledger: of this start.
      progress: of the starts before: steps that no line has told, and the lines of the epoch.
      patient: whether lines may wait; not where the next steps depend on them.
    """

    def __init__(self, parts: Assembly, pipeline: Pipeline, ledger: Ledger, progress: Progress, patient: bool) -> None:
        self._parts, self._pipeline, self._ledger, self._patient = parts, pipeline, ledger, patient
        self.totals, self.epoch = progress.totals, progress.epoch
        self._ids_before, self._ids = progress.ids, 0
        self._stalls: list[float] = []
        self._waiting: list[Line] = []

    def add(self, totals: Totals, first: int, end: int) -> None:
        """Notes new totals, to which the steps `first` to `end` were added."""
        self.totals = totals
        self._ids += self._pipeline.fed(first, end)

    def stalled(self, seconds: float) -> None:
        """Notes how long a save held the training up."""
        self._stalls.append(seconds)

    def line(self, step: int) -> Line:
        """The steps since the last line, as they stand."""
        ids = self._ids_before, self._ids
        return Line(step, self.totals, ids, self._stalls, self._ledger.table())

    def begin(self) -> None:
        """Begins a new line."""
        self.totals = self._parts.program.objective.no_totals()
        self._ids = self._ids_before = 0
        self._stalls = []

    def keeps(self, line: Line) -> bool:
        """Keeps a line until others are told, too, and begins the next, if it may wait; returns whether it does."""
        if self._patient and len(self._waiting) < _MOST:
            self._waiting.append(line)
            self.begin()
            return True
        return False

    @property
    def waits(self) -> bool:
        """Whether a line does."""
        return bool(self._waiting)

    def waited(self, newest: bool = True) -> list[Line]:
        """The lines that have waited, fetched; without the newest, its steps may be in flight."""
        end = len(self._waiting) - (not newest)
        lines, self._waiting = self._waiting[:end], self._waiting[end:]
        return [self.fetched(line) for line in lines]

    def fetched(self, line: Line) -> Line:
        """A line with its totals on the host, and its metrics."""
        totals = line.totals.on_host()
        return line._replace(totals=totals, metrics=self._metrics(totals))

    def tell(self, line: Line) -> None:
        """Notes that a line is told: it is one of the epoch's, where callbacks ask for these."""
        if self._parts.config.callbacks:
            self.epoch = line.totals if self.epoch is None else self.epoch.plus(line.totals)

    def end_epoch(self) -> dict[str, float]:
        """What the lines since the epoch began come to, as fit() tells callbacks; and begins the next.

        No numbers where all its steps were left out: that there are 'loss' and the others, callbacks rely on.
        """
        if not self._parts.config.callbacks:
            return {}
        totals, self.epoch = self.epoch or self._parts.program.objective.no_totals(), None
        return self._results(totals)

    def _metrics(self, totals: Totals) -> dict[str, float]:
        return self._results(totals) if any(totals.counted[:2]) else {}

    def _results(self, totals: Totals) -> dict[str, float]:
        found = self._parts.strategy.aside(functools.partial(self._parts.program.objective.results, totals))
        return found if totals.counted.steps else dict.fromkeys(found, math.nan)  # Keras's of nothing would be 0

    def facts(self, line: Line) -> dict[str, Any]:
        """What metrics.jsonl says of a line beside its metrics; all processes call it together."""
        facts: dict[str, Any] = {
            "learning_rate": self._parts.strategy.aside(
                functools.partial(self._parts.program.learning_rate, line.step)
            ),
            "ids": self.ids(line),
            "gradient_norms": self._parts.program.objective.gradient_norms(line.totals),
        }
        if line.stalls:
            facts["save_stall"] = max(line.stalls)
        if skipped := line.totals.counted.skipped:
            facts["skipped"] = skipped
        return facts

    def ids(self, line: Line) -> str:
        """The checksum in words; all processes call it together."""
        return f"{self.checksum(line):016x}"

    def checksum(self, line: Line) -> int:
        """Of the ids that all processes were fed; they call it together. A share may be fed to several."""
        before, own = line.ids
        gathered = self._parts.peers.gather([self._pipeline.shares[0].start, own])
        return (before + sum({first: ids for first, ids in gathered}.values())) % 2**64
