"""arrays: .npy files, memory-mapped, or one .npz: x_train, y_train, x_val, x_test and so on, as Keras names its own."""

import pathlib
import zipfile

import numpy as np
import numpy.typing as npt

from input_pipeline.dataset import Dataset
from input_pipeline.source import Arrays, DataError

_NAMES, _PARTS = ("x", "y", "weight"), ("train", "test", "validation", "val")


def load(data_dir: str, classes: int | None = None) -> Dataset:
    """x_train and perhaps y_train, weight_train, (examples, ...); and perhaps as many of test, val or validation.

    Without test, what is to validate on is to evaluate on.

    Args:
      data_dir: a directory of .npy files, which stay on the disk, or an .npz file, which is read into memory.
      classes: number of classes, if labels are integers and training does not show them all.

    Raises:
      DataError: a file is missing, damaged, or holds Python objects, which are never loaded.
    """
    path = pathlib.Path(data_dir).expanduser()
    arrays = _of_npz(path) if path.is_file() else _of_directory(path)
    train, test, *validation = (_source(arrays, part) for part in _PARTS)
    if train is None:
        packed = [file.name for file in sorted(path.glob("*.npz"))]
        hint = f": is --data_dir={path / packed[0]} meant?" if packed and not arrays else ""
        raise DataError(f"{path} holds {', '.join(sorted(arrays)) or 'no arrays'}, and x_train is needed{hint}")
    known = {f"{name}_{part}" for name in _NAMES for part in _PARTS}
    for name in sorted(set(arrays) - known):
        if name.startswith(tuple(f"{each}_" for each in _NAMES)) or name.endswith(tuple(f"_{part}" for part in _PARTS)):
            raise DataError(f"{path} holds {name}, which is not looked at: there are {', '.join(sorted(known))}")
    found = next((source for source in validation if source is not None), None)
    return Dataset(train, found if test is None else test, classes, found)


def _source(arrays: dict[str, npt.NDArray], part: str) -> Arrays | None:
    x, y, weight = (arrays.get(f"{name}_{part}") for name in _NAMES)
    if x is None:
        return None
    if y is None and weight is not None:
        raise DataError(f"there is a weight_{part} without y_{part}")
    return Arrays(*(array for array in (x, y, weight) if array is not None))


def _of_directory(path: pathlib.Path) -> dict[str, npt.NDArray]:
    return {file.stem: _read(file) for file in sorted(path.glob("*.npy"))}


def _read(file: pathlib.Path) -> npt.NDArray:
    try:
        return np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(f"{file} can't be read: {error}") from None


def _of_npz(path: pathlib.Path) -> dict[str, npt.NDArray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} can't be read: {error}") from None
