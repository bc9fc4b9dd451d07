"""What a run needs to go on, beside its variables and its step: a few numbers in the manifest of a checkpoint."""

import pathlib
from typing import Any, NamedTuple

import keras
import numpy as np

from trainer.errors import UserError
from trainer.sums import Totals


class Progress(NamedTuple):
    """What a run goes on with.

    Attributes:
      totals: sums since the last line of the log.
      ids: checksum of the examples since then.
      callbacks: the memory of each callback; None in a new run.
      guard: what the guard remembers.
      stopped: whether a callback has ended the run.
      owed: names of what was due at this step and is not done, for a signal broke it off.
      epoch: sums of the lines of the log since the epoch began; None where no callback asks for them.
    """

    totals: Totals
    ids: int = 0
    callbacks: list[dict[str, Any]] | None = None
    guard: dict[str, Any] = {}
    stopped: bool = False
    owed: list[str] = []
    epoch: Totals | None = None


def pack(progress: Progress) -> dict[str, Any]:
    """As JSON."""
    found = {"totals": progress.totals, "epoch": progress.epoch}
    as_lists = {k: v and [keras.ops.convert_to_numpy(part).tolist() for part in v] for k, v in found.items()}
    return progress._asdict() | as_lists


def unpack(packed: dict[str, Any], nothing: Totals, run_dir: pathlib.Path) -> tuple[Progress, str]:
    """From JSON.

    Args:
      packed: what `pack` gave, perhaps that of another version.
      nothing: totals of no steps, of the model as it is now.
      run_dir: the run directory, for errors.

    Returns:
      (what the run goes on with, in words what of it is left out).

    Raises:
      UserError: another version wrote it.
    """
    try:
        totals = _totals(packed["totals"], np.float32)
        epoch = packed.get("epoch") and _totals(packed["epoch"], np.float64)
        progress = Progress(**(packed | {"totals": totals, "epoch": epoch}))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            "run_dir",
            run_dir,
            f"was written by another version of the trainer, and goes on with what this one does not know: {error}",
            "go on with that version, or take its variables into a new run by --initialize_from",
        ) from error
    if totals.amounts.shape == nothing.amounts.shape:
        return progress, ""
    reason = "the model's metrics are not those of the checkpoint: the next line of the log begins here"
    return progress._replace(totals=nothing, epoch=None), reason


def _totals(packed: list[Any], dtype: type[np.floating]) -> Totals:
    amounts, counts = packed
    return Totals(np.array(amounts, dtype), np.array(counts, np.int32))
