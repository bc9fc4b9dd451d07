"""What do more devices cost where the cores stay the same? One is the ideal, for they share the processors.

python -m benchmarks.scaling [tensorflow|jax]
"""

import contextlib
import dataclasses
import subprocess
import sys
from collections.abc import Callable

import numpy as np

from benchmarks import page
from benchmarks.paired import in_turn, ratio
from benchmarks.rounds import training

STEPS, BATCH, EACH = 20, 512, 128
_DEVICES = {"jax": (1, 2, 4, 8), "tensorflow": (1, 2, 4)}
_WAYS = {"ours": "", "zero1": ", --layout=zero1", "exact": ", exact (the tree's order)"}
_TARGETS = {"jax": {2: 1.10, 4: 1.35, 8: 2.0}, "tensorflow": {2: 1.40}}


def main(backend: str = "jax") -> None:
    """Measures one device and more in processes of their own, which take turns, each beside Keras's own way."""
    others = page.busy()  # asked before, for eight devices' threads are many, too
    with contextlib.ExitStack() as stack:
        processes = {n: stack.enter_context(_process(backend, n)) for n in _DEVICES[backend]}
        sides = {(n, name): _ask(process, name) for n, process in processes.items() for name in _names(backend, n)}
        # From the same variables, on the same data; exact steps go on from where ours have come.
        losses = [side() for (_, name), side in sides.items() if name in ("ours", "zero1")]
        if max(losses) > 1.01 * min(losses):
            raise SystemExit(f"one device and more compute different things: {losses}")
        found = in_turn(sides, rounds=7, tolerance=float("inf"))  # each has variables of its own, and goes on
    rows = []
    for n in _DEVICES[backend][1:]:
        theirs, rival_noisy = "not run: its steps in flight deadlock", False
        if (n, "keras") in found:
            growth = ratio(found[n, "keras"], found[1, "keras"])
            theirs = f"{1e3 * found[n, 'keras'].least / STEPS:.3g} ms a step: {growth.paired:.2f} of one device"
            rival_noisy = growth.noisy
        for name, which in _WAYS.items():
            if (n, name) not in found:
                continue
            growth = ratio(found[n, name], found[1, "ours"])
            case = f"{n} devices on the same cores{which}"
            rival = "Keras DataParallel" if backend == "jax" else "MirroredStrategy, fit"
            own = f"{1e3 * found[n, name].least / STEPS:.3g} ms a step"
            text = f"{growth.paired:.2f} ({growth.least:.2f})"
            target = _TARGETS[backend].get(n) if name != "exact" or backend == "tensorflow" else None
            noisy = growth.noisy or rival_noisy or others
            rows.append(page.Row(case, rival, own, theirs, text, growth.paired, target, True, noisy))
        if backend == "tensorflow":  # where collectives of two strategies in a process meet one another
            continue
        growth = ratio(found[n, "weak"], found[1, "weak"])
        own, one = (f"{1e3 * found[devices, 'weak'].least / STEPS:.3g} ms a step" for devices in (n, 1))
        text, value = f"{growth.paired / n:.2f} ({growth.least / n:.2f})", growth.paired / n
        case = f"{n} devices on the same cores, {EACH} examples each"
        rows.append(page.Row(case, f"{n} x one device", own, one, text, value, noisy=growth.noisy or others))
    page.record(
        f"scaling-{backend}",
        f"What do more devices cost on the same cores? ({backend})",
        f"mlp(units=512), global batch {BATCH}, a logical replica a device; a step of the fastest of 7 rounds; "
        f"ratio: to Onecurve's one device in the same round, where each has {EACH} examples, to as many of its steps",
        rows,
    )


def _names(backend: str, devices: int) -> list[str]:
    ways = ["ours", *(["exact"] if devices > 1 else [])]
    if backend == "jax":
        ways += ["weak", *(["zero1"] if devices > 1 else [])]
    # Keras's fit has many steps in flight. On eight virtual devices, which share threads, their all-reduces
    # wait for one another, and XLA ends the process.
    return [*ways, "keras"] if devices < 8 else ways


def _process(backend: str, devices: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.scaling", "measure", backend, str(devices)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _ask(process: subprocess.Popen[str], name: str) -> Callable[[], float]:
    """A side that runs in a process: it does a round when its name is written to it, and answers with the loss."""

    def once() -> float:
        assert process.stdin and process.stdout
        process.stdin.write(f"{name}\n")
        process.stdin.flush()
        return float(process.stdout.readline())

    return once


def measure(backend_name: str, devices: int) -> None:
    """Does a round of the side that each line of the standard input names, and prints its loss."""
    from trainer import backend
    from trainer.config import Config

    several = "device_mesh" if backend_name == "jax" else "mirrored"
    config = Config(
        strategy=several if devices > 1 else "one_device",
        backend=backend_name,
        devices=devices if devices > 1 else 0,
        model="mlp(units=512)",
        dataset=f"synthetic(examples={STEPS * BATCH}, shape=(28, 28, 1))",
        cache="memory",
        steps=STEPS,
        global_batch=BATCH,
        replicas=devices,
    )
    backend.prepare(backend_name)
    with backend.quiet():
        import keras

        from trainer.assembly import assemble
    from trainer.peers import Peers

    parts, names = assemble(config, Peers()), _names(backend_name, devices)
    sides = {name: training(parts, name == "exact") for name in names if name in ("ours", "exact")}
    if "zero1" in names:
        sides["zero1"] = training(assemble(dataclasses.replace(config, layout="zero1"), Peers()), False)
    if "weak" in names:
        examples = f"synthetic(examples={STEPS * EACH * devices}, shape=(28, 28, 1))"
        weak = dataclasses.replace(config, global_batch=EACH * devices, dataset=examples)
        sides["weak"] = training(assemble(weak, Peers()), False)
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (STEPS * BATCH, 28, 28, 1), np.uint8)
    y = rng.integers(0, 10, STEPS * BATCH).astype(np.int32)
    scope = parts.strategy.scope if backend_name == "tensorflow" else contextlib.nullcontext
    if backend_name == "jax" and devices > 1:
        mesh = keras.distribution.DeviceMesh((devices,), ["batch"], keras.distribution.list_devices("cpu")[:devices])
        scope = keras.distribution.DataParallel(mesh).scope
    with scope():
        model = keras.Sequential(
            [
                keras.Input((28, 28, 1)),
                keras.layers.Rescaling(1 / 255),
                keras.layers.Flatten(),
                keras.layers.Dense(512, "relu"),
                keras.layers.Dense(512, "relu"),
                keras.layers.Dense(10),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])

    def fit() -> float:
        with scope():
            return float(model.fit(x, y, BATCH, shuffle=False, verbose=0).history["loss"][0])

    for line in sys.stdin:
        print({**sides, "keras": fit}[line.strip()](), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        measure(sys.argv[2], int(sys.argv[3]))
    else:
        main(*sys.argv[1:])
