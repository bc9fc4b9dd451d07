"""Counts the floating-point operations of a JAX function, as it is written down."""

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
from jax._src.core import jaxprs_in_params
from jax._src.lib import _jax, xla_client
from keras.src.backend.jax import nn

from trainer.strategies.base import nothing_again

_attention = nn.dot_product_attention
# Operations for which an accelerator takes longer than the host for a call: some milliseconds, with hundreds of arrays.
_LONG = 2e12


def count(function: Callable[..., Any], *shapes: Any) -> float:
    """Operations of a call, as XLA counts those of the program that it is given.

    A kernel is a call whose operations nobody knows. So attention is counted without one: all products of queries and
    keys, those that a mask leaves out, too, as Chowdhery et al. do (2022, arXiv:2204.02311). Nor is anything counted
    twice that is computed again to save memory.

    Args:
      function: one that was not traced before.
      shapes: of its arguments.
    """
    with nothing_again(), mock.patch.object(nn, "dot_product_attention", _written_down):
        program: Any = jax.jit(function).lower(*shapes).compiler_ir("hlo")
    # Of the clients of devices, those of CPUs alone count.
    counted = _jax.hlo_module_cost_analysis(xla_client.make_cpu_client(), program.as_hlo_module())
    return float(counted["flops"])


def of_products(jaxpr: Any) -> float:
    """Operations of a traced function's matrix products and convolutions: of a step all but a few, and found at once.

    A kernel's are left out, and multiplications by the zeros that a convolution is padded with counted.
    """
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            total += 2.0 * equation.outvars[0].aval.size * math.prod(shape[dim] for dim in contracted)
        elif equation.primitive.name == "conv_general_dilated":
            kernel, dims = equation.invars[1].aval, equation.params["dimension_numbers"]
            of_output = kernel.size / kernel.shape[dims.rhs_spec[0]] / math.prod(equation.params["lhs_dilation"])
            total += 2.0 * equation.outvars[0].aval.size * of_output
        turns = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        total += turns * sum(map(of_products, jaxprs_in_params(equation.params)))
    return total


def are_long(jaxpr: Any, turns: int) -> bool:
    """Whether steps of so many turns of a traced function are better called one by one.

    A GPU asks the host at each turn of a loop whether there is another: the call returns as the last one begins, and
    only then is the next call prepared. A step alone is called while those before it are computed.
    """
    return turns * of_products(jaxpr) > _LONG


def _written_down(*args: Any, **kwargs: Any) -> Any:
    return _attention(*args, **kwargs | {"flash_attention": False})
