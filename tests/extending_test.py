"""The worked examples of the docs: their very text, run as a user's modules."""

import re

import numpy as np
import pytest

from tests.forks import trainer
from tests.running import REPOSITORY, curve, deviation, lines, summary


def write_example(directory, name, page="extending"):
    """A module of the page, as a file."""
    text = (REPOSITORY / "docs" / f"{page}.md").read_text()
    code = re.search(rf"```python\n(# {name}.py\b.*?)```", text, re.DOTALL)
    assert code
    (directory / f"{name}.py").write_text(code[1])


def test_a_strategy_of_one_s_own(tmp_path):
    write_example(tmp_path, "my_strategy")
    flags = ("--backend=jax", "--model=dense", "--replicas=4", "--steps=20", "--log_every=1", "--seed=3")
    trainer("--strategy=my_strategy:create", *flags, f"--run_dir={tmp_path / 'own'}", cwd=tmp_path)
    trainer(*flags, f"--run_dir={tmp_path / 'ours'}")
    assert deviation(curve(tmp_path / "ours"), curve(tmp_path / "own")) <= 1e-6
    ours, own = (summary(tmp_path / name)["final"] for name in ("ours", "own"))
    assert own["test_accuracy"] == ours["test_accuracy"]


def test_a_trained_model_is_tuned_further(tmp_path):
    """From what a run has exported, with LoRA and a new head; stopped on the way, it ends in the same bits.

    And a smaller one learns from it.
    """
    write_example(tmp_path, "my_tuned")
    write_example(tmp_path, "my_distilled")
    trainer("--steps=60", "--run_dir=runs/first", "--backend=jax", cwd=tmp_path)
    trainer("export", "--run_dir=runs/first", cwd=tmp_path)
    flags = ("--model=my_tuned:build(rank=2)", "--backend=jax")
    trainer(*flags, "--steps=40", "--run_dir=whole", cwd=tmp_path)
    for steps in (20, 40):
        trainer(*flags, f"--steps={steps}", "--run_dir=cut", cwd=tmp_path)
    whole, cut = (summary(tmp_path / name) for name in ("whole", "cut"))
    assert whole["weights_sha256"] == cut["weights_sha256"] and whole["final"]["test_accuracy"] > 0.7
    out = trainer("--model=my_distilled:build", "--backend=jax", "--steps=200", "--run_dir=small", cwd=tmp_path).stdout
    assert "loss  what the model's compute_loss() returns" in out
    final = summary(tmp_path / "small")["final"]
    assert final["test_accuracy"] > 0.4 and 0 < final["test_apart"] < final["test_loss"]


def test_an_optimizer_and_a_schedule_of_one_s_own(tmp_path):
    """They give one curve on either backend, whose learning rate halves as they say."""
    write_example(tmp_path, "my_signs")
    flags = ("--optimizer=my_signs:create(momentum=0.8)", "--schedule=my_signs:halving", "--learning_rate=0.01")
    for backend in ("tensorflow", "jax"):
        steps = ("--steps=40", "--log_every=10", f"--backend={backend}", f"--run_dir={backend}")
        trainer(*flags, *steps, "--evaluate_every=never", cwd=tmp_path)
    assert deviation(curve(tmp_path / "tensorflow"), curve(tmp_path / "jax")) < 1e-5
    rates = [line["learning_rate"] for line in lines(tmp_path / "jax")]
    assert rates == pytest.approx([0.005, 0.0025, 0.00125, 0.000625])


@pytest.mark.long
def test_tokens_of_another_program(tmp_path):
    write_example(tmp_path, "my_tokens", "data")
    for name, tokens in (("train", 2000), ("val", 200)):
        (np.arange(tokens, dtype=np.uint16) % 50 + 1000).tofile(tmp_path / f"{name}.bin")
    flags = ("--dataset=my_tokens:load(context=16, classes=1050)", "--data_dir=.", "--steps=30", "--backend=jax")
    model = "--model=transformer(width=32, depth=1, heads=2, groups=2, hidden=32)"
    out = trainer(*flags, model, "--learning_rate=0.03", "--run_dir=run", cwd=tmp_path).stdout
    assert "124 examples to train on, 12 to test on" in out
    assert summary(tmp_path / "run")["final"]["test_accuracy"] > 0.9  # each token says which is next


def test_what_is_no_strategy_is_said(tmp_path):
    (tmp_path / "empty.py").write_text("def create(config):\n    return None\n")
    ran = trainer("--strategy=empty:create", f"--run_dir={tmp_path / 'run'}", cwd=tmp_path, code=2)
    assert "returned a NoneType" in ran.stderr
