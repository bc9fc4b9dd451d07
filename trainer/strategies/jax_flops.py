"""What a JAX function computes: its floating-point operations, as it is written down."""

import math
from collections.abc import Callable, Iterator
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
_CONVOLUTION = "conv_general_dilated"


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
    for equation, times in _equations(jaxpr):
        of_output = 0.0  # multiplications for each element
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            of_output = math.prod(equation.invars[0].aval.shape[dim] for dim in contracted)
        elif equation.primitive.name == _CONVOLUTION:
            kernel, dims = equation.invars[1].aval, equation.params["dimension_numbers"]
            of_output = kernel.size / kernel.shape[dims.rhs_spec[0]] / math.prod(equation.params["lhs_dilation"])
        if of_output:  # not each output has a size
            total += 2.0 * times * of_output * equation.outvars[0].aval.size
    return total


def convolves(jaxpr: Any) -> bool:
    """Whether a traced function has convolutions."""
    return any(equation.primitive.name == _CONVOLUTION for equation, _ in _equations(jaxpr))


def _equations(jaxpr: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """Each equation, and how often it is computed, as far as that is known."""
    for equation in jaxpr.eqns:
        yield equation, times
        turns = equation.params["length"] if equation.primitive.name == "scan" else 1
        for inner in jaxprs_in_params(equation.params):
            yield from _equations(inner, times * turns)


def are_long(jaxpr: Any, turns: int) -> bool:
    """Whether steps of so many turns of a traced function are better called one by one.

    A GPU asks the host at each turn of a loop whether there is another: the call returns as the last one begins, and
    only then is the next call prepared. A step alone is called while those before it are computed.
    """
    return turns * of_products(jaxpr) > _LONG


def _written_down(*args: Any, **kwargs: Any) -> Any:
    return _attention(*args, **kwargs | {"flash_attention": False})
