"""One run, one curve: on one device and on several, on TensorFlow and on JAX, on even and uneven data."""

import pathlib

import pytest

from tests.forks import trainer
from tests.running import REPOSITORY, curve, deviation, lines, summary

TENSORFLOW = [
    ("--strategy=one_device", "--backend=tensorflow"),
    ("--strategy=mirrored", "--devices=2"),
    ("--strategy=mirrored", "--devices=4"),
]
JAX = [
    ("--strategy=one_device", "--backend=jax"),
    ("--strategy=device_mesh", "--devices=2"),
    ("--strategy=device_mesh", "--devices=4"),
]

# Rounding alone: the all-reduce adds in another order than one device does. 100 float32 steps of
# the models here amplify that to a few 1e-6.
SAME_BACKEND = 1e-5


def run_each(strategies: list[tuple[str, ...]], tmp_path: pathlib.Path, *flags: str, **env: str) -> list[pathlib.Path]:
    directories = []
    for strategy in strategies:
        directories.append(tmp_path / "-".join(flag.partition("=")[2] for flag in strategy))
        trainer(*strategy, *flags, f"--run_dir={directories[-1]}", **env)
    return directories


def agree(directories: list[pathlib.Path], within: float) -> None:
    first, *others = directories
    for other in others:
        assert deviation(curve(first), curve(other)) <= within, other.name


def compiled_by_xla(input_shape, classes):
    """A model that asks for XLA on TensorFlow, in Keras's own words."""
    from trainer.models.mlp import build

    model = build(input_shape, classes)
    model.compile(jit_compile=True)
    return model


@pytest.mark.long
def test_xla_does_not_show_in_the_curve(tmp_path):
    directories = [tmp_path / "by XLA", tmp_path / "as it is"]
    flags = ("--backend=tensorflow", "--steps=100", "--log_every=1", "--on_nan=skip")
    for directory, model in zip(directories, ("tests.curve_test:compiled_by_xla", "mlp"), strict=True):
        said = trainer(*flags, f"--model={model}", f"--run_dir={directory}").stdout
        assert ("OneDeviceStrategy, XLA" in said) == (directory is directories[0])
    agree(directories, SAME_BACKEND)
    seconds = summary(directories[0])["seconds"]
    assert seconds["step"] < 5 * seconds["compile"], "it is compiled once, not with each call"
    two = ("--model=tests.curve_test:compiled_by_xla", "--replicas=2", "--steps=1", f"--run_dir={tmp_path / 'two'}")
    assert "no XLA: that is for one logical replica" in trainer("--backend=tensorflow", *two).stdout


@pytest.mark.parametrize(
    ("strategies", "model"),
    [
        pytest.param(TENSORFLOW, "dense", id="tensorflow-dense"),
        *(
            pytest.param(strategies, model, id=f"{name}-{model}", marks=pytest.mark.long)
            for strategies, name, model in (
                (TENSORFLOW, "tensorflow", "mlp"),
                (TENSORFLOW, "tensorflow", "convnet"),
                (JAX, "jax", "mlp"),
                (JAX, "jax", "dense"),
                (JAX, "jax", "convnet"),
            )
        ),
    ],
)
def test_devices_don_t_show_in_the_curve(strategies, model, tmp_path):
    """Dropout, batch statistics, accumulation; 1,437 examples in batches of 128; 360 to evaluate on."""
    directories = run_each(
        strategies,
        tmp_path,
        f"--model={model}",
        "--replicas=4",
        "--global_batch=128",
        "--steps=100",
        "--log_every=1",
        "--evaluate_every=50",
    )
    agree(directories, SAME_BACKEND)
    evaluations = [[line["val_loss"] for line in lines(d) if "val_loss" in line] for d in directories]
    for found in evaluations:
        assert len(found) == 2
        assert deviation(evaluations[0], found) <= SAME_BACKEND
    accuracies = {summary(d)["final"]["test_accuracy"] for d in directories}
    assert len(accuracies) == 1
    # A share of 360 examples, each counted once: padding or double counting would show.
    assert round(accuracies.pop() * 360, 3).is_integer()


