"""A checkpoint is the run at a step: one directory, committed by a rename, verified before it is trusted.

  checkpoints/00001234/model.weights.h5   all variables, as keras.Model.load_weights reads them
                       (or shards-*.bin   each process's own: trainer/shards.py)
  checkpoints/00001234/manifest.json      the step, digests of the files and of each variable, and the
                                          few numbers beside the variables that the run needs

Data position and randomness follow from the step (input_pipeline/order.py), so nothing else is saved.
"""

import concurrent.futures
import functools
import hashlib
import itertools
import json
import os
import pathlib
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np

from trainer import digests, hdf5, shards
from trainer.program import Program, kind
from trainer.run_directory import replace, sync_directory
from trainer.shards import Piece
from trainer.synced import synced

WEIGHTS = "model.weights.h5"
MANIFEST = "manifest.json"


class Damaged(Exception):
    """A checkpoint that can't be trusted, and why."""


def write(parent: pathlib.Path, program: Program, values: dict[str, np.ndarray], state: dict[str, Any]) -> None:
    """Commits values of the program's variables as checkpoint <step> in `parent`: there whole or not at all.

    Args:
      parent: the run's checkpoints directory.
      program: whose variables they are.
      values: by path, from program.values().
      state: JSON values that go into the manifest, 'step' among them.
    """
    temporary = parent / f".{state['step']:08d}.{secrets.token_hex(4)}"
    temporary.mkdir(mode=0o700)
    file = temporary / WEIGHTS
    try:
        once = digests.Once(values.values())
        with synced(file):
            arrays = hdf5.write_weights(file, program, values, once.of_bytes)
            files = {WEIGHTS: digests.of_file(file, arrays, {array.blake3 for array in arrays})}
        facts = {path: _facts(program, path, value, once.of_array) for path, value in values.items()}
        _commit(temporary, files, facts, state)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_shards(
    parent: pathlib.Path,
    program: Program,
    pieces: dict[str, list[Piece]],
    state: dict[str, Any],
    process: int,
    processes: int,
    patience: float,
) -> None:
    """The same where each process has pieces: all call it, and process 0 commits once all have written.

    Args:
      parent, program, state: as in `write`.
      pieces: by path, from program.snapshot().
      process, processes: this one's number, and how many there are.
      patience: seconds to wait for the others.
    """
    temporary = parent / f".{state['step']:08d}.shards"
    temporary.mkdir(mode=0o700, exist_ok=True)
    variables = program.variables
    shards.write(temporary, process, {path: kind(v) for path, v in variables.items()}, pieces)
    if process == 0:
        try:
            files, found = shards.collect(temporary, processes, patience)
            facts = {
                path: {"shape": list(v.shape), "dtype": kind(v), "pieces": found[path]} for path, v in variables.items()
            }
            _commit(temporary, files, facts, state)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _commit(temporary: pathlib.Path, files: dict[str, Any], variables: dict[str, Any], state: dict[str, Any]) -> None:
    """Writes the manifest of files that are on the disk, and gives their directory its name."""
    manifest = json.loads(json.dumps({"files": files, "variables": variables, **state}))  # as it will be read
    replace(temporary / MANIFEST, json.dumps(manifest | {"sha256": _digest(manifest)}, indent=1))
    sync_directory(temporary)
    target = temporary.parent / f"{state['step']:08d}"
    if target.exists():  # a resumed run is at this step again: the new one takes its place
        shutil.rmtree(target)
    os.rename(temporary, target)
    sync_directory(target.parent)


def steps(parent: pathlib.Path) -> list[int]:
    """Steps of the committed checkpoints in a directory, ascending."""
    return sorted(int(path.name) for path in parent.glob("[0-9]" * 8) if path.is_dir())


def verify(path: pathlib.Path, arrays: bool = True) -> dict[str, Any]:
    """Reads a checkpoint's manifest and checks its files against it.

    Args:
      path: the checkpoint.
      arrays: whether large arrays that are variables are looked at, too. `read` needs no look before: it checks all
        variables. What else a layer has saved, nobody would check.

    Raises:
      Damaged: something is missing, cut or changed; it says what.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files, written = dict(manifest["files"]), manifest.pop("sha256")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{path / MANIFEST}: {error!r}") from None
    if _digest(manifest) != written:
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


def newest(parent: pathlib.Path, arrays: bool = True) -> Iterator[tuple[pathlib.Path, dict[str, Any] | Damaged]]:
    """Checkpoints from the newest to the oldest, each with its manifest, verified, or what is wrong with it."""
    for step in reversed(steps(parent)):
        path = parent / f"{step:08d}"
        try:
            yield path, verify(path, arrays)
        except Damaged as error:
            yield path, error


def read(path: pathlib.Path, program: Program, manifest: dict[str, Any]) -> None:
    """Loads all variables of a verified checkpoint into the program, and checks that they arrived.

    Raises:
      Damaged: a variable is not what was saved.
    """
    saved = manifest["variables"]
    if {k: [v["shape"], v["dtype"]] for k, v in saved.items()} != program.signature():
        raise Damaged(f"{path} holds other variables")
    if WEIGHTS not in manifest["files"]:
        read_shards(path, program, manifest, program.variables)
        return
    found: dict[str, concurrent.futures.Future[dict[str, Any]]] = {}
    with concurrent.futures.ThreadPoolExecutor(1) as thread:

        def check(name: str, variable: keras.Variable) -> None:
            found[name] = thread.submit(lambda: _facts(program, name, program.to_host(variable)))

        try:
            # Beside the reading; but what all processes are to gather, they gather in one order, once all is read.
            hdf5.read_weights(path / WEIGHTS, program, check if program.whole else None)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Damaged(f"{path / WEIGHTS} can't be read: {error}") from None
        for name, variable in program.variables.items():
            if name not in found:
                check(name, variable)
    for name, facts in found.items():
        if (now := facts.result()) != saved[name]:
            raise Damaged(f"{path}: variable {name} is {now} after loading, {saved[name]} when saved")


def read_shards(path: pathlib.Path, program: Program, manifest: dict[str, Any], names: Iterable[str]) -> None:
    """Sets some variables from the pieces of a checkpoint, each process what it needs."""
    for name in names:
        read_region = functools.partial(shards.region, path, manifest["variables"][name])
        try:
            program.assign(program.variables[name], read_region)
        except ValueError as error:
            raise Damaged(f"{path}: variable {name}: {error}") from None


def arrays(path: pathlib.Path, manifest: dict[str, Any]) -> dict[str, np.ndarray]:
    """The arrays of a verified checkpoint, by their place in its file, or by their path where it is in shards."""
    if WEIGHTS not in manifest["files"]:
        variables = manifest["variables"].items()
        return {name: shards.region(path, facts, shards.everything(facts["shape"])) for name, facts in variables}
    return hdf5.arrays(path / WEIGHTS)


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _facts(
    program: Program, path: str, value: np.ndarray, of_array: Callable[[np.ndarray], str] = digests.of_array
) -> dict[str, Any]:
    """Shape, dtype and digest of a variable's value."""
    dtype = kind(program.variables[path])
    digest = of_array(value.astype(np.int64) if dtype == "int" else value)
    return {"shape": list(value.shape), "dtype": dtype, "blake3": digest}
