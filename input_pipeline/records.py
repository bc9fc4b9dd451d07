"""records: tf.train.Examples of TFRecord or ArrayRecord files."""

import glob
import io
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from input_pipeline.dataset import Dataset
from input_pipeline.decoding import decoded
from input_pipeline.source import DataError, Example
from input_pipeline.tfrecord import Records

_IMAGE = "image"  # in place of a dtype
Features = Mapping[str, Sequence[Any]]


class Examples:
    """tf.train.Examples as x and y.

    Args:
      records: the serialized examples.
      features: name -> (dtype, shape). Numbers are lists of floats or integers, or the raw bytes of an array. The
        dtype "image" is that of a JPEG or PNG, which becomes uint8 (height, width, 1 or 3) of the shape.
      label: the feature that is y; the others are x: an array, or a dict of them where there are several.

    Raises (on reading):
      DataError: a record without a feature, with other numbers of values or such as the dtype does not hold, or with an
        image that can't be decoded.
    """

    def __init__(self, records: "Sequence[bytes]", features: Features, label: str) -> None:
        self._records, self._label = records, label
        self._features = {
            name: (dtype if dtype == _IMAGE else np.dtype(dtype), tuple(shape))
            for name, (dtype, shape) in features.items()
        }
        for name, (dtype, shape) in self._features.items():
            if dtype == _IMAGE and (len(shape) != 3 or shape[2] not in (1, 3)):
                raise DataError(f"feature {name!r} is an image of {shape}, not of (height, width, 1 or 3)")

    def __len__(self) -> int:
        return len(self._records)

    def read(self, ids: npt.NDArray[np.int64]) -> Example:
        from tensorflow.train import Example as Proto

        rows = [Proto.FromString(self._records[i]).features.feature for i in ids]
        columns = {name: np.stack([self._value(row, name, i) for row, i in zip(rows, ids)]) for name in self._features}
        y = columns.pop(self._label)
        return (columns if len(columns) > 1 else next(iter(columns.values()))), y

    def _value(self, row: Any, name: str, number: int) -> npt.NDArray[Any]:
        dtype, shape = self._features[name]
        kind = row[name].WhichOneof("kind") if name in row else None
        if kind is None:
            raise DataError(f"record {number} has no feature {name!r}; it has {', '.join(sorted(row))}")
        values = getattr(row[name], kind).value
        if dtype == _IMAGE:
            if kind != "bytes_list" or len(values) != 1:
                raise DataError(
                    f"feature {name!r} of record {number} has a {kind} of {len(values)}, not one image's bytes"
                )
            try:
                return decoded(io.BytesIO(values[0]), shape)
            except (OSError, DataError) as error:
                raise DataError(f"feature {name!r} of record {number} is no image: {error}") from error
        if kind == "bytes_list" and values:
            if len(values) > 1 or len(values[0]) % dtype.itemsize:
                raise DataError(
                    f"feature {name!r} of record {number} holds bytes, {b', '.join(values)[:40]!r}, and no {dtype} "
                    f"{shape}: if they are words, write the number of each"
                )
            given = np.frombuffer(values[0], dtype)
        else:
            given = np.array(values)
        array = given.astype(dtype)
        if dtype.kind in "biu" and (wrong := array != given).any():  # 0.5 would be 0, and 300 of 8 bits 44
            raise DataError(f"feature {name!r} of record {number} has {given[wrong][0]}, which {dtype} does not hold")
        if array.size != np.prod(shape, dtype=int):
            raise DataError(f"feature {name!r} of record {number} has {array.size} values, not those of shape {shape}")
        return array.reshape(shape)


def load(
    data_dir: str,
    features: Features,
    label: str,
    train: str = "train*",
    evaluation: str = "test*",
    classes: int | None = None,
    skip_bad: int = 0,
    validation: str = "val[-._i]*",
) -> Dataset:
    """Examples of TFRecord files, each scanned once, with an index kept beside it; or of ArrayRecord files.

    Args:
      data_dir: directory of the files, or one file.
      features: name -> (dtype, shape), such as {'image': ('uint8', (28, 28, 1)), 'label': ('int32', ())}; an image that
        is JPEG or PNG in the record has the dtype 'image', and is cut and resized to the shape.
      label: name of the feature that is y.
      train, evaluation, validation: globs in data_dir; no file need match the latter two. Where none is to evaluate on,
        what is to validate on is.
      classes: number of classes, where labels are integers.
      skip_bad: how many damaged records of each may be left out.

    Raises:
      DataError: no files, or damaged records.
    """
    root = pathlib.Path(data_dir).expanduser()
    globs = (train, evaluation, validation)
    found = ([root / p for p in sorted(glob.glob(g, root_dir=root, recursive=True))] for g in globs)
    paths = [[path for path in matching if path.is_file()] for matching in found]
    if root.is_file():
        paths[0] = [root]
    if not paths[0]:
        where = f"{root} (the working directory is {pathlib.Path.cwd()})"
        raise DataError(f"no files match {train!r} in {where}: name yours, such as records(..., train='part-*')")
    if label not in features:
        raise DataError(f"label {label!r} is not among the features {', '.join(features)}")
    trained, evaluated, validated = (
        Examples(_records(each, skip_bad), features, label) if each else None for each in paths
    )
    assert trained is not None
    return Dataset(trained, validated if evaluated is None else evaluated, classes, validated)


def _records(paths: list[pathlib.Path], skip_bad: int) -> Any:
    """The records of files: of ArrayRecord, which has an index of its own, or else of TFRecord."""
    if not all(path.suffix in (".array_record", ".arrayrecord") for path in paths):
        return Records(paths, skip_bad)
    try:
        from grain.sources import ArrayRecordDataSource
    except ImportError:
        raise DataError("to read ArrayRecord files, grain is needed: pip install 'onecurve[grain]'") from None
    return ArrayRecordDataSource([str(path) for path in paths])
