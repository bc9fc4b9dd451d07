"""Whether examples that are read again are the same."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from input_pipeline import order
from input_pipeline.source import DataError, Example, Source, checked, is_streamed, read
from input_pipeline.structure import flatten


def check_same(source: Source, augment: Callable[[Example, Any], Example] | None = None) -> None:
    """Reads some examples again, in another order and company, and changes them by the same keys.

    Raises:
      DataError: they are others then. A run could not go on with them after a start, and readers beside each other
        would change them.
    """

    def changed(ids: npt.NDArray[np.int64]) -> list[Any]:
        example = read(source, ids)
        if augment:
            example = checked(augment(example, order.fold(0, ids)), ids, "augment(example, keys)")
        return flatten(example)

    few = np.arange(min(len(source), 4))
    first = changed(few)
    for ids in [few] if is_streamed(source) else [few[::-1], few[-1:]]:
        if not all(_close(a[ids], b) for a, b in zip(first, changed(ids), strict=True)):
            raise DataError(
                f"examples {ids.tolist()} are others when they are read again. A source is a function of the id: draw "
                "what changes from pass to pass in the dataset's `augment`, by its keys; shuffle a tf.data.Dataset "
                "once, by .shuffle(n, seed=0, reshuffle_each_iteration=False) (of folders by Keras: shuffle=False)"
            )


def _close(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    """Equal, but for the rounding of floats: a product of matrices rounds by how many rows it has."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    if a.dtype.kind not in "fcV":  # V: bfloat16
        return np.array_equal(a, b)
    a, b = a.astype(np.complex128), b.astype(np.complex128)  # which holds any of these numbers
    scale = np.max(np.abs(a), initial=0.0, where=np.isfinite(a))
    return np.allclose(a, b, 1e-4, 1e-4 * float(scale), equal_nan=True)
