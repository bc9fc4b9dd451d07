"""What a run's time is lost by, in words, with the flag to change."""

from collections.abc import Mapping

_LEAST = 5.0  # seconds, of which nothing can be said
# purpose: (the share of the time that is too much, the cause, what to change)
_LIMITS = {
    "data": (
        0.2,
        "input: devices wait for data",
        "--cache=memory, or a source that reads faster; --prefetch=16, if it waits for disks or networks",
    ),
    "save": (0.05, "checkpoints: saves hold the training up", "a longer --save_every, or a faster disk for --run_dir"),
    "evaluate": (0.3, "evaluation", "a longer --evaluate_every"),
    "callbacks": (0.1, "callbacks", "a longer --log_every, or callbacks that do less"),
}


def verdict(seconds: Mapping[str, float], straggler: str = "") -> str:
    """Names the bottleneck.

    Args:
      seconds: by purpose, of a start or a run.
      straggler: which process is slow, in words, if one is.

    Returns:
      '' where nothing stands out.
    """
    if straggler:
        return f"a straggler: {straggler}: look at its host (other jobs, heat, limits), or leave it out with --elastic"
    running = {k: v for k, v in seconds.items() if k in ("step", *_LIMITS)}
    whole = sum(running.values())
    if whole < _LEAST:
        return ""
    shares = {k: running.get(k, 0.0) / whole for k in _LIMITS}
    above = {k: share for k, share in shares.items() if share > _LIMITS[k][0]}
    if not above:
        return ""
    worst = max(above, key=lambda k: above[k] / _LIMITS[k][0])
    _, cause, change = _LIMITS[worst]
    return f"{cause}, {above[worst]:.0%} of the time: {change}"
