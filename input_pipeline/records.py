"""records: TFRecord files of tf.train.Examples, by an index of where each record is."""

import functools
import glob
import io
import json
import os
import pathlib
import resource
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from input_pipeline import lengthy
from input_pipeline.dataset import Dataset
from input_pipeline.decoding import decoded
from input_pipeline.source import DataError, Example

_FRAME = struct.Struct("<QI")  # length of the record, and the masked checksum of the length
_SUM = struct.Struct("<I")  # masked checksum of the record, after it
_IMAGE = "image"  # in place of a dtype
Features = Mapping[str, Sequence[Any]]


class Records:
    """The records of some files, in the order of the files.

    Args:
      paths: the files.
      skip_bad: how many damaged records may be left out; one more, and it is an error.

    Raises:
      DataError: damaged records, each with its file and offset; also on reading.
    """

    def __init__(self, paths: Sequence[pathlib.Path], skip_bad: int = 0) -> None:
        bad: list[str] = []
        tables = []
        for number, path in enumerate(paths):
            table = _index(path, bad)
            tables.append(np.column_stack([np.full(len(table), number), table]))
        if len(bad) > skip_bad:
            raise DataError(
                f"{len(bad)} damaged records, and {skip_bad} may be left out (skip_bad): " + "; ".join(bad[:5])
            )
        if bad:
            print(f"{len(bad)} damaged records are left out: " + "; ".join(bad[:5]), flush=True)
        self._table, self._paths = np.concatenate(tables), paths  # int64 (records, 3): file, offset, bytes

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> bytes:
        number, offset, size = self._table[index].tolist()
        data = os.pread(_opened(self._paths[number]), size + _SUM.size, offset)
        if data[size:] != _SUM.pack(_masked(data[:size])):  # where the index is older than the damage
            place = f"{self._paths[number]} at byte {offset - _FRAME.size}"
            raise DataError(f"{place}: a record that is not what it was; copy the file anew")
        return data[:size]


@functools.lru_cache(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)  # each holds a descriptor
def _opened(path: pathlib.Path) -> "_Descriptor":
    return _Descriptor(os.open(path, os.O_RDONLY))


class _Descriptor(int):
    """That of a file, which is closed once nobody reads it any more."""

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self)


def _index(path: pathlib.Path, bad: list[str]) -> npt.NDArray[np.int64]:
    """int64 (records, 2): offset and bytes of each whole record; made once, and kept beside the file."""
    kept = path.with_name(f".{path.name}.index.json")
    facts = path.stat()
    state = [facts.st_size, facts.st_mtime_ns]
    try:
        known = json.loads(kept.read_text())
        if known["state"] == state:
            bad += known["bad"]
            return np.array(known["records"], np.int64).reshape(-1, 2)
    except (OSError, ValueError, KeyError):
        pass
    found, damaged = _scan(path)
    bad += damaged
    try:
        temporary = kept.with_name(f"{kept.name}.part")
        temporary.write_text(json.dumps({"state": state, "bad": damaged, "records": found}))
        temporary.replace(kept)
    except OSError:
        pass  # a directory that may not be written: the next start scans again
    return np.array(found, np.int64).reshape(-1, 2)


def _scan(path: pathlib.Path) -> tuple[list[tuple[int, int]], list[str]]:
    """Reads a file once, checking all its sums. Returns the whole records, and the damaged ones in words."""
    found: list[tuple[int, int]] = []
    damaged: list[str] = []
    offset, end = 0, path.stat().st_size
    with open(path, "rb") as file:
        while offset < end:
            lengthy.tell(f"looking through {path}: {offset >> 20:,} of {end >> 20:,} MiB")
            frame = file.read(_FRAME.size)
            if len(frame) < _FRAME.size:
                damaged.append(f"{path} ends in the middle of a record at byte {offset}")
                break
            size, check = _FRAME.unpack(frame)
            if _masked(frame[:8]) != check:
                damaged.append(f"{path} at byte {offset}: a damaged length; what follows can't be found")
                break
            if offset + _FRAME.size + size + _SUM.size > end:
                damaged.append(f"{path} ends in the middle of a record at byte {offset}")
                break
            data = file.read(size)
            if _masked(data) == _SUM.unpack(file.read(_SUM.size))[0]:
                found.append((offset + _FRAME.size, size))
            else:
                damaged.append(f"{path} at byte {offset}: a damaged record")
            offset += _FRAME.size + size + _SUM.size
    return found, damaged


def framed(record: bytes) -> bytes:
    """A record as a TFRecord file has it: its length and itself, each with its checksum."""
    length = struct.pack("<Q", len(record))
    return length + _SUM.pack(_masked(length)) + record + _SUM.pack(_masked(record))


def _masked(data: bytes) -> int:
    """The checksum of a TFRecord: CRC-32C, rotated and moved (tensorflow/core/lib/hash/crc32c.h)."""
    crc = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


class Examples:
    """tf.train.Examples as x and y.

    Args:
      records: the serialized examples.
      features: name -> (dtype, shape). Numbers are lists of floats or integers, or the raw bytes of an array. The
        dtype "image" is that of a JPEG or PNG, which becomes uint8 (height, width, 1 or 3) of the shape.
      label: the feature that is y; the others are x: an array, or a dict of them where there are several.

    Raises (on reading):
      DataError: a record without a feature, with other numbers of values, or with an image that can't be decoded.
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
        array = np.frombuffer(values[0], dtype) if kind == "bytes_list" and values else np.array(values, dtype)
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
    paths = [[root / p for p in sorted(glob.glob(g, root_dir=root, recursive=True))] for g in globs]
    if root.is_file():
        paths[0] = [root]
    if not paths[0]:
        where = f"{root} (the working directory is {pathlib.Path.cwd()})"
        raise DataError(f"no files match {train!r} in {where}: name yours, such as records(..., train='part-*')")
    if label not in features:
        raise DataError(f"label {label!r} is not among the features {', '.join(features)}")
    found, evaluated, validated = (
        Examples(_records(each, skip_bad), features, label) if each else None for each in paths
    )
    assert found is not None
    return Dataset(found, validated if evaluated is None else evaluated, classes, validated)


def _records(paths: list[pathlib.Path], skip_bad: int) -> Any:
    """The records of files: of ArrayRecord, which has an index of its own, or else of TFRecord."""
    if not all(path.suffix in (".array_record", ".arrayrecord") for path in paths):
        return Records(paths, skip_bad)
    try:
        from grain.sources import ArrayRecordDataSource
    except ImportError:
        raise DataError("to read ArrayRecord files, grain is needed: pip install 'onecurve[grain]'") from None
    return ArrayRecordDataSource([str(path) for path in paths])
