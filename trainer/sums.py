"""What travels: values of variables, sums over examples, and totals over steps. Legend: see trainer/step.py."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

Tensor = Any  # of the backend


class Values(NamedTuple):
    """Values of the run's variables, as the pure functions see them.

    Attributes:
      trainable: of model.trainable_variables, in that order.
      state: of the other model variables (batch-norm statistics and the like) but seed generators'.
      optimizer: of optimizer.variables.
    """

    trainable: list[Tensor]
    state: list[Tensor]
    optimizer: list[Tensor]


class Sums(NamedTuple):
    """What one logical replica adds to the whole, all float32.

    Attributes:
      objective: () sum over examples of weight * loss, over B; the model's own losses
        (regularization) weigh in with the replica's examples.
      weight: () sum of the examples' weights, over B.
      metrics: what the examples add to each metric variable.
      state: change of each state variable; [] of one that no step changes.
      gradients: d objective / d trainable, one per trainable variable; [] in evaluation. Of a variable that Keras
        overwrites with its gradient, such as the scales of float8, the value that the replica would give it.
    """

    objective: Tensor
    weight: Tensor
    metrics: list[Tensor]
    state: list[Any]
    gradients: list[Tensor]

    @property
    def scale(self) -> Tensor:
        """What makes a mean of sums. One division: by a factor, compilers multiply where a gradient is used."""
        return 1.0 / ops.where(self.weight > 0, self.weight, 1.0)

    def mean_gradients(self, variables: Sequence[keras.Variable], replicas: int) -> list[Tensor]:
        """Of complete sums, what an optimizer is to apply: gradients of the mean loss over the global batch.

        In the variables' dtype; in float32 if they have several. An optimizer casts them anyhow; but what it clips by
        one norm, TensorFlow can't multiply in several dtypes by it.

        Args:
          variables: the trainable ones; those that are overwritten, with the mean of what the replicas give them.
          replicas: V.
        """
        scale, dtypes = self.scale, {keras.backend.standardize_dtype(v.dtype) for v in variables}
        dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
        pairs = zip(self.gradients, variables, strict=True)
        return [ops.cast(g * (1.0 / replicas if is_overwritten(v) else scale), dtype) for g, v in pairs]

    def mean_state(self, state: Sequence[Tensor], replicas: int) -> list[Tensor]:
        """Of complete sums, the state moved by the mean of the changes; what no replica changed stays to the bit."""

        def moved(old: Tensor, change: Tensor) -> Tensor:
            if is_integer(old):
                return old + ops.cast(ops.cast(change / replicas, "int32"), old.dtype)
            return ops.cast(ops.cast(old, "float32") + change / replicas, old.dtype)

        pairs = zip(state, self.state, strict=True)
        return [old if isinstance(change, list) else moved(old, change) for old, change in pairs]


class Outcome(NamedTuple):
    """What one step comes to for the log.

    Attributes:
      amounts: float32 (n,), end to end: objective and weight as in Sums, the squared norm of each mean gradient
        (0 in evaluation), metrics as in Sums. One array, for each takes a call as long as a small step's arithmetic.
      healthy: bool (), whether the objective and the gradients are finite.
    """

    amounts: Tensor
    healthy: Tensor


class Counts(NamedTuple):
    """Steps, of which totals are.

    Attributes:
      steps: how many were added up.
      skipped: how many were left out because they were not healthy.
      unhealthy: the first that was not healthy, NEVER if all were.
    """

    steps: int
    skipped: int
    unhealthy: int


class Totals(NamedTuple):
    """Sums over steps, from one line of the log to the next.

    Attributes:
      amounts: float32 (n,), as in Outcome.
      counts: int32 (3,), as in Counts.
    """

    amounts: Tensor
    counts: Tensor

    def wait(self) -> None:
        """Returns when the steps are done."""
        if hasattr(self.counts, "block_until_ready"):  # JAX: in a third of the time that the numbers take to the host
            self.counts.block_until_ready()
        else:
            ops.convert_to_numpy(self.counts)

    def on_host(self) -> "Totals":
        """The same as numpy's arrays."""
        return Totals(*map(ops.convert_to_numpy, self))

    def plus(self, other: "Totals") -> "Totals":
        """Of the steps of both, on the host, in float64."""
        amounts = np.add(*(ops.convert_to_numpy(each.amounts) for each in (self, other)), dtype=np.float64)
        steps, skipped, unhealthy = zip(self.counted, other.counted, strict=True)
        return Totals(amounts, np.array(Counts(sum(steps), sum(skipped), min(unhealthy)), np.int32))

    @property
    def counted(self) -> Counts:
        """The counts, on the host."""
        return Counts(*ops.convert_to_numpy(self.counts).tolist())


NEVER = 2**31 - 1


def is_integer(array: Tensor) -> bool:
    """Whether an array is of integers."""
    return "int" in keras.backend.standardize_dtype(array.dtype)


def is_overwritten(variable: keras.Variable) -> bool:
    """Whether a step gives a variable its gradient as its value, which a layer computes as such."""
    return getattr(variable, "overwrite_with_gradient", False)
