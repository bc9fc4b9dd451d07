"""The command line in the forms that people give it, in their locales, and to the launcher."""

import re
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.running import REPOSITORY, environment, finished, launch, summary, trainer
from trainer.command_line import VERBS
from trainer.config import Config

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
MIXTURE = """mixture(parts={
  'digits': 3,
  'synthetic(shape=(8, 8, 1))': 1,
})"""


def test_words_lines_and_letters_of_any_kind(tmp_path):
    """A run of flags and values apart and of a dataset in several lines is found by its directory, in any locale."""
    run = tmp_path / "Läufe 100%" / "ł"
    words = ("--backend", "jax", "--steps", "20", f"--dataset={MIXTURE}", "--run_dir", "~/Läufe 100%/ł")
    trainer(*words, HOME=str(tmp_path), **ASCII)
    assert summary(run)["step"] == 20
    assert "test_loss" in trainer("evaluate", run).stdout
    assert "test_loss" in trainer("evaluate", f"--run_dir={run}", **ASCII).stdout
    assert trainer("report", run).stdout.strip() == str(run / "report.html")
    trainer(f"--flagfile={run / 'run.flags'}", "--steps=30")
    assert summary(run)["step"] == 30


@pytest.mark.parametrize(
    "spec",
    ["mlp(units=8)", "net('a b')", """net(a='"b"')""", "net(a='$HOME')", "net(a='`b`')", "net(a='b!c\\\\d')", MIXTURE],
)
def test_a_command_that_is_printed_is_taken_by_a_shell_as_it_was_meant(spec):
    config = Config(dataset=spec, run_dir="~/Läufe 100%")
    shell = ["bash", "-c", f"set -- {config.command()}; printf '%s\\0' \"$@\""]
    words = subprocess.run(shell, capture_output=True, text=True, check=True).stdout.split("\0")[:-1]
    assert words == ["python", "-m", "trainer", *config.to_flags()] == shlex.split(config.command())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "steps=10"], "'steps=10' is no flag"),
        (["steps=10"], "there is no such verb"),
        (["--batch_size=8"], "see --global_batch in"),
        (["report", "one", "two"], "--run_dir=one: holds no run"),
        (["report", "--run_dir=one"], "--run_dir=one: holds no run"),
    ],
)
def test_words_that_nothing_takes_are_told(words, said, tmp_path):
    err = trainer(*words, code=2, cwd=tmp_path).stderr
    assert said in err and "Fix: " in err and "Traceback" not in err


def test_the_launcher_reads_the_flags_as_the_trainer_does(tmp_path):
    """It knows the run of a file of flags, keeps the logs there, and tells a mistake once, before anything starts."""
    run, flags = tmp_path / "run", tmp_path / "flags"
    flags.write_text(f"--strategy=device_mesh\n--replicas=2\n--steps=4\n--run_dir={run}\n")
    finished(launch(f"--flagfile={flags}"))
    assert sorted(log.name for log in (run / "logs").iterdir()) == ["process-0.log", "process-1.log"]
    shutil.rmtree(run)
    out = finished(launch(f"--flagfile={flags}", "--steps=four"), code=2)
    assert out.count("onecurve: ") == 1 and "--steps=four" in out
    assert not run.exists()
    out = finished(launch(f"--flagfile={flags}", "--run_dir=/proc/none"), code=2)
    assert "--logs=/proc/none/logs: can't be made" in out and "Traceback" not in out


def test_help_lists_the_verbs(tmp_path):
    told = trainer("--help", code=1, cwd=tmp_path).stdout
    for verb in VERBS:
        assert re.search(rf"^ *{verb}\b|^ *\w[^:]*, {verb}\b", told, re.MULTILINE), verb


@pytest.mark.parametrize("strategy", ["mirrored", "device_mesh"])
def test_a_package_that_computes_when_it_is_imported_is_so_after_the_devices_are_taken(strategy, tmp_path):
    package = tmp_path / "computing"
    package.mkdir()
    (package / "__init__.py").write_text("import keras\n\nONES = keras.ops.ones((2,))\n")
    (package / "net.py").write_text("from trainer.models.mlp import build\n")
    flags = (f"--strategy={strategy}", "--devices=2", "--steps=1", "--run_dir=run")
    trainer("--model=computing.net:build", *flags, cwd=tmp_path)


def test_a_job_that_can_t_run_is_not_submitted():
    command = [sys.executable, "-m", "launch.slurm", "--dry_run", "--", "--strategy=device_mesh"]

    def ran(flag):
        return subprocess.run([*command, flag], cwd=REPOSITORY, env=environment(), capture_output=True, text=True)

    assert ran("--steps=4").stdout.startswith("#!/bin/bash")
    wrong = ran("--steps=four")
    assert wrong.returncode == 2 and "--steps=four" in wrong.stderr and not wrong.stdout
