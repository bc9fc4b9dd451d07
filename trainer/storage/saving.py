"""A program's variables, written to a checkpoint and read from it."""

import concurrent.futures
import functools
import pathlib
import secrets
import shutil
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np

from trainer.checkpoint import WEIGHTS, Damaged, commit
from trainer.errors import UserError
from trainer.objective.trial import is_coarse
from trainer.program import Program, kind
from trainer.storage import digests, hdf5, shards
from trainer.storage.shards import Piece
from trainer.storage.synced import synced

# How far the probe's loss may lie from what it was, relatively: another backend rounds otherwise. A loss near 0
# is a difference of large numbers, whose rounding stays.
_PRECISE, _COARSE, _ROUNDING = 1e-3, 5e-2, 1e-6


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
        commit(temporary, files, facts, state)
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
            commit(temporary, files, facts, state)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


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
        except (OSError, ValueError) as error:
            raise Damaged(f"{path}: variable {name}: {error}") from None


def check_probe(program: Program, path: pathlib.Path, saved: float | None, probe: Callable[[], float | None]) -> None:
    """The variables are to the bit what they were; is the model?

    Args:
      program: what is trained or judged.
      path: the checkpoint that the variables are from.
      saved: what the probe was when they were saved.
      probe: the loss of a few examples with the variables as they are; None where they don't come before a stop.

    Raises:
      UserError: the model computes something else with them.
    """
    if saved is None or not np.isfinite(saved):  # of step 0, or without its examples; or these are no measure
        return
    now, tolerance = probe(), _COARSE if is_coarse(program.model) else _PRECISE
    if now is not None and not abs(now - saved) <= _ROUNDING + tolerance * abs(saved):
        raise UserError(
            "model",
            program.config.model,
            f"with the variables of {path}, whose digests are right, its loss on the probe's examples is "
            f"{now:.6g}; it was {saved:.6g} when they were saved: the code of the model or of the data has "
            "changed, or a package",
            "take the change back, or start a new run with --initialize_from",
        )


def _facts(
    program: Program, path: str, value: np.ndarray, of_array: Callable[[np.ndarray], str] = digests.of_array
) -> dict[str, Any]:
    """Shape, dtype and digest of a variable's value."""
    dtype = kind(program.variables[path])
    digest = of_array(value.astype(np.int64) if dtype == "int" else value)
    return {"shape": list(value.shape), "dtype": dtype, "blake3": digest}
