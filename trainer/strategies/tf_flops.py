"""Floating-point operations of a TensorFlow graph: those of its matrix products and convolutions."""

import math
from typing import Any

import tensorflow as tf


def count(graph: tf.Graph) -> float:
    """Multiplications and additions, two for each term of a sum; of the bodies of loops, none."""
    return float(sum(2 * _terms(op) for op in graph.get_operations()))


def _terms(op: Any) -> int:
    """How many products an operation adds up; 0 where it is not of those that take the time."""
    shapes = [tuple(tensor.shape) for tensor in op.inputs if tensor.shape.is_fully_defined()]
    out = tuple(op.outputs[0].shape) if op.outputs and op.outputs[0].shape.is_fully_defined() else None
    if op.type == "MatMul" and out is not None:
        return math.prod(out) * shapes[0][0 if op.get_attr("transpose_a") else 1]
    if op.type.startswith("BatchMatMul") and out is not None:
        return math.prod(out) * shapes[0][-2 if op.get_attr("adj_x") else -1]
    if op.type == "Einsum":
        names = op.get_attr("equation").decode().partition("->")[0].split(",")
        sizes = {n: d for name, shape in zip(names, shapes, strict=True) for n, d in zip(name, shape, strict=True)}
        return math.prod(sizes.values())
    if op.type in ("Conv2D", "DepthwiseConv2dNative") and out is not None:
        taps = shapes[1][:3] if op.type == "Conv2D" else shapes[1][:2]
        return math.prod(out) * math.prod(taps)
    if op.type in ("Conv2DBackpropInput", "Conv2DBackpropFilter"):
        # Each term of the convolution comes once more, whatever it is summed over: as in the convolution, whose
        # output's gradient is the last input.
        kernel = shapes[1] if op.type == "Conv2DBackpropInput" else out
        return math.prod(shapes[-1]) * math.prod(kernel[:3]) if kernel is not None else 0
    return 0
