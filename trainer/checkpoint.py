"""A checkpoint is the run at a step: one directory, committed by a rename, verified before it is trusted.

  checkpoints/00001234/model.weights.h5   all variables, as keras.Model.load_weights reads them
                       (or shards-*.bin   each process's own: trainer/storage/shards.py)
  checkpoints/00001234/manifest.json      the step, digests of the files and of each variable, and the
                                          few numbers beside the variables that the run needs

Data position and randomness follow from the step (input_pipeline/order.py), so nothing else is saved. What is here
needs no Keras, and tells of the runs of either backend: trainer/storage/saving.py has what knows a program's variables.
"""

import contextlib
import hashlib
import itertools
import json
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np

from trainer.storage import digests, hdf5_file, shards
from trainer.storage.replacing import replace, sync_directory

WEIGHTS = "model.weights.h5"
MANIFEST = "manifest.json"
_BEFORE = ".before"  # ends the hidden name of a checkpoint whose place another of the same step takes


class Damaged(Exception):
    """A checkpoint that can't be trusted, and why."""


def commit(temporary: pathlib.Path, files: dict[str, Any], variables: dict[str, Any], state: dict[str, Any]) -> None:
    """Writes the manifest of files that are on the disk, and gives their directory its name."""
    manifest = json.loads(json.dumps({"files": files, "variables": variables, **state}))  # as it will be read
    replace(temporary / MANIFEST, json.dumps(manifest | {"sha256": digest(manifest)}, indent=1))
    sync_directory(temporary)
    target = temporary.parent / f"{state['step']:08d}"
    before = target.with_name(f".{target.name}{_BEFORE}")
    if target.exists():  # a resumed run is at this step again; the one that is there may be its only one
        os.rename(target, before)
    os.rename(temporary, target)
    sync_directory(target.parent)
    shutil.rmtree(before, ignore_errors=True)


def remove(path: pathlib.Path) -> None:
    """Removes a checkpoint that is no longer kept: whoever looks for it meanwhile finds it whole, or gone."""
    hidden = path.with_name(f".{path.name}.removed")
    with contextlib.suppress(OSError):  # somebody else has removed it
        path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def tidy(parent: pathlib.Path) -> None:
    """Removes what killed writes left in a directory of checkpoints; one that had lost its name gets it back."""
    for before in parent.glob(f".*{_BEFORE}"):
        target = before.with_name(before.name[1:].removesuffix(_BEFORE))
        if not target.exists():
            before.rename(target)
    for leftover in parent.glob(".[0-9]*"):
        shutil.rmtree(leftover, ignore_errors=True)


def steps(parent: pathlib.Path) -> list[int]:
    """Steps of the committed checkpoints in a directory, ascending."""
    found = (path.name for path in parent.glob("[0-9]*") if path.is_dir() and path.name.isdigit())
    return sorted(int(name) for name in found if name == f"{int(name):08d}")


def verify(path: pathlib.Path, arrays: bool = True) -> dict[str, Any]:
    """Reads a checkpoint's manifest and checks its files against it.

    Args:
      path: the checkpoint.
      arrays: whether large arrays that are variables are looked at, too. `saving.read` needs no look before: it checks
        all variables. What else a layer has saved, nobody would check.

    Raises:
      Damaged: something is missing, cut or changed; it says what.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files, written = dict(manifest["files"]), manifest.pop("sha256")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{path / MANIFEST}: {error!r}") from None
    if digest(manifest) != written:
        raise Damaged(f"{path / MANIFEST} is not what was written")
    step = manifest.get("step")
    if not isinstance(step, int) or f"{step:08d}" != path.name:
        raise Damaged(f"{path} holds step {step}")
    for name, facts in files.items():
        file = path / name
        if file.parent != path or file.is_symlink() or not file.is_file():
            raise Damaged(f"{file} is missing, or not in the checkpoint")
        try:
            regions = [digests.Region(*region) for region in facts.get("arrays", [])]
            checked_later = () if arrays else {v.get("blake3") for v in manifest["variables"].values()}
            now = digests.of_file(file, regions, checked_later)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise Damaged(f"{file} can't be checked: {error}") from None
        if now != facts:
            raise Damaged(f"{file} is not what was written: {now} now, {facts} then")
    return dict(manifest)


def set_aside(path: pathlib.Path) -> None:
    """Takes a damaged checkpoint from among those of a run, and keeps it."""
    aside, others = path.with_name(f"damaged-{path.name}"), itertools.count(2)
    while aside.exists():  # that step was saved anew, and damaged anew
        aside = path.with_name(f"damaged-{path.name}-{next(others)}")
    path.rename(aside)


def newest(
    parent: pathlib.Path, arrays: bool = True, only: pathlib.Path | None = None
) -> Iterator[tuple[pathlib.Path, dict[str, Any] | Damaged]]:
    """Checkpoints from the newest to the oldest, each with its manifest, verified, or what is wrong with it.

    Args:
      parent: the directory of them.
      arrays: as in `verify`.
      only: which of them, if not all.
    """
    for step in reversed(steps(parent)):
        path = parent / f"{step:08d}"
        if only not in (None, path):
            continue
        try:
            yield path, verify(path, arrays)
        except Damaged as error:
            if path.exists():  # a run that goes on removes what it no longer keeps
                yield path, error


def arrays(path: pathlib.Path, manifest: dict[str, Any]) -> dict[str, np.ndarray]:
    """The arrays of a verified checkpoint, by their place in its file, or by their path where it is in shards."""
    if WEIGHTS not in manifest["files"]:
        variables = manifest["variables"].items()
        return {name: shards.region(path, facts, shards.everything(facts["shape"])) for name, facts in variables}
    return hdf5_file.arrays(path / WEIGHTS)


def digest(manifest: dict[str, Any]) -> str:
    """Of all that a verified checkpoint holds."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
