"""verify proves the promise on a user's model, and catches what was planted to break it."""

import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tests.running import REPOSITORY, alive, children, environment, start, trainer
from trainer import verify_rows
from trainer.errors import UserError, last_words

PLANTED = """
import keras, numpy as np
from keras import layers, ops

class Center(layers.Layer):
    def call(self, x): return x - ops.mean(x, axis=0, keepdims=True)

class Noise(layers.Layer):
    def call(self, x): return x + np.random.normal(size=(1,)).astype("float32")

class Warmup(layers.Layer):
    calls = 0
    def call(self, x):
        self.calls += 1
        return x * min(1.0, self.calls / 100)

def net(extra, input_shape, classes):
    return keras.Sequential([keras.Input(input_shape), layers.Rescaling(1 / 255), layers.Flatten(),
                             layers.Dense(32, "relu"), *extra, layers.Dense(classes)])

def good(input_shape, classes): return net([layers.Dropout(0.1)], input_shape, classes)
def recurrent(input_shape, classes):
    rows = layers.Reshape(input_shape[:2])
    return keras.Sequential([keras.Input(input_shape), rows, layers.LSTM(4), layers.Dense(classes)])
def wrapped(input_shape, classes):
    rows = layers.Reshape(input_shape[:2])
    normalized = [layers.TimeDistributed(layers.BatchNormalization(), name="each"), layers.Flatten()]
    return keras.Sequential([keras.Input(input_shape), rows, *normalized, layers.Dense(classes)])
def mixing(input_shape, classes): return net([Center(name="center")], input_shape, classes)
def noisy(input_shape, classes): return net([Noise(name="noise")], input_shape, classes)

class Chaos(layers.Layer):
    def call(self, x):
        x = ops.sigmoid(x)
        for _ in range(12): x = 4 * x * (1 - x)  # the logistic map doubles what is apart: far, whatever the processor
        return x
def warming(input_shape, classes): return net([Warmup(name="warmup")], input_shape, classes)
def chaotic(input_shape, classes): return net([Chaos()], input_shape, classes)

def scaled(input_shape, classes):
    model = net([], input_shape, classes)
    def loss(y, p):
        values = keras.losses.sparse_categorical_crossentropy(y, p, from_logits=True)
        return values / ops.cast(ops.shape(values)[0], "float32")
    model.compile(loss=loss, metrics=["accuracy"])
    return model

class Annealed(keras.losses.Loss):
    steps = 0
    def call(self, y, y_pred):
        self.steps += 1
        return keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True) * 0.9**self.steps

def annealing(input_shape, classes):
    model = good(input_shape, classes)
    model.compile("sgd", Annealed())
    return model

class Sampling(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense, self.seeds = layers.Dense(6), keras.random.SeedGenerator(1)
    def call(self, x):
        y = self.dense(x) + keras.random.normal(ops.shape(x), seed=self.seeds)
        self.add_loss(ops.mean(ops.square(x - y)))
        return {"found": y, "given": x}

class Sentences:
    def __len__(self): return 300
    def read(self, ids):
        words = np.stack([np.random.default_rng(int(i)).integers(1, 50, 12) for i in ids]).astype("int32")
        there = np.arange(12) < 6 + np.asarray(ids)[:, None] % 6
        return {"token_ids": words * there, "padding_mask": there.astype("int32")}, np.roll(words * there, -1, 1), there

def sentences(): return {"train": Sentences(), "evaluation": Sentences()}
def gemma():
    import keras_hub
    sizes = dict(vocabulary_size=50, num_layers=2, hidden_dim=16, intermediate_dim=32, head_dim=8)
    body = keras_hub.models.GemmaBackbone(num_query_heads=2, num_key_value_heads=1, dropout=0.1, **sizes)
    body.enable_lora(2)
    model = keras_hub.models.GemmaCausalLM(backbone=body, preprocessor=None)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(1e-3), loss, weighted_metrics=[keras_hub.metrics.Perplexity(from_logits=True)])
    return model

def asked(input_shape, classes):
    import jax
    assert jax.config.jax_default_matmul_precision == "highest" and keras.config.dtype_policy().name == "float32"
    return good(input_shape, classes)

def deterministic(input_shape, classes):
    import os
    from tensorflow.python.framework import config
    assert config.is_op_determinism_enabled() and "--xla_gpu_deterministic_ops=true" in os.environ["XLA_FLAGS"]
    return good(input_shape, classes)

def unlabelled(): return np.random.default_rng(0).normal(size=(100, 6)).astype("float32")
"""


