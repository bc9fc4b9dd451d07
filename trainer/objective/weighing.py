"""A replica's part of the loss, and what its examples weigh: the loss of a step is sum(weight * loss) / sum(weight)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras
from keras import ops
from keras.src.backend import get_keras_mask

from input_pipeline.pipeline import Batch
from trainer.errors import UserError
from trainer.sums import Tensor

Masks = tuple[Any, ...]


class Losses:
    """The losses of a model's outputs, and of its own.

    Args:
      flag: which --model it is, for errors.
      losses: one keras.losses.Loss per output, or None where an output has none.
      factors: one per output.
      names: of the labels, if they are a dict, in the order of the outputs; None where that is their own.
      global_batch: B.
      places: name -> place among the model's outputs, flattened, of those that have labels; None: all have. The
        losses are of these, in this order.
      outputs: names of these, if they have some.
    """

    def __init__(
        self,
        flag: str,
        losses: Sequence[Any],
        factors: Sequence[float],
        names: Sequence[str] | None,
        global_batch: int,
        places: Mapping[str, int] | None = None,
        outputs: Sequence[str] = (),
    ) -> None:
        self.flag, self._losses, self._factors = flag, losses, factors
        self._names, self._global_batch, self._places = names, global_batch, places
        self._outputs = outputs
        having = [name for name, loss in zip(outputs, losses, strict=False) if loss is not None]
        apart = len(outputs) == len(losses) and len(set(having)) == len(having) > 1
        self.names = [f"{name}_loss" for name in having] if apart else []  # of losses that are told apart

    def __call__(self, batch: Batch, y_pred: Any, own: Sequence[Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """(sum of weight * loss, sum of weight, the former by output) over a replica's examples, each over B.

        By output, those of `names` are one array (names,), not multiplied by their factors; none where there are none.

        Args:
          batch: 'x', 'y' (b, ...), perhaps 'weight' (b,) or (b, time), and 'weights' of outputs, by which their losses
            are multiplied; y is () without labels.
          y_pred: the outputs that have labels.
          own: what the model adds by add_loss() and by regularizers, each a mean over the replica's examples.
        """
        found = self._values(batch, keras.tree.flatten(y_pred), self._own_weights(batch, y_pred))
        weights = self._weights(batch, [masks for *_, masks in found if masks is not None])
        objective, weight = ops.zeros((), "float32"), self._mean(weights)
        apart = [self._mean(self._weighed(values, weights)) for _, values, _ in found]
        for (factor, *_), loss in zip(found, apart, strict=True):
            objective += factor * loss
        for loss in own:
            objective += weight * ops.cast(loss, "float32")
        return objective, weight, [ops.stack(apart)] if self.names else []

    def labelled(self, outputs: Any) -> Any:
        """The outputs that losses and metrics compare with labels."""
        return outputs if self._places is None else labelled(outputs, self._places)

    def metric_weights(self, batch: Batch, y_pred: Any) -> Any:
        """Weights as Keras's metrics take them: of each output, with as many dims as its mask, by which they multiply.

        None where a batch has none.
        """
        if not batch.keys() & {"weight", "weights"}:
            return None

        def of_output(output: Tensor, own: Tensor | None) -> Tensor:
            weight = batch["weight"] if "weight" in batch else ops.ones((output.shape[0],))
            for factor in (own, get_keras_mask(output)):
                if factor is not None:
                    weight = expand(weight, factor)
            return weight if own is None else weight * expand(own, weight)

        weights = map(of_output, keras.tree.flatten(y_pred), self._own_weights(batch, y_pred))
        return keras.tree.pack_sequence_as(y_pred, list(weights))

    def check(self, own: Sequence[Tensor]) -> None:
        """Raises UserError where a model in training has neither a loss nor its own, or one that is no number."""
        for loss in own:
            if len(loss.shape):
                raise UserError(
                    "model",
                    self.flag,
                    f"adds a loss of shape {tuple(loss.shape)} by add_loss(): fit() would add its values up, and "
                    "larger batches be another loss",
                    "add one number, such as ops.mean(...)",
                )
        if not own and all(loss is None for loss in self._losses):
            raise UserError(
                "model",
                self.flag,
                "has nothing to be trained on: examples have no labels, and its call() adds no loss",
                "let the source return (x, y), or call() use add_loss()",
            )

    def _values(
        self, batch: Batch, outputs: list[Tensor], weights: list[Tensor | None]
    ) -> list[tuple[float, Tensor, Masks | None]]:
        """Each loss: its factor, its values (b, ...), and the masks of those that count.

        Of an output that has weights of its own, its masks are part of them: the values are times both.
        """
        if all(loss is None for loss in self._losses):
            return []
        found, y, examples = list[tuple[float, Tensor, Masks | None]](), batch["y"], _examples(batch)
        targets = keras.tree.flatten(y) if self._names is None else [y[name] for name in self._names]
        targets = targets or [None] * len(outputs)
        for loss, factor, target, output, own in zip(
            self._losses, self._factors, targets, outputs, weights, strict=True
        ):
            if loss is None:
                continue
            try:
                values = loss.call(ops.cast(target, "float32"), ops.cast(output, "float32"))
            except (ValueError, TypeError) as error:
                raise UserError(
                    "model",
                    self.flag,
                    f"has outputs {shapes(output)} for labels {shapes(target)}, which its loss {loss.name!r} does not "
                    f"take: {error}",
                    "let the last layers give what the loss compares with a label (is a Flatten missing?), "
                    "or compile it with another loss; without one, if call() adds all of it by add_loss()",
                ) from error
            masks: Masks | None = (get_keras_mask(output), get_keras_mask(values))
            if len(values.shape) and values.shape[0] is None:  # TensorFlow has lost sight of it
                values = ops.reshape(values, (examples, *values.shape[1:]))
            if values.shape[:1] != (examples,):
                fix = "return one value per example, such as ops.mean(..., axis=-1)"
                if getattr(loss, "axis", ()) is None:  # Keras's Dice and Tversky
                    fix = f"create it with axis={tuple(range(1, len(output.shape)))}"
                elif len(output.shape) == 1:
                    fix = "let the model give outputs (batch, 1): Keras's losses take the mean over the last axis"
                raise UserError(
                    "model",
                    self.flag,
                    f"its loss {loss.name!r} returns shape {tuple(values.shape)}, not one value per example: a mean "
                    "taken inside can't be weighted, padded or split over devices",
                    fix,
                )
            if own is not None:
                values, masks = self._weighed(values, _masked(own, masks or ())), None
            found.append((factor, values, masks))
        return found

    def _own_weights(self, batch: Batch, y_pred: Any) -> list[Tensor | None]:
        """For each output, the weights that it alone has."""
        count = len(keras.tree.flatten(y_pred))
        if "weights" not in batch:
            return [None] * count
        weights, names = batch["weights"], self._outputs
        if isinstance(weights, dict):
            given, fits = f"weights of {', '.join(sorted(weights))}", weights.keys() <= set(names)
            found = [weights.get(name) for name in names]
        else:
            given, fits = f"{len(weights)} arrays of weights", not isinstance(y_pred, dict)
            found = list(weights)
        problem = ""
        if all(loss is None for loss in self._losses):
            problem = "no output has a loss that they could weigh"
        elif not fits or len(found) != count or len(keras.tree.flatten(weights)) != len(weights):
            problem = f"its outputs that have labels are {', '.join(names) or f'{count} without names'}"
        if problem:
            raise UserError(
                "model",
                self.flag,
                f"is given {given}, and {problem}",
                "let the source give one array of weights, of examples; or for outputs that have a loss, a dict of one "
                "by output",
            )
        return [None if each is None else ops.cast(each, "float32") for each in found]

    def _weighed(self, values: Tensor, weights: Tensor) -> Tensor:
        if values.shape[: len(weights.shape)] != weights.shape:
            raise UserError(
                "model",
                self.flag,
                f"has a loss with values of shape {shapes(values)}, and the weights are {shapes(weights)}",
                "give weights of examples (batch,) or of the loss's values; a mask counts as such weights",
            )
        return values * expand(weights, values)

    def _weights(self, batch: Batch, masks: list[Masks]) -> Tensor:
        """(b,) or (b, time): what examples weigh, and nothing where a mask leaves them out."""
        if len({tuple(map(id, of_loss)) for of_loss in masks}) > 1:
            raise UserError(
                "model",
                self.flag,
                "has several losses, of different masks: a step's loss is one mean over examples, by one weight",
                "let the source give weights by output for those that have masks (docs/data.md); or build its layers "
                "without mask_zero, and leave out ignore_class",
            )
        weights = batch["weight"] if "weight" in batch else ops.ones((_examples(batch),))
        return _masked(ops.cast(weights, "float32"), masks[0] if masks else ())

    def _mean(self, values: Tensor) -> Tensor:
        """A replica's part of the mean over the global batch; of values (b, time), of their mean over time."""
        return ops.sum(values) * (1.0 / (self._global_batch * math.prod(values.shape[1:])))


