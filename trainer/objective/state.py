"""What a step does to a model's state, such as the statistics of batch-norm: variables that are not trained."""

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from trainer.errors import UserError
from trainer.objective.randomness import is_seed
from trainer.sums import Tensor, is_integer


class State:
    """Non-trainable variables but the seed generators': a seed follows from the step and replica.

    Args:
      flag: which --model it is, for errors.
      model: a built model.
    """

    def __init__(self, flag: str, model: keras.Model) -> None:
        self._flag = flag
        self.variables = [v for v in model.non_trainable_variables if not is_seed(v)]
        # Which ones steps change, and which ones a step that was traced has.
        self._moves, self._moved = [True] * len(self.variables), set[int]()

    def leave_what_stays(self) -> None:
        """Adds up no changes any more of what no step traced so far changes, such as a frozen layer's variables."""
        self._moves = [id(v) in self._moved for v in self.variables]

    def changes(self, changed: Sequence[keras.Variable], new: Sequence[Tensor], old: Sequence[Tensor]) -> list[Any]:
        """What a replica adds to each variable, float32; [] to those that stay.

        Args:
          changed: variables that were assigned to.
          new, old: values after and before.
        """
        self._moved.update(map(id, changed))
        for variable, moves in zip(self.variables, self._moves, strict=True):
            if id(variable) in self._moved and not moves:
                raise UserError(
                    "model",
                    self._flag,
                    f"changes {variable.path} in some of its calls in training, as they are traced, and not in others",
                    "let call() assign to the same variables each time",
                )
        return [_change(n, o) if moves else [] for n, o, moves in zip(new, old, self._moves, strict=True)]

    def no_changes(self) -> list[Any]:
        """What no replicas add."""
        pairs = zip(self.variables, self._moves, strict=True)
        return [ops.zeros(v.shape, "float32") if moves else [] for v, moves in pairs]


def _change(new: Tensor, old: Tensor) -> Tensor:
    """new - old in float32, which holds a counter's step, but not a large counter."""
    common = "int32" if is_integer(old) else "float32"  # of unsigned ones modulo 2**32, as they count
    return ops.cast(ops.cast(new, common) - ops.cast(old, common), "float32")
