"""What a run's time is lost by, in words, with the flag to change."""

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from trainer.monitoring.ledger import OTHERS_DATA

_LEAST = 5.0  # seconds, of which nothing can be said
_SLOW = 2.0  # times as long as the others, for a process to be named
# purpose: (the share of the time that is too much, the cause, what to change)
_LIMITS = {
    "data": (
        0.2,
        "input: devices wait for data",
        "--cache=memory, or a source that reads faster; --prefetch=16, if it waits for disks or networks; "
        "python -m trainer input tells its stages apart",
    ),
    "save": (0.05, "checkpoints: saves hold the training up", "a longer --save_every, or a faster disk for --run_dir"),
    "evaluate": (0.3, "evaluation", "a longer --evaluate_every"),
    "exchange": (
        0.4,
        "communication: devices add up their gradients (timed alone)",
        "a larger --global_batch, fewer processes, or a faster network between them",
    ),
    "log": (0.1, "the log: its lines hold the training up", "a longer --log_every"),
    "callbacks": (0.1, "callbacks", "a longer --log_every, or callbacks that do less"),
}


class Verdict(NamedTuple):
    """The bottleneck.

    Attributes:
      cause: a purpose of the ledger, or 'straggler'; '' where nothing stands out.
      words: for people.
    """

    cause: str
    words: str


def verdict(
    seconds: Mapping[str, float], straggler: str = "", waits: Sequence[float] = (), exchange: float = 0.0
) -> Verdict:
    """Names the bottleneck.

    Args:
      seconds: by purpose, of a start or a run.
      straggler: which process is slow, in words, if one is.
      waits: seconds that each of several processes has waited for its own data.
      exchange: seconds of its steps in which devices add up, if nothing is computed meanwhile.
    """
    if straggler:
        change = "look at its host (other jobs, heat, limits), or leave it out with --elastic"
        return Verdict("straggler", f"a straggler: {straggler}: {change}")
    running = {purpose: seconds.get(purpose, 0.0) for purpose in ("step", *_LIMITS)}
    running["data"] += seconds.get(OTHERS_DATA, 0.0)
    whole = sum(running.values())
    running["exchange"] = min(exchange, running["step"])
    above = {purpose: running[purpose] / whole for purpose in _LIMITS if running[purpose] > _LIMITS[purpose][0] * whole}
    if whole < _LEAST or not above:
        return Verdict("", "")
    worst = max(above, key=lambda purpose: above[purpose] / _LIMITS[purpose][0])
    _, cause, change = _LIMITS[worst]
    if worst == "data":
        cause += _whose(waits)
    return Verdict(worst, f"{cause}, {above[worst]:.0%} of the time: {change}")


def _whose(waits: Sequence[float]) -> str:
    """Which process they wait for, if it is one, in words."""
    if len(waits) < 2:
        return ""
    longest = max(range(len(waits)), key=lambda process: waits[process])
    others = [wait for process, wait in enumerate(waits) if process != longest]
    return f" of process {longest}" if waits[longest] > _SLOW * statistics.median(others) else ""
