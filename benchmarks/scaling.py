"""What do more devices cost where the cores stay the same? One is the ideal, for they share the processors.

python -m benchmarks.scaling tensorflow|jax
"""

import contextlib
import copy
import json
import subprocess
import sys
from collections.abc import Callable

import numpy as np

from benchmarks import page
from benchmarks.paired import Side, in_turn, ratio

STEPS, BATCH = 32, 512
_TARGETS = {"jax": {2: 1.10, 4: 1.35, 8: 2.0}, "tensorflow": {2: 1.40}}


def main(backend: str) -> None:
    """Measures one, two and four devices in processes of their own, each beside Keras's own way."""
    found = {n: _measured(backend, n) for n in (1, 2, 4)}
    rows = []
    for n in (2, 4):
        for mode in [side for side in found[n] if side != "keras"]:
            rivals = {"keras": ratio(found[n][mode], found[n]["keras"])} if "keras" in found[n] else {}
            growth = found[n][mode].least / found[1]["ours"].least
            theirs, text = "", f"{growth:.2f}"
            if "keras" in found[n] and "keras" in found[1]:
                keras_growth = found[n]["keras"].least / found[1]["keras"].least
                theirs = f"{1e3 * found[n]['keras'].least / STEPS:.3g} ms a step: {keras_growth:.2f} of one device"
            name = "Keras DataParallel" if backend == "jax" else "MirroredStrategy, fit"
            own = f"{1e3 * found[n][mode].least / STEPS:.3g} ms a step"
            target = _TARGETS[backend].get(n) if mode == "ours" else None
            noisy = any(r.noisy for r in rivals.values()) or page.busy()
            case = f"{n} devices on the same cores" + ("" if mode == "ours" else ", exact (the tree's order)")
            rows.append(page.Row(case, name, own, theirs, text, growth, target, True, noisy))
    page.record(
        f"scaling-{backend}",
        f"What do more devices cost on the same cores? ({backend})",
        f"mlp(units=512), global batch {BATCH}, a logical replica a device, fastest of the rounds; "
        "ratio: to Onecurve's one device",
        rows,
    )


def _measured(backend: str, devices: int) -> dict[str, Side]:
    command = [sys.executable, "-m", "benchmarks.scaling", "measure", backend, str(devices)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: Side(*sides) for name, sides in found.items()}


def measure(backend_name: str, devices: int) -> None:
    """Prints the seconds of each round of each side, as JSON."""
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

    parts = assemble(config, Peers())
    pipeline = parts.pipeline(parts.dataset.train, shuffled=True)
    order = "_in_tree_order" if hasattr(parts.strategy, "_in_tree_order") else "_exact"

    def side(exact: bool) -> Callable[[], float]:
        strategy = copy.copy(parts.strategy)
        strategy.compile(parts.program)
        setattr(strategy, order, exact)
        fed = strategy.feed(pipeline)  # goes on from pass to pass, as in a run

        def once() -> float:
            totals, done = parts.program.objective.no_totals(), 0
            while done < STEPS:
                count = min(pipeline.block, STEPS - done)
                totals = strategy.train(next(fed), 0, count, done, totals)
                done += count
            return float(parts.program.objective.results(totals)["loss"])

        return once

    sides = {"ours": side(False)} if devices == 1 else {"ours": side(False), "exact": side(True)}
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (STEPS * BATCH, 28, 28, 1), np.uint8)
    y = rng.integers(0, 10, STEPS * BATCH).astype(np.int32)
    scope = parts.strategy.scope() if backend_name == "tensorflow" else contextlib.nullcontext()
    if backend_name == "jax" and devices > 1:
        mesh = keras.distribution.DeviceMesh((devices,), ["batch"], keras.distribution.list_devices("cpu")[:devices])
        scope = keras.distribution.DataParallel(mesh).scope()
    with scope:
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
            return float(model.fit(x, y, BATCH, shuffle=False, verbose=0).history["loss"][0])

        measured = in_turn({**sides, "keras": fit}, rounds=5, tolerance=float("inf"))
    print(json.dumps(measured))


if __name__ == "__main__":
    if sys.argv[1] == "measure":
        measure(sys.argv[2], int(sys.argv[3]))
    else:
        main(sys.argv[1])
