"""Does a step cost what its arithmetic costs? Beside keras.Model.fit and a loop written by hand.

python -m benchmarks.step_time [tensorflow|jax]

On JAX it needs no TensorFlow: on a machine without, one rival is left out.
"""

import dataclasses
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import page
from benchmarks.paired import in_turn, ratio
from benchmarks.rounds import run, training
from trainer import backend
from trainer.config import Config

# case: (the model's flag, shape of an example, batch, steps, target of ours to the hand-written loop, and to fit)
_CASES: dict[str, tuple[str, tuple[int, ...], int, int, tuple[float, float]]] = {
    "overhead: 16 units, batch 8": ("benchmarks.step_time:by_xla(units=16, depth=1)", (8,), 8, 1200, (0.25, 1 / 12)),
    "mlp, batch 64": ("benchmarks.step_time:by_xla", (784,), 64, 300, (0.90, 1 / 1.5)),
    "mlp, batch 512": ("benchmarks.step_time:by_xla", (784,), 512, 75, (1.02, 1.0)),
    "mlp, batch 4096": ("benchmarks.step_time:by_xla", (784,), 4096, 12, (1.02, 1.0)),
}


def by_xla(input_shape: tuple[int, ...], classes: int, units: int = 256, depth: int = 2) -> Any:
    """The mlp, compiled by XLA on TensorFlow, too, as the loop by hand is."""
    from trainer.models import mlp

    model = mlp.build(input_shape, classes, units, depth)
    model.compile(jit_compile=True)
    return model


def main(name: str = "jax") -> None:
    """Times all cases and records them."""
    backend.prepare(name)
    with backend.quiet():
        import trainer.assembly  # noqa: F401
    rows = []
    for case, (model, shape, batch, steps, targets) in _CASES.items():
        if name == "tensorflow":  # whose calls take ten times as long
            steps = min(steps, 800) // 2
        config = Config(
            backend=name,
            model=model,
            dataset=f"synthetic(examples={steps * batch}, shape={shape})",
            cache="memory",
            learning_rate=1e-4,
            steps=steps,
            global_batch=batch,
        )
        measured = in_turn(sides(config), rounds=7, tolerance=1e-2)
        unit, per = ("µs", steps * 1e-6) if batch == 8 else ("ms", steps * 1e-3)
        ours, single = measured.pop("ours"), measured.pop("ours, a step a call")
        by_hand = measured["loop by hand"]
        found, single_case = ratio(single, by_hand), f"{case}, a step a call"
        rows.append(page.compared(single_case, "loop by hand", single, by_hand, found, per, f"{unit} a step", 1.3))
        for rival, theirs in measured.items():
            target = targets[0] if rival == "loop by hand" else targets[1] if rival == "fit, tf.data" else None
            found = ratio(ours, theirs)
            rows.append(page.compared(case, rival, ours, theirs, found, per, f"{unit} a step", target))
    # Many short rounds, each with a line of the log or more: of few long ones the median swings by 5 %. Their steps are
    # whole blocks, which a run always does.
    rows += [_watched(name, batch, steps, rounds) for batch, steps, rounds in ((64, 400, 20), (512, 100, 15))]
    page.record(
        f"step-{name}",
        f"What does a step cost beside Keras's own? ({name})",
        "One device, Adam, metrics on; by XLA, but for fit on TensorFlow, which is as it comes; Onecurve with its "
        "shuffling, gradient norms and watch for what is not finite; "
        "mean losses of the first round equal to 1 %; a run beside its steps in as many calls",
        rows,
    )


