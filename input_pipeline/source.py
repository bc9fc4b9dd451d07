"""A source is random-access examples: a length and `read(ids)`. A dataset is two of them, and a name for labels."""

import functools
import hashlib
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from input_pipeline import order
from input_pipeline.memory import gather
from input_pipeline.structure import Spec, flatten, map_structure

Example = Any  # (x, y) or (x, y, weight), each a nested structure of arrays; without labels y is ()


class DataError(ValueError):
    """What is wrong with the data, for the user of the dataset: the reason and the fix."""


@runtime_checkable
class Source(Protocol):
    """Random-access examples."""

    def __len__(self) -> int:
        """Number of examples."""

    def read(self, ids: npt.NDArray[np.int64]) -> Example:
        """Reads a batch.

        Args:
          ids: int64 (batch,), each in [0, len(self)), in any order and perhaps repeated.

        Returns:
          (x, y) or (x, y, weight), each a (nested) array whose first dim is batch; x alone where there are no
          labels; weight (batch,) or (batch, time), or several, by output. A pure function of ids: the same id gives
          the same bytes at every call in every process.
        """


class Arrays:
    """Examples that lie in memory (or in memory-mapped files).

    Args:
      arrays: x, and perhaps y and weight, each a (nested) array (examples, ...).
    """

    def __init__(self, *arrays: Any) -> None:
        self.arrays = arrays
        for array in flatten(arrays):
            _check_is_of_numbers(array)
        lengths = [len(array) for array in flatten(arrays)]
        if len(set(lengths)) != 1:
            raise DataError(f"the arrays differ in length: {lengths}")
        self._length = lengths[0]

    def __len__(self) -> int:
        return self._length

    @property
    def is_mapped(self) -> bool:
        """Whether some lie in files, and a look at all of them takes long."""
        return any(isinstance(array, np.memmap) for array in flatten(self.arrays))

    def read(self, ids: npt.NDArray[np.int64]) -> Example:
        return map_structure(lambda array: gather(array, ids), self.arrays)


class Subset:
    """Some examples of another source.

    Args:
      source: the whole.
      ids: int64 (n,), those that belong to the subset.
    """

    def __init__(self, source: Source, ids: npt.NDArray[np.int64]) -> None:
        self.source, self.ids = source, ids

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, ids: npt.NDArray[np.int64]) -> Example:
        return self.source.read(self.ids[ids])


def arrays_of(source: Source | None) -> Arrays | None:
    """The arrays in which a source's examples lie, if they do, perhaps among others."""
    while isinstance(source, Subset):
        source = source.source
    return source if isinstance(source, Arrays) else None


def as_array(given: Any) -> npt.NDArray[Any]:
    """np.asarray, in this machine's order of bytes.

    Raises:
      DataError: it is sparse or ragged, of which that makes an array of one object; it has masked values, which would
        be trained on; it holds times or records.
    """
    if hasattr(given, "shape") and not hasattr(given, "__array__"):
        raise DataError(
            f"{type(given).__name__} {given.shape} is no array: make it dense, by .toarray() or .to_tensor(); where "
            "that is too large for the memory, give a source whose read(ids) makes dense the rows that it is asked for"
        )
    if np.ma.is_masked(given):
        raise DataError(f"an array of {given.shape} has masked values: fill them, by .filled(value)")
    array = np.asarray(given)
    if array.dtype.kind in "mM" or array.dtype.type is np.void:
        raise DataError(
            f"an array has dtype {array.dtype}: make numbers of it, by .astype, or one field at a time; what "
            "numpy.save makes of bfloat16 is .view(ml_dtypes.bfloat16)"
        )
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _check_is_of_numbers(array: npt.NDArray[Any]) -> None:
    if array.dtype.kind in "OSU":
        raise DataError(
            f"an array has dtype {array.dtype}: give numbers, in arrays of one shape (of words, say, those of "
            "numpy.unique(words, return_inverse=True), or of keras.layers.StringLookup called where you load)"
        )


def example_spec(source: Source) -> Example:
    """The structure of one example, with a Spec for each array, learnt by reading example 0, once."""
    return _spec_of(_Same(source))


