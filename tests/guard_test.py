"""A loss that is not finite, or leaps: stop, skip, roll back. Checkpoints that are kept; deadlines."""

import csv
import json
import time

import numpy as np
import pytest

from input_pipeline import order
from tests.forks import trainer
from tests.running import lines, start, summary

FLAGS = ("--model=dense", "--log_every=10", "--save_every=20", "--evaluate_every=never", "--epochs=3")
POISONED = "--dataset=tests.poisoned:load(examples=[700])"
STRATEGY = {"tensorflow": "mirrored", "jax": "device_mesh"}
LATER = pytest.mark.long


def steps_of(example: int, epochs: int = 3, batch: int = 64, examples: int = 1437) -> list[int]:
    """The steps, from 1 on, that an example is in."""
    plan = order.order(0, list(range(epochs * examples)), examples)
    return [position // batch + 1 for position in range(epochs * examples) if plan[position] == example]


@pytest.mark.parametrize("backend", [pytest.param("tensorflow", marks=LATER), "jax"])
def test_a_step_that_is_not_finite_is_skipped(backend, tmp_path):
    """Three epochs, so three such steps; on one device and on two the same, and after a restart."""
    flags = (*FLAGS, POISONED, "--on_nan=skip", "--replicas=2", "--exact")
    one, two = tmp_path / "one", tmp_path / "two"
    out = trainer(f"--backend={backend}", *flags, f"--run_dir={one}").stdout
    for step in steps_of(700):
        assert f"not finite at step {step} (examples" in out
    assert sum(line.get("skipped", 0) for line in lines(one)) == 3
    assert all(line["loss"] < 3 for line in lines(one)) and summary(one)["final"]["accuracy"] > 0.7
    where = (f"--strategy={STRATEGY[backend]}", "--devices=2")
    trainer(*where, *flags, "--epochs=1.5", f"--run_dir={two}")
    trainer(*where, *flags, f"--run_dir={two}")
    assert summary(two)["weights_sha256"] == summary(one)["weights_sha256"]


def test_the_log_is_json_where_a_loss_is_none(tmp_path):
    """A line of one step, which was skipped, has no loss; other programs read no NaN."""

    def refused(word: str) -> float:
        raise AssertionError(f"{word} is no JSON")

    run, step = tmp_path / "run", steps_of(700)[0]
    flags = ("--backend=jax", *FLAGS[:-1], POISONED, "--on_nan=skip", "--log_every=1", f"--run_dir={run}")
    trainer(*flags, f"--steps={step}")
    for text in [*(run / "metrics.jsonl").read_text().splitlines(), (run / "summary.json").read_text()]:
        json.loads(text, parse_constant=refused)
    assert lines(run)[-1]["loss"] is lines(run)[-1]["accuracy"] is summary(run)["final"]["loss"] is None
    trainer("report", f"--run_dir={run}")
    assert "<td>loss<td>nan<tr>" in (run / "report.html").read_text()
    trainer(*flags, f"--steps={step + 1}")  # goes on


@pytest.mark.parametrize("backend", ["tensorflow", pytest.param("jax", marks=LATER)])
def test_a_run_rolls_back_and_goes_on(backend, tmp_path):
    run = tmp_path / "run"
    flags = (*FLAGS, POISONED, "--on_nan=rollback", f"--backend={backend}", "--callbacks=tests.poisoned:Decaying")
    out = trainer(*flags, f"--run_dir={run}").stdout
    assert out.count("rolled back: the loss or a gradient was not finite") == 3
    back = [line for line in lines(run) if "rolled_back_to" in line]
    for line, step in zip(back, steps_of(700), strict=True):
        assert line["rolled_back_to"] < step <= line["step"] and f"step {step} " in line["why"]
    assert summary(run)["step"] == 68 and summary(run)["final"]["loss"] < 2.0
    # The rate stays as a callback has set it since the checkpoint.
    rates = [
        (line["learning_rate"], 1e-3 / (1 + (line["step"] - 1) * 64 // 1437)) for line in lines(run) if line.get("loss")
    ]
    assert rates and all(rate == pytest.approx(epochs) for rate, epochs in rates), rates
    proof = trainer("audit", f"--run_dir={run}").stdout
    assert "each was fed the examples of the run's order" in proof and proof.count("changed nothing") == 3


def test_callbacks_are_told_of_an_epoch_all_of_which_is_left_out(tmp_path):
    """They look for 'loss' in its logs: there is none, which is no number."""
    flags = ("--backend=jax", *FLAGS[:1], POISONED, "--on_nan=rollback", "--log_every=1epoch", "--epochs=1")
    trainer(*flags, f"--callbacks=CSVLogger(filename='{tmp_path / 'log.csv'}')", f"--run_dir={tmp_path / 'run'}")
    (row,) = csv.DictReader((tmp_path / "log.csv").open())
    assert row["loss"] == row["accuracy"] == "nan" and float(row["val_loss"]) > 0


def test_a_run_that_only_rolls_back_ends(tmp_path):
    """Every batch is poisoned: after three returns in a row there is no sense in another."""
    every = f"--dataset=tests.poisoned:load(examples={list(range(0, 1437, 5))})"
    ran = trainer("--backend=jax", *FLAGS, every, "--on_nan=rollback", f"--run_dir={tmp_path / 'run'}", code=2)
    assert "after the run went back 3 times in a row; the last good checkpoint, of step 0, is kept" in ran.stderr


def test_a_leap_of_the_loss_is_rolled_back(tmp_path):
    flags = ("--backend=jax", *FLAGS[:4], "--steps=300", "--callbacks=tests.poisoned:Ruin(step=200)")
    run = tmp_path / "run"
    out = trainer(*flags, "--on_nan=rollback(spike=5)", f"--run_dir={run}").stdout
    # The checkpoint of step 200 holds the ruin already, as shows after the first return to it.
    first, second = (line["rolled_back_to"] for line in lines(run) if "rolled_back_to" in line)
    assert (first, second) == (200, 180) and out.count("rolled back: the loss leapt to") == 2
    assert summary(run)["final"]["accuracy"] > 0.9
    ran = trainer(*flags, "--on_nan=stop(spike=5)", f"--run_dir={tmp_path / 'stopped'}", code=2)
    assert "the loss leapt to" in ran.stderr and "of step 200, is kept" in ran.stderr


@pytest.mark.parametrize("value", ["skip(spike=5)", "stop(spike=1)", "explode", "rollback(often=2)"])
def test_other_policies_are_told(value, tmp_path):
    assert "--on_nan=" in trainer(f"--on_nan={value}", f"--run_dir={tmp_path}", code=2).stderr


def test_some_checkpoints_are_kept_for_ever(tmp_path):
    flags = ("--backend=jax", *FLAGS[:2], "--evaluate_every=never", "--steps=100", "--save_every=10", "--keep_every=25")
    trainer(*flags, "--keep=2", f"--run_dir={tmp_path}")
    saved = [int(path.name) for path in sorted((tmp_path / "checkpoints").glob("0*"))]
    assert saved == [25, 50, 75, 90, 100]


@pytest.mark.parametrize("when", ["", "later", *(pytest.param(w, marks=LATER) for w in ("now", "2026-01-01T00:00"))])
def test_a_deadline_stops_a_run_as_a_signal_does(when, tmp_path):
    text = {"now": str(time.time()), "later": f"{time.time() + 8:.3f}"}.get(when, when)
    process = start("--backend=jax", *FLAGS[:4], "--steps=10000000", f"--run_dir={tmp_path}")
    while not (tmp_path / "checkpoints").exists():
        time.sleep(0.05)
    if when == "later":  # as a shell does it
        (tmp_path / "deadline").touch()
        time.sleep(0.2)
    (tmp_path / "deadline").write_text(text)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert "Stopped by its deadline after step" in out and not (tmp_path / "deadline").exists()
    assert when != "later" or time.time() >= float(text)


def test_a_deadline_that_is_none_is_told_and_ignored(tmp_path):
    (tmp_path / "deadline").write_text("tomorrow")
    ran = trainer("--backend=jax", *FLAGS[:4], "--steps=50", f"--run_dir={tmp_path}")
    assert ran.stderr.count("'tomorrow', which is no time: it is ignored") == 1


@pytest.mark.parametrize("backend", [pytest.param("tensorflow", marks=LATER), "jax"])
def test_a_bit_that_flips_on_one_device_is_noticed(backend, tmp_path):
    """At the next save; and the next start goes on from the checkpoint before it."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    flags = ("--model=dense", "--steps=60", "--save_every=10", "--log_every=5", "--evaluate_every=never")
    flags = (*flags, f"--strategy={STRATEGY[backend]}", "--devices=2")
    flip = f"--callbacks=tests.faulty:Flip(step=25,once={str(tmp_path / 'once')!r})"
    ran = trainer(*flags, flip, f"--run_dir={run}", code=71)
    assert "after step 30 the variables on device 1 of process 0 are not those on device 0" in ran.stderr
    assert "the last good checkpoint, of step 20, is kept" in ran.stderr
    trainer(*flags, flip, f"--run_dir={run}")
    trainer(*flags, f"--run_dir={whole}")
    assert summary(run)["weights_sha256"] == summary(whole)["weights_sha256"]


OVERFLOWING = """
import keras

def build(input_shape, classes):
    layers = [keras.Input(input_shape), keras.layers.Flatten(), keras.layers.Dense(classes)]
    return keras.Sequential([layers[0], keras.layers.Rescaling(4.0), *layers[1:]])
"""
BY_ITSELF = """
import keras

keras.config.set_dtype_policy("mixed_float16")
from overflowing import build
"""


@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_steps_whose_scaled_loss_overflows_are_steps(backend, tmp_path):
    """The optimizer leaves them out, and does not count them: saves, and what goes on from them, do.

    Whether a flag asks for 16 bits, or the model's module by itself. Nor are moving averages, which begin as zeros, due
    after them.
    """
    (tmp_path / "overflowing.py").write_text(OVERFLOWING)
    (tmp_path / "by_itself.py").write_text(BY_ITSELF)
    flags = (f"--backend={backend}", "--log_every=1", "--schedule=constant(warmup_steps=30)")
    flags += ("--optimizer=adam(use_ema=True,ema_overwrite_frequency=4)",)
    flags += ("--save_every=10", "--keep=9", "--evaluate_every=never")
    for run, ends, model in (
        ("whole", [40], ["--model=overflowing:build", "--precision=mixed_float16"]),
        ("parts", [17, 40], ["--model=by_itself:build"]),
    ):
        for steps in ends:
            said = trainer(*flags, *model, f"--steps={steps}", f"--run_dir={run}", cwd=tmp_path).stdout
        assert ("float32, layers in float16" in said) == (run == "parts")
        saved = [int(path.name) for path in sorted((tmp_path / run / "checkpoints").iterdir())]
        assert saved == sorted({0, 10, 20, 30, *ends})
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    left_out = [line for line in lines(whole) if not any(line["gradient_norms"].values())]
    assert 0 < len(left_out) < 20 and left_out[0]["step"] == 1
    assert all(line["loss"] > 1.1 * np.log(10) for line in lines(whole)[:2])  # of logits that are all 0, it is the log
    assert summary(parts)["weights_sha256"] == summary(whole)["weights_sha256"]
    assert [line["ids"] for line in lines(parts)] == [line["ids"] for line in lines(whole)]
    counted = np.cumsum([any(line["gradient_norms"].values()) for line in lines(whole)])  # which schedules follow
    for run in (whole, parts):
        rates = [line["learning_rate"] for line in lines(run)]
        assert rates == pytest.approx(1e-3 * np.minimum(1, counted / 30))


TWO = """
import keras

def build(input_shape, classes, two):
    a, b = keras.layers.Dense(16, "relu", name="a"), keras.layers.Dense(classes, name="b")
    model = keras.Sequential([keras.Input(input_shape), keras.layers.Rescaling(1 / 255), keras.layers.Flatten(), a, b])
    rate = keras.optimizers.schedules.ExponentialDecay(0.4, 2, 0.5)
    one, other = keras.optimizers.SGD(rate), keras.optimizers.SGD(rate)
    by_layer = keras.optimizers.MultiOptimizer(lambda variable: one if "a/" in variable.path else other)
    model.compile(by_layer if two else one, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model
"""


@pytest.mark.parametrize(("backend", "on_nan"), [("tensorflow", "skip"), ("jax", "skip"), ("jax", "rollback")])
def test_each_of_several_optimizers_counts_the_steps_that_are_left_out(backend, on_nan, tmp_path):
    """As a single one does: their schedules went on from where they were, and the log told another rate."""
    (tmp_path / "my_optimizers.py").write_text(TWO)
    poisoned = f"--dataset=tests.poisoned:load(examples={order.order(0, [70], 1437).tolist()})"
    for two in (True, False):
        flags = (f"--model=my_optimizers:build({two=})", poisoned, f"--backend={backend}", f"--on_nan={on_nan}")
        trainer(*flags, "--steps=8", "--log_every=1", "--evaluate_every=never", f"--run_dir={two}", cwd=tmp_path)
    assert summary(tmp_path / "True")["weights_sha256"] == summary(tmp_path / "False")["weights_sha256"]


@pytest.mark.parametrize(("backend", "on_nan"), [("tensorflow", "rollback"), ("jax", "skip")])
def test_moving_averages_begin_at_the_variables(backend, on_nan, tmp_path):
    """Whichever of the first steps are left out: from Keras's zeros, they would be a hundredth of them here."""
    (tmp_path / "overflowing.py").write_text(OVERFLOWING)
    poisoned = f"--dataset=tests.poisoned:load(examples={order.order(0, [5], 1437).tolist()})"
    average = "--optimizer=adam(use_ema=True,ema_momentum=0.999)"
    flags = (f"--backend={backend}", "--model=overflowing:build", poisoned, average, "--learning_rate=1e-5")
    trainer(*flags, "--steps=10", "--log_every=1", f"--on_nan={on_nan}", "--run_dir=run", cwd=tmp_path)
    final = summary(tmp_path / "run")["final"]
    assert final["test_loss"] == pytest.approx(final["loss"], rel=0.3)
    start = trainer(*flags[:2], "--steps=1", "--initialize_from=run", "--run_dir=other", cwd=tmp_path)
    assert "as its last step left them: the moving averages that it was judged by are in its export" in start.stdout


@pytest.mark.parametrize("backend", [pytest.param("tensorflow", marks=pytest.mark.long), "jax"])
def test_all_that_an_optimizer_keeps_is_kept_where_the_loss_is_scaled(backend, tmp_path):
    """Nadam makes a variable that Keras does not see where it is wrapped: each start had it anew, or it stood still."""
    flags = ("--optimizer=nadam", "--log_every=1", "--evaluate_every=never", f"--backend={backend}")

    def run(name: str, steps: int, precision: str = "mixed_float16") -> None:
        trainer(*flags, f"--precision={precision}", f"--steps={steps}", f"--run_dir={tmp_path / name}")

    run("whole", 40)
    if backend == "tensorflow":
        run("parts", 25)
        run("parts", 40)
        assert summary(tmp_path / "parts")["weights_sha256"] == summary(tmp_path / "whole")["weights_sha256"]
    else:
        run("wide", 40, "float32")
        narrow, wide = ([line["loss"] for line in lines(tmp_path / name)] for name in ("whole", "wide"))
        assert narrow == pytest.approx(wide, rel=0.01)


@pytest.mark.parametrize("backend", [pytest.param("tensorflow", marks=pytest.mark.long), "jax"])
def test_gradient_norms_are_told_without_the_scale_of_the_loss(backend, tmp_path):
    def norms(precision: str) -> list[float]:
        flags = ("--steps=3", "--log_every=1", "--evaluate_every=never", f"--backend={backend}")
        trainer(*flags, f"--precision={precision}", f"--run_dir={tmp_path / precision}")
        return [norm for line in lines(tmp_path / precision) for norm in line["gradient_norms"].values()]

    assert norms("mixed_float16") == pytest.approx(norms("float32"), rel=0.05)


MODEL = """
import keras

class Gate(keras.layers.Layer):
    def call(self, x):
        return keras.ops.{function}(x)

def build(input_shape, classes):
    dense = keras.layers.Dense
    return keras.Sequential([keras.Input(input_shape), keras.layers.Flatten(), dense(32), Gate(), dense(classes)])
"""


def test_a_model_that_computes_something_else_is_refused(tmp_path):
    """Names, shapes and configuration are the same; only the code of a layer's own is not."""
    module = tmp_path / "changing.py"
    flags = ("--backend=jax", "--model=changing:build", "--save_every=10", "--evaluate_every=never")
    flags += (f"--run_dir={tmp_path / 'run'}",)
    # Of another length: what Python keeps of a module it takes for that of any other of its size, in the same second.
    for function, steps, code in (("relu", 20, 0), ("relu", 30, 0), ("sigmoid", 40, 2), ("relu", 40, 0)):
        module.write_text(MODEL.format(function=function))
        err = trainer(*flags, f"--steps={steps}", code=code, cwd=tmp_path).stderr
        assert ("the code of the model or of the data has changed" in err) == (code == 2)
        if code:
            for verb, *elsewhere in (["evaluate"], ["export"], ["evaluate", "--strategy=device_mesh", "--devices=2"]):
                err = trainer(verb, flags[-1], *elsewhere, code=2, cwd=tmp_path).stderr
                assert "the code of the model or of the data has changed" in err and "Traceback" not in err
            other = ("--dataset=synthetic(examples=100, shape=(8, 8, 1))", flags[-1])
            assert "test_loss" in trainer("evaluate", *other, cwd=tmp_path).stdout  # nothing tells it apart
