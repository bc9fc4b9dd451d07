"""Squared norms of whole arrays on CPUs, where XLA's own way takes longer than all other work on a gradient."""

import functools

import jax
import jax.numpy as jnp

_WAYS = 16  # parts; with 8 a stage leaves more to be added up one by one than it saves
_FEW = 1024  # elements that may be added up one by one


def in_stages(array: jax.Array) -> jax.Array:
    """() the sum of squares of an array that one device holds whole.

    XLA's CPU compiler adds up an array's elements one after the other. Here a stage adds 16 parts of it to one
    another, element by element, which is done in vectors; there are as many stages as leave few elements.
    """
    squares, total = jnp.square(array.ravel()), jnp.zeros((), array.dtype)
    while squares.size >= _FEW:
        whole = squares.size - squares.size % _WAYS
        total += jnp.sum(squares[whole:])
        squares = functools.reduce(jnp.add, jnp.split(squares[:whole], _WAYS))
    return total + jnp.sum(squares)
