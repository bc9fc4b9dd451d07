"""images: a folder for each class, of JPEG, PNG or whatever else Pillow reads."""

import collections
import functools
import os
import pathlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from input_pipeline.dataset import Dataset
from input_pipeline.decoding import decoded
from input_pipeline.order import fold
from input_pipeline.source import DataError, Example

_SUFFIXES = {".avif", ".bmp", ".gif", ".jp2", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
_HELD_OUT = ("test", "validation", "val", "valid")  # folders beside train
Keys = npt.NDArray[np.uint64]


class Images:
    """Images of files, of one size.

    Args:
      paths: the files.
      labels: int32 (files,).
      size: (height, width): the middle of the image is cut out in that shape, and resized.
      channels: 1 or 3.
      skip_bad: how many files that can't be decoded get weight 0; one more, and it is an error.
    """

    def __init__(
        self,
        paths: Sequence[str | pathlib.Path],
        labels: npt.NDArray[np.int32],
        size: tuple[int, int],
        channels: int = 3,
        skip_bad: int = 0,
    ) -> None:
        self._paths, self._labels, self._size, self._skip_bad = paths, labels, size, skip_bad
        self._channels = channels
        self._bad: dict[int, str] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, ids: npt.NDArray[np.int64]) -> Example:
        images = np.zeros((len(ids), *self._size, self._channels), np.uint8)
        weights = np.ones(len(ids), np.float32)
        for row, i in enumerate(ids):
            try:
                images[row] = decoded(self._paths[i], images.shape[1:])
            except (OSError, DataError) as error:
                self._note(int(i), f"{self._paths[i]}: {error}")
                weights[row] = 0
        labels = self._labels[ids]
        return (images, labels, weights) if self._skip_bad else (images, labels)

    def _note(self, number: int, words: str) -> None:
        with self._lock:
            new = number not in self._bad
            self._bad[number] = words
            bad = list(self._bad.values())
        if len(bad) > self._skip_bad:
            raise DataError(
                f"{len(bad)} images can't be decoded, and {self._skip_bad} may be skipped (skip_bad): "
                + "; ".join(bad[:5])
            )
        if new:
            print(f"skipped, {len(bad)} of at most {self._skip_bad}: {words}", flush=True)


def flip_and_shift(example: Example, keys: Keys, most: int) -> Example:
    """Mirrors half of the images and moves each by up to `most` pixels, edges repeated.

    Args:
      example: x uint8 (batch, height, width, channels), and what goes with it, which stays.
      keys: uint64 (batch,), all the randomness there is.
      most: pixels.
    """
    x, *rest = example
    height, width = x.shape[1:3]
    down, right = ((fold(keys, salt) % np.uint64(2 * most + 1)).astype(np.int64)[:, None] - most for salt in (0, 1))
    rows = np.clip(np.arange(height) + down, 0, height - 1)
    columns = np.clip(np.arange(width) + right, 0, width - 1)
    mirrored = (fold(keys, 2) & np.uint64(1)).astype(bool)
    columns[mirrored] = columns[mirrored, ::-1]
    return (x[np.arange(len(x))[:, None, None], rows[:, :, None], columns[:, None, :]], *rest)


