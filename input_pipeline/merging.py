"""Batches of single examples, and of other batches."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from input_pipeline.source import DataError, as_array, without_nones


def merged(parts: Sequence[Any], merge: Callable[[list[Any]], Any] = np.stack) -> Any:
    """Nested structures as one: single examples stacked to a batch, or batches laid end to end by np.concatenate."""
    first = parts[0]
    if isinstance(first, dict):
        return {name: merged([part[name] for part in parts], merge) for name in first}
    if isinstance(first, tuple | list):
        return tuple(merged([part[i] for part in parts], merge) for i in range(len(first)))
    arrays = [as_array(part) for part in parts]
    if len({array.shape[merge is np.concatenate :] for array in arrays}) > 1:
        shapes = ", ".join(sorted({str(array.shape) for array in arrays}))
        raise DataError(f"examples are of several shapes, such as {shapes}: pad them to one")
    return merge(arrays)


def items(source: Any, ids: npt.NDArray[np.int64]) -> list[Any]:
    """source[id] for each id; by one call, where there is one: tfds', ArrayRecord's and Hugging Face's sources have it.

    Raises:
      DataError: the call returned something else.
    """
    wanted = [int(i) for i in ids]
    if not hasattr(source, "__getitems__"):
        return [without_nones(source[i]) for i in wanted]
    found = source.__getitems__(wanted)
    if not isinstance(found, list | tuple) or len(found) != len(wanted):
        raise DataError(f"__getitems__ of {len(wanted)} ids returned {type(found).__name__}, not a list of as many")
    return [without_nones(example) for example in found]
