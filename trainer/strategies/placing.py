"""Where a program's variables lie on a mesh, as Keras creates them."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import google_crc32c
import jax
import jax.numpy as jnp
import keras
import keras.src.backend.jax.core as keras_jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from keras.src.distribution.distribution_lib import Distribution
from keras.src.initializers.random_initializers import RandomInitializer
from keras.src.optimizers.base_optimizer import BaseOptimizer

from trainer import layouts, plugins
from trainer.config import Config
from trainer.errors import UserError
from trainer.layouts import Layout
from trainer.strategies.host_values import from_host

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
        self.given = 0  # checksum of the values that variables have been given, of which a process may keep a part

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
                stack.enter_context(
                    mock.patch.object(variable, "_initialize_with_initializer", self._initializing_in_parts())
                )
                slots = mock.patch.object(BaseOptimizer, "add_variable", self._adding_slots(BaseOptimizer.add_variable))
                stack.enter_context(slots)
            if self._mesh.is_multi_process:
                assign = mock.patch.object(variable, "_direct_assign", self._noting(variable._direct_assign))
                stack.enter_context(assign)
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

    def _initializing_in_parts(self) -> Callable[[Any, Any], None]:
        """What is made on the host goes to each device in its part; all else is made there."""
        initialize_by_keras = keras_jax.JaxVariable._initialize_with_initializer

        def initialize(variable: Any, initializer: Any) -> None:
            if not isinstance(initializer, RandomInitializer | keras.initializers.Ones | keras.initializers.Zeros):
                initialize_by_keras(variable, initializer)
                return
            variable._initialize_layout()
            values = np.asarray(initializer(variable._shape, dtype=variable._dtype))
            self._note(values)
            variable._value = jax.make_array_from_callback(values.shape, variable._layout, lambda index: values[index])

        return initialize

    def _noting(self, assign: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        """Keras's way to give a variable a value, of which note is taken: each process may keep another part of it."""

        def noting(variable: Any, value: Any) -> None:
            self._note(value)
            assign(variable, value)

        return noting

    def _note(self, value: Any) -> None:
        if not isinstance(value, jax.core.Tracer) and getattr(value, "is_fully_addressable", True):
            self.given = google_crc32c.extend(self.given, np.ascontiguousarray(value).view(np.uint8))


def _defer(variable: Any, initializer: Any = None) -> None:
    """Gives a variable no value; where Keras traces the model again, it has zeros, of which none are made."""
    variable._initialize_layout()
    variable._value, variable._initializer = None, jnp.zeros
