"""What --exact costs: a step with sums in the tree's order beside one with the backend's all-reduce, interleaved.

python -m benchmarks.exact_cost [tensorflow|jax] [rounds]
"""

import json
import subprocess
import sys

from benchmarks import page
from benchmarks.paired import Ratio, in_turn, ratio
from benchmarks.rounds import training
from trainer import backend
from trainer.config import Config

_SYNTHETIC = "synthetic(examples=20480, shape=(28, 28, 1))"
# Of small steps the cost is what single programs and moves cost beside one program; of long ones, sums.
_CASES = {  # model: dataset, global batch, steps
    "mlp": (_SYNTHETIC, 256, 64),
    "mlp(units=512)": (_SYNTHETIC, 512, 40),
    "transformer": ("text(context=64, files='*.py')", 32, 8),
}


def main(name: str = "jax", rounds: str = "7") -> None:
    """Measures two and four devices, in processes of their own, and records them."""
    rows = []
    for model, (_, batch, _) in _CASES.items():
        for devices in (2, 4):
            command = [sys.executable, "-m", "benchmarks.exact_cost", "measure", name, model, str(devices), rounds]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            exact, default, *ratios = json.loads(done.stdout.splitlines()[-1])
            found = Ratio(*ratios)
            ours, theirs = f"{exact:.2f} ms a step", f"{default:.2f} ms a step"
            case, rival = f"--exact, {model}, batch {batch}, {devices} devices", "the backend's all-reduce"
            text, noisy = f"{found.paired:.2f} ({found.least:.2f})", found.noisy or page.busy()
            rows.append(page.Row(case, rival, ours, theirs, text, found.paired, 1.3, True, noisy))
    page.record(
        f"exact-{name}",
        f"What does a step cost whose sums follow the tree's order? ({name})",
        f"Virtual CPU devices, a logical replica each; median of {rounds} rounds, in turn",
        rows,
    )


def measure(name: str, model: str, devices: int, rounds: int) -> None:
    """Prints the median milliseconds a step of both sides, and their Ratio."""
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
    sides = {exact: training(parts, exact) for exact in (True, False)}
    start, losses = parts.program.values(), []
    for side in sides.values():  # both train the same variables
        for path, variable in parts.program.variables.items():
            parts.program.assign(variable, start[path].__getitem__)
        losses.append(side())
    if abs(losses[0] - losses[1]) > 1e-3 * losses[0]:
        raise SystemExit(f"the sides compute different things: {losses}")
    found = in_turn(sides, rounds, tolerance=float("inf"))
    milliseconds = [1e3 * found[exact].median / steps for exact in (True, False)]
    print(json.dumps([*milliseconds, *ratio(found[True], found[False])]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        measure(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
    else:
        main(*sys.argv[1:])
