"""Variables sharded over a mesh, and compiled steps on them: one global program, partitioned by XLA.

Legend of shapes: K steps of a block, V logical replicas, R shares of the data axis, n = V / R turns,
b examples of a replica.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import keras
import keras.src.backend.jax.core as keras_jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec
from keras.src.distribution.distribution_lib import Distribution
from keras.src.initializers.random_initializers import RandomInitializer
from keras.src.optimizers.base_optimizer import BaseOptimizer

from input_pipeline.pipeline import Batch
from trainer import layouts, plugins
from trainer.config import Config
from trainer.errors import UserError
from trainer.layouts import Layout
from trainer.strategies.base import Block
from trainer.strategies.data_parallel import OneProgram
from trainer.strategies.host_values import from_host
from trainer.strategies.jax_step import Forward, Leaf, Tally, Update
from trainer.sums import Sums, Totals, Values

_DATA = "data"


def layout_of(config: Config, sizes: dict[str, int]) -> Layout:
    """The layout that --layout names, perhaps from the model's module."""
    build, _ = plugins.resolve(config.model, "model", "trainer.models", "build")
    beside = getattr(sys.modules.get(getattr(build, "__module__", "")), "LAYOUTS", {})
    layout = layouts.create(config.layout, beside, sizes)
    if config.exact and (layout.shards or len(sizes) > 1):
        raise UserError(
            "exact",
            True,
            f"can't be held under --layout={config.layout} and --mesh={config.mesh}: where a product is "
            "shared out over devices, XLA chooses the order in which it is added up",
            "drop --exact, or use --layout=replicated and a mesh of the data axis alone",
        )
    return layout


class Placing(Distribution):
    """Tells Keras where variables and layer outputs go, as it creates them.

    Args:
      mesh: the devices.
      layout: the rules.
      abstract: create variables without values: shape, dtype and layout alone.
    """

    def __init__(self, mesh: jax.sharding.Mesh, layout: Layout, abstract: bool = False) -> None:
        axes = list(mesh.shape)
        names = [f"{d.platform}:{d.id}" for d in mesh.devices.flat]
        super().__init__(keras.distribution.DeviceMesh(list(mesh.shape.values()), axes, names), _DATA, False)
        self._mesh, self._layout, self._abstract = mesh, layout, abstract
        self.error: UserError | None = None  # raised once Keras, which would wrap it, has returned

    def get_data_layout(self, data_shape: Any) -> None:
        return None

    def get_variable_layout(self, variable: Any) -> NamedSharding:
        try:
            axes = self._layout.place(variable.path, variable.shape).axes
        except UserError as error:
            self.error, axes = self.error or error, ()
        return NamedSharding(self._mesh, PartitionSpec(*axes))

    def get_slot_layout(self, shape: Sequence[int], variable: NamedSharding) -> NamedSharding:
        """Of what an optimizer keeps of a variable, which also is where its gradient goes and its update is made."""
        return NamedSharding(self._mesh, PartitionSpec(*self._layout.place_slots(shape, tuple(variable.spec))))

    def get_tensor_layout(self, path: str) -> NamedSharding | None:
        axes = self._layout.place_output(path)
        if axes is None:
            return None
        # A replica's examples lie on one share of the data axis as it is.
        return NamedSharding(self._mesh, PartitionSpec(*(None if axis == _DATA else axis for axis in axes)))

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        variable = keras_jax.JaxVariable
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(variable, "_convert_to_tensor", from_host))
            if self._layout.shards:
                # Keras creates small variables whole and then shards them; here no device ever holds the whole.
                sharded = mock.patch.object(keras_jax, "should_shard_at_init", lambda layout, _: any(layout.spec))
                stack.enter_context(sharded)
                stack.enter_context(mock.patch.object(variable, "_initialize_with_initializer", _initialize_in_parts))
                slots = mock.patch.object(BaseOptimizer, "add_variable", self._adding_slots(BaseOptimizer.add_variable))
                stack.enter_context(slots)
            if self._abstract:
                # What Keras does in its own stateless scope, which takes no variables made from arrays.
                stack.enter_context(mock.patch.object(variable, "_initialize_with_initializer", _defer))
                stack.enter_context(mock.patch.object(variable, "_deferred_initialize", _defer))
            stack.enter_context(super().scope())
            yield
        if self.error:
            raise self.error

    def _adding_slots(self, add_variable: Callable[..., Any]) -> Callable[..., Any]:
        """Keras's way to create an optimizer's variable, but that a slot need not lie where its variable does."""

        def add(optimizer: Any, shape: Any, *args: Any, layout: Any = None, **others: Any) -> Any:
            layout = layout and self.get_slot_layout(shape, layout)
            return add_variable(optimizer, shape, *args, layout=layout, **others)

        return add


_initialize = keras_jax.JaxVariable._initialize_with_initializer  # Keras's own


