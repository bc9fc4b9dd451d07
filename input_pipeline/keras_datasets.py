"""The image datasets of keras.datasets: downloaded, or read from its cache where there is no network."""

import importlib
import os
import pathlib
from collections.abc import Callable, Sequence

import numpy as np

from input_pipeline.dataset import Dataset
from input_pipeline.source import Arrays, DataError


def loader(name: str, class_names: Sequence[str]) -> Callable[[], Dataset]:
    """A `load` for keras.datasets.<name>; images become (height, width, channels) uint8, labels int32."""

    def load() -> Dataset:
        module = importlib.import_module(f"keras.datasets.{name}")
        try:
            (x, y), (x_test, y_test) = module.load_data()
        except Exception as error:  # urllib, socket, zipfile and EOF errors alike: all mean 'not to be had'
            home = pathlib.Path(os.environ.get("KERAS_HOME", pathlib.Path.home() / ".keras"))
            raise DataError(f"{name} could neither be downloaded nor read from {home / 'datasets'}: {error}") from error
        return Dataset(_source(x, y), _source(x_test, y_test), class_names=class_names)

    return load


def _source(images: np.ndarray, labels: np.ndarray) -> Arrays:
    if images.ndim == 3:
        images = images[..., None]
    return Arrays(images, labels.reshape(len(images)).astype(np.int32))
