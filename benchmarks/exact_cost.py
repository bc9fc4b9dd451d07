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

_SYNTHETIC = "synthetic(examples=16384, shape=(28, 28, 1))"
# Of small steps the cost is what single programs and moves cost beside one program; of long ones, sums.
_CASES = {  # model: dataset, global batch, steps
    "mlp": (_SYNTHETIC, 256, 64),
    "mlp(units=512)": (_SYNTHETIC, 512, 32),
    "transformer": ("text(context=64, files='*.py')", 32, 8),
}


def main(name: str, rounds: int) -> None:
    """Measures two and four devices, in processes of their own, and records them."""
    rows = []
    for model, (_, batch, _) in _CASES.items():
        for devices in (2, 4):
            command = [sys.executable, "-m", "benchmarks.exact_cost", "measure", name, model, str(devices), str(rounds)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            exact, default, ratio, least = json.loads(done.stdout.splitlines()[-1])
            ours, theirs = f"{exact:.2f} ms a step", f"{default:.2f} ms a step"
            case, rival = f"--exact, {model}, batch {batch}, {devices} devices", "the backend's all-reduce"
            noisy = page.busy() or abs(ratio - least) > 0.15 * ratio
            rows.append(page.Row(case, rival, ours, theirs, f"{ratio:.2f} ({least:.2f})", ratio, 1.3, True, noisy))
    page.record(
        f"exact-{name}",
        f"What does a step cost whose sums follow the tree's order? ({name})",
        f"Virtual CPU devices, a logical replica each; median of {rounds} rounds, in turn (of the fastest)",
        rows,
    )


def measure(name: str, model: str, devices: int, rounds: int) -> None:
    """Prints milliseconds a step of both sides, the median of the paired ratios, and the least's, at R = V."""
    dataset, batch, steps = _CASES[model]
    config = Config(
        strategy="mirrored" if name == "tensorflow" else "device_mesh",
        devices=devices,
        model=model,
        dataset=dataset,
        cache="memory",  # or the sides would share the processors with what makes the data
        steps=steps,
        global_batch=batch,
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
            for done in range(0, steps, pipeline.block):
                totals = strategy.train(next(fed), 0, min(pipeline.block, steps - done), done, totals)
            parts.program.objective.results(totals)  # waits
            times.append(1e3 * (time.perf_counter() - start) / steps)
        if turn >= 2:
            pairs.append(times)
    exact, default = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratio = statistics.median(a / b for a, b in pairs)
    least = min(a for a, _ in pairs) / min(b for _, b in pairs)
    print(json.dumps([exact, default, ratio, least]))


def _side(parts: Any, exact: bool) -> Any:
    """The strategy with sums in one order or the other; both train the same variables."""
    strategy = copy.copy(parts.strategy)
    strategy.compile(parts.program)
    setattr(strategy, "_in_tree_order" if hasattr(strategy, "_in_tree_order") else "_exact", exact)
    return strategy


if __name__ == "__main__":
    if sys.argv[1] == "measure":
        measure(*sys.argv[2:4], *map(int, sys.argv[4:]))
    else:
        main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 7)