def _initialize_in_parts(variable: Any, initializer: Any) -> None:
    """What is made on the host goes to each device in its part; all else is made there."""
    if not isinstance(initializer, RandomInitializer | keras.initializers.Ones | keras.initializers.Zeros):
        _initialize(variable, initializer)
        return
    variable._initialize_layout()
    values = np.asarray(initializer(variable._shape, dtype=variable._dtype))
    variable._value = jax.make_array_from_callback(values.shape, variable._layout, lambda index: values[index])


def _defer(variable: Any, initializer: Any = None) -> None:
    """Gives a variable no value; where Keras traces the model again, it has zeros, of which none are made."""
    variable._initialize_layout()
    variable._value, variable._initializer = None, jnp.zeros


def over_replicas(forward: Forward, shardings: Sequence[NamedSharding]) -> Forward:
    """The same for R logical replicas at once, (R, b, ...) laid over the data axis: sums over them.

    A variable that is sharded over the data axis is gathered where it is used, and its gradient scattered
    where it arises (ZeRO, Rajbhandari et al. 2019, arXiv:1910.02054): left to itself, XLA may
    rather gather the batch. The backward pass gathers again, so that no device ever keeps the whole.

    Args:
      forward: for one replica.
      shardings: of the trainable variables.
    """

    def summed(trainable: list[Any], values: Values, batches: Batch) -> tuple[Any, Sums]:
        trainable = [_gathered(v, s) if _DATA in s.spec else v for v, s in zip(trainable, shardings, strict=True)]
        one = jax.vmap(lambda batch: forward(trainable, values, batch), spmd_axis_name=_DATA)
        return jax.tree.map(lambda a: jnp.sum(a, axis=0), one(batches))

    if not any(_DATA in sharding.spec for sharding in shardings):
        return summed
    return jax.checkpoint(summed, policy=jax.checkpoint_policies.save_anything_except_these_names("gathered"))


def _constrained(arrays: Sequence[Any], shardings: Sequence[NamedSharding]) -> list[Any]:
    return [jax.lax.with_sharding_constraint(a, s) for a, s in zip(arrays, shardings, strict=True)]


def _gathered(value: Any, sharding: NamedSharding) -> Any:
    spec = PartitionSpec(*(None if axis == _DATA else axis for axis in sharding.spec))
    whole = NamedSharding(sharding.mesh, spec)

    @jax.custom_vjp
    def gather(value: Any) -> Any:
        return jax.lax.with_sharding_constraint(value, whole)

    gather.defvjp(
        lambda value: (gather(value), None),
        lambda _, gradient: (jax.lax.with_sharding_constraint(gradient, sharding),),
    )
    return checkpoint_name(gather(value), "gathered")


class ShardedLoop(OneProgram):
    """A compiled step, called once per step; variables stay where the layout puts them.

    Args:
      mesh: with an axis data of R shares, and others.
      replicas: V.
      leaf: (values, R replicas' batches (R, b, ...)) -> their Sums.
      update: (values, complete Sums) -> values; None: the values stay, and are returned as None.
      tally: adds a step to the totals.
      shardings: of the values.
      slots: of each trainable variable's slots.
    """

    def __init__(
        self,
        mesh: jax.sharding.Mesh,
        replicas: int,
        leaf: Leaf,
        update: Update | None,
        tally: Tally,
        shardings: Values,
        slots: Sequence[NamedSharding],
    ) -> None:
        super().__init__(mesh, apart=True)
        self._leaf, self._update, self._tally = leaf, update, tally
        self._slots = slots if update else []
        self._shares = mesh.shape[_DATA]
        self.turns = replicas // self._shares
        results = (shardings if update else None, self.whole)
        self.program = jax.jit(self._step, out_shardings=results, donate_argnums=(0,) if update else ())

    def exchange(self, floats: int) -> float:
        """See Strategy.exchange: what XLA moves here is no one sum."""
        return 0.0

    def _step(self, values: Values, totals: Totals, block: Block, numbers: Any) -> tuple[Any, Totals]:
        i, _, step = (numbers[j] for j in range(3))
        turns = jax.tree.map(lambda a: self._by_turn(a[i]), block)
        sums = self._sums(values, jax.tree.map(lambda a: a[0], turns))
        if self.turns > 1:

            def add_turn(sums: Sums, batches: Batch) -> tuple[Sums, None]:
                return jax.tree.map(jnp.add, sums, self._sums(values, batches)), None

            sums, _ = jax.lax.scan(add_turn, sums, jax.tree.map(lambda a: a[1:], turns))
        totals = self._tally(totals, values, sums, step)
        if not self._update:
            return None, totals
        return self._update(values._replace(trainable=_constrained(values.trainable, self._slots)), sums), totals

    def _by_turn(self, array: Any) -> Any:
        """(V, b, ...) -> (n, R, b, ...): in turn j, share d takes its j-th replica."""
        by_turn = array.reshape(self._shares, self.turns, *array.shape[1:]).swapaxes(0, 1)
        return jax.lax.with_sharding_constraint(by_turn, NamedSharding(self.mesh, PartitionSpec(None, _DATA)))

    def _sums(self, values: Values, batches: Batch) -> Sums:
        sums = self._leaf(values, batches)
        return sums._replace(gradients=_constrained(sums.gradients, self._slots))