@pytest.fixture
def here(tmp_path):
    (tmp_path / "planted.py").write_text(PLANTED)
    return tmp_path


@pytest.mark.parametrize(
    ("flag", "named"),
    [
        ("--model=planted:mixing", "layer 'center' (Center): mixes examples"),
        ("--model=planted:noisy", "layer 'noise' (Noise): gives another result for the same input"),
        ("--model=planted:scaled", "the loss: of 4 examples is"),
    ],
)
@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_planted_faults_are_named(flag, named, backend, here):
    assert named in trainer("probe", flag, f"--backend={backend}", cwd=here, code=1).stdout


def test_one_process_probes_for_a_strategy_of_several(here):
    trainer("probe", "--model=planted:good", "--strategy=parameter_server", cwd=here)
    told = trainer("probe", "--strategy=parameter_server", "--backend=jax", cwd=here, code=2).stderr
    assert "contradicts --strategy=parameter_server" in told


def test_a_number_that_call_counts_up_is_named(here):
    """A compiled step has what it was when it was traced."""
    out = trainer("probe", "--backend=jax", "--model=planted:warming", cwd=here, code=1).stdout
    assert "'calls' of layer 'sequential/warmup': is changed in Python by each call()" in out and "add_weight" in out
    out = trainer("probe", "--backend=jax", "--model=planted:annealing", cwd=here, code=1).stdout
    assert "'steps' of loss 'annealed': is changed in Python by each step" in out


def test_random_numbers_in_evaluation_break_nothing(here):
    flags = ("--backend=jax", "--model=planted:Sampling", "--dataset=planted:unlabelled")
    out = trainer("probe", *flags, cwd=here).stdout
    assert "note  the loss: draws random numbers in evaluation" in out and '"random": true' in out
    # An LSTM has a generator of seeds, and without dropout no use for it: so the backends can be compared.
    assert '"random": false' in trainer("probe", "--backend=jax", "--model=planted:recurrent", cwd=here).stdout


def test_batch_normalization_inside_another_layer_is_a_note(here):
    out = trainer("probe", "--backend=jax", "--model=planted:wrapped", cwd=here).stdout
    assert "note  layer 'each' (TimeDistributed): takes statistics over the examples" in out


def test_what_is_asked_of_a_model_is_not_how_an_accelerator_rounds(here):
    """Of float32 it would keep 11 bits in some shapes, so that examples seemed to mix (an H200)."""
    flags = ("--backend=jax", "--model=planted:asked", "--precision=mixed_bfloat16")
    assert "nothing found" in trainer("probe", *flags, cwd=here).stdout


def test_accelerators_are_held_to_the_same_bits_each_time(here):
    """By what --exact sets, and a drill where there are some: else two undisturbed starts differ (an H200)."""
    trainer("probe", "--backend=tensorflow", "--model=planted:deterministic", "--exact", cwd=here)


