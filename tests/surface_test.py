"""What a person sees and sets: print-outs, TensorBoard, what a run leaves behind, precisions, optimizers, caches."""

import contextlib
import io
import json
import re
import shutil
import time
import urllib.request

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from launch.local import free_ports
from tests import running
from tests.forks import trainer
from tests.running import REPOSITORY, curve, deviation, finished, launch, lines, start, summary
from trainer import checkpoint
from trainer.monitoring.board import Board
from trainer.monitoring.gallery import confusion

BACKENDS = ["tensorflow", "jax"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_run_leaves_behind(backend, tmp_path):
    run = tmp_path / "größe 5%"  # as a person may call it
    out = running.trainer(
        f"--backend={backend}",
        f"--run_dir={run}",
        "--steps=60",
        "--log_every=10",
        "--profile_steps=20,30",
        "--schedule=cosine(warmup_steps=10)",
    ).stdout
    for word in (
        "batch  64 examples",
        f"tensorboard --logdir '{run}/tensorboard'",
        "first steps done after",
        "100%  step 60/60",
        "final",
        f"python -m trainer evaluate '--run_dir={run}'",
    ):
        assert word in out
    board = EventAccumulator(str(run / "tensorboard"), {"tensors": 0}).Reload()
    tags = board.Tags()
    assert {"loss/train", "accuracy/train", "loss/validation", "learning_rate"} <= set(tags["tensors"])
    assert {"performance/examples_per_second", "performance/data_wait", "run/flags", "run/environment"} <= set(
        tags["tensors"]
    )
    assert {"confusion", "worst", "run/variables"} <= set(tags["tensors"])
    assert any(tag.startswith("weight_norm/") for tag in tags["tensors"])
    assert tags["graph"]
    logged = lines(run)
    points = {e.step: float(e.tensor_proto.float_val[0]) for e in board.Tensors("loss/train")}
    assert points == pytest.approx({line["step"]: line["loss"] for line in logged})
    rates = {line["step"]: line["learning_rate"] for line in logged}
    assert rates[10] == pytest.approx(1e-3) and rates[60] == pytest.approx(0, abs=1e-9)
    assert list((run / "tensorboard").rglob("*.xplane.pb")), "no profiler trace"
    flags = (run / "run.flags").read_text().splitlines()
    assert "--steps=60" in flags


@pytest.mark.parametrize("backend", [pytest.param("tensorflow", marks=pytest.mark.long), "jax"])
def test_a_trace_of_what_is_left_of_its_steps_or_none(backend, tmp_path):
    """A start in the midst of them traces the rest; what the profiler can't do stops no run, and is said."""
    flags = (f"--backend={backend}", f"--run_dir={tmp_path / 'run'}", "--profile_steps=20,30")
    assert "--profile_steps=20,30 are not among the run's 20 steps" in trainer(*flags, "--steps=20").stdout
    folders = tmp_path / "run" / "tensorboard" / "plugins"
    assert not folders.exists()
    assert "steps 20 to 25 to" in trainer(*flags, "--steps=25").stdout
    shutil.rmtree(folders)  # so that a second trace in the same second is one, too
    trainer(*flags, "--steps=28")
    assert list(folders.rglob("*.xplane.pb")), "no trace of the steps that were left"
    shutil.rmtree(folders)
    folders.write_text("a file, where a folder should be")
    ended = trainer(*flags, "--steps=40")
    assert ended.stderr.count("no trace of steps 20 to 30: ") == 1 and summary(tmp_path / "run")["step"] == 40


TRACKER = """
import atexit, concurrent.futures, multiprocessing, pathlib, tempfile
import keras, numpy as np
from input_pipeline.digits import load

class Tracker(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.file = open("lines.txt", "w")
        self.scratch = tempfile.TemporaryDirectory()
        atexit.register(pathlib.Path("sent.txt").write_text, "all")

    def on_epoch_end(self, epoch, logs=None):
        self.file.write(f"{epoch}\\n")
        if epoch == 3:
            self.model.no_such_name

class Decoded:
    def __init__(self, source):
        self.source = source
        self.pool = concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))

    def __len__(self):
        return len(self.source)

    def read(self, ids):
        images, labels = self.source.read(ids)
        return self.pool.submit(np.flip, images, 1).result(), labels

def digits():
    data = load()
    return type("Data", (), {"train": Decoded(data.train), "evaluation": data.evaluation, "classes": 10})
"""


@pytest.mark.parametrize("backend", [pytest.param("tensorflow", marks=pytest.mark.long), "jax"])
def test_what_is_left_to_a_process_s_end_is_done(backend, tmp_path):
    """A tracker sends its last lines there, an open file is written out, and no scratch file, or process, is left."""
    (tmp_path / "tracker.py").write_text(TRACKER)
    (tmp_path / "tmp").mkdir()
    flags = [f"--backend={backend}", "--callbacks=tracker:Tracker", "--dataset=tracker:digits", "--run_dir=run"]
    for epochs, code, told in ((2, 0, "0\n1\n"), (5, 1, "2\n3\n")):
        running.trainer(*flags, f"--epochs={epochs}", code=code, cwd=tmp_path, TMPDIR=str(tmp_path / "tmp"))
        assert (tmp_path / "lines.txt").read_text() == told
        assert (tmp_path / "sent.txt").read_text() == "all"
        (tmp_path / "sent.txt").unlink()
        assert not [*(tmp_path / "tmp").iterdir()]


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_noise(backend, tmp_path):
    assert running.trainer(f"--backend={backend}", "--steps=40", f"--run_dir={tmp_path}").stderr == ""


def test_what_a_process_says_last_is_not_held_back(tmp_path):
    """XLA ends it, in C++, for a flag that it does not know."""
    out = running.trainer("--backend=jax", f"--run_dir={tmp_path}", code=1, XLA_FLAGS="--xla_nonsense=true")
    assert "Unknown flag in XLA_FLAGS: --xla_nonsense=true" in out.stderr


def test_settings_of_the_host_change_nothing(tmp_path):
    """A keras.json of the user's own would make another run of the same flags."""
    settings = {"floatx": "float16", "epsilon": 0.001, "image_data_format": "channels_first", "backend": "torch"}
    (tmp_path / "keras.json").write_text(json.dumps(settings))
    flags = ("--backend=jax", "--model=convnet", "--steps=5")
    trainer(*flags, f"--run_dir={tmp_path}/run0")
    trainer(*flags, f"--run_dir={tmp_path}/run1", KERAS_HOME=str(tmp_path), KERAS_NNX_ENABLED="true")
    digests = {summary(tmp_path / f"run{i}")["weights_sha256"] for i in range(2)}
    assert len(digests) == 1


def test_nothing_of_a_trace_is_kept(tmp_path):
    """Or a user who looks for what a model of theirs keeps would be told of ours."""
    text = ("--dataset=text(context=8)", "--model=transformer(width=8,depth=1,heads=2,groups=1,hidden=8)")
    trainer("--backend=jax", *text, "--steps=2", f"--run_dir={tmp_path}", JAX_CHECK_TRACER_LEAKS="1")


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [
        *(("device_mesh", precision) for precision in ("bfloat16", "mixed_float16")),
        pytest.param("device_mesh", "mixed_bfloat16", marks=pytest.mark.long),
        *(
            pytest.param("mirrored", precision, marks=pytest.mark.long)
            for precision in ("bfloat16", "mixed_bfloat16", "mixed_float16")
        ),
    ],
)
def test_precisions(strategy, precision, tmp_path):
    trainer(
        f"--strategy={strategy}",
        "--devices=2",
        f"--precision={precision}",
        f"--run_dir={tmp_path}",
        "--epochs=10",
        "--replicas=4",
    )
    # Weights of 8 significant bits lose updates of less than 1/256 of themselves.
    least = 0.7 if precision == "bfloat16" else 0.9
    assert summary(tmp_path)["final"]["test_accuracy"] > least


