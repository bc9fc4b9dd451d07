"""A compute_loss() of the model's own, such as keras.distillation.Distiller has: a step's loss is what it returns.

It is given a logical replica's examples, and what it returns counts as the mean of what each of them gives.
"""

from typing import Any
from unittest import mock

import keras
from keras import ops
from keras.src.backend import compute_output_spec

from input_pipeline.dataset import Dataset
from input_pipeline.structure import flatten
from trainer.errors import UserError
from trainer.objective import inputs
from trainer.objective.purity import pure
from trainer.objective.trial import several
from trainer.sums import Tensor


def is_own(model: keras.Model) -> bool:
    """Whether the model's class has its own."""
    return type(model).compute_loss is not keras.Model.compute_loss


def compute(flag: str, model: keras.Model, x: Any, y: Any, y_pred: Any, losses: list[Any], training: bool) -> Tensor:
    """What it returns, ().

    Args:
      flag: which --model it is, for errors.
      model: in a scope that has its variables' values.
      x, y: examples and labels (b, ...); y is () without labels.
      y_pred: the model's outputs of them.
      losses: what the model added by add_loss() and by regularizers, which it finds in self.losses.
      training: as call() was told.

    Raises:
      UserError: it returns something else than one number.
    """
    with mock.patch.dict(vars(model), _losses_override=losses):  # set as an attribute, a list is another thing
        loss = model._compute_loss(inputs.taken(model, x), y if flatten(y) else None, y_pred, None, training=training)
    shape = getattr(loss, "shape", None)
    if shape is None or set(shape) - {1}:
        found = repr(loss) if shape is None else f"an array {tuple(shape)}"
        raise UserError(
            "model",
            flag,
            f"its compute_loss() returns {found}, and a step's loss is one number",
            "return the mean over the examples that it is given, such as ops.mean(...)",
        )
    return ops.reshape(loss, ())


def build(flag: str, model: keras.Model, dataset: Dataset) -> None:
    """Traces it, for what compile() was given may make variables of its own when it is first called, as in fit().

    Args:
      flag: which --model it is, for errors.
      model: a compiled model.
      dataset: of which it is given examples.

    Raises:
      UserError: examples have weights, or it returns something else than one number.
    """
    if len(dataset.spec) > 2:
        raise UserError(
            "model",
            flag,
            "has a compute_loss() of its own, and examples have weights, of which nobody knows what it makes",
            "let the source return them as a part of y, and compute_loss() weigh by them; or delete it",
        )

    def trace(x: Any, y: Any) -> Tensor:
        outputs = model(inputs.taken(model, x), **inputs.mode(model, training=True))
        return compute(flag, model, x, y, outputs, [], training=True)

    with pure(flag, model):
        compute_output_spec(trace, *several(inputs.symbols(dataset.spec[:2])))