@pytest.mark.parametrize("verb", ["verify", "drill"])
def test_who_is_told_to_stop_leaves_no_files_and_no_runs(verb, tmp_path):
    process = start(verb, "--backend=jax", cwd=tmp_path, TMPDIR=str(tmp_path))
    time.sleep(4)  # so that it is past asking who is there
    while not (started := children(process.pid)):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 130 and err == "\nonecurve: stopped\n"
    deadline = time.monotonic() + 5  # what it was starting just then is killed by the system, once it has ended
    while any(map(alive, started)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not [*tmp_path.iterdir()]


def test_runs_of_an_earlier_verify_are_not_taken_for_this_one_s(tmp_path):
    (tmp_path / "one_device-jax").mkdir()
    said = trainer("verify", f"--run_dir={tmp_path}", code=2).stderr
    assert "is not empty" in said and "--run_dir" in said


def test_a_backend_that_fails_is_not_taken_for_one_without_accelerators(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "nonesuch")
    with pytest.raises(UserError, match="--backend=jax: can't be asked for its devices"):
        verify_rows.ask("jax")


def test_a_row_that_did_not_run_is_not_taken_for_one_of_other_bits():
    twice = verify_rows.Row("one_device jax, again", "jax", 1, 4)
    assert "did not run" in verify_rows.likely_cause([twice])
    twice.losses = [1.0]
    assert "not deterministic" in verify_rows.likely_cause([twice])


@pytest.mark.long
def test_a_model_that_amplifies_rounding_is_held_to_what_rounding_comes_to(here):
    flags = ("--model=planted:chaotic", "--learning_rate=0.01", "--replicas=2")
    text = trainer("verify", *flags, cwd=here).stdout
    assert "it holds" in text and ", perturbed" in text and "ok: within 10 times what rounding comes to" in text


def test_more_than_rounding_comes_to_is_a_failure():
    def row(name: str, apart: list[float]) -> verify_rows.Row:
        return verify_rows.Row(name, "jax", 1, 4, "one", False, 1e-4, apart=apart, verdict="FAIL: not within 0.0001")

    perturbed = row("perturbed", [1e-7, 4e-4, 2e-4])
    at_once, later, too_far = (
        row("at once", [1e-3, 2e-3, 0]),
        row("later", [1e-6, 2e-3, 3e-3]),
        row("too far", [0, 0, 5e-3]),
    )
    verify_rows.judge_by(perturbed, [at_once, later, too_far])
    assert [r.verdict.startswith("ok") for r in (at_once, later, too_far)] == [False, True, False]
    verify_rows.judge_by(verify_rows.Row("did not run", "jax", 1, 4), [at_once])
    assert at_once.verdict.startswith("FAIL")


def test_rows_that_are_compared_run_on_one_kind_of_chip():
    assert all(verify_rows.ask(backend) == 0 for backend in verify_rows.BACKENDS)  # this machine's
    both = verify_rows.rows(4, {"tensorflow": 0, "jax": 0}, True, "adam")
    assert len(both) == 14 and not any(row.on_cpu for row in both)
    few = verify_rows.rows(4, {"jax": 2}, False, "adam")
    by_name = {row.name: row for row in few}
    assert by_name["device_mesh x4"].on_cpu and by_name["one_device jax"].on_cpu
    assert not by_name["one_device jax"].against  # TensorFlow is not there
    assert [row.name for row in few if not row.on_cpu] == [
        "accelerator jax",
        "accelerator jax, again",
        "accelerators jax x2",
    ]
    assert all(row.on_cpu == by_name[row.against].on_cpu for row in few if row.against)
    many = verify_rows.rows(4, {"jax": 8}, True, "adam")
    assert not any(row.on_cpu for row in many)
    # Of float32 such chips multiply 11 bits, but not in every shape.
    assert [row.within for row in many if not row.bits] == [1e-3] and both[-1].within == 1e-4
    perturbed = [verify_rows.perturbed(rows[0], rows[-1].within).perturbation for rows in (both, many)]
    assert perturbed == ["trainer.perturbation:Perturbed(bits=0)", "trainer.perturbation:Perturbed(bits=11)"]


@pytest.mark.long
def test_verify_passes_on_a_user_s_model(here):
    """In a place whose environment names a cluster, too: process 0 does it, by runs of its own."""
    flags = ("verify", "--model=planted:good", "--steps=4", "--replicas=2")
    hosts = {"TPU_WORKER_HOSTNAMES": "a,b"}
    assert not trainer(*flags, cwd=here, **hosts, TPU_WORKER_ID="1").stdout
    text = trainer(*flags, cwd=here, **hosts, TPU_WORKER_ID="0").stdout
    assert "it holds for this model and data" in text
    assert text.count("ok: the same bits") == 6


@pytest.mark.long
def test_verify_passes_on_a_model_of_keras_hub_with_lora(here):
    """Gemma, small, on sentences of several lengths."""
    flags = ("--model=planted:gemma", "--dataset=planted:sentences", "--global_batch=16", "--steps=3", "--replicas=2")
    assert "it holds for this model and data" in trainer("verify", *flags, cwd=here).stdout


@pytest.mark.long
def test_verify_fails_on_a_planted_fault(here):
    text = trainer("verify", "--model=planted:mixing", "--steps=3", "--replicas=2", cwd=here, code=1).stdout
    assert "The promise is broken" in text and "cause: layer 'center'" in text
    assert "FAIL" in text  # the runs show it, too: with one replica the curve is another


SABOTAGE = """
import sys
from trainer.strategies import {module}
{patch}
from trainer import __main__ as program
sys.argv[0] = "trainer"
program.define_flags()
from absl import app
app.run(program._run, flags_parser=lambda argv: program._guarded(program.parse, argv))
"""


def test_a_wrong_loss_scale_of_ours_shows_in_the_bits(here: pathlib.Path):
    """Sabotage: gradients are divided by the number of devices, as a naive mean over them would do."""
    patch = (
        "whole = tf_distribute.TFDistribute._sum_over_devices\n"
        "def scaled(self, local):\n"
        "    sums = whole(self, local)\n"
        "    return sums._replace(gradients=[g / self.devices for g in sums.gradients])\n"
        "tf_distribute.TFDistribute._sum_over_devices = scaled"
    )
    (here / "sabotaged.py").write_text(SABOTAGE.format(module="tf_distribute", patch=patch))
    flags = ["--model=mlp", "--optimizer=sgd", "--exact", "--replicas=2", "--steps=3", "--log_every=1"]
    digests = []
    for where in (["--strategy=one_device"], ["--strategy=mirrored", "--devices=2"]):
        run_dir = here / f"run{len(digests)}"
        command = [sys.executable, "sabotaged.py", *where, *flags, f"--run_dir={run_dir}"]
        subprocess.run(command, cwd=here, env=environment(), check=True, capture_output=True)
        digests.append((run_dir / "summary.json").read_text().partition("weights_sha256")[2][:80])
    assert digests[0] != digests[1]


@pytest.mark.long
@pytest.mark.parametrize("model", ["mlp", "dense", "convnet", "vit", "resnet(width=8)", "transformer"])
def test_verify_passes_on_built_in_models(model):
    data = ["--dataset=text(context=32)"] if model == "transformer" else []
    assert "it holds" in trainer("verify", f"--model={model}", *data, "--steps=3", cwd=REPOSITORY, timeout=900).stdout


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("", "no word"),
        ("W0000 noise\nKilled\n", "Killed"),
        ("onecurve: --model=a: is wrong\n  Fix: mend it\n", "--model=a: is wrong"),
        ("[1] ValueError: b\n[0] more\nlaunch: process 1 ended with exit code 1\n", "ValueError: b"),
        (
            "Traceback:\nRuntimeError: Exception encountered when calling Cond.call().\n\n\x1b[1mits reason\x1b[0m\n\n"
            "Arguments received by Cond.call():\n  • training=False\n",
            "RuntimeError: Exception encountered when calling Cond.call(). its reason",
        ),
    ],
)
def test_the_last_words_of_a_process(said, told):
    assert last_words(said) == told
