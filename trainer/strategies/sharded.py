"""Variables sharded over a mesh, and compiled steps on them: one global program, partitioned by XLA.

Legend of shapes: K steps of a block, V logical replicas, R shares of the data axis, n = V / R turns,
b examples of a replica.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from input_pipeline.pipeline import Batch
from trainer.config import Config
from trainer.errors import UserError
from trainer.objective.patched import patched
from trainer.strategies.base import Block
from trainer.strategies.data_parallel import OneProgram
from trainer.strategies.jax_step import Forward, Leaf, Tally, Update
from trainer.sums import Sums, Totals, Values, is_overwritten

_DATA = "data"


def over_replicas(
    forward: Forward, variables: Sequence[keras.Variable], shardings: Sequence[NamedSharding], config: Config | None
) -> Forward:
    """The same for R logical replicas at once, (R, b, ...) laid over the data axis: sums over them.

    A variable that is sharded over the data axis is gathered where it is used, and its gradient scattered
    where it arises (ZeRO, Rajbhandari et al. 2019, arXiv:1910.02054): left to itself, XLA may
    rather gather the batch. The backward pass gathers again, so that no device ever keeps the whole.

    Args:
      forward: for one replica.
      variables: the trainable ones. Each replica has a copy of those that are overwritten: what a layer computes of
        its variables alone, it would else compute once, and give one value where R are added up.
      shardings: of the trainable variables.
      config: the flags, where gradients are taken; else None.

    Raises:
      UserError: while it is traced, for a convolution whose gradient XLA would not add up as it is.
    """
    axes = [0 if is_overwritten(variable) else None for variable in variables]

    def summed(trainable: list[Any], values: Values, batches: Batch) -> tuple[Any, Sums]:
        trainable = [_gathered(v, s) if _DATA in s.spec else v for v, s in zip(trainable, shardings, strict=True)]
        shares = jax.tree.leaves(batches)[0].shape[0]
        trainable = [
            v if axis is None else _repeated(v, shares, s.mesh)
            for v, axis, s in zip(trainable, axes, shardings, strict=True)
        ]
        one = jax.vmap(lambda own, batch: forward(own, values, batch), in_axes=(axes, 0), spmd_axis_name=_DATA)
        with _without_groups(config, shardings[0].mesh) if config else contextlib.nullcontext():
            return jax.tree.map(lambda a: jnp.sum(a, axis=0), one(trainable, batches))

    if not any(_DATA in sharding.spec for sharding in shardings):
        return summed
    return jax.checkpoint(summed, policy=jax.checkpoint_policies.save_anything_except_these_names("gathered"))


@contextlib.contextmanager
def _without_groups(config: Config, mesh: Any) -> Iterator[None]:
    """Refuses convolutions by groups of channels on a mesh whose devices compute some gradients alike.

    XLA adds theirs up over all devices: by JAX alone, 0.10 as 0.12, jax.grad of a depthwise convolution is twice as
    large on data=2,model=2 as on one device.
    """
    alike, convolve = mesh.size // mesh.shape[_DATA], jax.lax.conv_general_dilated
    by_groups = False

    def noting(*args: Any, **kwargs: Any) -> Any:
        nonlocal by_groups
        by_groups |= kwargs.get("feature_group_count", 1) > 1
        return convolve(*args, **kwargs)

    with patched(jax.lax, "conv_general_dilated", noting):
        yield
    if by_groups and 1 not in (alike, mesh.shape[_DATA]):  # told here, for Keras would wrap an error of a layer's
        raise UserError(
            "mesh",
            config.mesh,
            f"makes gradients of convolutions by groups (depthwise, separable) {alike} times as large as they are: XLA "
            "adds them up over devices that have computed the same, too",
            f"shard over the data axis alone, by --mesh=data={mesh.size} --layout=fsdp, or use other convolutions",
        )


def _constrained(arrays: Sequence[Any], shardings: Sequence[NamedSharding]) -> list[Any]:
    return [jax.lax.with_sharding_constraint(a, s) for a, s in zip(arrays, shardings, strict=True)]


def _repeated(value: Any, shares: int, mesh: Any) -> Any:
    """(R, ...), a copy for each share of the data axis."""
    place = NamedSharding(mesh, PartitionSpec(_DATA))
    return jax.lax.with_sharding_constraint(jnp.broadcast_to(value, (shares, *value.shape)), place)


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
