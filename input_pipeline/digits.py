"""digits: 1,797 handwritten digits, 8 x 8 pixels, in the repository. The default dataset; see data/README.md."""

import importlib.resources
import io

import numpy as np

from input_pipeline.dataset import Dataset
from input_pipeline.source import Arrays


def load() -> Dataset:
    """Every fifth example is for evaluation: 1,437 to train on, 360 to test on.

    Images are (8, 8, 1) uint8 from 0 to 255 (the source's 0 to 16, rescaled), labels int32 0 to 9.
    """
    packed = importlib.resources.files("input_pipeline").joinpath("data/digits.npz").read_bytes()
    with np.load(io.BytesIO(packed), allow_pickle=False) as arrays:
        images, labels = arrays["images"], arrays["labels"].astype(np.int32)
    images = (images.astype(np.uint16) * 255 // 16).astype(np.uint8)[..., None]
    test = np.arange(len(labels)) % 5 == 0
    return Dataset(Arrays(images[~test], labels[~test]), Arrays(images[test], labels[test]), classes=10)
