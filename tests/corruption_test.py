"""64 corruptions of a checkpoint's files: each is detected, and the checkpoint before is taken."""

import json
import os
import random
import shutil

import h5py
import numpy as np
import pytest
from blake3 import blake3

from tests.forks import trainer
from tests.running import finished, launch, summary
from trainer import checkpoint
from trainer.storage import digests, shards
from trainer.storage.hdf5_file import LARGE, File

KINDS = ("flip", "zero", "truncate", "extend")
FLAGS = ("--backend=jax", "--model=dense", "--steps=20", "--save_every=10", "--evaluate_every=never")


pytestmark = pytest.mark.xdist_group("corruption")  # they share a run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("corruption") / "run"
    trainer(*FLAGS, f"--run_dir={directory}")
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


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A run whose variables are partly larger than a megabyte."""
    directory = tmp_path_factory.mktemp("corruption") / "large"
    flags = ("--backend=jax", "--model=mlp(units=600)", "--steps=2", "--save_every=1", "--evaluate_every=never")
    trainer(*flags, f"--run_dir={directory}")
    return directory, (*flags, "--steps=3")


def test_a_bit_of_a_large_array_counts(large, tmp_path):
    """It has a digest of its own, which a start leaves to whoever reads the array."""
    run, flags = large
    facts = checkpoint.verify(run / "checkpoints" / "00000002")["files"][checkpoint.WEIGHTS]
    assert len(facts["arrays"]) == 3 and sum(size for _, size, _ in facts["arrays"]) == 3 * 600 * 600 * 4
    whole = trainer(*flags, f"--run_dir={shutil.copytree(run, tmp_path / 'whole')}")
    assert "set aside" not in whole.stdout
    copy = shutil.copytree(run, tmp_path / "run")
    path = copy / "checkpoints" / "00000002"
    offset, size, _ = facts["arrays"][1]
    corrupt(path / checkpoint.WEIGHTS, "flip", (offset + size - 1) / facts["bytes"])
    with pytest.raises(checkpoint.Damaged):
        checkpoint.verify(path)
    assert checkpoint.verify(path, arrays=False)["step"] == 2
    assert "set aside as damaged" in trainer(*flags, f"--run_dir={copy}").stdout
    assert summary(copy)["weights_sha256"] == summary(tmp_path / "whole")["weights_sha256"]


def test_what_is_damaged_again_is_set_aside_again(tmp_path):
    """And where nothing is left that can be trusted, no later start begins anew without a word."""
    flags = ("--backend=jax", "--steps=2", "--save_every=1", "--evaluate_every=never", f"--run_dir={tmp_path}")
    checkpoints = tmp_path / "checkpoints"
    trainer(*flags)
    for _ in range(2):
        corrupt(checkpoints / "00000002" / checkpoint.WEIGHTS, "flip", 0.5)
        (tmp_path / "summary.json").unlink()
        assert "set aside as damaged" in trainer(*flags).stdout
    assert {path.name for path in checkpoints.glob("damaged-*")} == {"damaged-00000002", "damaged-00000002-2"}
    for path in checkpoints.glob("0*"):
        corrupt(path / checkpoint.WEIGHTS, "truncate", 0.5)
    for _ in range(2):
        assert "holds no checkpoint that can be trusted" in trainer(*flags, code=2).stderr
    assert not list(checkpoints.glob("0*"))


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["device_mesh", "multi_worker_mirrored"])
def test_a_bit_of_a_large_array_counts_in_each_process(strategy, tmp_path):
    """All find it as they read, and go on from the checkpoint before."""
    flags = (f"--strategy={strategy}", "--replicas=2", "--model=mlp(units=600)", "--save_every=1")
    flags += ("--evaluate_every=never",)
    run = tmp_path / "run"
    finished(launch(*flags, "--steps=2", f"--run_dir={run}"))
    whole = shutil.copytree(run, tmp_path / "whole")
    path = run / "checkpoints" / "00000002"
    facts = checkpoint.verify(path)["files"][checkpoint.WEIGHTS]
    corrupt(path / checkpoint.WEIGHTS, "flip", (facts["arrays"][0][0] + 5) / facts["bytes"])
    finished(launch(*flags, "--steps=3", f"--run_dir={whole}"))
    assert "set aside as damaged" in finished(launch(*flags, "--steps=3", f"--run_dir={run}"))
    assert (run / "checkpoints" / "damaged-00000002").exists()
    assert summary(run)["weights_sha256"] == summary(whole)["weights_sha256"]


def test_arrays_that_are_written_over_have_no_digest_of_their_own(tmp_path):
    path, data = tmp_path / "file", os.urandom(3 * LARGE)
    with File(path, digests.of_bytes) as file:
        for offset, size in ((0, 1), (1, LARGE), (LARGE + 1, LARGE + 5), (LARGE + 9, 3)):
            file.seek(offset)
            file.write(data[:size])
    assert [(array.offset, array.bytes) for array in file.arrays] == [(1, LARGE)]
    believed = {file.arrays[0].blake3}
    facts = digests.of_file(path, file.arrays, believed)
    assert facts == digests.of_file(path, file.arrays) and facts["bytes"] == 2 * LARGE + 6
    written = path.read_bytes()
    assert facts["blake3"] == blake3(written[:1] + written[1 + LARGE :]).hexdigest()
    corrupt(path, "flip", 0.25)
    assert facts == digests.of_file(path, file.arrays, believed), "whoever reads the array checks it"
    assert facts != digests.of_file(path, file.arrays, {"another's"})


HOSTILE = {
    "an array outside of the file": lambda m: m["files"][checkpoint.WEIGHTS].update(arrays=[[-1, 8, ""]]),
    "an array without a digest": lambda m: m["files"][checkpoint.WEIGHTS].update(arrays=[[0, 8]]),
    "facts of no form": lambda m: m["files"].update({checkpoint.WEIGHTS: 3}),
    "a file outside of the checkpoint": lambda m: m["files"].update(
        {"../../summary.json": m["files"].pop(checkpoint.WEIGHTS)}
    ),
    "an absolute path": lambda m: m["files"].update({"/etc/passwd": {"bytes": 1, "blake3": ""}}),
    "no list of files": lambda m: m.update(files=None),
    "another step": lambda m: m.update(step=7),
    "a step that is no number": lambda m: m.update(step="20"),
    "a file that is a link": lambda m: m["files"].update({"link": m["files"][checkpoint.WEIGHTS]}),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_manifest_is_refused(what, run, tmp_path):
    """Even one whose own digest is right: nothing outside of the checkpoint is read."""
    copy = tmp_path / "checkpoints"
    shutil.copytree(run / "checkpoints", copy)
    path = copy / "00000020" / checkpoint.MANIFEST
    manifest = json.loads(path.read_text())
    del manifest["sha256"]
    (path.parent / "link").symlink_to(path.parent / checkpoint.WEIGHTS)
    HOSTILE[what](manifest)
    path.write_text(json.dumps(manifest | {"sha256": checkpoint.digest(manifest)}))
    with pytest.raises(checkpoint.Damaged):
        checkpoint.verify(copy / "00000020")


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        (lambda p: p.update(totals=[0.0, 0.0, [0.0], [0.0]]), 2, "was written by another version of the trainer"),
        (lambda p: p.update(unheard_of=1), 2, "was written by another version of the trainer"),
        (lambda p: p["totals"][0].append(0.0), 0, "the model's metrics are not those of the checkpoint"),
    ],
    ids=["totals of another form", "more than is known", "other metrics"],
)
def test_progress_of_another_version(change, code, said, run, tmp_path):
    """It is not guessed at."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    path = copy / "checkpoints" / "00000020" / checkpoint.MANIFEST
    manifest = json.loads(path.read_text())
    del manifest["sha256"]
    change(manifest["progress"])
    path.write_text(json.dumps(manifest | {"sha256": checkpoint.digest(manifest)}))
    flags = (*FLAGS, f"--run_dir={copy}")
    ran = trainer(*flags, code=code)
    assert said in ran.stdout + ran.stderr and "Traceback" not in ran.stderr