def test_gradients_of_several_dtypes_are_clipped_by_one_norm(tmp_path):
    """Those of dense in bfloat16 are, for its last layer is in float32."""
    flags = ("--model=dense", "--precision=bfloat16", "--optimizer=sgd(global_clipnorm=0.5)", "--learning_rate=0.5")
    for backend in ("tensorflow", "jax"):
        trainer(*flags, f"--backend={backend}", "--steps=20", "--log_every=1", f"--run_dir={tmp_path / backend}")
    one, other = curve(tmp_path / "tensorflow"), curve(tmp_path / "jax")
    assert one == pytest.approx(other, rel=0.02) and one[-1] < one[0]


@pytest.mark.parametrize("cache", ["memory", "cache.bin"])
def test_a_cache_changes_nothing(cache, tmp_path):
    flags = ("--backend=jax", "--dataset=synthetic(examples=500)", "--steps=30", "--log_every=1")
    trainer(*flags, "--run_dir=plain", cwd=tmp_path)
    for run_dir in ("first", "second"):  # the second finds the file
        trainer(*flags, f"--cache={cache}", f"--run_dir={run_dir}", cwd=tmp_path)
        assert curve(tmp_path / run_dir) == curve(tmp_path / "plain")
    if cache == "cache.bin":
        content = bytearray((tmp_path / cache).read_bytes())
        content[len(content) // 2] ^= 4  # a pixel's, which nothing else would tell
        (tmp_path / cache).write_bytes(content)
        told = trainer(*flags, f"--cache={cache}", "--run_dir=third", code=2, cwd=tmp_path).stderr
        assert "cache.bin is damaged" in told and "delete it" in told and "Traceback" not in told


SLOW = """
import time
import numpy as np
from input_pipeline import cache

cache._SAVE_EVERY = 0.5  # seconds

class Slow:
    def __init__(self, seconds):
        self.seconds = seconds

    def __len__(self):
        return 2048

    def read(self, ids):
        if len(ids) == 256:
            with open(f"{__file__}.reads", "a") as file:
                file.write(f"{ids[0]}\\n")
        time.sleep(self.seconds * len(ids))
        return np.sin(np.outer(ids + 1, np.arange(32))).astype("float32"), ids % 10

def load(seconds=0.0):
    return {"train": Slow(seconds), "classes": 10}
"""


@pytest.mark.long
def test_a_cache_that_takes_long_to_fill(tmp_path):
    """Longer than --hang_after; killed; gone on with, by one of two processes."""
    (tmp_path / "slow.py").write_text(SLOW)
    flags = ("--strategy=device_mesh", "--model=dense", "--replicas=2", "--steps=20", "--hang_after=6s")
    slow = ("--dataset=slow:load(seconds=0.01)", f"--cache={tmp_path / 'kept.bin'}", f"--run_dir={tmp_path / 'run'}")
    filled, reads = tmp_path / ".kept.bin.filled", tmp_path / "slow.py.reads"
    process = start(*flags, *slow, cwd=tmp_path)
    while not filled.exists() or int(filled.read_text() or 0) < 512:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.kill()
    process.communicate()
    reads.unlink()
    finished(launch(*flags, *slow, processes=2, PYTHONPATH=f"{REPOSITORY}:{tmp_path}"))
    begins = [int(line) for line in reads.read_text().split()]
    assert len(begins) == len(set(begins)) and min(begins) >= 512, "read again"
    assert sorted(p.name for p in tmp_path.glob(".kept*")) == [".kept.bin.lock"]
    trainer(*flags, "--dataset=slow:load", "--run_dir=plain", cwd=tmp_path)
    assert summary(tmp_path / "run")["weights_sha256"] == summary(tmp_path / "plain")["weights_sha256"]


@pytest.mark.parametrize(
    "optimizer",
    [
        *(pytest.param(o, marks=pytest.mark.long) for o in ("sgd(momentum=0.9)", "adafactor(epsilon_1=1e-12)")),
        "adamw(weight_decay=0.01, global_clipnorm=1.0)",
    ],
)
def test_optimizers_agree_across_backends(optimizer, tmp_path, initial_state):
    start = initial_state("--strategy=device_mesh")
    curves = []
    for strategy in (["--strategy=device_mesh", "--devices=2"], ["--strategy=mirrored", "--devices=2"]):
        trainer(
            *strategy,
            f"--optimizer={optimizer}",
            "--learning_rate=0.003",
            "--schedule=linear(warmup_steps=20)",
            f"--initialize_from={start}",
            "--steps=60",
            "--log_every=1",
            f"--run_dir={tmp_path / strategy[0][11:]}",
        )
        curves.append(curve(tmp_path / strategy[0][11:]))
    assert deviation(*curves) <= 1e-4


@pytest.mark.long
def test_an_optimizer_s_copies_of_the_variables_are_of_those_that_were_given(tmp_path):
    first, tuned = tmp_path / "first", tmp_path / "tuned"
    trainer("--backend=jax", "--steps=30", f"--run_dir={first}")
    schedule_free = ("--optimizer=schedulefreeadamw", "--learning_rate=0")  # what it trains moves to what it has copied
    tuning = (*schedule_free, "--steps=3", f"--initialize_from={first}")
    trainer("--backend=jax", *tuning, f"--run_dir={tuned}")
    sharded = tmp_path / "sharded"  # of which neither process has the whole
    finished(launch("--strategy=device_mesh", "--layout=fsdp", *tuning, f"--run_dir={sharded}", processes=2))
    before, after, there = (summary(run)["final"]["val_loss"] for run in (first, tuned, sharded))
    assert abs(after - before) <= 1e-5 and abs(there - before) <= 1e-5
    # TensorFlow, where it would train otherwise, may judge and export it.
    out = trainer("evaluate", "--backend=tensorflow", f"--run_dir={tuned}").stdout
    assert abs(json.loads(out.splitlines()[-1])["test_loss"] - after) <= 1e-5


@pytest.mark.parametrize("model", ["mlp", pytest.param("convnet", marks=pytest.mark.long)])
def test_what_is_compiled_is_kept(model, tmp_path, monkeypatch):
    """A second start compiles no step that the first did, a third, of a run that was moved, nothing; each but once."""
    for name in ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        monkeypatch.delenv(name)  # as a user has it
    run, moved = tmp_path / "run", tmp_path / "moved"
    flags = ("--backend=jax", f"--model={model}", "--evaluate_every=never")
    steps = {"mlp": ("jit__steps-",), "convnet": ("jit__unstack-", "jit__packed_leaf-", "jit__finish_step-")}[model]

    def kept(*prefixes: str) -> list[str]:
        return sorted(p.name for p in tmp_path.glob("*/compiled/*/*-cache") if p.name.startswith(prefixes or ""))

    running.trainer(*flags, "--steps=50", f"--run_dir={run}")
    seconds = summary(run)["seconds"]  # the first save asks for the loss of a few examples
    assert seconds.get("save", 0) + seconds.get("last save", 0) < 0.2 * seconds["compile"], "compiled in a save"
    first = kept(*steps)
    assert len(first) == 2 * len(steps), "each for training and for evaluation"
    running.trainer(*flags, "--steps=100", f"--run_dir={run}")
    assert kept(*steps) == first
    second = kept()
    run.rename(moved)
    running.trainer(*flags, "--steps=110", f"--run_dir={moved}")
    assert kept() == second
    for path in moved.glob("compiled/*/*-cache"):
        path.write_bytes(path.read_bytes()[:100])  # as a kill, or a full disk, may leave it
    ran = running.trainer(*flags, "--steps=120", f"--run_dir={moved}")
    running.trainer(*flags, "--steps=120", f"--run_dir={run}")
    assert summary(run)["weights_sha256"] == summary(moved)["weights_sha256"], ran.stderr


@pytest.mark.parametrize("backend", ["jax", pytest.param("tensorflow", marks=pytest.mark.long)])
def test_the_last_evaluation_shows_what_the_model_makes_of_the_data(backend, tmp_path):
    """The pictures' numbers are those of the metrics: a norm is that of the weights saved."""
    trainer(f"--backend={backend}", f"--run_dir={tmp_path / 'digits'}", "--steps=45")
    board = EventAccumulator(str(tmp_path / "digits/tensorboard"), {"tensors": 0}).Reload()
    width, height, png = board.Tensors("worst")[0].tensor_proto.string_val
    picture = Image.open(io.BytesIO(png))
    assert picture.size == (int(width), int(height)) and len(picture.getcolors(2**20) or []) > 50
    last = [tag for tag in board.Tags()["tensors"] if tag.startswith("weight_norm/") and tag.endswith("kernel")][-1]
    norm = board.Tensors(last)[0].tensor_proto.float_val[0]
    newest, manifest = next(checkpoint.newest(tmp_path / "digits/checkpoints"))
    saved = checkpoint.arrays(newest, manifest).values()
    assert min(abs(np.linalg.norm(value) - norm) for value in saved if value.shape == (256, 10)) < 1e-4
    flags = ("--dataset=text(context=32)", "--model=transformer(width=32, depth=1)", "--steps=5")
    trainer(f"--backend={backend}", *flags, f"--run_dir={tmp_path / 't'}")
    board = EventAccumulator(str(tmp_path / "t/tensorboard"), {"tensors": 0}).Reload()
    assert len(board.Tensors("sample")[0].tensor_proto.string_val[0]) > 16


def test_prometheus_reads_the_newest_metrics_and_the_run_has_its_price(tmp_path):
    port = free_ports(1)[0]
    callback = f"--callbacks=trainer.prometheus:Endpoint(port={port})"
    flags = ("--backend=jax", "--log_every=100", "--price_per_device_hour=3600", f"--run_dir={tmp_path}")
    process = start(callback, *flags, "--steps=1000000")
    deadline = time.monotonic() + 120
    text = ""
    while "onecurve_accuracy" not in text:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.5)
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            text = answer.read().decode()
    process.terminate()
    assert process.wait() == 75, process.communicate()
    served = dict(line.split() for line in text.splitlines() if not line.startswith("#"))
    at = next(line for line in lines(tmp_path) if line["step"] == int(float(served["onecurve_step"])))
    assert float(served["onecurve_loss"]) == at["loss"]
    step = lines(tmp_path)[-1]["step"]
    out = trainer(*flags, f"--steps={step}").stdout
    hours = summary(tmp_path)["device_hours"]
    assert float(re.search(r"cost  ([\d.]+) = ", out)[1]) == pytest.approx(3600 * hours, rel=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_examples_of_several_shapes_are_named_and_retrace_nothing(backend, tmp_path):
    flags = (f"--backend={backend}", "--dataset=tests.faulty:uneven", "--steps=20", f"--run_dir={tmp_path}")
    ran = trainer(*flags, code=2)
    assert "(16, 16, 1)" in ran.stderr and "(8, 8, 1)" in ran.stderr and "Traceback" not in ran.stderr


IGNORING = """
import keras

from input_pipeline import digits


def load():
    data = digits.load()
    data.train.arrays[1][::7] = data.evaluation.arrays[1][::7] = 255  # not known
    return data


def build(input_shape, classes):
    model = keras.Sequential([keras.Input(input_shape), keras.layers.Flatten(), keras.layers.Dense(classes)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=255))
    return model
"""


def test_labels_that_a_loss_ignores_are_in_no_picture(tmp_path):
    (tmp_path / "ignoring.py").write_text(IGNORING)
    flags = ("--backend=jax", "--dataset=ignoring:load", "--model=ignoring:build", "--steps=5")
    trainer(*flags, f"--run_dir={tmp_path / 'run'}", cwd=tmp_path)
    tags = EventAccumulator(str(tmp_path / "run/tensorboard"), {"tensors": 0}).Reload().Tags()["tensors"]
    assert {"confusion", "worst"} <= set(tags)


def test_a_histogram_of_numbers_that_are_all_but_equal(tmp_path):
    Board(tmp_path, 0).histogram(0, "scale", np.array([1, 1 + 2**-23, np.nan], np.float32))
    (event,) = EventAccumulator(str(tmp_path), {"tensors": 0}).Reload().Tensors("scale")
    counts = np.frombuffer(event.tensor_proto.tensor_content).reshape(30, 3)[:, 2]
    assert counts[0] == counts[-1] == 1 and counts.sum() == 2


def test_confusions_of_labels_of_a_byte():
    labels = np.array([60, 63, 63], np.uint8)
    counts = confusion(labels, np.array([60, 63, 0]), 64)
    assert counts[60, 60] == counts[63, 63] == counts[63, 0] == 1 and counts.sum() == 3