class _Same:
    """A source by which it is, for it may be neither hashable nor comparable."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.source is other.source

    def __hash__(self) -> int:
        return id(self.source)


@functools.lru_cache(64)
def _spec_of(same: _Same) -> Example:
    return map_structure(lambda a: Spec(np.shape(a)[1:], np.asarray(a).dtype), read(same.source, [0]))


def read(source: Source, ids: Sequence[int] | npt.NDArray[np.int64]) -> Example:
    """`source.read(ids)`, checked: (x, y) or (x, y, weight), with len(ids) rows each."""
    ids = np.asarray(ids, np.int64)
    return checked(source.read(ids.copy()), ids, "read(ids)")  # a copy, for some sort theirs


def checked(example: Any, ids: npt.NDArray[np.int64], by: str) -> Example:
    """What `by` returned for these ids, as numpy arrays with a row for each.

    Raises:
      DataError: it is something else.
    """
    if isinstance(example, dict) or hasattr(example, "shape"):
        example = (example,)
    if not isinstance(example, tuple) or len(example) not in (1, 2, 3):
        raise DataError(f"{by} returned {type(example).__name__}, not a tuple (x, y) or (x, y, weight), or x alone")
    x, *others = without_nones(example)
    y, *weight = others or ((),)
    example = map_structure(as_array, tuple(map(_without_lists, (x, y, *weight))))
    for array in flatten(example):
        _check_is_of_numbers(array)
        if array.shape[:1] != ids.shape:
            raise DataError(
                f"{by} of {len(ids)} ids returned an array of shape {array.shape}. A list of arrays is several inputs; "
                "of examples make one array, by np.stack(...)"
            )
    return example


def _without_lists(part: Any) -> Any:
    """x, y or weight, in which a list is of several inputs where it holds arrays, and else one array's rows."""
    if isinstance(part, dict):
        return {name: _without_lists(value) for name, value in part.items()}
    if isinstance(part, list) and not any(is_array(each) or isinstance(each, dict | tuple) for each in part):
        return of_rows(part)
    return tuple(map(_without_lists, part)) if isinstance(part, tuple | list) else part


def of_rows(rows: list[Any]) -> npt.NDArray[Any]:
    """np.asarray.

    Raises:
      DataError: they are of several lengths, or dicts.
    """
    if any(isinstance(row, dict) for row in rows):
        raise DataError("a list holds dicts: give one dict of arrays, each of which has all examples")
    try:
        return np.asarray(rows)
    except ValueError as error:
        raise DataError(f"a list is of no one shape ({error}): pad sequences; give several inputs as a dict") from None


def named_weights(weight: Sequence[Any]) -> dict[str, Any]:
    """An example's weight, if it has one, by its name in a batch: 'weight', or 'weights' if outputs have their own."""
    return {"weights" if isinstance(each, dict) or type(each) is tuple else "weight": each for each in weight}


def is_array(given: Any) -> bool:
    """Whether it is an array of numpy's, or what becomes one: pandas', TensorFlow's, JAX's."""
    return hasattr(given, "__array__") and len(getattr(given, "shape", ())) > 0


def without_nones(example: Any) -> Any:
    """(x, y, weight) of which None may stand for no labels, which are (), no weights, or, in a dict, no such input."""
    if not isinstance(example, tuple | list) or len(example) < 2:
        return example
    x, *others = example
    if isinstance(x, dict):
        x = {name: value for name, value in x.items() if value is not None}
    while others and others[-1] is None:
        others.pop()
    return (x, *(() if part is None else part for part in others))


def is_streamed(source: Source) -> bool:
    """Whether a source is read in its own order, one example after another."""
    return bool(getattr(source, "streamed", False))


def ids_at(source: Source, seed: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The example at each position of a run's endless order: random in each pass, or as it is streamed."""
    return positions % len(source) if is_streamed(source) else order.order(seed, positions, len(source))


def fingerprint(source: Source) -> str:
    """A short digest of a source: its length, its spec and a few examples spread over it."""
    n = len(source)
    ids = np.arange(min(n, 16)) if is_streamed(source) else np.unique(np.linspace(0, n - 1, 16).astype(np.int64))
    digest = hashlib.sha256(repr((n, example_spec(source))).encode())
    for array in flatten(read(source, ids)):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]
