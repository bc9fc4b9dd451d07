"""Squared norms of gradients, of which a device may hold a share, and quickly on CPUs.

XLA's own way takes longer there than all other work on a gradient.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

_WAYS = 16  # parts; with 8 a stage leaves more to be added up one by one than it saves
_FEW = 128  # elements; XLA adds up fewer in a single kernel, and as quickly


def squared_norms(shardings: Sequence[NamedSharding], arrays: list[jax.Array]) -> jax.Array:
    """(n,) the sums of squares of n arrays, which lie as n shardings on one mesh say, over its axis data or whole."""

    def over_devices(arrays: list[jax.Array]) -> jax.Array:
        shares = jnp.stack([in_stages(array) for array in arrays])
        cut = jnp.array(["data" in sharding.spec for sharding in shardings])
        return jnp.where(cut, jax.lax.psum(shares, "data"), shares)

    mesh, specs = shardings[0].mesh, [sharding.spec for sharding in shardings]
    if not any("data" in spec for spec in specs):
        return jnp.stack([in_stages(array) for array in arrays])
    return jax.shard_map(over_devices, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec(), check_vma=False)(arrays)


@jax.jit  # traced and lowered once for all arrays of a shape
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