def load(
    data_dir: str,
    size: int | tuple[int, int] = 64,
    channels: int = 3,
    train: str = "",
    evaluation: str = "",
    held_out: int = 10,
    shift: int = 0,
    skip_bad: int = 0,
    validation: str = "",
) -> Dataset:
    """data_dir/cat/1.jpg, data_dir/dog/2.png ...; or data_dir/train/cat/..., data_dir/test/cat/... .

    Args:
      data_dir: has a folder for each class, or for `train` and `evaluation`, which have them.
      size: height and width in pixels.
      channels: 3, or 1 for gray.
      train, evaluation, validation: folders of data_dir; by default train, test and validation, val or valid, where
        they are there; without test, what is to validate on is to evaluate on.
      held_out: where there are none, one file in so many of each class is to evaluate on.
      shift: while training, images are mirrored and moved by up to so many pixels; 0: they are not.
      skip_bad: how many files that can't be decoded may be skipped.

    Returns:
      x uint8 (height, width, channels), y int32: the place of the class's folder in the alphabet.

    Raises:
      DataError: no folders, no images of a class, other classes to evaluate on, or channels that no image has.
    """
    if channels not in (1, 3):
        raise DataError(f"channels={channels}: an image has 3 of colours, or 1 of gray")
    root = pathlib.Path(data_dir).expanduser()
    folders = _folders(root)
    # Beside other classes it may be one, of vehicles; beside a folder test alone it never is.
    if not train and "train" in folders and (_folders(root / "train") or {"train", *_HELD_OUT}.issuperset(folders)):
        train, there = "train", [name for name in _HELD_OUT if name in folders]
        evaluation = evaluation or next(iter(there), "")
        validation = validation or next((name for name in there if name not in ("test", evaluation)), "")
    height, width = (size, size) if isinstance(size, int) else size
    paths, labels, classes = _files(root / train)
    if without := sorted({*range(len(classes))} - {*labels.tolist()}):
        raise DataError(
            f"{root / train / classes[without[0]]} has no image ({', '.join(sorted(_SUFFIXES))}), and a folder is a "
            "class: fill it, or remove it"
        )

    def source(paths: Sequence[str], labels: Any) -> Images | None:
        return Images(paths, labels, (height, width), channels, skip_bad) if paths else None

    def of_folder(name: str) -> Images | None:
        paths, labels, its_classes = _files(root / name)
        if its_classes != classes:
            raise DataError(f"{root / name} has the classes {its_classes}, {root / train} has {classes}")
        return source(paths, labels)

    if evaluation:
        found, evaluated = source(paths, labels), of_folder(evaluation)
    else:
        places = np.concatenate([np.arange(np.sum(labels == label)) for label in range(len(classes))])
        held = places % held_out == held_out - 1
        found, evaluated = (source([paths[i] for i in np.flatnonzero(part)], labels[part]) for part in (~held, held))
    if found is None:
        raise DataError(f"{root / train} has no image to train on")
    return Dataset(
        found,
        evaluated,
        len(classes),
        of_folder(validation) if validation else None,
        _augmentation(shift) if shift else None,
        class_names=classes,
    )


@functools.cache
def _augmentation(shift: int) -> Callable[[Example, Keys], Example]:
    """One for each shift, so that a mixture sees whether its parts are changed alike."""
    return functools.partial(flip_and_shift, most=shift)


def _folders(root: pathlib.Path) -> list[str]:
    """Names of the folders in one, without hidden ones."""
    return sorted(p.name for p in root.iterdir() if p.is_dir() and p.name[:1] != ".") if root.is_dir() else []


def _files(root: pathlib.Path) -> tuple[list[str], npt.NDArray[np.int32], list[str]]:
    """Files, their labels, and the names of the classes."""
    classes, others = _folders(root), collections.Counter[str]()
    found = [(path, i) for i, name in enumerate(classes) for path in _images(root / name, others)]
    if others:
        words = ", ".join(f"{count:,} of {suffix or 'none'}" for suffix, count in sorted(others.items()))
        print(f"{root} has other files, by their suffixes {words}: left out", flush=True)
    if not found:
        raise DataError(
            f"{root} has no folder with images ({', '.join(sorted(_SUFFIXES))}); "
            f"the working directory is {pathlib.Path.cwd()}"
        )
    return [p for p, _ in found], np.array([i for _, i in found], np.int32), classes


def _images(folder: pathlib.Path, others: collections.Counter[str]) -> list[str]:
    """Files of images in a folder and those in it, in the order of their parts; no Paths, for there may be millions.

    Hidden ones are left out: what macOS adds to an archive is no image, and what Jupyter keeps is one twice. Of other
    files, `others` counts the suffixes.
    """

    def fail(error: OSError) -> None:
        raise DataError(f"{error.filename} can't be listed: {error.strerror}")

    found = list[str]()
    for at, below, names in os.walk(folder, onerror=fail):
        below[:] = (name for name in below if name[0] != ".")
        for name in (name for name in names if name[0] != "."):
            if (suffix := os.path.splitext(name)[1].lower()) in _SUFFIXES:
                found.append(os.path.join(at, name))
            else:
                others[suffix] += 1
    return sorted(found, key=lambda path: path.split(os.sep))
