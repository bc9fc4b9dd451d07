"""Values of Python's that are made of plain ones, as JSON and back."""

import collections
from collections.abc import Iterable
from typing import Any

import numpy as np

OTHER = object()  # what is made of other things, too
_KIND = "made of"  # key of what JSON has no form for; its value is the kind's name and the parts
_MOST = 2**14  # elements of an array; a larger one belongs into a variable, not into text


def to_json(value: Any) -> Any:
    """A copy of a value as JSON.

    Args:
      value: a number, a string, None; a list, tuple, set, deque or dict of such; an array of up to 16,384 numbers.

    Returns:
      It, or OTHER where it is something else, or has something else in it.
    """
    value = value.item() if isinstance(value, np.generic) else value
    kind = type(value)
    if isinstance(value, int | float | str | None):
        return value
    if kind is list:
        return _each(value)
    if kind is dict and all(isinstance(key, str) for key in value) and _KIND not in value:
        items = _each(value.values())
        return OTHER if items is OTHER else dict(zip(value, items, strict=True))
    parts: Any = OTHER
    if kind is dict:
        parts = _each(map(list, value.items()))
    elif kind in (set, frozenset):
        parts = _each(sorted(value, key=repr))  # equal ones in one order
    elif kind is tuple:
        parts = _each(value)
    elif kind is collections.deque:
        parts = _each([value.maxlen, *value])
    elif kind is np.ndarray and value.dtype.kind in "biuf" and value.size <= _MOST:
        parts = [value.dtype.name, [*value.shape], value.ravel().tolist()]
    return OTHER if parts is OTHER else {_KIND: [kind.__name__, parts]}


def from_json(value: Any) -> Any:
    """What `to_json` made the JSON of, nothing of which it shares."""
    if isinstance(value, list):
        return [*map(from_json, value)]
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {key: from_json(part) for key, part in value.items()}
    name, parts = value[_KIND]
    if name == "ndarray":
        dtype, shape, numbers = parts
        return np.array(numbers, dtype).reshape(shape)
    parts = from_json(parts)
    if name == "deque":
        return collections.deque(parts[1:], parts[0])
    return {"dict": dict, "set": set, "frozenset": frozenset, "tuple": tuple}[name](parts)


def _each(values: Iterable[Any]) -> Any:
    parts = [to_json(value) for value in values]
    return OTHER if any(part is OTHER for part in parts) else parts
