"""Which labels may be: others would be silent nonsense, for JAX takes the loss of a class that is not there for 0."""

from typing import Any, NamedTuple

import numpy as np

from input_pipeline.source import DataError


class Labels(NamedTuple):
    """The labels of an output.

    Attributes:
      classes: they are in [0, classes).
      ignored: one more label, of what the loss leaves out.
    """

    classes: int
    ignored: int | None = None

    def check(self, labels: Any, where: str, ids: Any) -> None:
        """Raises DataError for other labels, naming the first such example.

        Args:
          labels: (examples, ...).
          where: what they are of, for the message.
          ids: of the examples.
        """
        bad = (labels < 0) | (labels >= self.classes)
        if self.ignored is not None:
            bad &= labels != self.ignored
        if bad.any():
            first = tuple(np.argwhere(bad)[0])
            raise DataError(
                f"label {labels[first]} of example {ids[first[0]]} of {where} is out of range: "
                f"there are {self.classes} classes, 0 to {self.classes - 1} ({int(bad.sum())} such labels)"
            )
