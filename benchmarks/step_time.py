"""Time of a step beside keras.Model.fit on the same data in the same order, interleaved; checks equal losses first.

python benchmarks/step_time.py [tensorflow|jax] [rounds]
"""

import statistics
import sys
import time

import numpy as np

from trainer import backend
from trainer.config import Config

STEPS, BATCH = 256, 64


def main(name: str, rounds: int) -> None:
    """Prints milliseconds a step of both sides, and the median of the paired ratios."""
    config = Config(
        backend=name,
        dataset="synthetic(examples=16384, shape=(28, 28, 1))",
        optimizer="sgd",
        steps=STEPS,
        global_batch=BATCH,
    )
    backend.prepare(backend.choose(config))
    with backend.quiet():
        import keras

        from trainer.assembly import assemble
        from trainer.peers import Peers

    ours = assemble(config, Peers())
    model = keras.models.clone_model(ours.program.model)
    model.set_weights(ours.program.model.get_weights())
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(config.learning_rate), loss, metrics=["accuracy"])
    pipeline = ours.pipeline(ours.dataset.train, shuffled=True)
    blocks = [pipeline.read_block(i) for i in range(STEPS // pipeline.block)]
    x, y = (np.concatenate([b[k].reshape(-1, *b[k].shape[3:]) for b in blocks]) for k in "xy")

    def our_pass() -> float:
        totals, fed = ours.program.objective.no_totals(), ours.blocks(pipeline)
        for i in range(STEPS // pipeline.block):
            totals = ours.strategy.train(next(fed), 0, pipeline.block, i * pipeline.block, totals)
        return ours.program.objective.results(totals)["loss"]

    def fit_pass() -> float:
        return float(model.fit(x, y, BATCH, shuffle=False, verbose=0).history["loss"][0])

    pairs = []
    for turn in range(rounds + 2):  # the first two warm up: they compile
        times, losses = [], []
        for one in (our_pass, fit_pass):
            start = time.perf_counter()
            losses.append(one())
            times.append(1e3 * (time.perf_counter() - start) / STEPS)
        if abs(losses[0] - losses[1]) > 1e-3 * losses[1]:
            raise SystemExit(f"the two sides compute different things: losses {losses}")
        if turn >= 2:
            pairs.append(times)
    own, fit = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratio = statistics.median(a / b for a, b in pairs)
    print(f"{name}, mlp, batch {BATCH}, metrics on: {own:.2f} ms a step, fit {fit:.2f} ms, ratio {ratio:.2f}")


if __name__ == "__main__":
    for chosen in sys.argv[1:2] or ["tensorflow"]:
        main(chosen, int(sys.argv[2]) if len(sys.argv) > 2 else 7)