def labelled(outputs: Any, places: Mapping[str, int]) -> dict[str, Tensor]:
    """Some of a model's outputs: name -> the one at a place among all, flattened."""
    flat = keras.tree.flatten(outputs)
    return {name: flat[place] for name, place in places.items()}


def shapes(structure: Any) -> str:
    """Shapes of batches, in words."""
    return ", ".join(str(("batch", *t.shape[1:])).replace("'", "") for t in keras.tree.flatten(structure))


def share(batch: Batch) -> Tensor:
    """Of a replica's examples those that weigh something, (): of padding, all is left out."""
    weights = ops.reshape(batch["weight"], (_examples(batch), -1))
    return ops.mean(ops.cast(ops.any(weights != 0, axis=-1), "float32"))


def _examples(batch: Batch) -> int:
    """b: how many examples a replica's batch has."""
    return int(keras.tree.flatten(batch["x"])[0].shape[0])


def _masked(weights: Tensor, masks: Masks) -> Tensor:
    """Weights (b,) or (b, time), and nothing where a mask leaves them out."""
    for mask in masks:
        if mask is not None:
            weights = expand(weights, mask) * expand(ops.cast(mask, "float32"), weights)
    return weights


def expand(w: Tensor, values: Tensor) -> Tensor:
    """Weights (b,) or (b, time) with as many dims as the values that they weigh."""
    while len(w.shape) < len(values.shape):
        w = ops.expand_dims(w, -1)
    return w
