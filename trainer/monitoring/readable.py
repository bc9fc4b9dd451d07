"""Metrics and numbers as people read them."""

import math
from collections.abc import Mapping

# What a line of metrics.jsonl tells of the time that its steps took: two runs of one curve differ in it.
OF_TIME = ("examples_per_second", "data_wait", "save_stall", "flops_per_second", "mfu")
# What in it is no metric.
NOT_METRICS = {"step", "learning_rate", "ids", "gradient_norms", "skipped", *OF_TIME}


def words(metrics: Mapping[str, float]) -> str:
    """'loss 0.1234  accuracy 0.9876'."""
    return "  ".join(f"{k} {v:.4f}" if math.isfinite(v) else f"{k} {v}" for k, v in metrics.items())


def duration(seconds: float) -> str:
    """'45s', '3m20s', '2h05m'."""
    s = round(seconds)
    if s < 60:
        return f"{s}s"
    return f"{s // 60}m{s % 60:02d}s" if s < 3600 else f"{s // 3600}h{s % 3600 // 60:02d}m"


def size(count: float) -> str:
    """Bytes for people: '1.2 MB'."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
