"""Digits whose labels depend on the process that reads them: no recovery can be exact."""

import os

import numpy as np

from input_pipeline import digits
from input_pipeline.dataset import Dataset


class Sabotaged:
    """A source that is no function of the id."""

    def __init__(self, source) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def read(self, ids: np.ndarray):
        images, labels = self._source.read(ids)
        return images, np.where(ids == 1000, os.getpid() % 10, labels).astype(np.int32)


def load() -> Dataset:
    """Its fingerprint, which looks at other ids, does not show it."""
    data = digits.load()
    return Dataset(Sabotaged(data.train), data.evaluation, data.classes)
