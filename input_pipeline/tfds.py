"""tfds: a dataset of TensorFlow Datasets by its name, read at random through its data source."""

from typing import Any

import numpy as np
import numpy.typing as npt

from input_pipeline.dataset import Dataset
from input_pipeline.merging import items, merged
from input_pipeline.source import DataError, Example


class Columns:
    """Two features of a data source as x and y.

    Args:
      rows: has a length, and rows[id] -> {feature: value}.
      x, y: names of features.
    """

    def __init__(self, rows: Any, x: str, y: str) -> None:
        self._rows, self._x, self._y = rows, x, y

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, ids: npt.NDArray[np.int64]) -> Example:
        return merged([(row[self._x], row[self._y]) for row in items(self._rows, ids)])


def load(
    name: str,
    data_dir: str = "",
    train: str = "train",
    evaluation: str = "test",
    x: str = "",
    y: str = "",
    validation: str = "",
) -> Dataset:
    """A dataset that is there in a format of random access, or is downloaded and prepared in one.

    Args:
      name: such as 'mnist' or 'imagenet2012:5.1.0'.
      data_dir: where prepared datasets lie; TFDS's own default if it is empty.
      train, evaluation, validation: splits; '' leaves one of the latter two out.
      x, y: features; by default those that the dataset calls supervised.

    Raises:
      DataError: TFDS is not installed, or has no such dataset, split or feature.
    """
    try:
        import tensorflow_datasets as tfds
    except ImportError:
        raise DataError("TensorFlow Datasets is not installed: pip install 'onecurve[tfds]'") from None
    options = {"data_dir": data_dir} if data_dir else {}
    try:
        builder = tfds.builder(name, file_format="array_record", **options)
        builder.download_and_prepare()
        sources = [builder.as_data_source(split) if split else None for split in (train, evaluation, validation)]
    except (tfds.core.DatasetNotFoundError, ValueError, KeyError, NotImplementedError, OSError) as error:
        raise DataError(f"TensorFlow Datasets can't give {name!r}: {error}") from None
    x, y = _features(builder.info, x, y)
    columns = [Columns(rows, x, y) if rows is not None else None for rows in sources]
    assert columns[0] is not None
    classes, names = (getattr(builder.info.features[y], fact, None) for fact in ("num_classes", "names"))
    return Dataset(columns[0], columns[1], classes, columns[2], class_names=names)


def _features(info: Any, x: str, y: str) -> tuple[str, str]:
    supervised = info.supervised_keys or ("", "")
    x, y = x or supervised[0], y or supervised[1]
    for name in (x, y):
        if name not in info.features:
            raise DataError(f"there is no feature {name!r}: give x and y of {', '.join(sorted(info.features))}")
    return x, y
