"""How long until the first step is done: cold, once more, and after a kill; beside a Keras script that does the same?

python -m benchmarks.start
"""

import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks import page
from trainer.monitoring import history

_BEFORE = ("import", "build", "restore", "data", "compile")  # what a start's ledger has before its first step
_SCRIPT = """
import os, sys
os.environ["KERAS_BACKEND"] = "{backend}"
import keras, numpy as np
from input_pipeline import digits
from trainer.models import {module}
x, y = digits.load().train.arrays
model = {module}.build(input_shape=x.shape[1:], classes=10{arguments})
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
model.fit(x, y, batch_size=64, epochs=1, steps_per_epoch=1, verbose=0)
"""
# (backend, model, its module, its arguments, rounds, the seconds that are aimed at over those of importing Keras)
_CASES = (
    ("jax", "mlp", "mlp", "", 3, 0.7),
    ("jax", "resnet(width=16)", "resnet", ", width=16", 2, 2.0),
    ("tensorflow", "mlp", "mlp", "", 2, None),
)
_KILLED = (("jax", 1, 9.0), ("jax", 2, 18.0), ("tensorflow", 2, 18.0))  # (backend, processes, seconds aimed at)


def main() -> None:
    """Starts each way a few times, in turn."""
    rows = [row for case in _CASES for row in _starts(*case)]
    for backend, processes, target in _KILLED:
        with tempfile.TemporaryDirectory() as scratch:
            seconds = _after_a_kill(backend, processes, pathlib.Path(scratch))
        who = "its process" if processes == 1 else f"one of its {processes} processes"
        case = f"killed, {who}, mlp on {backend}: the next first step"
        rows.append(page.Row(case, "SIGKILL", f"{seconds:.1f} s", "", "", seconds, target))
    page.record(
        "start",
        "How long until the first step is done?",
        "Median of 3 rounds, of the resnet and on TensorFlow of 2; a second start goes on from a checkpoint; the "
        "script ends with its first step; after a kill the same command is given again, or all processes are started "
        "again",
        rows,
    )


def _starts(backend: str, model: str, module: str, arguments: str, rounds: int, over: float | None) -> list[page.Row]:
    first, second = list[dict[str, float]](), list[dict[str, float]]()
    script, imports = list[float](), list[float]()
    script_text = _SCRIPT.format(backend=backend, module=module, arguments=arguments)
    alone = f"import os; os.environ['KERAS_BACKEND'] = '{backend}'; import keras"
    with tempfile.TemporaryDirectory() as scratch:
        for turn in range(rounds):
            run = pathlib.Path(scratch, str(turn))
            flags = [f"--backend={backend}", f"--model={model}", "--evaluate_every=never", f"--run_dir={run}"]
            for steps in (1, 2):
                _seconds("-m", "trainer", *flags, f"--steps={steps}")
            script.append(_seconds("-c", script_text))
            imports.append(_seconds("-c", alone))
            spent = [start["seconds"] for start in history.read(run / "starts")]
            for found, seconds in zip((first, second), spent, strict=True):
                found.append({name: seconds.get(name, 0.0) for name in _BEFORE})
    whole, parts = _middle(second)
    pairs = statistics.median(sum(w.values()) / s for w, s in zip(second, script, strict=True))
    more = statistics.median(sum(w.values()) - i for w, i in zip(second, imports, strict=True))
    case, ours = f"second start, {model} on {backend}", f"{whole:.1f} s ({parts})"
    target = 0.45 if backend == "jax" else None
    script_words, alone_words = f"{statistics.median(script):.1f} s", f"{statistics.median(imports):.1f} s"
    busy = page.busy()
    whole, parts = _middle(first)
    return [
        page.Row(case, "keras script, cold", ours, script_words, f"{pairs:.2f}", pairs, target, True, busy),
        page.Row(case, "import keras", ours, alone_words, f"{more:+.1f} s", more, over, True, busy),
        page.Row(
            f"first start, {model} on {backend}",
            "keras script, cold",
            f"{whole:.1f} s ({parts})",
            script_words,
            "",
            0.0,
        ),
    ]


def _middle(starts: list[dict[str, float]]) -> tuple[float, str]:
    """Seconds of the median start, and its parts in words."""
    spent = sorted(starts, key=lambda seconds: sum(seconds.values()))[len(starts) // 2]
    return sum(spent.values()), ", ".join(f"{name} {value:.1f}" for name, value in spent.items() if value >= 0.05)


def _after_a_kill(backend: str, processes: int, scratch: pathlib.Path) -> float:
    """Seconds from a SIGKILL to the end of the first steps that follow it."""
    flags = [
        f"--backend={backend}",
        "--steps=10000000",
        "--save_every=100",
        "--log_every=100",
        f"--run_dir={scratch}/run",
    ]
    command = [sys.executable, "-m", "trainer", *flags]
    if processes > 1:
        strategy = {"jax": "device_mesh", "tensorflow": "multi_worker_mirrored"}[backend]
        options = [
            f"--processes={processes}",
            "--restarts=1",
            "--",
            f"--strategy={strategy}",
            f"--replicas={processes}",
        ]
        command = [sys.executable, "-m", "launch.local", *options, *flags]
    log = scratch / "log"
    with open(log, "ab") as output:

        def begin() -> subprocess.Popen[bytes]:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

        def wait_for_steps(starts: int) -> None:
            while log.read_text(errors="replace").count("first steps done") < starts:
                if process.poll() is not None:
                    raise SystemExit(f"the run ended too early:\n{log.read_text(errors='replace')[-2000:]}")
                time.sleep(0.05)

        process = begin()
        wait_for_steps(1)
        while not list(scratch.glob("run/checkpoints/*[1-9]*/manifest.json")):
            time.sleep(0.05)
        killed = time.perf_counter()
        if processes == 1:
            process.kill()
            process.wait()
            process = begin()
        else:
            os.kill(max(_children(process.pid)), signal.SIGKILL)
        wait_for_steps(2)
        seconds = time.perf_counter() - killed
        process.terminate()
        process.wait()
    return seconds


def _children(pid: int) -> list[int]:
    tasks = pathlib.Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def _seconds(*arguments: str) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
