"""Counts the floating-point operations of a JAX function, as it is written down."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
from jax._src.lib import _jax, xla_client
from keras.src.backend.jax import nn

from trainer.strategies.base import nothing_again

_attention = nn.dot_product_attention


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


def _written_down(*args: Any, **kwargs: Any) -> Any:
    return _attention(*args, **kwargs | {"flash_attention": False})
