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
    total, array, power = jnp.zeros((), array.dtype), array.ravel(), 2
    while array.size >= _FEW:
        whole = array.size - array.size % _WAYS
        total += jnp.sum(array[whole:] ** power)
        # Each part is squared where it is added: the squares of the whole array would be written and read again.
        array = functools.reduce(jnp.add, [part**power for part in jnp.split(array[:whole], _WAYS)])
        power = 1
    return total + jnp.sum(array**power)