def sides(config: Config, singly: bool = True) -> dict[str, Callable[[], float]]:
    """Ways of doing the steps of a run from the same weights on the same examples; each returns the mean loss.

    Args:
      config: of the run.
      singly: whether one of them waits for each step.
    """
    import keras

    from trainer.assembly import assemble
    from trainer.peers import Peers

    steps, batch = config.steps, config.global_batch
    parts = assemble(config, Peers())
    program = parts.program
    pipeline = parts.pipeline(parts.dataset.train, shuffled=True)
    blocks = [pipeline.read_block(i) for i in range(-(-steps // pipeline.block))]
    x, y = (np.concatenate([b[k].reshape(-1, *b[k].shape[3:]) for b in blocks])[: steps * batch] for k in "xy")

    def fresh() -> Any:
        """A model of its own, as compile() makes it, with the weights that ours begins with."""
        model = keras.models.clone_model(program.model)
        model.set_weights(program.model.get_weights())
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(config.learning_rate), loss, metrics=["accuracy"])
        return model

    of_arrays, of_tf_data = fresh(), fresh()

    def fit_arrays() -> float:
        return float(of_arrays.fit(x, y, batch, shuffle=False, verbose=0).history["loss"][0])

    def fit_tf_data() -> float:
        import tensorflow as tf

        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
        return float(of_tf_data.fit(data, verbose=0).history["loss"][0])

    by_hand = {"jax": _loop_in_jax, "tensorflow": _loop_in_tensorflow}[config.backend](fresh(), x, y, batch)
    ways = {"ours": training(parts)}
    if singly:
        ways["ours, a step a call"] = training(assemble(config, Peers()), most=1)
    ways |= {"loop by hand": by_hand, "fit, arrays": fit_arrays}
    return ways | ({"fit, tf.data": fit_tf_data} if importlib.util.find_spec("tensorflow") else {})


def _watched(name: str, batch: int, steps: int, rounds: int) -> page.Row:
    """A run beside its steps alone: the log, TensorBoard, signals and the pace, the account of time."""
    from trainer.assembly import assemble
    from trainer.peers import Peers

    with tempfile.TemporaryDirectory() as scratch:
        config = Config(
            backend=name,
            model="benchmarks.step_time:by_xla",
            dataset=f"synthetic(examples={steps * batch}, shape=(784,))",
            cache="memory",
            global_batch=batch,
            evaluate_every="never",
            save_every="never",
            run_dir=f"{scratch}/run",
        )
        alone = assemble(dataclasses.replace(config, steps=steps), Peers())
        with run(dataclasses.replace(config, steps=10**7), steps) as (watched, more):
            # Each tells another thing, and is asked for its variables in the end.
            sides = {"run": more, "alone": training(alone, most=100)}
            measured = in_turn(sides, rounds, tolerance=float("inf"))
            if watched.program.weights_sha256() != alone.program.weights_sha256():
                raise SystemExit("the run has trained other variables than its steps alone")
    found = ratio(measured["run"], measured["alone"])
    case = f"mlp, batch {batch}, all that a run does, a line of the log each 100 steps"
    return page.compared(
        case, "its steps alone", measured["run"], measured["alone"], found, steps * 1e-3, "ms a step", 1.02
    )


def _loop_in_jax(model: Any, x: Any, y: Any, batch: int) -> Callable[[], float]:
    """One jitted step, with its arguments donated, called for each slice of the arrays."""
    import jax
    import keras

    optimizer, loss_of, metric = model.optimizer, model.loss, keras.metrics.SparseCategoricalAccuracy()
    optimizer.build(model.trainable_variables)

    def loss_and_more(trainable: Any, rest: Any, metrics: Any, x: Any, y: Any) -> Any:
        y_pred, rest = model.stateless_call(trainable, rest, x, training=True)
        return loss_of(y, y_pred), (rest, metric.stateless_update_state(metrics, y, y_pred))

    def step(state: Any, total: Any, x: Any, y: Any) -> Any:
        trainable, rest, slots, metrics = state
        gradient_of = jax.value_and_grad(loss_and_more, has_aux=True)
        (loss, (rest, metrics)), gradients = gradient_of(trainable, rest, metrics, x, y)
        trainable, slots = optimizer.stateless_apply(slots, gradients, trainable)
        return (trainable, rest, slots, metrics), total + loss

    compiled = jax.jit(step, donate_argnums=(0, 1))
    variables = (model.trainable_variables, model.non_trainable_variables, optimizer.variables, metric.variables)
    kept = [tuple([v.value for v in group] for group in variables)]

    def run() -> float:
        state, total = kept[0], 0.0
        for first in range(0, len(x), batch):
            state, total = compiled(state, total, x[first : first + batch], y[first : first + batch])
        kept[0] = state
        return float(total) * batch / len(x)

    return run


def _loop_in_tensorflow(model: Any, x: Any, y: Any, batch: int) -> Callable[[], float]:
    """One tf.function of a step, compiled by XLA, called for each slice of the arrays."""
    import keras
    import tensorflow as tf

    optimizer, loss_of, metric = model.optimizer, model.loss, keras.metrics.SparseCategoricalAccuracy()
    optimizer.build(model.trainable_variables)
    total = tf.Variable(0.0)

    @tf.function(jit_compile=True)
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            y_pred = model(x, training=True)
            loss = loss_of(y, y_pred)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        metric.update_state(y, y_pred)
        total.assign_add(loss)

    def run() -> float:
        total.assign(0.0)
        for first in range(0, len(x), batch):
            step(x[first : first + batch], y[first : first + batch])
        return float(total) * batch / len(x)

    return run


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    # tf.data's threads still call sources, and one that calls into an interpreter being taken down can wait for ever.
    os._exit(0)
