"""What becomes of a loss that is not finite, or that leaps: the run stops, skips the step, or goes back."""

import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from input_pipeline.pipeline import Pipeline
from input_pipeline.source import Example, is_streamed, read
from input_pipeline.structure import flatten
from trainer import policy
from trainer.config import Config
from trainer.errors import UserError
from trainer.sums import NEVER, Totals

_LINES = 10  # of the log, whose median a leap is measured by
_MOST_IN_A_ROW = 3  # times that a run goes back without a healthy line of the log in between


class Cause(NamedTuple):
    """What makes a loss not finite, where it is not the training itself: words for a UserError."""

    flag: str
    words: str
    fix: str


class Guard:
    """Watches the loss of a run.

    Args:
      config: gives on_nan.
      compiled: whether the model is compiled with an optimizer of its own.
      pipeline: of the training examples.
      out_of_range: what examples look up, and has no row, in words.
      remembered: what `memory` was when the run was saved.
    """

    def __init__(
        self,
        config: Config,
        compiled: bool,
        pipeline: Pipeline,
        out_of_range: Callable[[Any], str],
        remembered: Mapping[str, Any],
    ) -> None:
        self._config, self._compiled, self._pipeline = config, compiled, pipeline
        self._out_of_range = out_of_range
        self._cause: Cause | None = None  # of what was not finite last
        self._policy = policy.parse(config.on_nan)
        self._losses: list[float] = list(remembered.get("losses", []))
        self._in_a_row = int(remembered.get("in_a_row", 0))

    @property
    def memory(self) -> dict[str, Any]:
        """What a later start needs to know: JSON."""
        return {"losses": self._losses, "in_a_row": self._in_a_row}

    @property
    def steers(self) -> bool:
        """Whether the steps that follow a line of the log depend on it."""
        return self._policy.name == "rollback" or bool(self._policy.spike)

    def unhealthy(self, totals: Totals) -> str:
        """The first step whose loss or gradients were not finite, and its examples, in words; '' if none."""
        self._cause, step = None, totals.counted.unhealthy
        if step == NEVER:
            return ""
        ids = self._pipeline.ids(step)
        first = ", ".join(map(str, ids[:8])) + ", ..." * (len(ids) > 8)
        if not is_streamed(self._pipeline.source):
            self._cause = self._found(step)
        if not (step or self._cause):
            self._cause = Cause("model", "no update was made yet", "look at what the model and its loss make of them")
        why = f": {self._cause.words}" if self._cause else ""
        return f"the loss or a gradient was not finite at step {step + 1} (examples {first}){why}"

    def _found(self, step: int) -> Cause | None:
        """What is wrong with the examples of a step, or with what the model looks up for them."""
        ids = self._pipeline.ids(step)
        example = read(self._pipeline.source, ids)
        if cause := _not_finite(ids, example, "", "mend it, or leave it out"):
            return cause
        if self._pipeline.augment:
            example = self._pipeline.examples(step)
            if cause := _not_finite(ids, example, ", as the dataset's `augment` makes it", "mend that function"):
                return cause
        missing = self._out_of_range(example[0])
        fix = "give that layer more rows (input_dim), or mend what computes its numbers"
        return Cause("model", missing, fix) if missing else None

    def leaps(self, step: int, loss: float) -> str:
        """Whether the loss of a line of the log leaps above the lines before, in words; '' if not."""
        factor, before = self._policy.spike, self._losses
        if factor and len(before) == _LINES and loss > factor * statistics.median(before):
            return f"the loss leapt to {loss:.4g} by step {step}, from a median of {statistics.median(before):.4g}"
        self._losses = [*before, loss][-_LINES:]
        self._in_a_row = 0
        return ""

    def go_back(self) -> int:
        """Counts a return. Which checkpoint to go back to, 1 the newest; 0 if --on_nan or the count forbids it.

        The newest may hold the fault already, though it did not show yet: the second return in a row goes one
        further back, and nothing is saved in between.
        """
        self._in_a_row += 1
        may = self._policy.name == "rollback" and self._in_a_row <= _MOST_IN_A_ROW
        return self._in_a_row if may else 0

    @property
    def in_doubt(self) -> bool:
        """Whether the run went back, and no healthy line of the log has come since."""
        return self._in_a_row > 0

    def error(self, reason: str, kept: str) -> UserError:
        """What is raised where the run must stop.

        Args:
          reason: what happened.
          kept: which good checkpoint there is, in words.
        """
        returns = self._in_a_row - 1
        often = f", after the run went back {returns} times in a row" if returns > 0 else ""
        if self._cause:
            flag, _, fix = self._cause
            return UserError(flag, getattr(self._config, flag), f"{reason}{often}; {kept}", fix)
        config, flag, fix = self._config, "learning_rate", "lower --learning_rate"
        value, clip = config.hyperparameters[flag], "clip with --optimizer='adam(global_clipnorm=1.0)'"
        if self._compiled:
            flag, value, fix, clip = "model", config.model, "lower the learning rate in compile()", "clip there"
        return UserError(
            flag,
            value,
            f"{reason}{often}; {kept}",
            f"{fix}, {clip}, or look at the data; --on_nan=skip or rollback goes on without the steps at fault; "
            "--initialize_from takes the kept checkpoint into a new run",
        )


def _not_finite(ids: npt.NDArray[np.int64], example: Example, by: str, fix: str) -> Cause | None:
    for what, part in zip(("input", "label", "weight"), example, strict=False):
        for array in flatten(part):
            bad = ~np.isfinite(array).reshape(len(ids), -1).all(axis=1)
            if bad.any():
                return Cause("dataset", f"the {what} of example {ids[bad][0]} is not finite{by}", fix)
    return None
