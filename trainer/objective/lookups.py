"""Which numbers of categories the layers of a model look up.

What goes to a layer as it is read is checked on the host. What the model computes from it, such as a column cast to
integers, is not seen there: what has no row is NaN on the device, so that the loss shows it, and is named then.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import keras.src.backend as keras_backend
import numpy as np
from keras import ops

from input_pipeline.domains import Categories
from input_pipeline.structure import flatten, map_structure, pack
from trainer.objective.calling import stateless_call
from trainer.objective.inputs import inputs_of, mode, taken
from trainer.objective.patched import patched

_SIZES = {keras.layers.Embedding: ("input_dim", "rows"), keras.layers.CategoryEncoding: ("num_tokens", "tokens")}


class Lookups(NamedTuple):
    """What a model looks up.

    Attributes:
      inputs: for each array of x, the categories of the layer to which it goes as it is; None if there is none.
      computed: embeddings that are given something else.
    """

    inputs: Sequence[Categories | None]
    computed: Sequence[keras.layers.Embedding] = ()


def looked_up(model: keras.Model, x: Any) -> Lookups:
    """What a model looks up, by a trace.

    Args:
      model: a built model.
      x: Specs of an example.
    """
    found: list[Categories | None] = [None] * len(flatten(x))
    if not any(isinstance(layer, tuple(_SIZES)) for layer in model._flatten_layers()):
        return Lookups(found)
    given, calls = list[Any](), list[keras.Layer]()

    def noting(call: Callable[..., Any], size: str, of: str) -> Callable[..., Any]:
        @functools.wraps(call)
        def noted(layer: keras.Layer, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            before = len(calls)
            outputs = call(layer, inputs, *args, **kwargs)
            categories = Categories(getattr(layer, size), f"{of} of layer {layer.path}")
            for i in (i for i, array in enumerate(given) if array is inputs):
                del calls[before:]
                known = found[i]
                found[i] = categories if known is None else min(known, categories)
            return outputs

        return noted

    def call(trainable: list[Any], state: list[Any], x: Any) -> Any:
        given[:] = flatten(x)
        outputs = stateless_call(model, trainable, state, x, training=False)
        given.clear()
        return outputs

    variables = model.trainable_variables, model.non_trainable_variables
    values = [[keras.KerasTensor(v.shape, v.dtype) for v in some] for some in variables]
    with contextlib.ExitStack() as patches:
        for layer, names in _SIZES.items():
            patches.enter_context(patched(layer, "__call__", noting(layer.__call__, *names)))
        patches.enter_context(_seen(lambda layer, _: calls.append(layer)))
        keras_backend.compute_output_spec(call, *values, _as_taken(model, x))
    return Lookups(found, list({id(layer): layer for layer in calls}.values()))


@contextlib.contextmanager
def _seen(see: Callable[[keras.layers.Embedding, Any], None]) -> Iterator[None]:
    """Within it, what embeddings are asked for is shown."""
    plain = keras.layers.Embedding.call

    def call(layer: keras.layers.Embedding, inputs: Any) -> Any:
        see(layer, inputs)
        return plain(layer, inputs)

    with patched(keras.layers.Embedding, "call", call):
        yield


@contextlib.contextmanager
def nan_out_of_range(layers: Sequence[keras.layers.Embedding]) -> Iterator[None]:
    """Within it, what these embeddings give for a number that they have no row for is NaN."""
    plain = keras.layers.Embedding.call

    def call(layer: keras.layers.Embedding, inputs: Any) -> Any:
        if not any(layer is each for each in layers):
            return plain(layer, inputs)
        # As Keras does, for 8 bits may not hold how many rows there are; but fractions are compared as they are.
        dtype = keras.backend.standardize_dtype(inputs.dtype)
        numbers = inputs if "float" in dtype or dtype == "int64" else ops.cast(inputs, "int32")
        there = ops.logical_and(numbers >= 0, numbers < layer.input_dim)
        rows = plain(layer, ops.where(there, numbers, ops.zeros_like(numbers)))  # TensorFlow's CPUs would raise
        return ops.where(ops.expand_dims(there, -1), rows, ops.cast(np.nan, rows.dtype))

    with patched(keras.layers.Embedding, "call", call) if layers else contextlib.nullcontext():
        yield


class _AllSeen(BaseException):  # for Keras would wrap an Exception
    pass


def out_of_range(model: keras.Model, computed: Sequence[keras.layers.Embedding], x: Any) -> str:
    """What these embeddings are asked for by examples, and have no row for, in words; '' if that can't be told.

    It computes no more of the model than it takes to know.
    """
    found, awaited = list[str](), {id(layer) for layer in computed}

    def see(layer: keras.layers.Embedding, inputs: Any) -> None:
        numbers = ops.convert_to_numpy(inputs)
        domain = Categories(layer.input_dim, f"rows of layer {layer.path}")
        bad = np.broadcast_to(domain.outside(numbers.astype(np.int64)), numbers.shape)
        if id(layer) in awaited and bad.any():
            found.append(f"{numbers[bad][0]} is {domain}")
        awaited.discard(id(layer))
        if found or not awaited:
            raise _AllSeen

    with _seen(see), contextlib.suppress(_AllSeen, Exception):  # a process may not hold all of the variables
        model(map_structure(ops.convert_to_tensor, taken(model, x)), **mode(model, training=False))
    return "".join(found)


def _as_taken(model: keras.Model, x: Any) -> Any:
    """Symbolic arrays of such Specs, with the dtypes and the dims of the model's inputs, so that it casts none."""

    def symbol(spec: Any, of: keras.KerasTensor | None) -> keras.KerasTensor:
        if of is None:
            return keras.KerasTensor((1, *spec.shape), str(spec.dtype))
        # A last dim of 1 may be there or not.
        return keras.KerasTensor((1, *spec.shape, 1)[: len(of.shape)], of.dtype)

    return pack(x, map(symbol, flatten(x), inputs_of(model, x)))
