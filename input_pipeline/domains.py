"""Which numbers may be in an array: others would be silent nonsense.

JAX takes the loss of a class that is not there for 0; for a row of an embedding that is not there, Keras takes one from
the table's end, or TensorFlow, on some devices, zeros; the crossentropy of a label of 255 has no least value; a mean by
weights of which some are negative may be divided by next to nothing.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from input_pipeline.source import DataError, Example, named_weights
from input_pipeline.structure import flatten

_ROUNDED = 2**-7  # by which a probability of 16 bits may be over 1


class Categories(NamedTuple):
    """Numbers of categories.

    Attributes:
      size: how many there are: the numbers are whole, and in [0, size).
      of: what they number.
      ignored: one more that may be.
    """

    size: int
    of: str = "classes"
    ignored: int | None = None

    def __str__(self) -> str:
        return f"none of the {self.size} {self.of}, 0 to {self.size - 1}"

    def outside(self, array: Any) -> Any:
        """Which numbers of an array are none of them."""
        if array.dtype.kind in "iu" and array.size and array.min() >= 0 and array.max() < self.size:
            return np.False_  # as nearly always, and without arrays of its size
        found = ~((array >= 0) & (array < self.size))  # also what is no number
        if array.dtype.kind == "f":
            found |= array % 1 != 0
        return found if self.ignored is None else found & (array != self.ignored)


class Shares(NamedTuple):
    """Probabilities: numbers in [0, 1].

    Attributes:
      taken_by: the loss.
    """

    taken_by: str

    def __str__(self) -> str:
        return f"not within 0 and 1, as {self.taken_by} takes it"

    def outside(self, array: Any) -> Any:
        """Which numbers of an array are none."""
        least, most = -_ROUNDED, 1 + _ROUNDED
        if array.size and array.min() >= least and array.max() <= most:
            return np.False_
        return ~((array >= least) & (array <= most))


class Weights:
    """Numbers by which a mean over examples weighs them: none is negative."""

    def __str__(self) -> str:
        return (
            "negative, and a mean is divided by the sum of the weights; those that a dict gives by output multiply its "
            "loss alone, and may be"
        )

    def outside(self, array: Any) -> Any:
        """Which numbers of an array are negative."""
        return np.False_ if array.size and array.min() >= 0 else array < 0


Domain = Categories | Shares | Weights


def check(
    inputs: Sequence[Domain | None], labels: Sequence[Domain | None], example: Example, where: str, ids: Any
) -> None:
    """Raises DataError for numbers outside of their domains, naming the first such example.

    Args:
      inputs, labels: of each array of x and of y; None: anything goes.
      example: (x, y, weight) of examples, or its first parts.
      where: what they are of, for the message.
      ids: of the examples.
    """
    x, y, *weight = (*example, ())[: max(2, len(example))]
    _check(inputs, x, "input", where, ids)
    _check(labels, y, "label", where, ids)
    _check([Weights()], named_weights(weight).get("weight", ()), "weight", where, ids)


def _check(domains: Sequence[Domain | None], part: Any, what: str, where: str, ids: Any) -> None:
    for domain, array in zip(domains, flatten(part), strict=False):
        if domain is None:
            continue
        bad = domain.outside(array)
        if np.any(bad):
            first = tuple(np.argwhere(bad)[0])
            raise DataError(
                f"{what} {array[first]} of example {ids[first[0]]} of {where} is {domain} "
                f"({int(bad.sum())} such {what}s)"
            )
