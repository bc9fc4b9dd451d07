"""Does the model of the all-reduce in trainer/scaling.py say what is measured? Fitted on some sizes, tried on others.

python -m benchmarks.allreduce
"""

import math
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from benchmarks import page

K = TypeVar("K")
_SIZES = (2**12, 2**14, 2**16, 2**18, 2**20, 2**21, 2**22)  # floats
_FITTED = (2**12, 2**16, 2**20, 2**22)
_DEVICES = (2, 4, 8)
_ROUNDS = 100


def main() -> None:
    """Measures, fits and compares."""
    import jax

    jax.config.update("jax_num_cpu_devices", max(_DEVICES))
    measured = _seconds({(n, size): _all_reduce(n, size) for n in _DEVICES for size in _SIZES})
    rows = []
    for n in _DEVICES:
        # 2 (N - 1) messages of S / N bytes; the devices are threads of one machine, whose memory they share, so that N
        # of these go at once through one bandwidth.
        points = [(2 * (n - 1), 2 * (n - 1) * 4 * size) for size in _FITTED]
        times = np.array([measured[n, size] for size in _FITTED])
        weights = 1 / times  # relative errors count
        matrix = np.array(points) * weights[:, None]
        (alpha, inverse), *_ = np.linalg.lstsq(matrix, times * weights, rcond=None)
        for size in _SIZES:
            predicted = 2 * (n - 1) * alpha + 2 * (n - 1) * 4 * size * inverse
            found = measured[n, size]
            away = max(predicted / found, found / predicted) if predicted > 0 else math.inf
            held_out = size not in _FITTED
            case = f"{n} virtual devices, {4 * size / 1e6:.3g} MB" + (", held out" if held_out else "")
            what = f"model: {1e6 * alpha:.0f} µs, {1e-9 / max(inverse, 1e-15):.2g} GB/s"
            rows.append(
                page.Row(
                    case,
                    what,
                    f"{1e6 * found:.0f} µs",
                    f"{1e6 * predicted:.0f} µs",
                    f"{predicted / found:.2f}",
                    away,
                    1.15 if held_out else None,
                    True,
                    page.busy(),
                )
            )
    page.record(
        "allreduce",
        "Does the model of the all-reduce say what is measured?",
        f"psum of float32 on virtual CPU devices, median of {_ROUNDS} rounds over all cases; "
        "latency and bandwidth fitted to the sizes not held out",
        rows,
    )


def _all_reduce(devices: int, size: int) -> Callable[[], object]:
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices("cpu")[:devices])
    spec = PartitionSpec("data")
    mapped = jax.shard_map(
        lambda a: jax.lax.psum(a, "data"), mesh=mesh, in_specs=spec, out_specs=PartitionSpec(), check_vma=False
    )
    add = jax.jit(mapped)
    array = jax.device_put(np.ones((devices, size), np.float32), NamedSharding(mesh, spec))
    return lambda: jax.block_until_ready(add(array))


def _seconds(cases: dict[K, Callable[[], object]]) -> dict[K, float]:
    """Median seconds of each case; all take turns, so that a slow minute of the machine falls on each alike."""
    times: dict[K, list[float]] = {case: [] for case in cases}
    for _ in range(_ROUNDS):
        for case, once in cases.items():
            once()  # the case before has left other data in the caches
            begin = time.perf_counter()
            once()
            times[case].append(time.perf_counter() - begin)
    return {case: statistics.median(seconds) for case, seconds in times.items()}


if __name__ == "__main__":
    main()