def test_the_backend_s_all_reduce_gives_the_same_curve(tmp_path):
    """What accelerators run where --exact is not asked for; large variables and small ones."""
    strategies = [
        ("--strategy=one_device",),
        *(("--strategy=tests.all_reduced:create", f"--devices={n}") for n in (2, 4)),
    ]
    flags = ("--backend=jax", "--model=mlp(units=512)", "--replicas=4", "--steps=50", "--log_every=1")
    directories = run_each(strategies, tmp_path, *flags)
    agree(directories, SAME_BACKEND)
    assert len({summary(d)["weights_sha256"] for d in directories}) > 1, "they add in the tree's order"


@pytest.mark.parametrize(
    ("optimizer", "across_backends"),
    # Adam divides small gradients by their own size, which turns a difference in the last bit of a
    # gradient near zero into one of a whole step.
    [pytest.param("sgd", 1e-5, marks=pytest.mark.long), pytest.param("adam", 1e-4, marks=pytest.mark.long)],
)
def test_fashion_mnist_curves(optimizer, across_backends, tmp_path, keras_home):
    """The first 100 steps of all six strategies, from one seed."""
    data = ("--dataset=fashion_mnist", "--model=mlp", f"--optimizer={optimizer}", "--learning_rate=0.001")
    flags = (*data, "--steps=100", "--log_every=1")
    # One run, hence one number of logical replicas on all devices.
    agree(run_each(TENSORFLOW, tmp_path / "shared", *flags, "--replicas=4", KERAS_HOME=keras_home), SAME_BACKEND)
    agree(run_each(JAX, tmp_path / "shared", *flags, "--replicas=4", KERAS_HOME=keras_home), SAME_BACKEND)
    # Across the backends every sum is rounded otherwise. See docs/decisions.md on what a relu makes of that.
    one_device = [TENSORFLOW[0], JAX[0]]
    agree(run_each(one_device, tmp_path, *flags, "--replicas=1", KERAS_HOME=keras_home), across_backends)


@pytest.mark.parametrize(
    "strategy",
    [JAX[0], *(pytest.param(s, marks=pytest.mark.long) for s in (*TENSORFLOW, *JAX[1:]))],
    ids=lambda s: "-".join(f.partition("=")[2] for f in s),
)
def test_fashion_mnist_learns(strategy, tmp_path, keras_home):
    """60,000 real images, 2 epochs."""
    trainer(
        *strategy,
        "--dataset=fashion_mnist",
        "--model=mlp",
        "--global_batch=64",
        "--epochs=2",
        "--log_every=500",
        f"--run_dir={tmp_path / 'run'}",
        KERAS_HOME=keras_home,
    )
    assert summary(tmp_path / "run")["final"]["test_accuracy"] >= 0.85


def test_digits_by_default(tmp_path):
    """On TensorFlow, and without JAX, whose import would be a tenth of the start."""
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("raise RuntimeError('no jax here')")
    trainer(f"--run_dir={tmp_path / 'run'}", PYTHONPATH=f"{tmp_path}:{REPOSITORY}")
    assert summary(tmp_path / "run")["final"]["test_accuracy"] >= 0.96


WRAPPING = """
import keras
from keras import layers

def build(input_shape, classes):
    keras.utils.set_random_seed(1)
    rows = [layers.Conv2D(4, 3, padding="same"), layers.Reshape((8, 32)), layers.Bidirectional(layers.LSTM(4))]
    return keras.Sequential([keras.Input(input_shape), *rows, layers.Dense(classes)])
"""


def test_jax_needs_no_tensorflow(tmp_path):
    """A run on JAX trains, saves, evaluates and goes on without it, and so starts 4 s sooner.

    Keras itself would import it to wrap a layer or to set a seed. Nor does a run load what else few runs use
    (trainer/later.py), which takes a fifth of the imports.
    """
    for package in ("tensorflow", "scipy", "requests"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(f"raise RuntimeError('no {package} here')")
    (tmp_path / "wrapping.py").write_text(WRAPPING)
    environment = {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    flags = ("--strategy=device_mesh", "--devices=2", "--model=wrapping:build", f"--run_dir={tmp_path / 'run'}")
    trainer(*flags, "--steps=20", **environment)
    trainer(*flags, "--steps=30", **environment)
    assert summary(tmp_path / "run")["step"] == 30
    trainer("evaluate", f"--run_dir={tmp_path / 'run'}", **environment)
