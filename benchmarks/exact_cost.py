"""What --exact costs: a step with sums in the tree's order beside one with the backend's all-reduce, interleaved.

python benchmarks/exact_cost.py [tensorflow|jax] [devices] [rounds]
"""

import copy
import statistics
import sys
import time
from typing import Any

from trainer import backend
from trainer.config import Config

STEPS, BATCH = 64, 256


def main(name: str, devices: int, rounds: int) -> None:
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
    print(
        f"{name}, mlp, batch {BATCH}, {parts.strategy.description}: exact {exact:.2f} ms a step, "
        f"all-reduce {default:.2f} ms, ratio {ratio:.2f}"
    )


def _side(parts: Any, exact: bool) -> Any:
    """The strategy with sums in one order or the other; both train the same variables."""
    strategy = copy.copy(parts.strategy)
    strategy.compile(parts.program)
    setattr(strategy, "_in_tree_order" if hasattr(strategy, "_in_tree_order") else "_exact", exact)
    return strategy


if __name__ == "__main__":
    for chosen in sys.argv[1:2] or ["tensorflow"]:
        numbers = [int(a) for a in sys.argv[2:]]
        devices, rounds = (*numbers, *(4, 7)[len(numbers) :])
        main(chosen, devices, rounds)
