"""Variables on a JAX mesh: for the compiled steps, and to and from the host, whole or what lies on its devices."""

import itertools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax import dtypes
from jax.sharding import NamedSharding, PartitionSpec
from keras.src.backend.jax.core import convert_to_tensor

from trainer.program import Program
from trainer.storage.shards import Index, Piece
from trainer.storage.snapshot import Pieces
from trainer.strategies.jax_arrays import placed
from trainer.sums import Values

PINNED = "pinned_host"  # JAX's name of that memory of the host which devices reach by themselves
_AT_ONCE = 16  # arrays
_value_of, _sharding_of = operator.attrgetter("_value"), operator.attrgetter("sharding")


class Gathering:
    """Whole values on the host, wherever they lie; one variable at a time is whole on the devices.

    Args:
      mesh: all devices.
    """

    def __init__(self, mesh: jax.sharding.Mesh) -> None:
        self._gather = jax.jit(lambda value: value, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def __call__(self, variable: keras.Variable) -> np.ndarray:
        return np.asarray(self.on_devices(variable))

    def on_devices(self, variable: keras.Variable) -> jax.Array:
        """The whole on this process's devices, and on one of them if each has it."""
        value = variable.value
        if not value.is_fully_addressable and not value.is_fully_replicated:
            value = self._gather(value)
        return value.addressable_data(0) if value.is_fully_replicated else value


class OnMesh:
    """A program's variables, as the compiled steps take and leave them.

    Not by Keras's value and assign, which ask of each variable in each call whether the value is wanted in another
    dtype, is there, fits, and lies where it should: longer than a small step takes.

    Args:
      program: whose.
      sharding: where a variable lies.
    """

    def __init__(self, program: Program, sharding: Callable[[keras.Variable], NamedSharding]) -> None:
        self.variables = Values(
            list(program.model.trainable_variables),
            list(program.objective.state_variables),
            list(program.optimizer.variables),
        )
        self.shardings = jax.tree.map(sharding, self.variables)
        self._all = list(itertools.chain(*self.variables))
        self._places = list(itertools.chain(*self.shardings))

    def values(self) -> Values:
        """On the mesh: a variable that was restored, or that a callback has set, may lie elsewhere."""
        values = list(map(_value_of, self._all))
        if not all(map(operator.is_, map(_sharding_of, values), self._places)):
            values = list(map(placed, values, self._places))
            # JAX may give an equal object in place of ours; what a step leaves has the same ones from then on.
            self._places = list(map(_sharding_of, values))
        trainable, state, _ = map(len, self.variables)
        return Values(values[:trainable], values[trainable : trainable + state], values[trainable + state :])

    def shapes(self, placed: bool) -> Values:
        """jax.ShapeDtypeStructs of the values, with their shardings if `placed`."""

        def shape(variable: keras.Variable, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
            dtype = keras.backend.standardize_dtype(variable.dtype)
            return jax.ShapeDtypeStruct(variable.shape, dtype, sharding=sharding if placed else None)

        return Values(*jax.tree.map(shape, self.variables, self.shardings))

    def assign(self, values: Values) -> None:
        """Sets all variables to values that lie on the mesh."""
        for variable, value in zip(self._all, itertools.chain(*values), strict=True):
            variable._value = value


def from_host(variable: keras.Variable, value: Any, dtype: Any = None) -> jax.Array:
    """As Variable._convert_to_tensor, but of a dtype that is named: else JAX compiles a copy of each numpy shape."""
    if dtype is None and isinstance(value, np.ndarray):
        dtype = dtypes.canonicalize_dtype(value.dtype)
    return convert_to_tensor(value, dtype, sparse=False)


def assign(variable: keras.Variable, sharding: NamedSharding, read: Callable[[Index], np.ndarray]) -> None:
    """Sets a variable from what is read of it, device by device."""

    def part(index: Index | None) -> np.ndarray:
        return read(index or ()).astype(keras.backend.standardize_dtype(variable.dtype))

    variable.assign(jax.make_array_from_callback(variable.shape, sharding, part))


def own_pieces(variable: keras.Variable) -> list[Piece]:
    """What lies on this process's devices, of each element the first copy alone."""
    return [
        Piece(tuple(part.start or 0 for part in shard.index), shard.data)
        for shard in variable.value.addressable_shards
        if shard.replica_id == 0
    ]


def copy_by_devices(pieces: Mapping[str, list[Piece]]) -> Callable[[], Pieces]:
    """Copying by the devices themselves, beside what they compute, into memory of the host that they can reach.

    Some 20 times as fast as by way of a buffer, one array at a time, which is how JAX fills memory of numpy. The
    largest are asked for at once: they keep the devices busy while the others are prepared, which takes longer than to
    copy a small one, and while the other thread does what it has to do.
    """
    arrays = [piece.values for of_variable in pieces.values() for piece in of_variable]
    arrays.sort(key=lambda array: -array.nbytes)
    copies = dict[int, jax.Array]()

    def begin(some: list[jax.Array]) -> None:
        places = [array.sharding.with_memory_kind(PINNED) for array in some]
        copies.update(zip(map(id, some), jax.device_put(some, places), strict=True))

    begin(arrays[:_AT_ONCE])

    def copy() -> Pieces:
        for i in range(_AT_ONCE, len(arrays), _AT_ONCE):
            begin(arrays[i : i + _AT_ONCE])
        jax.block_until_ready(copies)
        return {
            path: [Piece(start, copies[id(values)]) for start, values in of_variable]
            for path, of_variable in pieces.items()
        }

    return copy


@jax.jit
def sum_bits(values: Values) -> Any:
    """uint32 (): the sum of the bits of all values, as integers of 32 bits, which wraps around."""
    floats = [value.astype(jnp.float32) for value in jax.tree.leaves(values)]
    return sum(jnp.sum(jax.lax.bitcast_convert_type(value, jnp.uint32), dtype=jnp.uint32) for value in floats)
