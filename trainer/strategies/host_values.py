"""Variables on a JAX mesh, to and from the host: whole, or what lies on this process's devices."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from trainer.shards import Index, Piece
from trainer.sums import Values


class Gathering:
    """Whole values on the host, wherever they lie; one variable at a time is whole on the devices.

    Args:
      mesh: all devices.
    """

    def __init__(self, mesh: jax.sharding.Mesh) -> None:
        self._gather = jax.jit(lambda value: value, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def __call__(self, variable: keras.Variable) -> np.ndarray:
        value = variable.value
        if not value.is_fully_addressable and not value.is_fully_replicated:
            value = self._gather(value)
        return np.asarray(value)


def assign(variable: keras.Variable, sharding: NamedSharding, read: Callable[[Index], np.ndarray]) -> None:
    """Sets a variable from what is read of it, device by device."""

    def part(index: Index | None) -> np.ndarray:
        return read(index or ()).astype(keras.backend.standardize_dtype(variable.dtype))

    variable.assign(jax.make_array_from_callback(variable.shape, sharding, part))


def own_pieces(variable: keras.Variable) -> list[Piece]:
    """Copies of what lies on this process's devices, of each element the first copy alone."""
    return [
        Piece(tuple(part.start or 0 for part in shard.index), np.array(shard.data))
        for shard in variable.value.addressable_shards
        if shard.replica_id == 0
    ]


@jax.jit
def sum_bits(values: Values) -> Any:
    """uint32 (): the sum of the bits of all values, as integers of 32 bits, which wraps around."""
    floats = [value.astype(jnp.float32) for value in jax.tree.leaves(values)]
    return sum(jnp.sum(jax.lax.bitcast_convert_type(value, jnp.uint32), dtype=jnp.uint32) for value in floats)
