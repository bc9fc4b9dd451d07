"""The pure step of one logical replica, and what its sums over all replicas come to. Same code on every backend.

Legend: V logical replicas in the run, B the global batch, b = B / V the examples of one replica.

Everything a replica computes is a sum that can be added to the other replicas' (Sums); what the
sums mean for the whole batch (a mean loss, a mean gradient, a new state) is decided once they are
complete. So no division by a number of devices or replicas exists on the way, and an example weighs
the same wherever it is computed.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import keras
import numpy as np
from keras import ops
from keras.src.losses import loss as keras_losses

from input_pipeline.pipeline import Batch
from trainer.objective import computed_loss, logits, lookups
from trainer.objective.calling import beside, stateless_call
from trainer.objective.purity import Noted, pure
from trainer.objective.randomness import GOLDEN, Generator, drawn_from, is_seed, keyed
from trainer.objective.state import State
from trainer.objective.trackers import Metrics, check_names
from trainer.objective.weighing import Losses, share
from trainer.sums import NEVER, Counts, Outcome, Sums, Tensor, Totals, is_overwritten


class Objective:
    """Loss and metrics of a compiled Keras model over one logical replica's examples.

    Args:
      model: a built model.
      losses: of its outputs.
      metrics: of the model.
      skips: whether a step that is not healthy changes nothing.
      scaled: whether the optimizer scales the loss, and deals with gradients that overflow by itself.
      computed: embeddings whose numbers the model computes, so that nobody has looked at them.
    """

    def __init__(
        self,
        model: keras.Model,
        losses: Losses,
        metrics: Metrics,
        skips: bool = False,
        scaled: bool = False,
        computed: Sequence[keras.layers.Embedding] = (),
    ) -> None:
        self.model, self.metrics = model, metrics
        self.skips, self._scaled = skips, scaled
        self._losses, self._computed, self._computes_loss = losses, computed, computed_loss.is_own(model)
        check_names(losses.flag, losses.names, ["loss"])
        # Losses that are told apart are sums like the metrics'.
        self._starts = metrics.start + [np.zeros(len(losses.names), np.float32)] * bool(losses.names)
        # (n,) the sums of n arrays' squares; a strategy may have a faster way.
        self.squared_norms: Callable[[list[Tensor]], Tensor] = _squared_norms
        # Values of the metrics' variables -> {name: result}; a strategy may have compiled it.
        self.metric_results: Callable[[list[Any]], dict[str, Tensor]] = metrics.stateless_result
        self.generator: Generator | None = None  # what layers draw random numbers from; None: the backend's own
        # Where the parts of the totals' amounts end: objective, weight, gradients' norms, metrics.
        sizes = [1, 1, len(model.trainable_variables), *(value.size for value in self._starts)]
        self._ends = list(itertools.accumulate(sizes))
        # Of what is no gradient, there is no norm.
        self._descends = np.array([not is_overwritten(v) for v in model.trainable_variables], np.float32)
        self._is_seed = [is_seed(v) for v in model.non_trainable_variables]
        self.state = State(losses.flag, model)
        self.outside: list[keras.Variable] = []  # variables, not to be trained, that it uses and no layer has

    @property
    def state_variables(self) -> list[keras.Variable]:
        """In the order of Values.state."""
        return self.state.variables

    def __call__(
        self, trainable: list[Tensor], state: list[Tensor], batch: Batch, training: bool
    ) -> tuple[Tensor, Sums]:
        """Forward pass of one logical replica.

        Args:
          trainable, state: values, as in Values.
          batch: 'x', 'y' (b, ...), 'key' uint32 (2,), perhaps 'weight' (b,) or (b, time), and 'weights' by output; y is
            () without labels.
          training: whether dropout and batch statistics are on.

        Returns:
          (objective, Sums with no gradients).
        """
        model = self.model
        with self._traced() as noted, logits.remembered(), _undivided():
            outputs, non_trainable, own_losses = self._forward(trainable, state, batch["key"], batch["x"], training)
            values = zip(model.trainable_variables, trainable, strict=True)
            values_after = zip(model.non_trainable_variables, non_trainable, strict=True)
            y_pred = self._losses.labelled(outputs)
            # Losses and metrics may use the model's variables, too, as those do that a model learns to weigh by.
            with keras.StatelessScope([*values, *values_after, *self.metrics.values(noted.values)]) as scope:
                if self._computes_loss:
                    args = self._losses.flag, model, batch["x"], batch["y"], outputs, own_losses, training
                    own_losses = [computed_loss.compute(*args)]
                if training:
                    self._losses.check(own_losses)
                objective, weight, apart = self._losses(batch, y_pred, own_losses)
                trained = len(noted.used)
                metrics = [*self._metric_sums(batch, y_pred, scope, training), *apart]
                del noted.used[trained:]
            non_trainable = [scope.get_current_value(v) for v in model.non_trainable_variables]
        new_state = [v for v, a_seed in zip(non_trainable, self._is_seed, strict=True) if not a_seed]
        sums = Sums(
            objective=objective,
            weight=weight,
            metrics=metrics,
            state=self.state.changes(noted.changed if training else [], new_state, state),
            gradients=[],
        )
        return objective, sums

    def outputs(self, trainable: list[Tensor], state: list[Tensor], x: Any) -> Any:
        """The model's outputs in evaluation for examples (n, ...)."""
        with self._traced():
            return self._forward(trainable, state, ops.zeros((2,), "uint32"), x, training=False)[0]

    @contextlib.contextmanager
    def _traced(self) -> Iterator[Noted]:
        """Within it, what is the user's draws from the run's generator, and may do what a pure step may."""
        drawn = drawn_from(self.generator) if self.generator else contextlib.nullcontext()
        with pure(self._losses.flag, self.model, self.metrics) as noted, drawn:
            with lookups.nan_out_of_range(self._computed):
                yield noted
        self.outside += noted.outside

    def _forward(self, trainable: list[Tensor], state: list[Tensor], key: Tensor, x: Any, training: bool) -> Any:
        """(outputs, new non-trainable values, the model's own losses)."""
        values = self._with_seeds(state, key)
        with beside(self.metrics.values({})):
            return stateless_call(self.model, trainable, values, x, training, return_losses=True)

    def _with_seeds(self, state: list[Tensor], key: Tensor) -> list[Tensor]:
        """All non-trainable values: seed generator j starts at the replica's key, offset by j."""
        values, remaining = [], iter(state)
        for j, a_seed in enumerate(self._is_seed):
            if a_seed:
                dtype = self.model.non_trainable_variables[j].dtype
                offset = ops.convert_to_tensor([j * GOLDEN % 2**32, 0], dtype)
                values.append(ops.cast(key, dtype) + offset)
            else:
                values.append(next(remaining))
        return values

    def _metric_sums(self, batch: Batch, y_pred: Any, scope: keras.StatelessScope, training: bool) -> list[Tensor]:
        if self.metrics.compiled.variables:
            weights = self._losses.metric_weights(batch, y_pred)
            with keyed(batch["key"], first=len(self._is_seed)):
                self.metrics.compiled.update_state(batch["y"], y_pred, sample_weight=weights)
        return self.metrics.changes(scope, share(batch) if "weight" in batch and not training else None)

    def no_sums(self, gradients: bool) -> Sums:
        """Sums of no replicas, with or without room for gradients."""

        def zeros(variables: Sequence[Any]) -> list[Tensor]:
            return [ops.zeros(v.shape, "float32") for v in variables]

        return Sums(
            ops.zeros((), "float32"),
            ops.zeros((), "float32"),
            zeros(self._starts),
            self.state.no_changes(),
            zeros(self.model.trainable_variables if gradients else []),
        )

    def no_totals(self) -> Totals:
        """Totals of no steps, on the host: each line of the log begins with them."""
        return Totals(np.zeros(self._ends[-1], np.float32), np.array(Counts(0, 0, NEVER), np.int32))

    def outcome(self, sums: Sums, loss_scale: Tensor | float = 1.0) -> Outcome:
        """What complete sums come to; their gradients are those of the loss times its scale."""
        norms, healthy = ops.zeros((len(self.model.trainable_variables),), "float32"), ops.isfinite(sums.objective)
        if sums.gradients:
            norms = self.squared_norms(sums.gradients) * ops.square(sums.scale / loss_scale)
            if not self._descends.all():
                norms *= self._descends
            if self._scaled:  # the optimizer leaves a step out whose gradients overflow
                norms = ops.where(ops.isfinite(ops.sum(norms)), norms, 0.0)
            else:
                healthy = ops.logical_and(healthy, ops.isfinite(ops.sum(norms)))
        parts = [sums.objective, sums.weight, norms, *sums.metrics]
        return Outcome(ops.concatenate([ops.reshape(part, (-1,)) for part in parts]), healthy)

    def add(self, totals: Totals, outcome: Outcome, step: Tensor) -> Totals:
        """Adds one step's outcome to the totals; none where unhealthy steps are skipped and it is one."""
        counted = outcome.healthy if self.skips else ops.ones_like(outcome.healthy)
        one = ops.cast(counted, "int32")
        amounts = ops.where(counted, outcome.amounts, 0.0) if self.skips else outcome.amounts
        unhealthy = ops.cast(ops.where(outcome.healthy, NEVER, step), "int32")
        steps, skipped, first = (totals.counts[i] for i in range(3))
        counts = Counts(steps + one, skipped + 1 - one, ops.minimum(first, unhealthy))
        return Totals(totals.amounts + amounts, ops.stack(counts))

    def loss(self, totals: Totals) -> float:
        """The mean over the examples of some steps."""
        objective, weight = ops.convert_to_numpy(totals.amounts)[:2]
        return float(objective / weight) if weight else float("nan")

    def results(self, totals: Totals) -> dict[str, float]:
        """'loss', those of several outputs apart, and the metrics, over the examples of some steps."""
        results = {"loss": self.loss(totals)}
        _, weight, _, *sums = np.split(ops.convert_to_numpy(totals.amounts), self._ends[:-1])
        if names := self._losses.names:
            results |= zip(names, (sums.pop() / (weight or math.nan)).tolist(), strict=True)
        if self.metrics.variables:
            pairs = zip(self.metrics.start, sums, strict=True)
            values = [(start + total.reshape(start.shape)).astype(start.dtype) for start, total in pairs]
            idle = self.metrics.idle(sums) if totals.counted.steps else []
            found = self.metric_results(values)
            check_names(self._losses.flag, found, results)  # known only now
            for name, value in found.items():
                if name not in idle:
                    results[name] = float(ops.convert_to_numpy(value).mean())
        return results

    def gradient_norms(self, totals: Totals) -> dict[str, float]:
        """By layer, the norm of its mean gradients: the root of the mean square over the steps of the totals."""
        squares: dict[str, float] = {}
        norms = ops.convert_to_numpy(totals.amounts)[2 : self._ends[2]]
        for variable, square in zip(self.model.trainable_variables, norms, strict=True):
            layer = variable.path.rpartition("/")[0] or variable.path
            squares[layer] = squares.get(layer, 0.0) + float(square)
        steps = max(1, totals.counted.steps)
        return {layer: math.sqrt(square / steps) for layer, square in squares.items()}


def _squared_norms(arrays: list[Tensor]) -> Tensor:
    return ops.stack([ops.sum(ops.square(array)) for array in arrays])


def _undivided() -> contextlib.AbstractContextManager[Any]:
    """Within it, a loss of Keras's that call() or a metric uses is the mean over its examples.

    Keras divides it by the devices of tf.distribute, whose gradients fit() adds up: a run counts examples.
    """
    names = "scale_loss_for_distribution", "unscale_loss_for_distribution"
    same: dict[str, Any] = dict.fromkeys(names, lambda loss: loss)
    return mock.patch.multiple(keras_losses, **same)
