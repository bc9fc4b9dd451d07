"""What a run needs to go on, beside its variables and its step: a few numbers in the manifest of a checkpoint."""

from typing import Any, NamedTuple

import keras
import numpy as np

from trainer.sums import Totals


class Progress(NamedTuple):
    """What a run goes on with.

    Attributes:
      totals: sums since the last line of the log.
      ids: checksum of the examples since then.
      callbacks: state of each callback, or None.
      guard: what the guard remembers.
      stopped: whether a callback has ended the run.
    """

    totals: Totals
    ids: int = 0
    callbacks: list[dict[str, Any]] | None = None
    guard: dict[str, Any] = {}
    stopped: bool = False


def pack(progress: Progress) -> dict[str, Any]:
    """As JSON."""
    totals = [keras.ops.convert_to_numpy(part).tolist() for part in progress.totals]
    return progress._asdict() | {"totals": totals}


def unpack(packed: dict[str, Any]) -> Progress:
    """From JSON."""
    amounts, counts = packed["totals"]
    totals = Totals(np.array(amounts, np.float32), np.array(counts, np.int32))
    return Progress(**(packed | {"totals": totals}))
