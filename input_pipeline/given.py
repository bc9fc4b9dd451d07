"""What a dataset's module may give as a source: arrays, several ways, single examples, batches, a tf.data.Dataset."""

import contextlib
import functools
import operator
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from input_pipeline.merging import items, merged
from input_pipeline.source import Arrays, DataError, Example, Source, as_array, is_array, of_rows, without_nones
from input_pipeline.structure import flatten, map_structure

_KEPT = 8  # batches


def adapted(given: Any) -> Any:
    """A Source, if it is one or can be made one; else what was given."""
    if all(hasattr(given, name) for name in ("cardinality", "element_spec", "as_numpy_iterator")):
        from input_pipeline.stream import Stream

        return Stream(given)  # a tf.data.Dataset
    given = without_nones(given) if isinstance(given, tuple) else given
    if is_array(given) or (isinstance(given, dict) and given and _is_arrays(given)):
        return Arrays(map_structure(as_array, given))
    if isinstance(given, tuple) and len(given) > 3 and all(map(is_array, given)):
        raise DataError(f"it is {len(given)} arrays: give (x, y) or (x, y, weight)")
    if isinstance(given, list) and len(given) == 1 and is_array(given[0]):
        raise DataError("it is a list of one array: give the array itself, whose first dim is that of the examples")
    if isinstance(given, tuple | list) and len(given) in (1, 2, 3):
        if isinstance(given, tuple):
            given = _without_lists(given)
        # A list's parts may be examples, too.
        if all(map(_is_arrays if isinstance(given, tuple) else is_array, given)):
            return Arrays(*map_structure(as_array, given))
    if hasattr(given, "num_batches"):
        return Batches(given)  # a keras.utils.PyDataset
    has_items = all(hasattr(given, name) for name in ("__len__", "__getitem__")) and not isinstance(given, str | bytes)
    return Items(given) if has_items and not isinstance(given, Source) else given


def is_whole(part: Any) -> bool:
    """Whether it is a part of a dataset, such as what to train on, and not of its examples, such as their labels."""
    if isinstance(part, tuple):
        return True
    source = None if isinstance(part, list | dict) or is_array(part) else adapted(part)
    return isinstance(source, Source)


def _without_lists(parts: tuple[Any, ...]) -> tuple[Any, ...]:
    """x, y and weight, of which a list holds examples or, as fit() takes them, the arrays of several inputs."""
    lists = [part for part in parts if isinstance(part, list)]
    if not lists:
        return parts
    others = {len(leaf) for part in parts if not isinstance(part, list) for leaf in flatten(part) if is_array(leaf)}
    inputs = all(part and all(map(is_array, part)) for part in lists)
    inputs = inputs and len(others.union(len(array) for part in lists for array in part)) == 1
    if inputs and len(others.union(map(len, lists))) == 1:
        raise DataError(
            "a list of arrays may hold examples, or several inputs: give examples as one array, by np.stack(...), and "
            "several inputs as a tuple or a dict"
        )
    make = tuple if inputs else of_rows
    return tuple(make(part) if isinstance(part, list) else part for part in parts)


def _is_arrays(part: Any) -> bool:
    """Whether it is an array, or a dict or a tuple of some."""
    return all(map(is_array, flatten(part)))


class Items:
    """What gives one example at a time, such as grain's and tfds' data sources.

    Args:
      given: has a length, and given[id] -> (x, y), (x, y, weight), or x alone.
    """

    def __init__(self, given: Any) -> None:
        self._items = given

    def __len__(self) -> int:
        return len(self._items)

    def read(self, ids: npt.NDArray[np.int64]) -> Example:
        return merged(items(self._items, ids))


class Batches:
    """What gives batches, as a keras.utils.PyDataset does: all of one length, but the last.

    For an example its whole batch is made; the last few are kept.

    Args:
      given: has num_batches, and given[i] -> a batch (x, y), (x, y, weight), or x alone. One thread asks it at a time,
        as under fit(), unless it has several workers.

    Raises:
      DataError: it does not know how many batches it has.
    """

    def __init__(self, given: Any) -> None:
        self._given, self._name = given, type(given).__name__
        self._turn = contextlib.nullcontext() if getattr(given, "workers", 1) > 1 else threading.Lock()
        self._batch = functools.lru_cache(_KEPT)(self._make)
        if not given.num_batches:
            raise DataError(f"{self._name} does not know its length: give it a __len__, the number of its batches")
        self._last, self._size = given.num_batches - 1, 0
        self._size = len(flatten(self._batch(0))[0])
        self._length = self._last * self._size + len(flatten(self._batch(self._last))[0])

    def __len__(self) -> int:
        return self._length

    def read(self, ids: npt.NDArray[np.int64]) -> Example:
        numbers, places = np.divmod(ids, self._size)
        parts, found = [], []
        for number in np.unique(numbers):
            found.append(np.flatnonzero(numbers == number))
            rows = places[found[-1]]
            parts.append(map_structure(operator.itemgetter(rows), self._batch(int(number))))
        back = np.argsort(np.concatenate(found))
        return map_structure(operator.itemgetter(back), merged(parts, np.concatenate))

    def _make(self, number: int) -> Example:
        with self._turn:  # copied, for it may fill the same arrays anew
            batch = map_structure(lambda array: np.array(as_array(array)), without_nones(self._given[number]))
        length, *others = sorted({len(array) for array in flatten(batch)})
        if others:
            raise DataError(f"batch {number} of {self._name} has arrays of {length} and of {others[0]} examples")
        if self._size and (length > self._size or (length < self._size and number < self._last)):
            raise DataError(
                f"batch {number} of {self._name} has {length} examples, and the first {self._size}: "
                "give batches of one length, of which the last may be shorter"
            )
        return batch
