"""How long a save holds the training up, beside a bare copy of the same variables to the host.

python -m benchmarks.save_stall [tensorflow|jax] [millions of parameters] [seconds between saves]

The run is a real one, on this machine, saved so often; its own log says how long each save held it up. The copies are
made in the same minutes, of as many arrays of the same sizes, into memory that was used before, as the run's are.
"""

import json
import math
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

from benchmarks import page

_SAVES = 7
_LAYERS = 4


def build(input_shape: tuple[int, ...], classes: int, millions: float) -> "object":
    """A model of so many parameters, in a few large layers."""
    import keras

    width = int(math.sqrt(millions * 1e6 / _LAYERS))
    hidden = [keras.layers.Dense(width, activation="relu") for _ in range(_LAYERS)]
    first = [keras.Input(input_shape), keras.layers.Flatten()]
    return keras.Sequential([*first, *hidden, keras.layers.Dense(classes)])


def main(backend: str, millions: float, interval: float) -> int:
    """Prints the stalls and the copies. Returns the exit code: 1 if a limit is broken."""
    with tempfile.TemporaryDirectory() as scratch:
        flags = [
            f"--backend={backend}",
            f"--model=benchmarks.save_stall:build(millions={millions})",
            "--global_batch=8",
            "--steps=1000000",
            "--log_every=1",
            f"--save_every={interval:g}s",
            "--evaluate_every=never",
            "--keep=1",
            f"--run_dir={scratch}/run",
        ]
        with open(pathlib.Path(scratch, "log"), "w") as log:
            process = subprocess.Popen([sys.executable, "-m", "trainer", *flags], stdout=log, stderr=log)
            stalls, copies = list[float](), list[float]()
            while len(stalls) < _SAVES and process.poll() is None:
                time.sleep(1)
                found = seen(pathlib.Path(scratch, "run"))
                if len(found) > len(stalls):
                    stalls = found
                    time.sleep(interval / 2)  # the write is over by then
                    copies.append(_copy(millions))
            process.terminate()
            if process.wait() != 75:
                print(pathlib.Path(scratch, "log").read_text()[-2000:])
                return 1
    # The first save is at the start; the second compiles the probe of the loss.
    rows = []
    stall, copy = statistics.median(stalls[2:]), statistics.median(copies[1:])
    case, ours = f"{millions:g} M parameters and Adam's state, a save each {interval:g} s", f"held up {stall:.3f} s"
    for name, rival, seconds, target in (
        ("the time between saves", "", interval, 0.05),
        ("a bare copy to the host", f"{copy:.3f} s", copy, 1.2),
    ):
        rows.append(page.Row(case, name, ours, rival, f"{stall / seconds:.3f}", stall / seconds, target))
    page.record(
        f"save-{backend}",
        f"How long does a save hold the training up? ({backend})",
        f"The run's own log; median of {len(stalls) - 2} saves, and of copies of as many arrays in the same minutes",
        rows,
    )
    return int(stall > 0.05 * interval)


def seen(run_dir: pathlib.Path) -> list[float]:
    """The seconds for which saves held a run up, as far as its log tells."""
    path = run_dir / "metrics.jsonl"
    lines = [line for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []
    return [line["save_stall"] for line in map(json.loads, lines) if "save_stall" in line]


def _copy(millions: float) -> float:
    """Seconds that it takes to copy arrays of the variables' sizes."""
    arrays = [np.ones(int(millions * 1e6 / _LAYERS), np.float32) for _ in range(3 * _LAYERS)]
    copies = [np.ones_like(array) for array in arrays]
    start = time.perf_counter()
    for array, copy in zip(arrays, copies, strict=True):
        np.copyto(copy, array)
    return time.perf_counter() - start


if __name__ == "__main__":
    name, millions, interval = [*sys.argv[1:], *["jax", "100", "30"][len(sys.argv) - 1 :]]
    sys.exit(main(name, float(millions), float(interval)))
