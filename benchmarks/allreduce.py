"""Does the model of the all-reduce in trainer/scaling.py say what is measured? Fitted on some sizes, tried on others.

And what does a sum in the tree's order cost between processes, beside the backend's own?

python -m benchmarks.allreduce
"""

import json
import math
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np

from benchmarks import page

K = TypeVar("K")
_HELD_OUT = (2**14, 2**18, 2**21)  # floats
_FITTED = (2**12, 2**16, 2**17, 2**19, 2**20, 2**22)
_SIZES = sorted(_HELD_OUT + _FITTED)
_DEVICES = (2, 4, 8)
_ROUNDS, _ROUNDS_OF_PROCESSES = 100, 30


def main() -> None:
    """Measures, fits and compares."""
    import jax

    jax.config.update("jax_num_cpu_devices", max(_DEVICES))
    measured = _seconds({(n, size): _all_reduce(n, size) for n in _DEVICES for size in _SIZES})
    rows = []
    for n in _DEVICES:
        model = _Model.fitted(n, {size: measured[n, size] for size in _FITTED})
        for size in _SIZES:
            predicted = model.seconds(size)
            found = measured[n, size]
            away = max(predicted / found, found / predicted) if predicted > 0 else math.inf
            held_out = size in _HELD_OUT
            case = f"{n} virtual devices, {4 * size / 1e6:.3g} MB" + (", held out" if held_out else "")
            rows.append(
                page.Row(
                    case,
                    f"model: {model}",
                    f"{1e6 * found:.0f} µs",
                    f"{1e6 * predicted:.0f} µs",
                    f"{predicted / found:.2f}",
                    away,
                    1.15 if held_out else None,
                    True,
                    page.busy(),
                )
            )
    rows += _between_processes()
    page.record(
        "allreduce",
        "Does the model of the all-reduce say what is measured?",
        f"psum of float32 on virtual CPU devices, median of {_ROUNDS} rounds over all cases; latency and two "
        "bandwidths fitted to the sizes not held out; sums over processes are of the same arrays, in turn",
        rows,
    )


class _Model(NamedTuple):
    """2 (N - 1) messages of S / N bytes, N at once through one memory: what the caches hold is moved faster.

    Attributes:
      devices: N.
      latency: seconds of a message.
      cached, beyond: seconds a byte, up to the knee and from there.
      knee: floats of an array, S / 4.
    """

    devices: int
    latency: float
    cached: float
    beyond: float
    knee: int

    @classmethod
    def fitted(cls, devices: int, measured: Mapping[int, float]) -> "_Model":
        """The one whose relative errors are least, with its knee at a size that was measured."""
        sizes, times = np.array([*measured]), np.array([*measured.values()])
        found = []
        for knee in sizes[1:-1]:
            parts = np.stack([np.ones(len(sizes)), 4 * np.minimum(sizes, knee), 4 * np.maximum(0, sizes - knee)], 1)
            numbers, *_ = np.linalg.lstsq(2 * (devices - 1) * parts / times[:, None], np.ones(len(sizes)), rcond=None)
            latency, cached, beyond = map(float, numbers)
            model = cls(devices, latency, cached, beyond, int(knee))
            found.append((sum((model.seconds(size) / measured[size] - 1) ** 2 for size in measured), model))
        return min(found)[1]

    def seconds(self, size: int) -> float:
        """Of the sum of arrays of so many floats."""
        moved = 4 * min(size, self.knee) * self.cached + 4 * max(0, size - self.knee) * self.beyond
        return 2 * (self.devices - 1) * (self.latency + moved)

    def __str__(self) -> str:
        rates = [1e-9 / max(inverse, 1e-15) for inverse in (self.cached, self.beyond)]
        return f"{1e6 * self.latency:.0f} µs, {rates[0]:.2g} GB/s to {4 * self.knee / 1e6:.2g} MB, then {rates[1]:.2g}"


def _between_processes() -> list[page.Row]:
    """The sum in the tree's order of two processes on this machine, beside JAX's all-reduce (gloo)."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    command = [sys.executable, "-m", "benchmarks.allreduce", address]
    second = subprocess.Popen([*command, "1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    first = subprocess.run([*command, "0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    if first.returncode or second.wait():
        raise SystemExit("the two processes have not ended well")
    rows = []
    for size, ours, theirs in json.loads(first.stdout.splitlines()[-1]):
        case, words = f"2 processes, {4 * size / 1e6:.3g} MB, in the tree's order", f"{1e6 * theirs:.0f} µs"
        value = ours / theirs
        row = page.Row(case, "psum (gloo)", f"{1e6 * ours:.0f} µs", words, f"{value:.2f}", value, 1.25)
        rows.append(row._replace(noisy=page.busy()))
    return rows


def _as_process(address: str, process: int) -> None:
    """Measures both sums as one of two processes; the first prints (floats, seconds of ours, of JAX's)."""
    from trainer import backend

    backend.prepare("jax")
    import jax

    jax.distributed.initialize(address, 2, process)
    from jax.sharding import NamedSharding, PartitionSpec

    from trainer.strategies.exact import ExactLoop

    mesh, cut = jax.make_mesh((2,), ("data",)), PartitionSpec("data")
    nothing: Any = None  # a loop that only adds
    in_order = ExactLoop(mesh, 2, nothing, nothing, nothing)
    psum = jax.jit(
        jax.shard_map(
            lambda a: jax.lax.psum(a, "data")[0], mesh=mesh, in_specs=cut, out_specs=PartitionSpec(), check_vma=False
        )
    )
    cases: dict[tuple[int, str], Callable[[], Any]] = {}
    for size in _SIZES:
        mine = jax.device_put(np.full(size, process + 1, np.float32), jax.local_devices()[0])
        row = jax.make_array_from_process_local_data(NamedSharding(mesh, cut), np.asarray(mine)[None], (2, size))
        sides = {
            "ours": lambda mine=mine: jax.block_until_ready(in_order._exchange([[[mine]]])[0][0]),
            "theirs": lambda row=row: jax.block_until_ready(psum(row)),
        }
        for side in sides.values():
            if (np.asarray(side().addressable_data(0)) != 3).any():
                raise SystemExit("a sum is wrong")
        cases |= {(size, name): side for name, side in sides.items()}
    found = _seconds(cases, _ROUNDS_OF_PROCESSES)
    print(json.dumps([(size, found[size, "ours"], found[size, "theirs"]) for size in _SIZES]))


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


def _seconds(cases: dict[K, Callable[[], object]], rounds: int = _ROUNDS) -> dict[K, float]:
    """Median seconds of each case; all take turns, so that a slow minute of the machine falls on each alike."""
    times: dict[K, list[float]] = {case: [] for case in cases}
    for _ in range(rounds):
        for case, once in cases.items():
            once()  # the case before has left other data in the caches
            begin = time.perf_counter()
            once()
            times[case].append(time.perf_counter() - begin)
    return {case: statistics.median(seconds) for case, seconds in times.items()}


if __name__ == "__main__":
    if sys.argv[1:]:
        _as_process(sys.argv[1], int(sys.argv[2]))
    else:
        main()
