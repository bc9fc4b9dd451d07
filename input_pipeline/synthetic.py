"""synthetic: examples that cost nothing to store, for tests and for timing. A function of the id alone."""

import numpy as np
import numpy.typing as npt

from input_pipeline.dataset import Dataset
from input_pipeline.order import fold


class Synthetic:
    """Images of noise around one random prototype per class, so that there is something to learn.

    Args:
      examples: number of examples.
      shape: of an image, (height, width, channels).
      classes: number of classes.
      first: id of the first example, so that two sources don't overlap.
    """

    def __init__(self, examples: int, shape: tuple[int, ...], classes: int, first: int = 0) -> None:
        self._examples, self._shape, self._classes, self._first = examples, shape, classes, first
        self._prototypes = np.random.default_rng(0).integers(0, 128, (classes, *shape), np.uint8)

    def __len__(self) -> int:
        return self._examples

    def read(self, ids: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
        words = fold(ids + self._first)
        labels = (words % np.uint64(self._classes)).astype(np.int32)
        pixels = np.arange(int(np.prod(self._shape)), dtype=np.uint64)
        noise = (fold(words[:, None], pixels) & np.uint64(127)).astype(np.uint8)
        return self._prototypes[labels] + noise.reshape(len(ids), *self._shape), labels


def load(
    examples: int = 1024,
    evaluation_examples: int = 256,
    shape: tuple[int, ...] = (8, 8, 1),
    classes: int = 10,
) -> Dataset:
    """Images (height, width, channels) uint8 and int32 labels."""
    return Dataset(
        Synthetic(examples, shape, classes),
        Synthetic(evaluation_examples, shape, classes, first=examples),
        classes=classes,
    )
