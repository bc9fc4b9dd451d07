"""The order in which sums over logical replicas are taken: a tree that no number of devices changes."""

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


class Tree:
    """The fixed binary tree in which leaves are added: pairs, then pairs of pairs, ever so; an odd one waits.

    A device owns n = V / R leaves in a row. The largest nodes into which the leaves of every device fall
    whole have `node_size(n, R)` leaves each; a device adds those up alone, and what it then holds (one
    node if it is alone, or n is a power of two) is added further in the tree's order.
    """

    @staticmethod
    def node_size(leaves: int, devices: int) -> int:
        """Of a device's leaves all, where it is alone; else the largest power of two that divides their number."""
        return leaves if devices == 1 else leaves & -leaves

    @staticmethod
    def push(nodes: list[T], leaf: T, carries: int, add: Callable[[T, T], T]) -> list[T]:
        """Adds leaf i to nodes of 2**level leaves, one per level, as the digits of a binary counter.

        So n leaves need log2(n) + 1 nodes. `carries` is the number of trailing ones of i in binary.
        """
        for level in range(carries):
            leaf = add(nodes[level], leaf)
        return [*nodes[:carries], leaf, *nodes[carries + 1 :]]

    @staticmethod
    def fold(nodes: list[T], leaves: int, add: Callable[[T, T], T]) -> T:
        """The sum of so many leaves, all of which were pushed: of the counter's digits that are 1, the lowest first."""
        ones = [node for level, node in enumerate(nodes) if leaves >> level & 1]
        return functools.reduce(lambda right, left: add(left, right), ones)

    @staticmethod
    def add_up(nodes: Sequence[T], add: Callable[[T, T], T]) -> T:
        """The sum of neighbouring nodes of one size."""
        nodes = list(nodes)
        while len(nodes) > 1:
            pairs = [add(a, b) for a, b in zip(nodes[::2], nodes[1::2], strict=False)]
            nodes = pairs + nodes[2 * len(pairs) :]
        return nodes[0]
