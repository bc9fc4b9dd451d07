"""A few examples that losses and metrics are tried on, before a run begins."""

import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from input_pipeline.structure import map_structure

EXAMPLES = 4
TOLERANCE = 1e-4  # relative, of float32 sums in another order

COARSE = 0.03  # the same, of the largest, where there are 16 bits: some roundings of 8 significant ones


def dtypes(model: keras.Model) -> list[str]:
    """Those beside float32 that layers compute in, perhaps by a dtype of their own, or are quantized to."""
    layers = list(model._flatten_layers())
    computed = {layer.compute_dtype for layer in layers} & {"bfloat16", "float16", "float64"}
    return sorted(computed | {layer.quantization_mode for layer in layers} - {None})


def is_coarse(model: keras.Model) -> bool:
    """Whether a layer computes in 16 bits or fewer."""
    return bool({*dtypes(model)} - {"float64"})


def several(symbols: Any) -> Any:
    """Symbols (n, ...) for those of one example each; n is no other dim, so that nothing is broadcast over examples."""
    dims = {dim for symbol in keras.tree.flatten(symbols) for dim in symbol.shape[1:]}
    n = next(n for n in itertools.count(EXAMPLES) if n not in dims)
    return keras.tree.map_structure(lambda symbol: keras.KerasTensor((n, *symbol.shape[1:]), symbol.dtype), symbols)


def drawn(y_pred: Any) -> Any:
    """What a model might say of EXAMPLES examples, as numpy's arrays: between 0 and 1, always the same."""
    random = np.random.default_rng(0)

    def draw(output: Any) -> Any:
        return ops.convert_to_numpy(ops.cast(random.random((EXAMPLES, *output.shape[1:]), np.float32), output.dtype))

    return keras.tree.map_structure(draw, y_pred)


def over_batches(function: Callable[[Any], Any], examples: Any, batch: int) -> Any:
    """The sum of what a function gives for each of several batches, as numpy's arrays.

    By ops.map, for it is one program: else JAX would compile each operation, for seconds.

    Args:
      function: of a nested structure of tensors (batch, ...).
      examples: numpy's arrays (examples, ...), as many as make whole batches.
      batch: examples of one.
    """
    batches = map_structure(lambda array: array.reshape(-1, batch, *array.shape[1:]), examples)
    return keras.tree.map_structure(lambda t: ops.convert_to_numpy(t).sum(0), ops.map(function, batches))
