"""64 corruptions of a checkpoint's files: each is detected, and the checkpoint before is taken."""

import os
import random
import shutil

import pytest

from tests.running import trainer
from trainer import checkpoint

KINDS = ("flip", "zero", "truncate", "extend")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("corruption") / "run"
    trainer("--model=dense", "--steps=20", "--save_every=10", "--evaluate_every=never", f"--run_dir={directory}")
    return directory


def corrupt(path, kind: str, position: float) -> None:
    """Changes a file at a place from 0 (its first byte) to 1."""
    size = path.stat().st_size
    at = min(size - 1, int(position * size))
    with open(path, "r+b") as file:
        if kind == "truncate":
            file.truncate(at)
        elif kind == "extend":
            file.seek(0, os.SEEK_END)
            file.write(b"\0" * (at + 1))
        else:
            file.seek(at)
            old = file.read(16 if kind == "zero" else 1)
            new = bytes(len(old)) if kind == "zero" else bytes([old[0] ^ 1])
            # What is zero already is changed, too: a corruption that changes nothing is none.
            file.seek(at)
            file.write(new if new != old else b"\xff" * len(old))


def test_every_corruption_is_detected_and_the_one_before_taken(run, tmp_path):
    """16 places of each kind, in manifest and data in turn: both files' first and last bytes, and random ones."""
    moments = random.Random(0)
    detected = 0
    for kind in KINDS:
        for i in range(16):
            copy = tmp_path / f"{kind}{i}"
            shutil.copytree(run / "checkpoints", copy)
            name = (checkpoint.MANIFEST, checkpoint.WEIGHTS)[i % 2]
            corrupt(copy / "00000020" / name, kind, (0.0, 0.0, 1.0, 1.0)[i] if i < 4 else moments.random())
            (newest, verdict), (before, good) = list(checkpoint.newest(copy))[:2]
            assert newest.name == "00000020" and before.name == "00000010"
            assert isinstance(verdict, checkpoint.Damaged), (kind, name, i)
            assert isinstance(good, dict) and good["step"] == 10
            detected += 1
            shutil.rmtree(copy)
    assert detected == 64


HOSTILE = {
    "a file outside of the checkpoint": lambda m: m["files"].update(
        {"../../summary.json": m["files"].pop(checkpoint.WEIGHTS)}
    ),
    "an absolute path": lambda m: m["files"].update({"/etc/passwd": {"bytes": 1, "sha256": ""}}),
    "no list of files": lambda m: m.update(files=None),
    "another step": lambda m: m.update(step=7),
    "a step that is no number": lambda m: m.update(step="20"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_manifest_is_refused(what, run, tmp_path):
    """Even one whose own digest is right: nothing outside of the checkpoint is read."""
    import json

    copy = tmp_path / "checkpoints"
    shutil.copytree(run / "checkpoints", copy)
    path = copy / "00000020" / checkpoint.MANIFEST
    manifest = json.loads(path.read_text())
    del manifest["sha256"]
    HOSTILE[what](manifest)
    path.write_text(json.dumps(manifest | {"sha256": checkpoint._digest(manifest)}))
    with pytest.raises(checkpoint.Damaged):
        checkpoint.verify(copy / "00000020")