def bomb(file: h5py.File) -> None:
    file.create_dataset("bomb", (2**38,), np.float32, chunks=(2**20,))  # a terabyte of nothing


HOSTILE_FILES = {
    "a shape that no memory holds": bomb,
    "a link to another file": lambda file: file.update({"away": h5py.ExternalLink("/etc/hostname", "/")}),
    "a soft link": lambda file: file.update({"away": h5py.SoftLink("/layers")}),
    "numbers in another file": lambda file: file.create_dataset(
        "away", (4,), np.uint8, external=[("/etc/hostname", 0, h5py.h5f.UNLIMITED)]
    ),
    "a virtual array": lambda file: file.create_virtual_dataset("away", h5py.VirtualLayout((4,), np.float32)),
    "no array": lambda file: file.clear(),
}


@pytest.mark.parametrize(
    "what", [*list(HOSTILE_FILES)[:2], *(pytest.param(w, marks=pytest.mark.long) for w in list(HOSTILE_FILES)[2:])]
)
def test_a_hostile_file_is_set_aside(what, run, tmp_path):
    """Though all digests are right: it is not read, and the run goes on from the checkpoint before."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    path = copy / "checkpoints" / "00000020"
    with h5py.File(path / checkpoint.WEIGHTS, "r+") as file:
        HOSTILE_FILES[what](file)
    manifest = json.loads((path / checkpoint.MANIFEST).read_text())
    del manifest["sha256"]
    manifest["files"] = {checkpoint.WEIGHTS: digests.of_file(path / checkpoint.WEIGHTS)}
    (path / checkpoint.MANIFEST).write_text(json.dumps(manifest | {"sha256": checkpoint.digest(manifest)}))
    checkpoint.verify(path)  # so far, all is well
    (copy / "summary.json").unlink()
    ran = trainer(*FLAGS, f"--run_dir={tmp_path / 'other'}", f"--initialize_from={path}", code=2)
    assert f"--initialize_from={path}: can't be read" in ran.stderr and "Traceback" not in ran.stderr
    assert "set aside as damaged" in trainer(*FLAGS, f"--run_dir={copy}").stdout
    assert summary(copy)["weights_sha256"] == summary(run)["weights_sha256"]


@pytest.fixture
def sharded(tmp_path):
    """A variable of 6 x 4 in two pieces."""
    values = np.arange(24, dtype=np.float32).reshape(6, 4)
    for process in range(2):
        piece = shards.Piece((3 * process, 0), values[3 * process :][:3])
        shards.write(tmp_path, process, {"v": "float32"}, {"v": [piece]})
    files, pieces = shards.collect(tmp_path, 2, 1.0)
    for name, facts in files.items():
        assert facts["blake3"] == blake3((tmp_path / name).read_bytes()).hexdigest()
    return {"shape": [6, 4], "dtype": "float32", "pieces": pieces["v"]}, values


def test_each_byte_of_a_large_file_counts(tmp_path):
    data = bytearray(os.urandom(2**24 + 2**21 + 5))  # it is read in several parts
    path = tmp_path / "large"

    def found() -> dict:
        path.write_bytes(data)
        return digests.of_file(path)

    assert found() == {"bytes": len(data), "blake3": blake3(data).hexdigest()}
    seen = [found()]
    for position in (0, 2**20, 2**24 - 1, 2**24, len(data) - 1):
        data[position] ^= 1
        assert found() not in seen
        seen.append(found())


def test_regions_of_shards(sharded, tmp_path):
    facts, values = sharded
    for rows in (slice(None), slice(0, 3), slice(2, 5), slice(5, 6)):
        for columns in (slice(None), slice(1, 3)):
            assert (shards.region(tmp_path, facts, (rows, columns)) == values[rows, columns]).all()


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [10**6, 10**6]},
        {"start": [5, 0]},
        {"start": [-1, 0]},
        {"file": "../../etc/hostname"},
        {"file": "/etc/hostname"},
        {"offset": 10**9},
        {"offset": -4},
        {"shape": [2, 4]},
    ],
    ids=str,
)
def test_hostile_pieces_are_refused(change, sharded, tmp_path):
    facts, _ = sharded
    facts["pieces"][0].update(change)
    if change.get("shape") == [10**6, 10**6]:
        facts["shape"] = change["shape"]
    with pytest.raises(ValueError, match="piece"):
        shards.region(tmp_path, facts, shards.everything(facts["shape"]))
