"""The README's own code, as a newcomer uses it: a model, a folder of images, two processes, a kill, the same again."""

import os
import re
import signal
import subprocess

import numpy as np
import pytest
from PIL import Image

from input_pipeline import digits
from tests.running import REPOSITORY, children, finished, launch, summary, trainer, wait_for_checkpoint

README = (REPOSITORY / "README.md").read_text()


def block(name: str) -> str:
    """The README's code of a file."""
    found = re.search(rf"```python\n(# {re.escape(name)}.*?)```", README, re.DOTALL)
    assert found, name
    return found[1]


def test_own_model_on_a_folder_of_images_in_two_processes_killed(tmp_path):
    (tmp_path / "my_model.py").write_text(block("my_model.py"))
    images, labels = digits.load().train.arrays
    for i in range(600):
        folder = tmp_path / "photographs" / str(labels[i])
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images[i, ..., 0] * 15).resize((16, 16)).save(folder / f"{i}.png")
    flags = [
        "--strategy=device_mesh",
        "--replicas=2",
        "--model=my_model:build(units=32)",
        "--dataset=images(size=16)",
        f"--data_dir={tmp_path / 'photographs'}",
        "--save_every=20",
        "--steps=200",
    ]
    path = {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    run = tmp_path / "run"
    process = launch(*flags, f"--run_dir={run}", **path)
    wait_for_checkpoint(process, run, 40)
    os.kill(children(process.pid)[1], signal.SIGKILL)
    process.communicate()
    assert process.returncode
    finished(launch(*flags, f"--run_dir={run}", **path))
    finished(launch(*flags, f"--run_dir={tmp_path / 'whole'}", **path))
    assert summary(run)["weights_sha256"] == summary(tmp_path / "whole")["weights_sha256"]
    assert summary(run)["final"]["accuracy"] > 0.8


def test_own_data(tmp_path):
    (tmp_path / "my_model.py").write_text(block("my_model.py"))
    (tmp_path / "my_data.py").write_text(block("my_data.py"))
    (tmp_path / "images").mkdir()
    images, labels = digits.load().train.arrays
    for i in range(300):
        np.save(tmp_path / "images" / f"{labels[i]}_{i}.npy", images[i])
    command = re.search(r"`python -m trainer (--dataset=my_data:load [^`]+)`", README)
    assert command
    flags = [word for word in command[1].split() if not word.startswith("--data_dir")]
    more = ("--model=my_model:build(units=32)", f"--data_dir={tmp_path / 'images'}", "--epochs=20")
    trainer(*flags, *more, f"--run_dir={tmp_path / 'run'}", cwd=tmp_path)
    assert summary(tmp_path / "run")["final"]["accuracy"] > 0.7


def test_make_installs_what_is_asked_for_though_something_else_is_installed(tmp_path):
    """CUDA, as a run that finds no GPU says, beside what is there."""
    (tmp_path / "installed-with-dev").touch()
    for extras, installs in (("dev", False), ("dev,cuda", True)):
        command = ["make", "--dry-run", "install", f"VENV={tmp_path}", f"EXTRAS={extras}"]
        ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
        assert (f"-e '.[{extras}]'" in ran.stdout) == installs


ELSEWHERE = """
'''What Linux alone has is not there: files of the kernel's, and what Python offers of it.'''
import builtins
import ctypes
import io
import os

for name in ("sched_getaffinity", "posix_fallocate"):
    delattr(os, name)
os.process_cpu_count = os.cpu_count  # of Python 3.13, which would ask the former


class CDLL(ctypes.CDLL):
    def __getattr__(self, name):
        if name in ("prctl", "mallopt", "sync_file_range"):
            raise AttributeError(name)
        return super().__getattr__(name)


def without_kernel_files(function):
    def call(path, *arguments, **keywords):
        if isinstance(path, str | os.PathLike) and os.fsdecode(path).startswith(("/proc/", "/sys/")):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return function(path, *arguments, **keywords)

    return call


ctypes.CDLL = CDLL
builtins.open = io.open = without_kernel_files(open)
for name in ("stat", "open", "listdir", "scandir"):
    setattr(os, name, without_kernel_files(getattr(os, name)))
"""


@pytest.mark.long
def test_without_what_linux_alone_has(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(ELSEWHERE)
    path = {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    flags = ("--steps=40", "--dataset=synthetic(examples=500)", "--log_every=10", f"--cache={tmp_path / 'cache'}")
    run = tmp_path / "run"
    finished(launch("--strategy=device_mesh", *flags, f"--run_dir={run}", **path))
    trainer("--backend=tensorflow", "--replicas=2", *flags, "--steps=60", f"--run_dir={run}", **path)
    assert summary(run)["step"] == 60
    for verb in ("evaluate", "report", "audit", "doctor"):
        trainer(verb, f"--run_dir={run}", **path)
