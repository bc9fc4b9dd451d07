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
    totals = [np.asarray(keras.ops.convert_to_numpy(leaf)).tolist() for leaf in keras.tree.flatten(progress.totals)]
    return progress._asdict() | {"totals": totals}


def unpack(packed: dict[str, Any]) -> Progress:
    """From JSON."""
    objective, weight, *metrics, gradients, steps, skipped, unhealthy = packed["totals"]
    totals = Totals(
        np.float32(objective),
        np.float32(weight),
        [np.asarray(m, np.float32) for m in metrics],
        np.asarray(gradients, np.float32),
        np.int32(steps),
        np.int32(skipped),
        np.int32(unhealthy),
    )
    return Progress(**(packed | {"totals": totals}))
