"""How many cores there are for this process: the machine's, as far as its container and the run's others leave them."""

import math
import os
import pathlib
from collections.abc import Sequence

from input_pipeline import cgroups

_sharing = 1  # processes that share the cores of this one


def cores() -> int:
    """How many this process may keep busy."""
    return max(1, min(len(allowed()), math.ceil(_quota())) // _sharing)


def allowed() -> list[int]:
    """The numbers of those that it may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(os.cpu_count() or 1)]


def share(ours: Sequence[int], others: Sequence[Sequence[int]]) -> None:
    """Has `cores` give this process its part of what it shares.

    Args:
      ours: what is `allowed` to this process.
      others: what is to those of its run on this host, with itself among them; a scheduler may have given each its own.
    """
    global _sharing
    _sharing = sum(not set(ours).isdisjoint(theirs) for theirs in others)


def _quota() -> float:
    """Of how many a container gives it the time: the least of its group's and of those above."""
    return min([float(os.cpu_count() or 1), *map(_quota_of, cgroups.folders("cpu"))])


def _quota_of(group: pathlib.Path) -> float:
    try:
        if (group / "cpu.max").exists():
            quota, period = map(int, (group / "cpu.max").read_text().split())
        else:
            quota, period = (int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        return quota / period if quota > 0 else math.inf
    except (OSError, ValueError):  # it has none, or 'max'
        return math.inf
