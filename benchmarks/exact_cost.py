"""What --exact costs: a step with sums in the tree's order beside one with the backend's all-reduce, interleaved.

python -m benchmarks.exact_cost [tensorflow|jax] [rounds]
"""

import copy
import json
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks import page
from trainer import backend
from trainer.config import Config

STEPS, BATCH = 64, 256


def main(name: str, rounds: int) -> None:
    """Measures two and four devices, in processes of their own, and records them."""
    rows = []
    for devices in (2, 4):
        command = [sys.executable, "-m", "benchmarks.exact_cost", "measure", name, str(devices), str(rounds)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        exact, default, ratio = json.loads(done.stdout.splitlines()[-1])
        ours, theirs = f"{exact:.2f} ms a step", f"{default:.2f} ms a step"
        case, rival = f"--exact, mlp, batch {BATCH}, {devices} devices", "the backend's all-reduce"
        rows.append(page.Row(case, rival, ours, theirs, f"{ratio:.2f}", ratio, 1.3, True, page.busy()))
    page.record(
        f"exact-{name}",
        f"What does a step cost whose sums follow the tree's order? ({name})",
        f"Virtual CPU devices, a logical replica each; median of {rounds} rounds of {STEPS} steps, in turn",
        rows,
    )


def measure(name: str, devices: int, rounds: int) -> None:
    """Prints milliseconds a step of both sides, and the median of the paired ratios, at R = V."""
    config = Config(
        strategy="mirrored" if name == "tensorflow" else "device_mesh",
        devices=devices,
        dataset="synthetic(examples=16384, shape=(28, 28, 1))",
        steps=STEPS,
        global_batch=BATCH,
    )
    backend.prepare(name)
    with backend.quiet():
        from trainer.assembly import assemble
        from trainer.peers import Peers

    parts = assemble(config, Peers())
    pipeline = parts.pipeline(parts.dataset.train, shuffled=True)
    sides = [(_side(parts, exact), parts.blocks(pipeline)) for exact in (True, False)]
    pairs = []
    for turn in range(rounds + 2):  # the first two warm up: they compile
        times = []
        for strategy, fed in sides:
            start = time.perf_counter()
            totals = parts.program.objective.no_totals()
            for i in range(STEPS // pipeline.block):
                totals = strategy.train(next(fed), 0, pipeline.block, i * pipeline.block, totals)
            parts.program.objective.results(totals)  # waits
            times.append(1e3 * (time.perf_counter() - start) / STEPS)
        if turn >= 2:
            pairs.append(times)
    exact, default = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratio = statistics.median(a / b for a, b in pairs)
    print(json.dumps([exact, default, ratio]))


def _side(parts: Any, exact: bool) -> Any:
    """The strategy with sums in one order or the other; both train the same variables."""
    strategy = copy.copy(parts.strategy)
    strategy.compile(parts.program)
    setattr(strategy, "_in_tree_order" if hasattr(strategy, "_in_tree_order") else "_exact", exact)
    return strategy


if __name__ == "__main__":
    if sys.argv[1] == "measure":
        measure(sys.argv[2], *map(int, sys.argv[3:]))
    else:
        main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 7)
