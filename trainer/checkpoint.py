"""A checkpoint is the run at a step: one directory, committed by a rename, verified before it is trusted.

  checkpoints/00001234/model.weights.h5   all variables, as keras.Model.load_weights reads them
  checkpoints/00001234/manifest.json      the step, digests of the file and of each variable, and the
                                          few numbers beside the variables that the run needs

Data position and randomness follow from the step (input_pipeline/order.py), so nothing else is saved.
"""

import hashlib
import io
import json
import os
import pathlib
import secrets
import shutil
import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from keras.src.backend.common import global_state
from keras.src.saving import saving_lib

from trainer.errors import UserError
from trainer.program import Program, kind
from trainer.run_directory import replace

WEIGHTS = "model.weights.h5"
MANIFEST = "manifest.json"


class Damaged(Exception):
    """A checkpoint that can't be trusted, and why."""


def write(parent: pathlib.Path, program: Program, values: dict[str, np.ndarray], state: dict[str, Any]) -> pathlib.Path:
    """Commits values of the program's variables as checkpoint <step> in `parent`.

    Args:
      parent: the run's checkpoints directory.
      program: whose variables they are.
      values: by path, from program.values().
      state: JSON values that go into the manifest, 'step' among them.

    Returns:
      The checkpoint's directory, which is there whole or, if the process dies, not at all.
    """
    target = parent / f"{state['step']:08d}"
    temporary = parent / f".{target.name}.{secrets.token_hex(4)}"
    temporary.mkdir(mode=0o700)
    try:
        (temporary / WEIGHTS).write_bytes(_weights(program, values))
        manifest = {
            "files": {WEIGHTS: _file_facts(temporary / WEIGHTS)},
            "variables": {path: _value_facts(program, path, value) for path, value in values.items()},
            **state,
        }
        replace(temporary / MANIFEST, json.dumps(manifest | {"sha256": _digest(manifest)}, indent=1))
        for path in (temporary / WEIGHTS, temporary):
            _fsync(path)
        if target.exists():  # a resumed run is at this step again: the new one takes its place
            shutil.rmtree(target)
        os.rename(temporary, target)
        _fsync(parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _weights(program: Program, values: dict[str, np.ndarray]) -> memoryview:
    """What keras.Model.save_weights writes, of these values, wherever the variables lie and whatever becomes of them.

    Made in memory: on a disk that is full, HDF5 does not raise but crash.
    """
    image = io.BytesIO()
    store = saving_lib.H5IOStore(image, mode="w")
    # Keras makes an optimizer to see what attributes it has, which it may not in the scope; and looks for
    # what it saw under another name than it keeps it by (3.15).
    seen = saving_lib.get_attr_skipset("Optimizer")
    global_state.set_global_attribute("saving_attr_skiplist_Optimizer", seen)
    variables = program.variables
    with keras.device("cpu"), keras.StatelessScope([(variables[name], value) for name, value in values.items()]):
        saving_lib._save_state(program.model, store, None, "", set())
    store.close()
    return image.getbuffer()


def steps(parent: pathlib.Path) -> list[int]:
    """Steps of the committed checkpoints in a directory, ascending."""
    return sorted(int(path.name) for path in parent.glob("[0-9]" * 8) if path.is_dir())


def verify(path: pathlib.Path) -> dict[str, Any]:
    """Reads a checkpoint's manifest and checks its files against it.

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
        if file.parent != path or not file.is_file():
            raise Damaged(f"{file} is missing")
        if (now := _file_facts(file)) != facts:
            raise Damaged(f"{file} is not what was written: {now} now, {facts} then")
    return dict(manifest)


def newest(parent: pathlib.Path) -> Iterator[tuple[pathlib.Path, dict[str, Any] | Damaged]]:
    """Checkpoints from the newest to the oldest, each with its verified manifest or what is wrong with it."""
    for step in reversed(steps(parent)):
        path = parent / f"{step:08d}"
        try:
            yield path, verify(path)
        except Damaged as error:
            yield path, error


def read(path: pathlib.Path, program: Program, manifest: dict[str, Any]) -> None:
    """Loads all variables of a verified checkpoint into the program, and checks that they arrived.

    Raises:
      Damaged: a variable is not what was saved.
    """
    program.model.load_weights(path / WEIGHTS)
    for name, value in program.values().items():
        expected = manifest["variables"].get(name)
        if (now := _value_facts(program, name, value)) != expected:
            raise Damaged(f"{path}: variable {name} is {now} after loading, {expected} when saved")


def read_model_variables(path: pathlib.Path, program: Program, manifest: dict[str, Any]) -> None:
    """Loads the model's variables of another run's checkpoint; the optimizer stays as it is.

    Raises:
      UserError: the other run's model has other variables; they are named.
    """

    def of_model(facts: dict[str, Any]) -> dict[str, Any]:
        return {k: v[:2] for k, v in facts.items() if not k.startswith("optimizer/")}

    there = of_model({k: [v["shape"], v["dtype"]] for k, v in manifest["variables"].items()})
    here = of_model(program.signature())
    if there != here:
        differing = sorted(k for k in there.keys() | here.keys() if there.get(k) != here.get(k))
        table = "".join(
            f"\n    {k}: {there.get(k, 'absent')} there, {here.get(k, 'absent')} here" for k in differing[:12]
        )
        raise UserError("initialize_from", path, f"holds another model:{table}", "give a checkpoint of the same model")
    optimizer = [(v, keras.ops.convert_to_numpy(v.value)) for v in program.optimizer.variables]
    with warnings.catch_warnings():  # another optimizer's variables are skipped, and are not wanted
        warnings.simplefilter("ignore")
        program.model.load_weights(path / WEIGHTS)
    for variable, value in optimizer:
        variable.assign(value)


def find(where: str) -> tuple[pathlib.Path, dict[str, Any]]:
    """The checkpoint that --initialize_from names: a checkpoint, or a run directory's newest good one."""
    path = pathlib.Path(where)
    if (path / MANIFEST).exists():
        try:
            return path, verify(path)
        except Damaged as error:
            raise UserError("initialize_from", where, str(error), "give another checkpoint") from None
    for found, manifest in newest(path / "checkpoints"):
        if isinstance(manifest, dict):
            return found, manifest
    raise UserError(
        "initialize_from",
        where,
        "is neither a checkpoint nor a run directory with one",
        "give a run directory (runs/...) or a checkpoint in it (runs/.../checkpoints/00001234)",
    )


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _file_facts(path: pathlib.Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def _value_facts(program: Program, path: str, value: np.ndarray) -> dict[str, Any]:
    dtype = kind(program.variables[path])
    if dtype == "int":
        value = value.astype(np.int64)
    digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
    return {"shape": list(value.shape), "dtype": dtype, "sha256": digest}


def _fsync(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
