"""--initialize_from: a new run that starts from another's variables."""

import pathlib
import warnings
from typing import Any

import numpy as np

from trainer import checkpoint, optimizers
from trainer.errors import UserError
from trainer.peers import Peers
from trainer.program import Program
from trainer.storage import hdf5, saving


def read_model_variables(path: pathlib.Path, program: Program, manifest: dict[str, Any]) -> str:
    """Loads the model's variables of another run's checkpoint; the optimizer begins with them.

    Returns:
      what of the other run is not taken though it was judged by it, in words; '' if nothing.

    Raises:
      UserError: the other run's model has other variables, which are named; or the checkpoint can't be read.
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
        raise UserError(
            "initialize_from",
            path,
            f"holds another model:{table}",
            "give a checkpoint of the same model; or build this one from an export of the other: docs/extending.md",
        )
    copies = [
        pair for each in optimizers.each_of(program.optimizer) for pair in optimizers.copies(each, program.to_host)
    ]
    try:
        if checkpoint.WEIGHTS not in manifest["files"]:
            saving.read_shards(path, program, manifest, here)
        else:
            optimizer = [(v, np.array(program.to_host(v))) for v in program.optimizer.variables]
            with warnings.catch_warnings():  # another optimizer's variables are skipped, and are not wanted
                warnings.simplefilter("ignore")
                hdf5.read_weights(path / checkpoint.WEIGHTS, program)
            for variable, value in optimizer:
                program.assign(variable, value.__getitem__)
    except (checkpoint.Damaged, OSError, ValueError, KeyError, TypeError) as error:
        raise UserError("initialize_from", path, f"can't be read: {error}", "give another checkpoint") from None
    for copy, variable in copies:
        program.assign(copy, program.to_host(variable).__getitem__)
    averaged = any(k.startswith("optimizer/") and k.endswith("_average") for k in manifest["variables"])
    return ", as its last step left them: the moving averages that it was judged by are in its export" * averaged


def find(where: str, peers: Peers) -> tuple[pathlib.Path, dict[str, Any]]:
    """The checkpoint that --initialize_from names, the same in all processes."""
    path, manifest = _find(where)
    peers.agree({"the checkpoint of --initialize_from": f"{path.name}, digest {checkpoint.digest(manifest)[:12]}"})
    return path, manifest


def _find(where: str) -> tuple[pathlib.Path, dict[str, Any]]:
    """A checkpoint, or a run directory's newest good one."""
    path = pathlib.Path(where)
    if (path / checkpoint.MANIFEST).exists():
        try:
            return path, checkpoint.verify(path)
        except checkpoint.Damaged as error:
            raise UserError("initialize_from", where, str(error), "give another checkpoint") from None
    for found, manifest in checkpoint.newest(path / "checkpoints"):
        if isinstance(manifest, dict):
            return found, manifest
    fix = "give a run directory (runs/...) or a checkpoint in it (runs/.../checkpoints/00001234)"
    if path.is_file():
        fix += "; build() may load a file of Keras's: docs/extending.md"
    raise UserError("initialize_from", where, "is neither a checkpoint nor a run directory with one", fix)
