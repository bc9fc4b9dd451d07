"""A program's step as pure functions of JAX arrays: what a logical replica adds, and what follows from the sums."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from input_pipeline.pipeline import Batch
from trainer.errors import UserError
from trainer.objective.calling import beside
from trainer.optimizers import counters
from trainer.program import Program
from trainer.sums import Sums, Totals, Values

Forward = Callable[[list[Any], Values, Batch], tuple[Any, Sums]]  # (trainable, values, batch) -> (objective, Sums)
Leaf = Callable[[Values, Batch], Sums]  # (values, one replica's batch) -> Sums
Update = Callable[[Values, Sums], Values]  # (values, complete Sums) -> new values
Tally = Callable[[Totals, Values, Sums, Any], Totals]  # (totals, values, complete Sums, step) -> new totals


class PureStep:
    """The pure functions of a program.

    Args:
      program: whose.
      variables: its variables, in the order of the values.
      scope: the strategy's, in which layers place their outputs while they are traced.

    Raises:
      UserError: JAX was told to compute in 64 bits.
    """

    def __init__(
        self, program: Program, variables: Values, scope: Callable[[], contextlib.AbstractContextManager[Any]]
    ) -> None:
        if jnp.result_type(float) != jnp.float32:  # by the environment it is refused before
            raise UserError(
                "model",
                program.config.model,
                "sets jax_enable_x64, or --dataset's module does: Keras's losses would have 64 bits, its variables not",
                "delete it, or use --backend=tensorflow",
            )
        self._objective, self._optimizer, self._replicas = program.objective, program.optimizer, program.replicas
        self._variables = variables
        self._scope = scope
        self._leaves: dict[bool, Leaf] = {}

    def forward(self, training: bool) -> Forward:
        """A replica's objective, scaled as gradients are to be, and its Sums without gradients."""

        def forward(trainable: list[Any], values: Values, batch: Batch) -> tuple[Any, Sums]:
            with self._scope(), self._beside(values):
                objective, sums = self._objective(trainable, values.state, batch, training)
            return objective * self._loss_scale(values), sums if training else sums._replace(state=[])

        return forward

    def leaf(self, training: bool) -> Leaf:
        """A replica's Sums; the same function each time, so that it is traced once for all programs it is part of."""
        if training not in self._leaves:
            self._leaves[training] = jax.jit(summing(self.forward(training), training), inline=True)
        return self._leaves[training]

    def outputs(self, values: Values, x: Any) -> Any:
        """The model's outputs in evaluation for examples (n, ...)."""
        with self._scope(), self._beside(values):
            return self._objective.outputs(values.trainable, values.state, x)

    def update(self, values: Values, sums: Sums) -> Values:
        """The variables after a step."""
        trainable, optimizer = self._optimizer.stateless_apply(
            values.optimizer, sums.mean_gradients(self._variables.trainable, self._replicas), values.trainable
        )
        new = Values(trainable, sums.mean_state(values.state, self._replicas), optimizer)
        if self._objective.skips:
            healthy = self._objective.outcome(sums).healthy
            new = jax.tree.map(lambda new, old: jnp.where(healthy, new, old), new, values)
            counting = [id(counter) for counter in counters(self._optimizer)]
            for i, variable in enumerate(self._variables.optimizer):
                if id(variable) in counting:  # steps count, skipped or not
                    new.optimizer[i] = optimizer[i]
        return new

    def tally(self, totals: Totals, values: Values, sums: Sums, step: Any) -> Totals:
        """The totals with a step more, of the values before it."""
        return self._objective.add(totals, self._objective.outcome(sums, self._loss_scale(values)), step)

    def _beside(self, values: Values) -> contextlib.AbstractContextManager[None]:
        """Within it, call() and losses read the optimizer's numbers, such as its count of steps: no constants."""
        pairs = zip(self._variables.optimizer, values.optimizer, strict=True)
        return beside((variable, value) for variable, value in pairs if not variable.shape)

    def _loss_scale(self, values: Values) -> Any:
        for variable, value in zip(self._variables.optimizer, values.optimizer, strict=True):
            if variable is getattr(self._optimizer, "dynamic_scale", None):  # mixed_float16
                return value
        return 1.0


def summing(forward: Forward, training: bool) -> Leaf:
    """(values, batch) -> Sums, with gradients in training."""

    def with_gradients(values: Values, batch: Batch) -> Sums:
        def objective(trainable: list[Any]) -> tuple[Any, Sums]:
            return forward(trainable, values, batch)

        gradients, sums = jax.grad(objective, has_aux=True)(values.trainable)
        return sums._replace(gradients=[g.astype(jnp.float32) for g in gradients])

    return with_gradients if training else lambda values, batch: forward(values.trainable, values, batch)[1]
