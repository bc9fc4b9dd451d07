"""Which numbers of categories the layers of a model look up."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import keras
import keras.src.backend as keras_backend

from input_pipeline.domains import Categories
from input_pipeline.structure import flatten
from trainer.objective.building import symbols

_SIZES = {keras.layers.Embedding: ("input_dim", "rows"), keras.layers.CategoryEncoding: ("num_tokens", "tokens")}


def looked_up(model: keras.Model, x: Any) -> Sequence[Categories | None]:
    """For each array of x, the categories of the layer to which it goes as it is, if it does; traced.

    Args:
      model: a built model.
      x: Specs of an example.
    """
    found: list[Categories | None] = [None] * len(flatten(x))
    if not any(isinstance(layer, tuple(_SIZES)) for layer in model._flatten_layers()):
        return found
    given = list[Any]()
    training = {"training": False} if "training" in inspect.signature(model.call).parameters else {}

    def noting(call: Callable[..., Any], size: str, of: str) -> Callable[..., Any]:
        @functools.wraps(call)
        def noted(layer: keras.Layer, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            categories = Categories(getattr(layer, size), f"{of} of layer {layer.path}")
            for i in (i for i, array in enumerate(given) if array is inputs):
                before = found[i]
                found[i] = categories if before is None else min(before, categories)
            return call(layer, inputs, *args, **kwargs)

        return noted

    def call(trainable: list[Any], state: list[Any], x: Any) -> Any:
        given[:] = flatten(x)
        return model.stateless_call(trainable, state, x, **training)

    variables = model.trainable_variables, model.non_trainable_variables
    values = [[keras.KerasTensor(v.shape, v.dtype) for v in some] for some in variables]
    with contextlib.ExitStack() as patches:
        for layer, names in _SIZES.items():
            patches.enter_context(mock.patch.object(layer, "__call__", noting(layer.__call__, *names)))
        keras_backend.compute_output_spec(call, *values, _as_taken(model, symbols(x)))
    return found


def _as_taken(model: keras.Model, x: Any) -> Any:
    """Symbolic arrays in the dtypes of the model's inputs, so that it need not cast them."""
    dtypes = [each.dtype for each in keras.tree.flatten(getattr(model, "inputs", None) or ())]
    if len(dtypes) != len(given := keras.tree.flatten(x)):
        return x
    cast = [keras.KerasTensor(each.shape, dtype) for each, dtype in zip(given, dtypes, strict=True)]
    return keras.tree.pack_sequence_as(x, cast)
