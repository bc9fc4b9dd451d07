"""The verbs that prove a run after the fact: audit, checkpoints, diff, drill; and that they can fail."""

import json
import re
import shutil

import numpy as np
import pytest

from input_pipeline import order
from tests.forks import trainer
from tests.running import REPOSITORY
from trainer import checkpoint
from trainer.diff import relative

pytestmark = pytest.mark.xdist_group("proof")  # they share a run
FLAGS = ("--model=dense", "--replicas=2", "--log_every=5", "--save_every=10", "--global_batch=80")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of 40 steps that moved between devices and backends, each leg stopped in mid-epoch."""
    directory = tmp_path_factory.mktemp("proof") / "run"
    legs = (
        ("13", "--strategy=mirrored", "--devices=2"),
        ("22", "--backend=jax"),
        ("31", "--strategy=device_mesh", "--devices=2"),
        ("40", "--backend=jax"),
    )
    for steps, *where in legs:
        trainer(*where, *FLAGS, f"--steps={steps}", f"--run_dir={directory}")
    return directory


def test_audit_proves_a_run_over_all_its_starts(run):
    ran = trainer("audit", f"--run_dir={run}")
    assert "steps 1 to 40, " in ran.stdout
    assert "2 passes of 1,437 examples: each example exactly once in each; 326 of the next, none twice" in ran.stdout


@pytest.mark.parametrize("word", ["lost", "fed again"])
def test_audit_names_lost_and_repeated_examples(word, run, tmp_path):
    """The log of a run whose pipeline left step 8 out, or fed it twice."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    ids = order.order(0, 7 * 80 + np.arange(80), 1437)
    line = next(line for line in lines if line["step"] == 10)
    sign = -1 if word == "lost" else 1
    line["ids"] = f"{(int(line['ids'], 16) + sign * int(order.checksums([ids])[0])) % 2**64:016x}"
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ran = trainer("audit", f"--run_dir={copy}", code=1)
    assert f"of steps 8 to 8, these examples were {word}: {ids[0]}, {ids[1]}, " in ran.stdout


def test_a_checkpoint_put_at_another_step_is_noticed(run, tmp_path):
    """The state of step 30 passed off as that of step 20: nine steps' examples are lost, and audit says so."""
    copy = tmp_path / "run"
    trainer("--backend=jax", *FLAGS, "--steps=20", f"--run_dir={copy}")
    newest = copy / "checkpoints" / "00000020"
    manifest = json.loads((newest / "manifest.json").read_text())
    manifest = {k: v for k, v in manifest.items() if k != "sha256"} | {"step": 30}
    manifest["sha256"] = checkpoint.digest(manifest)
    (newest / "manifest.json").write_text(json.dumps(manifest))
    newest.rename(newest.with_name("00000030"))
    trainer("--backend=jax", *FLAGS, "--steps=40", f"--run_dir={copy}")
    ran = trainer("audit", f"--run_dir={copy}", code=1)
    assert "of steps 21 to 30, these examples were lost" in ran.stdout


def test_files_that_a_disk_has_spoilt(run, tmp_path):
    """What is left of a log ends where it ends; only the run's definition can't be done without."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    for name in ("metrics.jsonl", "starts/000001.json"):
        with open(copy / name, "ab") as file:
            file.write(b'{"step": 4\xff\0\0')
    assert "steps 1 to 40, " in trainer("audit", f"--run_dir={copy}").stdout
    assert "one run" in trainer("diff", str(run), str(copy)).stdout
    trainer("report", f"--run_dir={copy}")
    trainer("--backend=jax", *FLAGS, "--steps=45", f"--run_dir={copy}")
    assert "steps 1 to 45, " in trainer("audit", f"--run_dir={copy}").stdout
    (copy / "definition.json").write_text("")
    told = trainer("--backend=jax", *FLAGS, "--steps=50", f"--run_dir={copy}", code=2).stderr
    assert "its definition.json is damaged" in told and "Traceback" not in told
    (copy / "run.flags").write_bytes(b"--model=dense\n\xff")
    told = trainer("audit", f"--run_dir={copy}", code=2).stderr
    assert "its run.flags is damaged" in told and "Traceback" not in told


def test_losses_of_no_weight_are_not_apart():
    assert relative(float("nan"), float("nan")) == 0 and relative(2.0, 1.0) == 0.5
    assert relative(1.0, float("nan")) == relative(float("nan"), 1.0) == float("inf")


def test_what_only_reads_needs_no_backend(run, tmp_path):
    """A run is looked at where no framework is, and in no time."""
    for package in ("keras", "jax", "tensorflow", "tensorboard"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(f"raise ImportError('no {package} here')")
    for verb in ("checkpoints", "report", "doctor"):
        trainer(verb, f"--run_dir={run}", PYTHONPATH=f"{tmp_path}:{REPOSITORY}")
    assert "one run" in trainer("diff", str(run), str(run), PYTHONPATH=f"{tmp_path}:{REPOSITORY}").stdout


def test_checkpoints_are_listed_and_verified(run, tmp_path):
    ran = trainer("checkpoints", f"--run_dir={run}")
    assert ran.stdout.count(" whole") == 3 and "best" in ran.stdout
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (copy / "checkpoints" / "00000040" / "model.weights.h5").write_bytes(b"x")
    assert "DAMAGED" in trainer("checkpoints", f"--run_dir={copy}", code=1).stdout
    assert "model.weights.h5 is not what was written" in trainer("diff", str(run), str(copy), code=1).stdout


def test_diff_names_where_two_runs_part(run, tmp_path):
    assert "one run" in trainer("diff", str(run), str(run)).stdout
    flags = ("--backend=jax", *FLAGS, "--log_every=1", "--steps=3")
    a, b, c = (tmp_path / name for name in "abc")
    trainer(*flags, f"--run_dir={a}")
    trainer(*flags, "--seed=1", f"--run_dir={b}")
    trainer(*flags, "--learning_rate=0.01", f"--run_dir={c}")
    ran = trainer("diff", str(a), str(b), code=1)
    assert "definition: --seed: 0, 1" in ran.stdout and "step 1: other examples were fed" in ran.stdout
    ran = trainer("diff", str(a), str(c), code=1)
    assert "another learning rate" in ran.stdout and "step 2: loss" in ran.stdout and "weights of step 3" in ran.stdout
    assert re.search(r"step 2: gradients of \d of \d layers differ in length, dense/\w+ first", ran.stdout)
    assert "two runs" in trainer("diff", str(a), code=2).stderr
    # A run that was ended and then made longer has a line more, and the next line tells of fewer steps.
    flags = ("--backend=jax", *FLAGS, "--log_every=3", f"--run_dir={tmp_path / 'longer'}")
    trainer(*flags, "--steps=2")
    trainer(*flags, "--steps=6")
    trainer(*flags[:-1], "--steps=6", f"--run_dir={tmp_path / 'at_once'}")
    assert "one run" in trainer("diff", str(tmp_path / "longer"), str(tmp_path / "at_once")).stdout


@pytest.mark.long
def test_a_drill_passes_on_a_good_model():
    ran = trainer("drill", "--model=dense", timeout=900)
    assert "Nothing was lost." in ran.stdout and ran.stdout.count("  ok") >= 10


@pytest.mark.long
def test_a_drill_fails_where_recovery_is_sabotaged():
    """Data that are not a function of the id: what is fed after a kill is not what would have been fed."""
    ran = trainer("drill", "--model=dense", "--dataset=tests.sabotaged:load", code=1, timeout=900)
    assert "FAILED: other weights" in ran.stdout
