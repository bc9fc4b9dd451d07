"""Nested structures of arrays: tuples, lists and dicts of them, and what lies at their leaves."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np


class Spec(NamedTuple):
    """Shape (without the batch dim) and dtype of one array of an example."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def map_structure(function: Callable[[Any], Any], structure: Any) -> Any:
    """Applies a function to every leaf of nested tuples, lists, which become tuples, and dicts (a Spec is a leaf)."""
    if isinstance(structure, dict):
        return {k: map_structure(function, v) for k, v in structure.items()}
    if isinstance(structure, tuple | list) and not isinstance(structure, Spec):
        return tuple(map_structure(function, v) for v in structure)
    return function(structure)


def flatten(structure: Any) -> list[Any]:
    """The leaves of nested tuples, lists and dicts, dicts in sorted order of their keys."""
    if isinstance(structure, dict):
        return [leaf for k in sorted(structure) for leaf in flatten(structure[k])]
    if isinstance(structure, tuple | list) and not isinstance(structure, Spec):
        return [leaf for v in structure for leaf in flatten(v)]
    return [structure]


def pack(structure: Any, leaves: Iterator[Any]) -> Any:
    """What flatten takes apart: a structure with other leaves."""
    if isinstance(structure, dict):
        packed = {k: pack(structure[k], leaves) for k in sorted(structure)}
        return {k: packed[k] for k in structure}
    if isinstance(structure, tuple | list) and not isinstance(structure, Spec):
        return tuple(pack(s, leaves) for s in structure)
    return next(leaves)


def words(specs: Any) -> str:
    """Specs in words, an array's dtype and shape each."""
    return str(map_structure(lambda spec: f"{spec.dtype} {spec.shape}", specs)).replace("'", "")
