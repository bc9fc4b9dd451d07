"""The disk is full: older checkpoints stay whole, the run says so, and goes on once there is room."""

import shutil
import subprocess

import pytest

from tests.conftest import need
from tests.running import summary, trainer

FLAGS = ("--model=dense", "--save_every=20", "--log_every=20", "--evaluate_every=never")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one megabyte."""
    directory = tmp_path / "disk"
    directory.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(directory)], capture_output=True, check=False
    )
    need(made.returncode == 0, "a file system of its own can't be mounted: that needs root")
    yield directory
    subprocess.run(["umount", "--lazy", str(directory)], check=False)


def test_a_full_disk_ends_the_run_with_its_state_whole(small_disk, tmp_path):
    run = small_disk / "run"
    trainer(*FLAGS, "--steps=40", "--keep=2", f"--run_dir={run}")
    filler = small_disk / "filler"
    free = shutil.disk_usage(small_disk).free
    filler.write_bytes(bytes(max(0, free - 50_000)))
    ran = trainer(*FLAGS, "--steps=400", "--keep=2", f"--run_dir={run}", code=73)
    assert ran.stderr.count("a checkpoint could not be written and is left out") == 2
    assert "3 times in a row" in ran.stderr and "No space left on device" in ran.stderr
    assert sorted(p.name for p in (run / "checkpoints").glob("0*"))[-1] == "00000040"
    filler.unlink()
    trainer(*FLAGS, "--steps=400", "--keep=2", f"--run_dir={run}")
    trainer(*FLAGS, "--steps=400", f"--run_dir={tmp_path / 'whole'}")
    assert summary(run)["weights_sha256"] == summary(tmp_path / "whole")["weights_sha256"]
