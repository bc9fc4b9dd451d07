"""What a run computes is what plain Keras computes of the same model, variables and batches."""

import json
import subprocess
import sys

import pytest

from tests.forks import trainer
from tests.plain import BATCH, STEPS
from tests.running import REPOSITORY, environment, lines, summary

long = pytest.mark.long


@pytest.mark.parametrize(
    ("case", "backend", "replicas"),
    [
        ("convolutions", "tensorflow", 1),  # its statistics of a batch are those of a logical replica
        ("attention", "jax", 2),
        pytest.param("convolutions", "jax", 1, marks=long),
        pytest.param("recurrent", "tensorflow", 4, marks=long),
        pytest.param("recurrent", "jax", 2, marks=long),
        pytest.param("attention", "tensorflow", 4, marks=long),
    ],
)
def test_plain_keras_gives_the_same_curve(case, backend, replicas, tmp_path):
    """Regularizers, constraints, clipping, schedules, moving averages, loss weights and metrics among it."""
    run = tmp_path / "run"
    flags = (f"--model=tests.plain:build(case={case!r})", "--dataset=tests.plain:load", f"--backend={backend}")
    flags += (f"--replicas={replicas}", f"--global_batch={BATCH}", f"--steps={STEPS}", "--evaluate_every=never")
    trainer(*flags, "--save_every=1", f"--keep={STEPS + 1}", "--log_every=1", f"--run_dir={run}")
    command = [sys.executable, "-m", "tests.plain", case, str(run)]
    out = subprocess.run(
        command, cwd=REPOSITORY, env=environment(KERAS_BACKEND=backend), capture_output=True, text=True, check=True
    ).stdout
    *steps, evaluation = json.loads(out.splitlines()[-1])
    assert len(steps) == STEPS
    for expected, line in zip(steps, lines(run), strict=True):
        assert {name: line[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    final = summary(run)["final"]
    assert {name: final[f"test_{name}"] for name in evaluation} == pytest.approx(evaluation, rel=1e-4)
