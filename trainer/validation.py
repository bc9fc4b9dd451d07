"""Evaluations of a run that is being trained; a start that is told to stop does not wait for their end."""

import contextlib
from collections.abc import Callable

from input_pipeline.source import Source
from trainer.assembly import Assembly
from trainer.evaluation import evaluate
from trainer.monitoring.gallery import Gallery
from trainer.monitoring.ledger import Ledger
from trainer.reporting import Nothing, Reporting


class Validation:
    """What evaluations tell of one start of a run.

    Args:
      parts: strategy, program and data.
      ledger: books their time.
      told: whether to break off; all processes ask it together, and hear the same.

    Attributes:
      metrics: of the last evaluation of this start, 'val_...'; {} if there was none.
    """

    def __init__(self, parts: Assembly, ledger: Ledger, told: Callable[[], bool]) -> None:
        self._parts, self._ledger, self._told = parts, ledger, told
        self._gallery = Gallery(parts, ledger, told)
        self._has_evaluated = False
        self.metrics: dict[str, float] = {}

    def run(self, step: int, reporting: Reporting | Nothing, is_last: bool) -> dict[str, float]:
        """Loss and metrics of the validation examples; {} where there are none.

        Args:
          step: where the run stands.
          reporting: is given pictures.
          is_last: whether the run ends here.

        Raises:
          BrokenOff: this start was told to stop.
        """
        source = self._parts.dataset.validation
        if source is None:
            return {}
        with self._booked(is_last), self._parts.program.averaged():
            self.metrics = self._evaluated(source, "val_")
            self._gallery.show(step, reporting, is_last)
        return self.metrics

    def final(self, step: int, reporting: Reporting | Nothing) -> dict[str, float]:
        """Those of the validation examples, and 'test_...' of the test's.

        Raises:
          BrokenOff: this start was told to stop.
        """
        final = dict(self.metrics or self.run(step, reporting, is_last=True))
        if (test := self._parts.dataset.evaluation) is self._parts.dataset.validation:
            final |= {f"test_{k.removeprefix('val_')}": v for k, v in self.metrics.items()}
        elif test is not None:
            with self._booked(is_last=True), self._parts.program.averaged():
                final |= self._evaluated(test, "test_")
        return final

    def _booked(self, is_last: bool) -> contextlib.AbstractContextManager[None]:
        return self._ledger("last evaluation" if is_last else "evaluate")  # the last one holds no steps up

    def _evaluated(self, source: Source, prefix: str) -> dict[str, float]:
        compiling = contextlib.nullcontext() if self._has_evaluated else self._ledger("compile")
        found = evaluate(self._parts, source, prefix, self._told, compiling)
        self._has_evaluated = True
        return found
