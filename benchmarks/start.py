"""How long until the first step is done, cold and once more, beside a Keras script that does the same?

python -m benchmarks.start
"""

import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks import page
from trainer import history

_ROUNDS = 3
_SCRIPT = """
import os, sys
os.environ["KERAS_BACKEND"] = "{backend}"
import keras, numpy as np
from input_pipeline import digits
from trainer.models import {model}
x, y = digits.load().train.arrays
model = {model}.build(input_shape=x.shape[1:], classes=10)
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
model.fit(x, y, batch_size=64, epochs=1, steps_per_epoch=1, verbose=0)
"""


def main() -> None:
    """Starts each way a few times, in turn."""
    rows = []
    for backend, model in (("jax", "mlp"), ("jax", "convnet"), ("tensorflow", "mlp")):
        cold, warm, script, detail = [], [], [], ""
        with tempfile.TemporaryDirectory() as scratch:
            for turn in range(_ROUNDS):
                run = pathlib.Path(scratch, str(turn))
                flags = [f"--backend={backend}", f"--model={model}", "--evaluate_every=never", f"--run_dir={run}"]
                cold.append(_seconds("-m", "trainer", *flags, "--steps=1"))
                warm.append(_seconds("-m", "trainer", *flags, "--steps=2"))
                script.append(_seconds("-c", _SCRIPT.format(backend=backend, model=model)))
                spent = history.read(run / "starts")[1]["seconds"]
                detail = ", ".join(f"{k} {v:.1f}" for k, v in spent.items() if v >= 0.1)
        pairs = statistics.median(w / s for w, s in zip(warm, script, strict=True))
        case, ours = f"second start, {model} on {backend}", f"{statistics.median(warm):.1f} s ({detail})"
        theirs = f"{statistics.median(script):.1f} s"
        rows.append(page.Row(case, "keras script", ours, theirs, f"{pairs:.2f}", pairs, None, True, page.busy()))
        first = f"{statistics.median(cold):.1f} s"
        rows.append(page.Row(f"first start, {model} on {backend}", "keras script", first, theirs, "", 0.0))
    page.record(
        "start",
        "How long is a process that does one step?",
        "Whole processes, from the shell; ours saves, evaluates, writes TensorBoard's files",
        rows,
    )


def _seconds(*arguments: str) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
