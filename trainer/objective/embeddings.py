"""Which numbers the embeddings of a model look up."""

from collections.abc import Sequence
from typing import Any
from unittest import mock

import keras
import keras.src.backend as keras_backend

from input_pipeline.domains import Categories
from input_pipeline.structure import flatten
from trainer.objective.building import symbols


def looked_up(model: keras.Model, x: Any) -> Sequence[Categories | None]:
    """For each array of x, the rows of the layer to which it goes as it is, if it does; traced.

    Args:
      model: a built model.
      x: Specs of an example.
    """
    found: list[Categories | None] = [None] * len(flatten(x))
    if not any(isinstance(layer, keras.layers.Embedding) for layer in model._flatten_layers()):
        return found
    given, look_up = list[Any](), keras.layers.Embedding.call

    def noting(layer: keras.layers.Embedding, inputs: Any) -> Any:
        for i in (i for i, array in enumerate(given) if array is inputs):
            before = found[i]
            if before is None or layer.input_dim < before.size:
                found[i] = Categories(layer.input_dim, f"rows of layer {layer.path}")
        return look_up(layer, inputs)

    def call(trainable: list[Any], state: list[Any], x: Any) -> Any:
        given[:] = flatten(x)
        return model.stateless_call(trainable, state, x)

    variables = model.trainable_variables, model.non_trainable_variables
    values = [[keras.KerasTensor(v.shape, v.dtype) for v in some] for some in variables]
    with mock.patch.object(keras.layers.Embedding, "call", noting):
        keras_backend.compute_output_spec(call, *values, _as_taken(model, symbols(x)))
    return found


def _as_taken(model: keras.Model, x: Any) -> Any:
    """Symbolic arrays in the dtypes of the model's inputs, so that it need not cast them."""
    dtypes = [each.dtype for each in keras.tree.flatten(getattr(model, "inputs", None) or ())]
    if len(dtypes) != len(given := keras.tree.flatten(x)):
        return x
    cast = [keras.KerasTensor(each.shape, dtype) for each, dtype in zip(given, dtypes, strict=True)]
    return keras.tree.pack_sequence_as(x, cast)
