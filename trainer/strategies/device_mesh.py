"""Keras on JAX: one device, or a keras.distribution.DeviceMesh of a data axis and perhaps others."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import keras
import numpy as np
from jax import dtypes
from jax.sharding import NamedSharding, PartitionSpec

from input_pipeline.ahead import in_order
from input_pipeline.pipeline import Batch, Pipeline
from input_pipeline.structure import map_structure
from trainer.cluster import ALONE, Cluster
from trainer.config import Config
from trainer.layouts import Layout
from trainer.program import Program
from trainer.storage.shards import Piece
from trainer.strategies import jax_compiled, jax_devices, jax_flops, jax_norms, pictures
from trainer.strategies.base import Block, Result, Strategy
from trainer.strategies.data_parallel import FastLoop
from trainer.strategies.exact import ExactLoop
from trainer.strategies.host_values import PINNED, Gathering, OnMesh, assign, copy_by_devices, own_pieces, sum_bits
from trainer.strategies.jax_arrays import per_device
from trainer.strategies.jax_step import Leaf, PureStep, summing
from trainer.strategies.placing import Placing, layout_of
from trainer.strategies.sharded import ShardedLoop, over_replicas
from trainer.sums import Totals, Values

Loop = ExactLoop | FastLoop | ShardedLoop


def create(config: Config, cluster: Cluster = ALONE, abstract: bool = False) -> "DeviceMesh":
    """A mesh of real devices, or of virtual CPUs where those are too few.

    Args:
      config: the flags.
      cluster: the processes, whose devices the mesh has in their order.
      abstract: variables are to have no values: for `explain`.
    """
    devices, description = jax_devices.take(config, cluster)
    sizes = config.mesh_sizes() or {"data": len(devices)}
    return DeviceMesh(devices, description, sizes, layout_of(config, sizes), config.exact, cluster, abstract)


class DeviceMesh(Strategy):
    """Synchronous training on a mesh: replicas over the data axis, variables as the layout says.

    Args:
      devices: JAX devices.
      description: the devices in words.
      sizes: of the mesh's axes, data first.
      layout: where variables go.
      exact: whether sums follow the tree on accelerators, too.
      cluster: the processes.
      abstract: whether variables have no values.
    """

    can_skip = True

    def __init__(
        self,
        devices: list[jax.Device],
        description: str,
        sizes: dict[str, int],
        layout: Layout,
        exact: bool,
        cluster: Cluster = ALONE,
        abstract: bool = False,
    ) -> None:
        self.devices, self.cluster = sizes["data"], cluster
        self.description = f"{description}, DeviceMesh({', '.join(f'{axis}={size}' for axis, size in sizes.items())})"
        self.layout, self._exact, self._abstract = layout, exact, abstract
        self.on_cpu = devices[0].platform == "cpu"
        self._sharded = layout.shards_variables or len(sizes) > 1
        self.mesh = jax.sharding.Mesh(np.array(devices).reshape(*sizes.values()), tuple(sizes))
        self._by_replica = NamedSharding(self.mesh, PartitionSpec(None, "data"))  # (K, V, ...)
        self._placing = Placing(self.mesh, layout, abstract)
        self._aside = ThreadPoolExecutor(1, "aside")

    @property
    def device_count(self) -> int:
        return int(self.mesh.size)

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        return self._placing.scope()

    def shares(self, replicas: int) -> list[range]:
        # JAX splits one array over a process's devices. Where another axis runs across processes, each of them
        # reads the share of the data axis that they have in common.
        local, by_share = {*self.mesh.local_devices}, self.mesh.devices.reshape(self.devices, -1)
        mine = [d for d, share in enumerate(by_share) if local & {*share}]
        n = replicas // self.devices
        return [range(mine[0] * n, (mine[-1] + 1) * n)]

    def feed(self, pipeline: Pipeline, first_block: int = 0) -> Iterator[Block]:
        def of_all(mine: np.ndarray) -> jax.Array:
            shape = (mine.shape[0], self._program.replicas, *mine.shape[2:])
            return jax.make_array_from_process_local_data(self._by_replica, mine, shape)

        def put(block: Block) -> Block:
            return jax.device_put(block, self._by_replica) if self.cluster.size == 1 else jax.tree.map(of_all, block)

        blocks = map(put, pipeline.blocks(first_block))
        # A GPU takes what it is sent after what it was told to compute before. So a block is sent before the call of
        # the step that it is to come beside.
        return blocks if self.on_cpu else in_order(lambda _: next(blocks), pipeline.indices(first_block), 1, threads=1)

    def compile(self, program: Program) -> None:
        self._program = program
        self._state = OnMesh(program, self.sharding)
        self._step = PureStep(program, self._state.variables, self.scope)
        self._outputs = jax.jit(self._step.outputs)
        trainable = zip(self._state.variables.trainable, self._state.shardings.trainable, strict=True)
        self._slots = [self._placing.get_slot_layout(variable.shape, sharding) for variable, sharding in trainable]
        outputs = [f"{layer.path}/output" for layer in program.model._flatten_layers()]
        self.layout.check_all_used([*program.variables, *outputs])
        if not self._abstract:
            self._state.assign(self._state.values())
        program.to_host = gathering = Gathering(self.mesh)
        program.held = lambda variable: [Piece((), gathering.on_devices(variable))]
        program.assign = lambda variable, read: assign(variable, self.sharding(variable), read)
        if self.layout.shards and self.cluster.size > 1:
            program.whole, program.held = False, own_pieces
        if not self.on_cpu and PINNED in {memory.kind for memory in self.mesh.local_devices[0].addressable_memories()}:
            program.copy = copy_by_devices
        if self.on_cpu and not self._sharded:
            program.objective.squared_norms = functools.partial(jax_norms.squared_norms, self._slots)
        program.objective.metric_results = jax_compiled.results_of(program.objective.metrics)
        # Virtual devices lose no fast interconnect by the tree's order.
        self._exact |= self.on_cpu and program.replicas > 1 and not self.layout.shards
        self._loops: dict[bool, Loop] = {}
        self._compiled = set[Any]()  # for training or not, and for which shapes of a block
        self._block: Block | None = None  # the last to train on

    def sharding(self, variable: keras.Variable) -> NamedSharding:
        """Where a variable of the program lies."""
        return getattr(variable, "_layout", None) or NamedSharding(self.mesh, PartitionSpec())

    def elements_on_device(self, variable: keras.Variable) -> int:
        return math.prod(self.sharding(variable).shard_shape(variable.shape))

    def pictures(self) -> list[str]:
        return pictures.draw(self._program, self.sharding, self.mesh)

    def lower(self, block: Block) -> jax.stages.Lowered:
        """The step of an abstract program, from shapes alone.

        Args:
          block: jax.ShapeDtypeStructs (K, V, b, ...).
        """
        values = self._state.shapes(placed=True)
        block = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self._by_replica), block)
        totals = jax.eval_shape(self._program.objective.no_totals)
        loop = self._sharded_loop(True) if self._sharded else self._fast_loop(True)
        with jax_compiled.explained(self._program):
            return loop.program.lower(values, totals, block, jax.ShapeDtypeStruct((3,), np.int32))

    def flops(self, spec: Any) -> float:
        step = PureStep(self._program, self._state.variables, self.scope)  # its traces are not those of the run
        return jax_flops.count(step.leaf(True), *self._of_replica(spec)) * self._program.replicas

    def train(self, block: Block, first: int, count: int, step: int, totals: Totals) -> Totals:
        # A block that was trained on is not looked at again, which takes a tenth of a small step.
        run: Any = self._loops[True] if block is self._block else functools.partial(self._run, True)
        self._block = block
        values, totals = run(self._state.values(), block, first, count, step, totals)
        self._state.assign(values)
        return totals

    def evaluate(self, block: Block, first: int, count: int, totals: Totals) -> Totals:
        return self._run(False, self._state.values(), block, first, count, 0, totals)[1]

    def _run(
        self, training: bool, values: Values, block: Block, first: int, count: int, step: int, totals: Totals
    ) -> tuple[Values | None, Totals]:
        """Steps by a loop, which is made at the first block: it shows what the model computes."""
        known = training, *(a.shape for a in jax.tree.leaves(block))
        if training not in self._loops:
            self._loops[training] = self._make_loop(training, block)
        with jax_compiled.explained(self._program):
            if known not in self._compiled:
                # GPUs of several processes look together for what is quickest: none may compile before another.
                with self.compiling(self.on_cpu) as wait_for_turn:
                    lowered = self._loops[training].lower(values, block, totals)
                    wait_for_turn()
                    jax_compiled.compile_all(lowered)
                self._compiled.add(known)
            return self._loops[training](values, block, first, count, step, totals)

    def predict(self, x: Any) -> Any:
        return jax.tree.map(np.asarray, self._outputs(self._state.values(), x))

    def aside(self, compute: Callable[[], Result]) -> Result:
        # A CPU computes what each thread asks for in its order, an accelerator what all do: behind the steps.
        return self._aside.submit(jax_devices.by_host, compute).result()

    def exchange(self, floats: int) -> float:
        return self._loops[True].exchange(floats)

    def checksums(self) -> list[int]:
        if self.layout.shards or self._sharded:  # which are parts, but of what all have begun with
            return [] if True in self._loops else [self._placing.given]
        return [int(sum_bits(copy)) for copy in per_device(self._state.values())] if self.devices > 1 else []

    def close(self, code: int) -> None:
        if self.cluster.size > 1:
            jax.distributed.shutdown()  # waits for the others, who would take our leaving for a crash

    def trace(self, directory: str, start: bool) -> None:
        jax.profiler.start_trace(directory) if start else jax.profiler.stop_trace()

    def _make_loop(self, training: bool, block: Block) -> Loop:
        if self._sharded:
            return self._sharded_loop(training)
        leaf = self._step.leaf(training)
        if not self._exact:
            traced = jax.make_jaxpr(leaf)(*self._of_replica(block))
            # XLA's CPU compiler has fast convolutions in a program's entry only: in loops they are 10 times slower.
            if not (self.on_cpu and jax_flops.convolves(traced)):
                n = self._program.replicas // self.devices
                return self._fast_loop(training, apart=not self.on_cpu and jax_flops.are_long(traced, n))
            if self.layout.shards:
                return self._sharded_loop(training)
        return ExactLoop(*self._parts(leaf, training)[:5])

    def _of_replica(self, block: Block) -> tuple[Values, Batch]:
        """The shapes of what a replica's part of a step takes, of a block or its spec."""

        def shape(array: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(array.shape[2:], dtypes.canonicalize_dtype(array.dtype))

        return self._state.shapes(placed=False), map_structure(shape, block)

    def _fast_loop(self, training: bool, apart: bool = False) -> FastLoop:
        return FastLoop(*self._parts(self._step.leaf(training), training), apart=apart)

    def _sharded_loop(self, training: bool) -> ShardedLoop:
        trainable = self._state.variables.trainable, self._state.shardings.trainable
        forward = over_replicas(self._step.forward(training), *trainable, self._program.config if training else None)
        return ShardedLoop(*self._parts(summing(forward, training), training))

    def _parts(self, leaf: Leaf, training: bool) -> Any:
        update = self._step.update if training else None
        return self.mesh, self._program.replicas, leaf, update, self._step.tally, self._state.shardings, self._slots
