"""Sums on TensorFlow, in the tree's order: over a device's logical replicas, over devices, over processes."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from input_pipeline.pipeline import Batch
from trainer.sums import Totals
from trainer.tree import Tree


def hold_rounding_fixed(threads: int) -> None:
    """Turns off what rewrites operations after the graph around them: the same step would be rounded
    otherwise on one device and on two.

    Args:
      threads: of a CPU; see threads_of_cpu().
    """
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    passes = ("arithmetic_optimization", "constant_folding", "remapping")
    tf.config.optimizer.set_experimental_options(dict.fromkeys(passes, False))


def sum_of_leaves(leaf: Callable[[Any], list[Any]], leaves: int, nothing: list[Any]) -> list[Any]:
    """The sum of leaves, by the tree; its nodes are the variables of a loop."""
    if leaves == 1:
        return leaf(0)
    levels = leaves.bit_length()

    def add_leaf(r: Any, nodes: list[Any]) -> Any:
        value = leaf(r)
        carries = tf.reduce_sum(tf.math.cumprod(tf.bitwise.bitwise_and(tf.bitwise.right_shift(r, tf.range(levels)), 1)))
        branches = [lambda c=c: Tree.push(nodes, value, c, add) for c in range(levels)]
        return r + 1, tf.switch_case(carries, branches)

    loop = (tf.constant(0), [nothing] * levels)
    nodes = tf.while_loop(lambda r, nodes: r < leaves, add_leaf, loop, parallel_iterations=1)[1]
    return Tree.fold(nodes, leaves, add)


def repeat(count: Any, one: Callable[[Any, Totals], tuple[Any, Totals]], totals: Totals) -> Totals:
    """Runs steps one after the other; their order is the run's."""
    return tf.while_loop(lambda i, _: i < count, one, (tf.constant(0), totals), parallel_iterations=1)[1]


def at(batch: Batch, r: Any) -> Batch:
    """The part of a batch at an index of its first dim."""
    return tf.nest.map_structure(lambda a: tf.gather(a, r), batch)  # for a[r], XLA compiles anew with each r


def add(a: list[Any], b: list[Any]) -> list[Any]:
    """Sums of two lists of tensors, one by one."""
    return [x + y for x, y in zip(a, b, strict=True)]


def add_in_tree_order(strategy: Any, vectors: list[Any]) -> Any:
    """The tree over all devices' nodes, each sum where its left part is; every device reads the result."""

    def add_where_left_is(left: tuple[str, Any], right: tuple[str, Any]) -> tuple[str, Any]:
        device, vector = left
        with tf.device(device):
            return device, vector + right[1]

    per_device = zip(*map(strategy.experimental_local_results, vectors), strict=True)
    devices = strategy.extended.worker_devices
    nodes = [(device, node) for device, nodes in zip(devices, per_device, strict=True) for node in nodes]
    return Tree.add_up(nodes, add_where_left_is)[1]


def add_over_processes(context: Any, vectors: list[Any], chunk: int = 2**20) -> Any:
    """The tree over the nodes of devices of all processes: each gathers them, a chunk of floats at a time."""
    nodes, sums = tf.stack(vectors), []  # (nodes of this device, N)
    count = len(vectors) * context.num_replicas_in_sync
    for first in range(0, nodes.shape[1], chunk):
        gathered = context.all_gather(nodes[:, first : first + chunk], axis=0)
        sums.append(Tree.add_up(tf.unstack(gathered, num=count), tf.add))
    return tf.concat(sums, 0)
