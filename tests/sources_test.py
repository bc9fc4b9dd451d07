"""Datasets of files, each on real bytes; and what comes of damaged ones."""

import datetime
import decimal
import gzip
import io
import json
import os
import pathlib
import re
import resource
import shutil
import sqlite3
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter

import keras
import numpy as np
import pytest
from PIL import Image, ImageOps

from input_pipeline import arrays, digits, images, mixture, records, table, text, tfrecord
from input_pipeline.cache import cached
from input_pipeline.dataset import prepare
from input_pipeline.processes import Processes
from input_pipeline.source import Arrays, DataError, Subset, checked, example_spec, read
from tests.forks import trainer
from tests.running import curve, deviation, environment, lines, summary
from trainer import loading

DATA = digits.load()
X, Y = DATA.train.arrays
FEATURES = {"image": ("uint8", (8, 8, 1)), "label": ("int32", ())}
FLAGS = ("--backend=jax", "--steps=40", "--evaluate_every=never")


def test_arrays_in_files(tmp_path):
    for name, (x, y) in {"train": DATA.train.arrays, "test": DATA.evaluation.arrays}.items():
        np.save(tmp_path / f"x_{name}.npy", x)
        np.save(tmp_path / f"y_{name}.npy", y)
    np.savez(tmp_path / "all.npz", x_train=X, y_train=Y)
    for data in (arrays.load(str(tmp_path)), arrays.load(str(tmp_path / "all.npz"))):
        ids = np.array([5, 0, 5])
        assert (data.train.read(ids)[0] == X[ids]).all() and (data.train.read(ids)[1] == Y[ids]).all()
    assert arrays.load(str(tmp_path)).evaluation is not None
    assert isinstance(arrays.load(str(tmp_path)).train.arrays[0], np.memmap)  # it need not fit the memory
    of_files = trainer("--dataset=arrays", f"--data_dir={tmp_path}", *FLAGS, f"--run_dir={tmp_path / 'a'}")
    trainer("--dataset=digits", *FLAGS, f"--run_dir={tmp_path / 'b'}")
    assert "1,437 examples to train on, 360 to test on" in of_files.stdout
    assert summary(tmp_path / "a")["weights_sha256"] == summary(tmp_path / "b")["weights_sha256"]


READ_BESIDE = """
import os
import numpy as np
from input_pipeline import digits
from input_pipeline.processes import Processes
from input_pipeline.source import DataError

class Source:
    def __init__(self, source, last):
        self.source, self.last, self.trainer = source, last, os.getpid()

    def __len__(self):
        return len(self.source)

    def read(self, ids):
        assert os.getpid() != self.trainer and not os.environ["CUDA_VISIBLE_DEVICES"]
        if max(ids) > self.last:
            raise DataError(f"example {max(ids)} is torn")
        return self.source.read(ids)

def load(last=2000):
    data = digits.load()
    return {"train": Processes(Source(data.train, last)), "evaluation": data.evaluation, "classes": 10}

def slow():
    return {"train": Slow(digits.load().train, 0)}

class Slow(Source):
    def read(self, ids):
        for _ in ids:
            sum(i * i for i in range(4000))
        return self.source.read(ids)
"""


def test_processes_read_a_source(tmp_path):
    (tmp_path / "beside.py").write_text(READ_BESIDE)
    trainer("--dataset=beside:load", *FLAGS, "--run_dir=beside", cwd=tmp_path)
    trainer("--dataset=digits", *FLAGS, "--run_dir=direct", cwd=tmp_path)
    assert summary(tmp_path / "beside")["weights_sha256"] == summary(tmp_path / "direct")["weights_sha256"]
    err = trainer("--dataset=beside:load(last=1400)", *FLAGS, "--run_dir=torn", code=2, cwd=tmp_path).stderr
    assert re.search(r"example 14\d\d is torn", err)


def test_what_processes_can_t_read():
    class Local(Arrays):
        """Whose module does not know it."""

    with pytest.raises(
        DataError, match=r"its Local can't be handed to processes: .*Open files and make locks in read\(\)"
    ):
        Processes(Local(X))


@pytest.mark.long
def test_a_source_whose_threads_wait_for_each_other_is_told_of_processes(tmp_path):
    (tmp_path / "beside.py").write_text(READ_BESIDE)
    out = trainer("input", "--backend=jax", "--dataset=beside:slow", cwd=tmp_path).stdout
    assert "input_pipeline.processes.Processes(source)" in out


def test_arrays_of_objects_and_cut_files_are_refused(tmp_path):
    np.save(tmp_path / "x_train.npy", np.array([print, None], object), allow_pickle=True)
    with pytest.raises(DataError, match=r"x_train\.npy can't be read"):
        arrays.load(str(tmp_path))
    np.savez(tmp_path / "cut.npz", x_train=X, y_train=Y)
    (tmp_path / "cut.npz").write_bytes((tmp_path / "cut.npz").read_bytes()[:-1000])
    with pytest.raises(DataError, match=r"cut\.npz can't be read"):
        arrays.load(str(tmp_path / "cut.npz"))


@pytest.fixture(scope="module")
def tf_records(tmp_path_factory):
    """The digits as tf.train.Examples in three files, written by TensorFlow."""
    import tensorflow as tf

    root = tmp_path_factory.mktemp("records")
    for part, (x, y) in {"train-0": (X[:700], Y[:700]), "train-1": (X[700:], Y[700:]), "test": (X[:9], Y[:9])}.items():
        with tf.io.TFRecordWriter(str(root / f"{part}.tfrecord")) as writer:
            for image, label in zip(x, y, strict=True):
                feature = {
                    "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image.tobytes()])),
                    "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
                }
                writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
    return root


def test_records_of_tensorflow(tf_records):
    ids = np.random.default_rng(0).permutation(len(X))[:200]
    for _ in range(2):  # the second time by the index that was kept
        data = records.load(str(tf_records), FEATURES, "label", classes=10)
        x, y = data.train.read(ids)
        assert len(data.train) == 1437 and (x == X[ids]).all() and (y == Y[ids]).all()
        assert len(data.evaluation) == 9
    index = tf_records / ".train-0.tfrecord.index"
    assert b'"bad": []' in index.read_bytes()
    index.write_bytes(index.read_bytes()[:-16])  # cut, as by a crash of the machine
    assert len(records.load(str(tf_records), FEATURES, "label", classes=10).train) == 1437


def test_encoded_images_in_records(tmp_path):
    """As ImageNet's: a JPEG or PNG in each record, of any size."""
    import tensorflow as tf

    def encoded(image, kind):
        file = io.BytesIO()
        Image.fromarray(image[..., 0]).resize((32, 24), Image.Resampling.NEAREST).save(file, kind)
        return file.getvalue()

    with tf.io.TFRecordWriter(str(tmp_path / "train.tfrecord")) as writer:
        for i, (image, label) in enumerate(zip(X[:300], Y[:300], strict=True)):
            content = encoded(image, ["PNG", "JPEG"][i % 2])[: 60 if i == 299 else None]
            feature = {
                "image/encoded": tf.train.Feature(bytes_list=tf.train.BytesList(value=[content])),
                "image/class/label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
            }
            writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
    features = {"image/encoded": ("image", (24, 24, 3)), "image/class/label": ("int64", ())}
    data = records.load(str(tmp_path), features, "image/class/label", classes=10)
    x, y = data.train.read(np.arange(0, 298, 2))
    wide = np.repeat(np.repeat(X[:298:2], 3, axis=1), 4, axis=2)
    assert x.dtype == np.uint8 and (x == wide[:, :, 4:28]).all() and (y == Y[:298:2]).all()
    with pytest.raises(DataError, match="'image/encoded' of record 299 is no image"):
        data.train.read(np.array([0, 299]))
    with pytest.raises(DataError, match=r"\(24, 24\), not of \(height, width, 1 or 3\)"):
        records.load(str(tmp_path), {**features, "image/encoded": ("image", (24, 24))}, "image/class/label")
    of_numbers = {**features, "image/class/label": ("image", (24, 24, 3))}
    with pytest.raises(DataError, match="'image/class/label' of record 0 has a int64_list of 1, not one image's bytes"):
        records.load(str(tmp_path), of_numbers, "image/class/label").train.read(np.array([0]))
    spec = f"records(features={features!r},label='image/class/label',classes=10)"
    flags = (*FLAGS, f"--data_dir={tmp_path}", f"--run_dir={tmp_path / 'run'}", "--global_batch=300")
    assert "record 299 is no image" in trainer(f"--dataset={spec}", *flags, code=2).stderr


def test_every_damage_of_a_record_is_found(tf_records, tmp_path):
    """Two records, each byte flipped, and cut at each byte."""
    whole = (tf_records / "train-0.tfrecord").read_bytes()
    size = 2 * (16 + struct.unpack("<Q", whole[:8])[0])
    path = tmp_path / "train.tfrecord"
    for offset in range(size):
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 1]) + whole[offset + 1 : size])
        assert tfrecord.scan(path)[1], offset
    for offset in range(1, size):
        path.write_bytes(whole[:offset])
        found, damaged = tfrecord.scan(path)
        assert damaged or (offset == size // 2 and len(found) == 1), offset


def test_damaged_records_are_told_or_left_out(tf_records, tmp_path):
    content = bytearray((tf_records / "train-0.tfrecord").read_bytes())
    content[50] ^= 1
    (tmp_path / "train.tfrecord").write_bytes(content)
    spec = f"records(features={FEATURES!r},label='label',classes=10,skip_bad=%d)"
    flags = (*FLAGS, f"--data_dir={tmp_path}")
    told = trainer(f"--dataset={spec % 0}", *flags, f"--run_dir={tmp_path / 'run'}", code=2).stderr
    assert "train.tfrecord at byte 0: a damaged record" in told and "skip_bad" in told
    left_out = trainer(f"--dataset={spec % 1}", *flags, f"--run_dir={tmp_path / 'run'}").stdout
    assert "1 damaged records are left out" in left_out and "699 examples to train on" in left_out


def test_a_record_that_is_damaged_later_is_found_when_it_is_read(tf_records, tmp_path):
    """By a disk, which leaves the file's time as it was, so that the index is taken for right."""
    path = pathlib.Path(shutil.copy2(tf_records / "train-0.tfrecord", tmp_path / "train.tfrecord"))
    records.load(str(tmp_path), FEATURES, "label", classes=10)  # makes the index
    before, content = path.stat(), bytearray(path.read_bytes())
    content[50] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    data = records.load(str(tmp_path), FEATURES, "label", classes=10)
    assert (data.train.read(np.array([1, 2]))[1] == Y[1:3]).all()
    with pytest.raises(DataError, match=r"train\.tfrecord at byte 0: a record that is not what it was"):
        data.train.read(np.array([0]))


def test_more_files_of_records_than_a_process_may_open(tf_records, tmp_path):
    lines = [record for path in sorted(tf_records.glob("train-*")) for record in tfrecord.Records([path])][:300]
    for number, record in enumerate(lines):
        (tmp_path / f"train-{number:03d}").write_bytes(tfrecord.framed(record))
    program = """
import pathlib, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from input_pipeline.tfrecord import Records
records = Records(sorted(pathlib.Path.cwd().glob("train-*")))
print(sum(map(len, [*records, *records])))
"""
    command = [sys.executable, "-c", program]
    out = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert out.stdout.strip() == str(2 * sum(map(len, lines))), out.stderr


def test_processes_of_a_host_share_the_look_through_records(tf_records, tmp_path):
    """Each file is read by one of them, whatever they are, and all know all."""
    content = (tf_records / "train-0.tfrecord").read_bytes()
    for number in range(20):
        (tmp_path / f"train-{number:02d}").write_bytes(content)
    program = """
import pathlib
from input_pipeline import tfrecord

scanned, scan = [], tfrecord.scan
tfrecord.scan = lambda path: scanned.append(path.name) or scan(path)
print(len(tfrecord.Records(sorted(pathlib.Path.cwd().glob("train-*")))), *scanned)
"""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program], cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    said = [process.communicate(timeout=60)[0].split() for process in started]
    assert [words[0] for words in said] == ["14000"] * 3
    assert sorted(name for words in said for name in words[1:]) == [f"train-{number:02d}" for number in range(20)]


def test_records_of_a_path_that_is_another_file_s_by_now(tmp_path):
    path = tmp_path / "train"
    for record in (b"one", b"another"):
        path.with_suffix(".new").write_bytes(tfrecord.framed(record))
        path.with_suffix(".new").replace(path)
        found = tfrecord.Records([path])
        assert [*found] == [record]


def test_one_file_of_records(tf_records):
    data = records.load(str(tf_records / "train-0.tfrecord"), FEATURES, "label", classes=10)
    assert (data.train.read(np.arange(700))[1] == Y[:700]).all() and data.evaluation is None


def test_numbers_that_a_dtype_does_not_hold(tmp_path):
    import tensorflow as tf

    feature = {
        "x": tf.train.Feature(float_list=tf.train.FloatList(value=[0.5])),
        "y": tf.train.Feature(int64_list=tf.train.Int64List(value=[300])),
        "z": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"cat"])),
        "zs": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"a", b"b"])),
    }
    record = tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()
    (tmp_path / "train").write_bytes(tfrecord.framed(record))
    for x, y, wrong in (
        ("float32", "uint8", "'y' of record 0 has 300, which uint8"),
        ("int32", "int32", "'x' of record 0 has 0.5, which int32"),
    ):
        with pytest.raises(DataError, match=f"feature {wrong} does not hold"):
            records.load(str(tmp_path), {"x": (x, ()), "y": (y, ())}, "y").train.read(np.array([0]))
    for words, dtype, held in (("z", "int32", "cat"), ("zs", "uint8", "a, b")):
        with pytest.raises(DataError, match=f"feature '{words}' of record 0 holds bytes, b'{held}', and no {dtype}"):
            records.load(str(tmp_path), {"x": ("float32", ()), words: (dtype, ())}, words).train.read(np.array([0]))
    (tmp_path / "train").write_bytes(gzip.compress(tfrecord.framed(record)))
    with pytest.raises(DataError, match="train is compressed, and a record can't be read by its place"):
        records.load(str(tmp_path), {"y": ("int32", ())}, "y")


def test_no_records(tmp_path):
    (tmp_path / "train_set").mkdir()
    with pytest.raises(DataError, match="no files match 'train\\*'"):
        records.load(str(tmp_path), FEATURES, "label")


@pytest.fixture
def folders(tmp_path):
    """A hundred digits of each of three classes as PNG and JPEG."""
    for label in range(3):
        folder = tmp_path / "images" / ["nought", "one", "two"][label]
        folder.mkdir(parents=True)
        for i, image in enumerate(X[label == Y][:100]):
            large = Image.fromarray(image[..., 0]).resize((32, 32), Image.Resampling.NEAREST)
            large.save(folder / f"{i:03d}.{'png' if i % 2 else 'jpg'}")
    return tmp_path / "images"


def test_images_in_folders(folders, tmp_path, capsys):
    (folders / "one" / ".ipynb_checkpoints").mkdir(exist_ok=True)
    for hidden in ("._001.png", ".ipynb_checkpoints/001-checkpoint.png"):
        shutil.copy(folders / "one" / "001.png", folders / "one" / hidden)
    (folders / "two" / "a.HEIC").touch()
    data = images.load(str(folders), size=8, channels=1)
    assert (len(data.train), len(data.evaluation), data.classes) == (270, 30, 3)
    assert "other files, by their suffixes 1 of .heic: left out" in capsys.readouterr().out
    first = images.Images([folders / "one" / "001.png"], np.zeros(1, np.int32), (32, 32), 1).read(np.array([0]))[0][0]
    assert (first[::4, ::4] == X[Y == 1][1]).all()
    deep = tmp_path / "deep.png"  # 16 bits a pixel
    Image.fromarray(first[..., 0].astype(np.uint16) * 256 + 3).save(deep)
    assert (images.Images([deep], np.zeros(1, np.int32), (32, 32), 1).read(np.array([0]))[0][0] == first).all()
    for pixels in (first[..., 0] / np.float32(16), first[..., 0].astype(np.int32) * 65536):
        odd = tmp_path / "odd.tiff"
        Image.fromarray(pixels).save(odd)
        with pytest.raises(DataError, match=r"odd.tiff: has pixels from 0 to [\d.e+]+, and an image has integers of 8"):
            images.Images([odd], np.zeros(1, np.int32), (32, 32), 1).read(np.array([0]))
    turned, held = tmp_path / "turned.png", Image.Exif()
    wide = Image.fromarray(first[:16, :, 0])
    for orientation in range(1, 10):  # how the camera was held; there is no 9
        held[0x0112] = orientation
        wide.save(turned, exif=held)
        seen = ImageOps.exif_transpose(Image.open(turned))
        decoded = images.Images([turned], np.zeros(1, np.int32), seen.size[::-1], 1).read(np.array([0]))[0][0]
        assert (decoded[..., 0] == np.asarray(seen)).all()
    wide.save(turned, exif=b"Exif\0\0II*\0" + b"\xff" * 9)  # notes that can't be read
    with pytest.warns(UserWarning, match="EXIF"):
        decoded = images.Images([turned], np.zeros(1, np.int32), (16, 32), 1).read(np.array([0]))[0][0]
    assert (decoded == first[:16]).all()
    data = ("--dataset=images(size=16,shift=1)", f"--data_dir={folders}", "--cache=memory")
    flags = (
        *data,
        "--model=mlp",
        "--epochs=40",
        "--learning_rate=0.003",
        "--evaluate_every=never",
    )
    trainer(*flags, f"--run_dir={tmp_path / 'one'}", "--backend=jax", "--replicas=2")
    assert summary(tmp_path / "one")["final"]["test_accuracy"] > 0.7
    trainer(*flags, f"--run_dir={tmp_path / 'two'}", "--strategy=device_mesh", "--devices=2")
    assert summary(tmp_path / "one")["weights_sha256"] == summary(tmp_path / "two")["weights_sha256"]


def test_a_run_is_evaluated_on_other_examples(folders, tmp_path):
    """Also on those that their dataset has for training, but not by other classes."""
    run, new = f"--run_dir={tmp_path / 'run'}", tmp_path / "new"
    flags = ("--dataset=images(size=16)", f"--data_dir={folders}", "--model=mlp", "--learning_rate=0.003")
    trainer(*flags, "--steps=100", "--evaluate_every=never", "--backend=jax", run)
    assert "train_" not in trainer("evaluate", run).stdout
    for folder in folders.iterdir():
        (new / folder.name).mkdir(parents=True)
        for path in sorted(folder.iterdir())[:5]:
            shutil.copy(path, new / folder.name)
    out = trainer("evaluate", run, f"--data_dir={new}").stdout
    assert "train_ is of 15 examples" in out and json.loads(out.splitlines()[-1])["train_accuracy"] > 0.7
    (new / "nought").rename(new / "zero")
    said = trainer("evaluate", run, f"--data_dir={new}", code=2).stderr
    assert "has the classes one, two, zero, and the run was trained on nought, one, two" in said


def huge(width: int = 100_000) -> bytes:
    """A PNG that declares more pixels than memory holds."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, width, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 1000))


@pytest.mark.parametrize(
    "damage", ["cut", "huge", *(pytest.param(d, marks=pytest.mark.long) for d in ("empty", "text"))]
)
def test_damaged_images_are_told_or_skipped(damage, folders, tmp_path):
    path = folders / "two" / "007.png"
    content = {"cut": path.read_bytes()[:60], "huge": huge(), "empty": b"", "text": b"not an image"}[damage]
    path.write_bytes(content)
    source = images.load(str(folders), size=8).train
    begin = time.monotonic()
    with pytest.raises(DataError, match=r"1 images can't be decoded.*007\.png"):
        source.read(np.arange(len(source)))
    assert time.monotonic() - begin < 10
    x, _, weights = images.load(str(folders), size=8, skip_bad=1).train.read(np.arange(270))
    assert weights.sum() == 269 and not x[weights == 0].any()
    flags = ("--backend=jax", f"--data_dir={folders}", "--epochs=1")
    if damage == "cut":
        assert "007.png" in trainer("--dataset=images(size=8)", *flags, f"--run_dir={tmp_path / 'a'}", code=2).stderr
        out = trainer("--dataset=images(size=8,skip_bad=1)", *flags, f"--run_dir={tmp_path / 'b'}").stdout
        assert "skipped, 1 of at most 1" in out and "007.png" in out


def test_folders_without_images(folders, tmp_path):
    with pytest.raises(DataError, match="has no folder with images"):
        images.load(str(tmp_path / "none"))
    (folders / "two").rename(folders / "train")
    assert images.load(str(folders)).classes == 3
    flat = tmp_path / "flat"  # no classes, though two folders have images
    for split, of in (("train", "one"), ("test", "nought")):
        shutil.copytree(folders / of, flat / split)
    with pytest.raises(DataError, match="train has no folder with images"):
        images.load(str(flat))
    (folders / "unfilled").mkdir()
    with pytest.raises(DataError, match=r"unfilled has no image .*a folder is a class"):
        images.load(str(folders))


def test_randomness_of_augmentation_is_in_the_keys():
    keys = np.arange(50, dtype=np.uint64)
    batch = (X[:50], Y[:50])
    once, again = (images.flip_and_shift(batch, keys, 2) for _ in range(2))
    assert (once[0] == again[0]).all() and (once[1] == Y[:50]).all()
    assert (images.flip_and_shift(batch, keys + np.uint64(50), 2)[0] != once[0]).any()
    # One example's randomness is its own key's, whatever batch it is in.
    assert (images.flip_and_shift((X[7:8], Y[7:8]), keys[7:8], 2)[0] == once[0][7:8]).all()
    assert (images.flip_and_shift(batch, keys, 0)[0][:, :, ::-1] == X[:50]).all(axis=(1, 2, 3)).any()


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_rows_of_a_table(kind, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import csv, parquet

    n = 1000
    a, b = np.random.default_rng(0).normal(size=(2, n))
    names = np.where(a + b > 0, "yes", "no")
    rows = pyarrow.table({"a": a, "b": b, "kind": np.arange(n) % 3, "answer": names})
    (csv.write_csv if kind == "csv" else parquet.write_table)(rows, tmp_path / f"rows.{kind}")
    data = table.load(str(tmp_path), label="answer")
    assert data.classes == 2 and example_spec(data.train)[0].shape == (3,) and len(data.train) == 900
    flags = ("--backend=jax", f"--data_dir={tmp_path}", "--model=mlp", "--epochs=20", "--learning_rate=0.01")
    trainer("--dataset=table(label='answer')", *flags, f"--run_dir={tmp_path / 'run'}")
    assert summary(tmp_path / "run")["final"]["test_accuracy"] > 0.7
    with pytest.raises(DataError, match="there is no column 'question'"):
        table.load(str(tmp_path), label="question")


def test_tables_that_are_parted_otherwise(tmp_path):
    pytest.importorskip("pyarrow")
    parted = {"tsv": "a\t b\tprice\n1\t2.5\t3.5\n", "csv": "a;b;price\n1;2,5;3,5\n"}
    for suffix, rows in parted.items():
        (tmp_path / f"rows.{suffix}").write_text(rows)
    for suffix, how in (("tsv", {}), ("csv", {"delimiter": ";", "decimal": ","})):
        x, y = table.load(str(tmp_path / f"rows.{suffix}"), "price", held_out=0.0, **how).train.read(np.array([0]))
        assert x.tolist() == [[1, 2.5]] and y.tolist() == [[3.5]]
    (tmp_path / "rows.csv").write_text(parted["csv"].replace(",", "."))
    with pytest.raises(DataError, match="has one column, 'a;b;price': say delimiter=';', or what it is"):
        table.load(str(tmp_path / "rows.csv"), "price")


def test_what_is_no_number_in_a_table(tmp_path):
    """Words and truth become codes, decimals numbers; of a date the user has to decide."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = {
        "price": pyarrow.array([decimal.Decimal("1.50"), decimal.Decimal("0.25")] * 10),
        "word": pyarrow.array(["b", "a"] * 10).dictionary_encode(),
        "truth": [True, False] * 10,
        "y": [0, 1] * 10,
        "day": [datetime.date(2026, 1, 1)] * 20,
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "rows.parquet")
    x = table.load(str(tmp_path), label="y", columns=("price", "word", "truth"), held_out=0.0).train.arrays[0]
    assert x[:2].tolist() == [[1.5, 1, 1], [0.25, 0, 0]]
    with pytest.raises(DataError, match=r"'day' is of date32.*columns="):
        table.load(str(tmp_path), label="y")
    (tmp_path / "rows.csv").write_text("time,y\n" + "1700000000000,1\n" * 20)  # milliseconds, of more than 32 bits
    x = table.load(str(tmp_path), label="y", files="*.csv", held_out=0.0).train.arrays[0]
    assert x[0] == pytest.approx(1.7e12)
    with pytest.raises(DataError, match="'time' has integers up to 1700000000000 in 20 rows: say regression=True"):
        table.load(str(tmp_path), label="time", files="*.csv")
    data = table.load(str(tmp_path), label="time", files="*.csv", held_out=0.0, regression=True)
    assert data.classes is None and data.train.arrays[1][0] == pytest.approx([1.7e12])
    data = table.load(str(tmp_path), label="time", files="*.csv", held_out=0.0, words=("time",))
    assert data.class_names == ["1700000000000"] and data.train.arrays[1][0] == 0


def test_what_programs_write_into_tables(tmp_path, capsys):
    """Rows' numbers are none of the features; other encodings, no names, and 1,234 for a number."""
    pytest.importorskip("pyarrow")
    path = tmp_path / "rows.csv"
    for name in ("", '""', "Unnamed: 0"):
        path.write_text(f"{name},a,y\n" + "".join(f"{i},{i % 5},{i % 2}\n" for i in range(20)))
        assert table.load(str(path), "y", held_out=0.0).train.arrays[0].shape == (20, 1)
        assert "the rows' names or numbers, is left out" in capsys.readouterr().out
    assert table.load(str(path), "y", columns=("Unnamed: 0", "a"), held_out=0.0).train.arrays[0].shape == (20, 2)
    path.write_text("Id,a,y\n" + "".join(f"{i},{i % 5},{i % 2}\n" for i in range(20)))
    assert table.load(str(path), "y", held_out=0.0).train.arrays[0].shape == (20, 2)
    assert "column 'Id' counts the rows" in capsys.readouterr().out
    path.write_bytes("größe,y\n1,0\n2,1\n".encode("latin-1"))
    with pytest.raises(DataError, match="say encoding='latin-1'"):
        table.load(str(path), "y")
    assert len(table.load(str(path), "y", columns=("größe",), encoding="latin-1", held_out=0.0).train) == 2
    path.write_text("1.5,2,yes\n2.5,3,no\n")
    with pytest.raises(DataError, match="if that is a row of values, say what they are, names="):
        table.load(str(path), "y")
    data = table.load(str(path), "a", names=("a", "b", "y"), words=("a",), held_out=0.0)
    assert data.class_names == ["1.5", "2.5"] and data.train.arrays[0].tolist() == [[2, 1], [3, 0]]
    with pytest.raises(DataError, match="'y' has words, which are no numbers to predict"):
        table.load(str(path), "y", names=("a", "b", "y"), regression=True)
    data = table.load(str(path), "y", names=("a", "b", "y"), held_out=0.0)
    assert data.train.arrays[0].tolist() == [[1.5, 2], [2.5, 3]] and data.class_names == ["no", "yes"]
    for word in ("1,234,567", "$12", "3.5 %", "1 000"):
        path.write_text(f'a,y\n"{word}",0\n"{word}",1\n')
        with pytest.raises(DataError, match="'a' has numbers that are written as words"):
            table.load(str(path), "y")
    for word in ("1,2", "$", "12 monkeys", "1st"):
        path.write_text(f'a,y\n"{word}",0\n"{word}",1\n')
        assert len(table.load(str(path), "y", held_out=0.0).train) == 2
    path.write_text("a,a,y\n1,2,0\n3,4,1\n")
    with pytest.raises(DataError, match="has several columns 'a'"):
        table.load(str(path), "y")
    path.write_text("# by hand\na,y\n1,0\n")
    with pytest.raises(DataError, match=r"Expected 1 columns.* or is the first line no row"):
        table.load(str(path), "y")


def test_a_missing_value_is_told(tmp_path):
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n3,\n")
    with pytest.raises(DataError, match="column 'b' has no value in row 1"):
        table.load(str(tmp_path), label="b")


def test_tables_as_people_have_them(tmp_path, capsys):
    """Of several files, packed, their columns in another order; a word among numbers makes no words of them."""
    rows = [f"{i},{i % 2}\n" for i in range(10)]
    (tmp_path / "a.csv").write_text("a,y\n" + "".join(rows))
    with gzip.open(tmp_path / "b.csv.gz", "wt") as file:
        file.write("y,a\n1,0.5\n0,1.5\n")
    data = table.load(str(tmp_path), label="y", held_out=0.0)
    assert data.train.arrays[0].ravel().tolist() == [*range(10), 0.5, 1.5] and data.classes == 2
    (tmp_path / "c.csv").write_text("a,y\n" + "".join(rows) + "?,1\n")
    with pytest.raises(DataError, match=r"'a' has numbers .* and '\?' among them, as in row 10: .*words=\('a',\)"):
        table.load(str(tmp_path), label="y", files="c.csv")
    data = table.load(str(tmp_path), label="y", files="c.csv", words=("a",), held_out=0.0)
    assert data.train.arrays[0][:, 0].tolist() == [*range(11)]
    with pytest.raises(DataError, match="column 'y' is the label"):
        table.load(str(tmp_path), label="y", files="a.csv", columns=("a", "y"))
    assert "integers" not in capsys.readouterr().out
    (tmp_path / "e.csv").write_text(f"id,up,y\n1,true,1\n{2**24 + 1},false,0\n{2**24},true,1\n")
    data = table.load(str(tmp_path), label="y", files="e.csv", held_out=0.0)
    assert data.train.arrays[0].tolist() == [[1, 1], [2**24, 0], [2**24, 1]]
    assert "does not hold, such as 16777217 in row 1, which is 16777216" in capsys.readouterr().out
    (tmp_path / "d.csv").write_text("a,y\n")
    with pytest.raises(DataError, match="have 0 rows"):
        table.load(str(tmp_path), label="y", files="d.csv")


def test_a_single_file(tmp_path):
    """Of a text its end is held out, so that no window of training reaches into it."""
    poem = tmp_path / "poem.txt"
    poem.write_bytes(bytes(range(200)))
    for data in (text.load(str(poem), context=4, held_out=10), text.load(str(tmp_path), "*.txt", 4, held_out=10)):
        x, y = data.train.read(np.arange(len(data.train)))
        assert x.ravel().tolist() == list(range(176)) and y.max() == 176
        assert data.evaluation.read(np.arange(len(data.evaluation)))[0].ravel().tolist() == list(range(180, 196))
    with pytest.raises(DataError, match=r"no files match '\*\*/\*.py'.*text\(files="):
        text.load(str(tmp_path))
    with pytest.raises(DataError, match="fewer tokens than context=128"):
        text.load(str(poem), context=128)
    rows = tmp_path / "rows.csv"
    rows.write_text("a,b\n1,0\n3,1\n")
    pytest.importorskip("pyarrow")
    assert len(table.load(str(rows), label="b", held_out=0.0).train) == 2


def mixed(parts):
    return mixture.load(parts, loading.loaded)


def test_a_mixture_keeps_its_shares():
    data = mixed({"digits": 3, "synthetic(examples=100)": 1})
    x, y = data.train.read(np.arange(len(data.train)))
    assert len(data.train) == 1437 + 479 and (x[:1437] == X).all()
    assert (x[1437 : 1437 + 100] == x[1537:1637]).all()  # 100 examples stand for 479
    assert data.classes == 10 and len(y) == len(x)
    with pytest.raises(DataError, match="shares must be positive"):
        mixed({"digits": 0})


def test_what_a_mixture_holds_out_is_not_trained_on():
    """Not even of a source that repeats: each is divided."""
    data = prepare(mixed({"digits": 3, "synthetic(examples=100)": 1}), 0.2)
    train, held = (
        Counter(image.tobytes() for image in source.read(np.arange(len(source)))[0])
        for source in (data.train, data.validation)
    )
    assert not train.keys() & held.keys() and len(train) + len(held) == 1437 + 100
    assert sum(count > 1 for count in train.values()) == 80 and sum(count > 1 for count in held.values()) == 20
    assert len(data.train) == 1150 + 383 and len(data.validation) == 287 + 96
    with pytest.raises(DataError, match="leaves nothing on one side"):
        prepare(mixed({"digits": 3, "synthetic(examples=2)": 1}), 0.1)


def test_parts_of_a_mixture_are_alike(folders, tmp_path):
    def part(place, shift=1):
        return f"images(data_dir='{place}',size=8,shift={shift})"

    more = shutil.copytree(folders, tmp_path / "more")
    both = mixed({part(folders): 1, part(more): 2})
    assert len(both.train) == 270 * 3 and both.class_names == ["nought", "one", "two"]
    assert both.augment is images.load(str(folders), shift=1).augment is not None
    with pytest.raises(DataError, match=r"\(augment\) in different ways"):
        mixed({part(folders): 1, part(more, shift=0): 2})
    (more / "two").rename(more / "another")
    with pytest.raises(DataError, match=r"'two'.* here and .*'another'"):
        mixed({part(folders): 1, part(more): 2})
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"{name} text " * 200)
    texts = mixed({f"text(data_dir='{tmp_path / name}.txt',context=8)": 1 for name in ("a", "b")})
    assert texts.decode(texts.train.read(np.array([0]))[0][0]) == "a text a"
    example = (np.zeros(4, np.int32), np.zeros(4, np.int32))
    with pytest.raises(DataError, match="none says how many tokens there are"):
        mixture.load({"a": 1, "b": 1}, lambda spec: {"train": [example] * 5, "decode": lambda tokens: spec})
    with pytest.raises(DataError, match="3 classes, and 2 class_names"):
        prepare({"train": DATA.train, "classes": 3, "class_names": ["a", "b"]}, 0)


def test_what_gives_one_example_at_a_time_is_a_source():
    class Given:
        train = [(x, y) for x, y in zip(X[:100], Y[:100], strict=True)]
        classes = 10

    data = prepare(Given, 0.0)
    assert (data.train.read(np.array([3, 1]))[0] == X[[3, 1]]).all()


class Column:
    """What becomes an array, and is none: a column of pandas', a tensor of another library's."""

    def __init__(self, values):
        self.values, self.shape = values, values.shape

    def __len__(self):
        return len(self.values)

    def __array__(self, dtype=None, copy=None):
        return self.values


class Rows:
    """A data source of another library's."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def test_several_examples_by_one_call():
    class Batched(list):
        asked = 0

        def __getitems__(self, ids):
            self.asked += 1
            return [self[i] for i in ids][: self.most]

        most = None

    source = Batched(zip(X, Y, strict=True))
    prepared = prepare(source, 0)
    x, y = read(prepared.train, [5, 0, 7])
    assert (x == X[[5, 0, 7]]).all() and (y == Y[[5, 0, 7]]).all() and source.asked
    source.most = 2
    with pytest.raises(DataError, match="__getitems__ of 3 ids returned list, not a list of as many"):
        read(prepared.train, [5, 0, 7])


def test_what_load_may_return():
    x, y = np.arange(12.0).reshape(6, 2), np.array([0, 1, 2, 0, 1, 2])
    items = [(x[i], y[i]) for i in range(6)]
    for loaded, evaluated, classes in (
        (((x, y), (x[:2], y[:2])), 2, 3),  # keras.datasets'
        ((x, y), None, 3),
        (((x, y), (x[:3], y[:3]), (x[:2], y[:2])), 2, 3),  # the second to validate on
        ((Rows(x, y), Rows(x[:2], y[:2])), 2, None),
        (items, None, None),
        (x, None, None),  # without labels
        ([x, y], None, 3),
        ((x.tolist(), y.tolist()), None, 3),
        ((Column(x), Column(y)), None, 3),
        ({"train": items, "evaluation": (x[:4], y[:4]), "classes": 5}, 4, 5),
    ):
        found = prepare(loaded, 0.0)
        assert len(found.train) == 6 and found.classes == classes
        assert (found.evaluation and len(found.evaluation)) == evaluated
        given = read(found.train, [4, 0])
        assert np.array_equal(given[0], x[[4, 0]])
        assert given[1] == () if loaded is x else np.array_equal(given[1], y[[4, 0]])
    for alone in ((x,), {"train": (x,)}, ((x,), (x[:2],)), (x, None), [(row, None) for row in x], (x, None, y)):
        given = read(prepare(alone, 0.0).train, [4, 0])
        assert np.array_equal(given[0], x[[4, 0]]) and given[1] == ()
    for labelled in ((x, y, None), ((x, y), None), ((x, y), None, (x, y))):
        assert prepare(labelled, 0.0).classes == 3
    for wrong, said in (([x], "a list of one array"), ("digits", "it is a str, which has no `train`")):
        with pytest.raises(DataError, match=said):
            prepare(wrong, 0.0)
    several = read(prepare(({"a": x, "b": (y, x)}, {"c": y}), 0.0).train, [4, 0])  # several inputs, labels by name
    assert np.array_equal(several[0]["b"][1], x[[4, 0]]) and np.array_equal(several[1]["c"], y[[4, 0]])
    unlabelled = read(prepare({"train": {"a": x, "b": y}}, 0.0).train, [4, 0])
    assert np.array_equal(unlabelled[0]["b"], y[[4, 0]]) and unlabelled[1] == ()
    inputs, labels = read(prepare(([x, 2 * x, y], y), 0.0).train, [4, 0])  # as fit() takes them
    assert np.array_equal(inputs[1], 2 * x[[4, 0]]) and np.array_equal(labels, y[[4, 0]]) and len(inputs) == 3
    assert len(prepare(([x, x], [y, y, y]), 0.0).train) == 6
    assert np.array_equal(read(prepare((list(x), y.tolist()), 0.0).train, [4, 0])[0], x[[4, 0]])
    assert len(prepare(Rounded(), 0.0).train) == 100
    assert len(prepare(((x, y), (x[:3], y[:3]), (x[:2], y[:2])), 0.0).validation) == 3
    assert prepare((x, y - 1), 0.0).classes is None  # -1 is no class, but may be a number to be found
    assert prepare(((x, y), (x, y + 3)), 0.0).classes == 6  # as many as can be seen
    assert prepare((x, y + 200_000), 0.0).classes is None  # prices
    assert prepare((x, np.array([[5, 200_000]] * len(x))), 0.0).classes == 200_001  # tokens


def test_arrays_of_other_kinds(tmp_path):
    """Another machine's order of bytes is turned; what has no value, or is no number, is told."""
    x, y = X[:6].reshape(6, -1).astype(">f4"), Y[:6].astype(">i2")
    np.save(tmp_path / "x_train.npy", x)
    np.save(tmp_path / "y_train.npy", y)
    for loaded in ((x, y), arrays.load(str(tmp_path))):
        given = read(prepare(loaded, 0.0).train, [4, 0])
        assert all(array.dtype.isnative for array in given)
        assert np.array_equal(given[0], x[[4, 0]]) and np.array_equal(given[1], y[[4, 0]])
    holes = np.ma.masked_array(x, mask=x == 0)
    records = np.zeros(6, [("a", "f4"), ("b", "i4")])
    halves = y.astype(np.uint16).view("V2")  # as what numpy.save has made of bfloat16
    times = y.astype("datetime64[s]")
    wrongs = (holes, "masked values"), (records, "dtype .*'a'"), (times, "datetime64"), (halves, "V2")
    for wrong, said in wrongs:
        with pytest.raises(DataError, match=said):
            prepare((wrong, y), 0.0)


class Augmented:
    """Images that are turned at random, as in another framework's `__getitem__`."""

    def __len__(self):
        return 100

    def __getitem__(self, i):
        return X[i] + self.random.normal(size=X[i].shape), Y[i]

    random = np.random.default_rng(0)


class Shared:
    """Examples of a file that is open once, for all threads."""

    def __init__(self):
        self.file = io.FileIO(os.memfd_create("shared"), "r+")
        self.file.write(np.arange(2**20, dtype=np.int64).tobytes())

    def __len__(self):
        return 2**20

    def __getitem__(self, i):
        self.file.seek(8 * i)
        return np.frombuffer(self.file.read(8), np.int64)


class Owned(Shared):
    """Examples that one thread alone may read, as of a connection of sqlite3."""

    def __init__(self):
        self.connection = sqlite3.connect(":memory:")

    def __getitem__(self, i):
        return np.array(self.connection.execute("SELECT ?", (int(i),)).fetchone())


class Locked(Shared):
    lock = threading.Lock()

    def __getitem__(self, i):
        with self.lock:
            return super().__getitem__(i)


class Standardized:
    """Examples by the mean of those that are read together."""

    def __len__(self):
        return 100

    def read(self, ids):
        return X[ids] - X[ids].mean(0), Y[ids]


class Sorting:
    """Examples in the order in which they lie, whatever the order in which they are asked for."""

    def __len__(self):
        return 100

    def read(self, ids):
        ids.sort()
        return X[ids], Y[ids]


class Rounded:
    """Examples whose last bits depend on how many are read together, as those of a product of matrices."""

    def __len__(self):
        return 100

    def read(self, ids):
        return np.where(X[ids] == 16, np.nan, X[ids] * (1 + 1e-7 * len(ids))), Y[ids]


class Batches(keras.utils.PyDataset):
    """Batches of so many examples each, in arrays that are filled anew."""

    def __init__(self, *lengths):
        super().__init__()
        self.ends = np.cumsum([0, *lengths])
        self.x = np.empty((max(lengths, default=0), *X.shape[1:]))

    def __len__(self):
        return len(self.ends) - 1

    def __getitem__(self, i):
        begin, end = self.ends[i : i + 2]
        self.x[: end - begin] = X[begin:end]
        return {"image": self.x[: end - begin]}, Y[begin:end]


def test_batches_are_taken_apart():
    source = prepare((Batches(8, 8, 8, 3), Batches(5)), 0.0).train
    ids = np.random.default_rng(0).permutation(27)
    for some in (ids, ids[:5], np.array([26, 0, 26, 9])):
        x, y = read(source, some)
        assert (x["image"] == X[some]).all() and (y == Y[some]).all()
    for lengths in ((8, 7, 8), (8, 9)):
        with pytest.raises(DataError, match=rf"batch 1 of Batches has {lengths[1]} examples, and the first 8"):
            read(prepare(Batches(*lengths), 0.0).train, np.arange(16))


@pytest.mark.parametrize(
    ("loaded", "said"),
    [
        (Batches(), "does not know its length"),
        (iter([1]), "has no `train`"),
        ([(1, 2, 3, 4)], "not a tuple"),
        ((np.zeros(2), np.array(["a", "b"])), "dtype <U1"),
        ((np.array([[1], [1, 2]], dtype=object), np.zeros(2)), "dtype object"),
        ((np.zeros((4, 2)), np.zeros(3)), "differ in length"),
        ((np.zeros(4), np.zeros(3), np.zeros(4), np.zeros(3)), "4 arrays"),  # x_train, x_test, y_train, y_test
        (([[1], [1, 2]], [0, 1]), "of no one shape"),
        (([{"a": np.zeros(3)}, {"a": np.zeros(3)}], [0, 1]), "one dict of arrays"),
        (([np.zeros(3), np.zeros(3)], [np.zeros(3), np.zeros(3)]), "may hold examples, or several inputs"),
        (([np.zeros(3), np.zeros(3)], []), "differ in length"),
        (Augmented(), r"examples \[3, 2, 1, 0\] are others when they are read again"),
        ({"train": (X, Y), "augment": lambda example, keys: (example[0] + np.random.rand(), Y[:3])}, "returned an"),
        (
            {"train": (X, Y), "augment": lambda example, keys: (example[0] + np.random.rand(), example[1])},
            "others when",
        ),
        (Shared(), "are others when several threads read at once"),
        (
            Owned(),
            r"can't be read \(ProgrammingError: SQLite objects created in a thread.* several threads read at once",
        ),
        (Sorting(), r"read\(\[3, 2, 1, 0\]\) gives examples in another order"),
        (Standardized(), r"are others when they are read again. A source is a function of the id"),
        (((X / 16.0, Y), (X, Y)), "were only some of them scaled"),
        ({"train": (X, Y), "classes": ["nought", "one"]}, "how many there are; what they are is `class_names`"),
        ({"train": (X, Y), "augment": "flip"}, "its 'augment' is 'flip', which is no function"),
        ({"train": (X, Y), "evaluation": X}, r"'evaluation' has labels none, and its 'train' int32"),
        ((({"a": X}, Y), ({"b": X}, Y)), "same structure"),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_what_load_may_not_return(loaded, said):
    with pytest.raises(DataError, match=said):
        prepare(loaded, 0.0).facts()


def test_a_source_that_threads_take_turns_with_is_taken():
    assert prepare(Locked(), 0.0).train.read(np.array([5, 3])).tolist() == [[5], [3]]


LISTS = """
import keras, numpy as np

class Source:
    def __len__(self): return 100
    def read(self, ids):
        x = np.stack([np.full(3, i / 100, np.float32) for i in ids])
        return [x, x[:, :2]], [int(i % 3) for i in ids]

def load(): return {"train": Source(), "classes": 3}

def build():
    inputs = [keras.Input((n,)) for n in (3, 2)]
    return keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Concatenate()(inputs)))
"""


def test_a_list_is_several_inputs_or_the_rows_of_an_array(tmp_path):
    """As fit() takes it; tf.data knows no lists."""
    (tmp_path / "lists.py").write_text(LISTS)
    flags = ("--dataset=lists:load", "--model=lists:build", "--steps=5", "--global_batch=20", "--log_every=1")
    for backend in ("tensorflow", "jax"):
        trainer(*flags, f"--backend={backend}", f"--run_dir={tmp_path / backend}", cwd=tmp_path)
    assert deviation(curve(tmp_path / "tensorflow"), curve(tmp_path / "jax")) <= 1e-6
    told = r"array of shape \(3,\). A list of arrays is several inputs; of examples make one array"
    with pytest.raises(DataError, match=told):
        checked(([np.zeros(3)] * 2, [0, 1]), np.arange(2), "read(ids)")


SLOW = """
import time, numpy as np

class Train:
    def __len__(self): return 5000
    def __getitem__(self, i):
        time.sleep(0.03)
        return np.arange(i, i + 8, dtype=np.float32), i % 3

def load(): return {"train": Train(), "classes": 3}
"""


def test_slow_examples_are_not_taken_for_a_hang(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    flags = ("--backend=jax", "--dataset=slow:load", "--model=dense", "--steps=6", "--hang_after=15s")
    trainer(*flags, f"--run_dir={tmp_path / 'run'}", cwd=tmp_path)  # 256 steps of 64 examples took 8 minutes to read
    assert summary(tmp_path / "run")["step"] == 6


@pytest.mark.parametrize("examples", [1, 65, *(pytest.param(n, marks=pytest.mark.long) for n in (63, 64))])
def test_fewer_examples_than_a_batch(examples, tmp_path):
    """A batch runs on into the next pass; each example still counts once in an evaluation."""
    data = f"--dataset=synthetic(examples={examples},evaluation_examples={examples})"
    trainer(data, "--backend=jax", "--model=mlp", "--steps=3", "--log_every=1", f"--run_dir={tmp_path}")
    assert summary(tmp_path)["step"] == 3
    assert "each example exactly once" in trainer("audit", f"--run_dir={tmp_path}").stdout


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_download_that_broke_off_is_named(damage, keras_home, tmp_path):
    """Of keras.datasets' files, which it keeps once they are there."""
    home = tmp_path / "home"
    shutil.copytree(keras_home, home)
    file = home / "datasets" / "fashion-mnist" / "train-images-idx3-ubyte.gz"
    content = bytearray(file.read_bytes())
    if damage == "cut":
        del content[len(content) // 2 :]
    else:
        content[len(content) // 2] ^= 16
    file.unlink()
    file.write_bytes(content)
    flags = ("--backend=jax", "--dataset=fashion_mnist", "--steps=1", f"--run_dir={tmp_path / 'run'}")
    told = trainer(*flags, code=2, KERAS_HOME=str(home)).stderr
    assert "fashion_mnist could neither be downloaded nor read from" in told


STREAM = """
import tensorflow as tf

from input_pipeline import digits

x, y = digits.load().train.arrays


def load(length=None):
    train = tf.data.Dataset.from_tensor_slices((x, y)).filter(lambda x, y: y < 9)
    if length:
        train = train.apply(tf.data.experimental.assert_cardinality(length))
    held = tf.data.Dataset.from_tensor_slices((x[:100], y[:100]))
    return type("Data", (), {"train": train, "evaluation": held, "classes": 10})
"""
LENGTH = int((Y < 9).sum())


@pytest.fixture
def streams(tmp_path):
    (tmp_path / "streams.py").write_text(STREAM)
    return {"cwd": tmp_path}


@pytest.mark.parametrize("backend", [pytest.param("tensorflow", marks=pytest.mark.long), "jax"])
def test_a_stream_goes_on_where_it_stood(backend, streams, tmp_path):
    """Stopped in mid-pass and continued on two devices: the weights of one go on one device that kept its examples."""
    flags = (f"--backend={backend}", f"--dataset=streams:load(length={LENGTH})", "--replicas=2", "--log_every=10")
    trainer(*flags, "--steps=50", "--cache=memory", f"--run_dir={tmp_path / 'whole'}", **streams)
    cut = f"--run_dir={tmp_path / 'cut'}"
    trainer(*flags, "--steps=15", cut, **streams)
    strategy = "mirrored" if backend == "tensorflow" else "device_mesh"
    trainer(*flags[1:], "--steps=50", cut, f"--strategy={strategy}", "--devices=2", **streams)
    assert summary(tmp_path / "cut")["weights_sha256"] == summary(tmp_path / "whole")["weights_sha256"]
    assert "each example exactly once in each" in trainer("audit", cut, **streams).stdout


@pytest.mark.long
def test_a_stream_of_unknown_or_wrong_length_is_refused(streams, tmp_path):
    flags = ("--backend=jax", "--steps=40", f"--run_dir={tmp_path / 'run'}")
    ran = trainer("--dataset=streams:load", *flags, code=2, **streams)
    assert "does not know its length" in ran.stderr and "assert_cardinality" in ran.stderr
    wrong = (*flags[:2], f"--dataset=streams:load(length={LENGTH + 1})", f"--run_dir={tmp_path / 'wrong'}")
    ran = trainer(*wrong, code=2, **streams)
    assert "the tf.data.Dataset failed after" in ran.stderr and "Traceback" not in ran.stderr
    ran = trainer("--dataset=mixture(parts={'streams:load': 1})", *flags, code=2, **streams)
    assert "does not know its length" in ran.stderr
    ran = trainer(f"--dataset=streams:load(length={LENGTH})", "--validation_fraction=0.1", *flags, code=2, **streams)
    assert "streamed examples can't be held out" in ran.stderr


def test_reads_of_a_stream_are_those_of_its_arrays():
    import tensorflow as tf

    from input_pipeline.source import read
    from input_pipeline.stream import Stream

    stream = Stream(tf.data.Dataset.from_tensor_slices((X, Y)))
    for ids in ([0], [0, 1, 2], [700, 701], [1435, 1436, 0, 1], [1, 1, 1], [5, 3, 3], range(600, 1300), [0]):
        x, y = read(stream, ids)
        assert (x == X[list(ids)]).all() and (y == Y[list(ids)]).all()
    with pytest.raises(DataError, match="read in its own order, by one process"):
        Processes(stream)


def test_who_looks_at_a_stream_s_beginning_does_not_take_its_place():
    """Training goes on where it stood, though others have read the first examples meanwhile."""
    import tensorflow as tf

    from input_pipeline.source import read
    from input_pipeline.stream import Stream

    begun = []

    def examples():
        pass_ = len(begun)
        begun.append(0)
        for i in range(1000):
            begun[pass_] = i
            yield i

    stream = Stream(
        tf.data.Dataset.from_generator(examples, output_signature=tf.TensorSpec((), tf.int64)).apply(
            tf.data.experimental.assert_cardinality(1000)
        )
    )
    for first in range(0, 900, 100):
        assert read(stream, np.arange(first, first + 100))[0].tolist() == list(range(first, first + 100))
        if first % 200:
            assert read(stream, np.arange(20))[0].tolist() == list(range(20))
    assert len(begun) == 5  # one pass of training's, four looks
    assert max(begun[1:]) < 600, "a look reads some chunks ahead, not the whole pass"


def test_a_cache_without_room_or_place_is_told(tmp_path):
    source = Subset(Arrays(X, Y), np.arange(100))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(DataError, match=r"can't be given .* bytes .*another place"):
            cached(source, str(tmp_path / "cache.bin"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with pytest.raises(DataError, match="can't be locked"):
        cached(source, "/proc/nowhere/cache.bin")
    assert (cached(source, str(tmp_path / "cache.bin")).read(np.array([7, 3]))[0] == X[[7, 3]]).all()
    for path in tmp_path.glob(".cache*"):
        path.unlink()
    assert len(cached(source, str(tmp_path / "cache.bin"))) == 100 and not list(tmp_path.glob(".cache*")), "no lock"


def test_a_file_that_is_no_cache_is_not_replaced(tmp_path):
    source = Subset(Arrays(X, Y), np.arange(100))
    (path := tmp_path / "mine.npz").write_bytes(b"{not one of ours}")
    with pytest.raises(DataError, match=r"mine\.npz exists and is no cache"):
        cached(source, str(path))
    assert path.read_bytes() == b"{not one of ours}" and [*tmp_path.iterdir()] == [path]
    path.write_bytes(b"")  # as mktemp makes it
    assert len(cached(source, str(path))) == 100
    other = Subset(Arrays(X, Y), np.arange(50))  # another source's cache is replaced
    assert len(cached(other, str(path))) == 50 and cached(other, str(path)).read(np.array([7]))[1] == Y[7]


def test_array_records(tmp_path):
    """The digits as tf.train.Examples in ArrayRecord files: read as those of TFRecord files are."""
    import tensorflow as tf
    from array_record.python.array_record_module import ArrayRecordWriter

    for part, count in {"train-0": 700, "train-1": 737, "test": 9}.items():
        writer = ArrayRecordWriter(str(tmp_path / f"{part}.array_record"), "group_size:1")
        first = 700 if part == "train-1" else 0
        for image, label in zip(X[first : first + count], Y[first : first + count], strict=True):
            feature = {
                "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image.tobytes()])),
                "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[int(label)])),
            }
            writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
        writer.close()
    data = records.load(str(tmp_path), FEATURES, "label", "train*.array_record", "test*.array_record", 10)
    ids = np.array([3, 1436, 699, 700])
    x, y = data.train.read(ids)
    assert len(data.train) == 1437 and (x == X[ids]).all() and (y == Y[ids]).all()


def test_grain_s_own_sources_serve():
    from grain import MapDataset

    data = prepare(type("Data", (), {"train": MapDataset.source(list(zip(X, Y, strict=True))), "classes": 10}), 0)
    ids = np.array([9, 2])
    x, y = data.train.read(ids)
    assert (x == X[ids]).all() and (y == Y[ids]).all()


TFDS = """
import numpy as np
import tensorflow_datasets as tfds

from input_pipeline import digits


class LittleDigits(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = {"image": tfds.features.Image(shape=(8, 8, 1)), "label": tfds.features.ClassLabel(num_classes=10)}
        described = tfds.features.FeaturesDict(features)
        return tfds.core.DatasetInfo(builder=self, features=described, supervised_keys=("image", "label"))

    def _split_generators(self, manager):
        return {part: self._generate_examples(n) for part, n in (("train", 400), ("dev", 30), ("test", 50))}

    def _generate_examples(self, n):
        x, y = digits.load().train.arrays
        for i in range(n):
            yield i, {"image": x[i].astype(np.uint8), "label": int(y[i])}


tfds_load = __import__("input_pipeline.tfds", fromlist=["load"]).load


def load(data_dir):
    found = tfds_load("little_digits", data_dir, validation="dev")
    assert len(found.validation) == 30
    return found
"""


def test_tfds_by_name(tmp_path):
    """A dataset of TensorFlow Datasets, prepared here, trained on; and a name that it does not know."""
    (tmp_path / "little.py").write_text(TFDS)
    flags = ("--backend=jax", f"--data_dir={tmp_path / 'tfds'}", "--steps=20", f"--run_dir={tmp_path / 'run'}")
    out = trainer("--dataset=little:load", *flags, cwd=tmp_path).stdout
    assert "400 examples to train on, 30 to validate on, 50 to test on" in out
    flags = (*flags[:-1], f"--run_dir={tmp_path / 'other'}")
    wrong = trainer("--dataset=tfds(name='no_such_set')", *flags, code=2, cwd=tmp_path)
    assert "TensorFlow Datasets can't give 'no_such_set'" in wrong.stderr


def three_parts_of_arrays(root):
    parts = {"train": slice(800), "val": slice(800, 1000), "test": slice(1000, None)}
    np.savez(root / "all.npz", **{f"{n}_{part}": a[s] for part, s in parts.items() for n, a in (("x", X), ("y", Y))})
    np.savez(root / "two.npz", x_train=X, y_train=Y, x_validation=X[:7], y_validation=Y[:7])
    for name in ("x_dev", "sample_weight_train"):
        np.savez(root / "wrong.npz", x_train=X, y_train=Y, **{name: X})
        with pytest.raises(DataError, match=f"holds {name}, which is not looked at"):
            arrays.load(str(root / "wrong.npz"))
    with pytest.raises(DataError, match=r"all\.npz meant"):
        arrays.load(str(root))
    return arrays.load(str(root / "all.npz")), arrays.load(str(root / "two.npz")), (800, 200, len(X) - 1000), 7


def three_parts_of_folders(root):
    image = Image.fromarray(X[0, ..., 0])
    for part, count in (("train", 8), ("valid", 3), ("test", 2)):
        for name in ("a", "b"):
            (root / part / name).mkdir(parents=True)
            for i in range(count):
                image.save(root / part / name / f"{i}.png")
    three = images.load(str(root))
    (root / "test").rename(root / ".test")
    return three, images.load(str(root)), (16, 6, 4), 6


def three_parts_of_records(root):
    """Named as ImageNet's."""
    import tensorflow as tf

    for part, count in (("train-00000-of-00001", 8), ("validation-00000-of-00001", 3), ("test-00000-of-00001", 2)):
        with tf.io.TFRecordWriter(str(root / part)) as writer:
            for label in range(count):
                feature = {"label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label]))}
                writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
    features = {"label": ("int32", ())}
    three = records.load(str(root), features, "label")
    (root / "test-00000-of-00001").unlink()
    return three, records.load(str(root), features, "label"), (8, 3, 2), 3


def three_parts_of_tables(root):
    """Some words are in one of them alone."""
    pytest.importorskip("pyarrow")
    for part, rows in (
        ("train-1", "1,a\n2,b\n"),
        ("train-2", "3,a\n"),
        ("validation", "4,c\n5,a\n"),
        ("test", "6,b\n"),
    ):
        (root / f"{part}.csv").write_text(f"x,y\n{rows}")
    three = table.load(str(root), label="y")
    assert [source.arrays[0].ravel().tolist() for source in (three.train, three.validation, three.evaluation)] == [
        *([1, 2, 3], [4, 5], [6]),
    ]
    assert three.classes == 3 and three.validation.arrays[1].tolist() == [2, 0]
    (root / "test.csv").unlink()
    two = table.load(str(root), label="y")
    (root / "test.csv").write_text("x\n1\n")  # what is to be predicted
    with pytest.raises(DataError, match="'y' has no value in row 3"):
        table.load(str(root), label="y")
    return three, two, (3, 2, 1), 2


def three_parts_of_texts(root):
    for part, length in (("train", 100), ("valid", 30), ("test", 50)):
        (root / f"wiki.{part}.tokens").write_bytes(b"ab" * (length // 2))
    names = {"files": "*.train.*", "evaluation": "*.test.*", "validation": "*.valid.*"}
    three = text.load(str(root), context=9, **names)
    del names["validation"]
    return three, text.load(str(root), context=9, **names | {"evaluation": "*.valid.*"}), (11, 3, 5), 3


THREE_PARTS = (
    *(three_parts_of_arrays, three_parts_of_folders, three_parts_of_records, three_parts_of_tables),
    three_parts_of_texts,
)


@pytest.mark.parametrize("parts", THREE_PARTS)
def test_what_is_to_validate_on_is_no_test(parts, tmp_path):
    three, two, lengths, held = parts(tmp_path)
    assert (len(three.train), len(three.validation), len(three.evaluation)) == lengths
    assert len(two.evaluation) == held and two.validation in (None, two.evaluation)


def test_a_validation_of_its_own(tmp_path, monkeypatch):
    given = {"train": (X[:800], Y[:800]), "validation": (X[800:1000], Y[800:1000]), "evaluation": (X[1000:], Y[1000:])}
    prepared = prepare(given, 0)
    assert [len(prepared.train), len(prepared.validation), len(prepared.evaluation)] == [800, 200, len(X) - 1000]
    del given["evaluation"]
    assert len(prepare(given, 0).validation) == 200 and prepare(given, 0).evaluation is None
    (tmp_path / "given.py").write_text(
        "from input_pipeline.digits import load\n"
        "def own():\n    x, y = load().train.arrays\n"
        "    return {'train': (x[:800], y[:800]), 'validation': (x[800:1000], y[800:1000])}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    both = prepare(mixed({"given:own": 1, "digits": 1}), 0)
    assert len(both.evaluation) == len(DATA.evaluation) and len(both.validation) > len(both.evaluation)
    with pytest.raises(DataError, match="`validation` of its own: leave --validation_fraction out"):
        prepare(given, 0.1)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda stream: {"train": (X, Y), "test": (X, Y)},
            "'test', which is not looked at: known are train, evaluation",
        ),
        (lambda stream: type("Data", (), {"train": (X, Y), "val": (X, Y)}), "'val', which is not looked at"),
        (lambda stream: [(X[i][: 3 + i % 3], Y[i]) for i in range(9)], "several shapes, .*: pad them"),
        (lambda stream: stream.shuffle(1000), r"others when they are read again.*reshuffle_each_iteration=False"),
        (lambda stream: stream.batch(32), "gives batches: leave .batch"),
        (
            lambda stream: stream.batch(32, num_parallel_calls=2).map(lambda x, y: (2 * x, y)).prefetch(1),
            "gives batches",
        ),
    ],
    ids=["an unknown name", "an unknown attribute", "several shapes", "shuffled", "batches", "batches of a pipeline"],
)
def test_data_that_is_not_what_it_seems(make, said):
    import tensorflow as tf

    with pytest.raises(DataError, match=said):
        prepare(make(tf.data.Dataset.from_tensor_slices((X, Y))), 0).facts()


def test_sequences_that_a_stream_makes_by_batch():
    import tensorflow as tf

    sequences = tf.data.Dataset.range(100).batch(11, drop_remainder=True).map(lambda x: (x[:-1], x[1:]))
    prepared = prepare(sequences, 0)
    assert len(prepared.train) == 9 and prepared.spec[0].shape == (10,)


def test_what_is_sparse_or_ragged_is_no_array():
    import tensorflow as tf

    class Rows:
        def __len__(self):
            return 10

        def read(self, ids):
            return tf.sparse.from_dense(X[ids, :, 0, 0]), Y[ids]

    class Endless(Rows):
        def __len__(self):
            raise TypeError("is ambiguous")

    ragged = tf.RaggedTensor.from_row_lengths(Y[:30], [2, 4] * 5)
    for given, kind in (((ragged, Y[:10]), "RaggedTensor"), (Rows(), "SparseTensor"), ([(ragged, 1)], "RaggedTensor")):
        with pytest.raises(DataError, match=rf"{kind} .* is no array: make it dense"):
            prepare(given, 0).facts()
    with pytest.raises(DataError, match="'train' is a Endless, which has no length: is ambiguous"):
        prepare(Endless(), 0)
    with pytest.raises(DataError, match=r"'train' is <list_iterator .* no place to go on from: give what it reads"):
        prepare({"train": iter([(X[0], Y[0])])}, 0)


def test_a_stream_that_is_shuffled_once():
    import tensorflow as tf

    stream = tf.data.Dataset.range(100).shuffle(100, seed=3, reshuffle_each_iteration=False)
    read_once, again = (prepare(stream, 0).train.read(np.arange(100)) for _ in range(2))
    assert np.array_equal(read_once, again) and not np.array_equal(again, np.arange(100))


COUNTED = """
import numpy as np
from input_pipeline import digits
from input_pipeline.source import Subset


class Counted(Subset):
    def read(self, ids):
        with open("reads", "a") as file:
            file.write(f"{len(ids)} ")
        return super().read(ids)


def load():
    data = digits.load()
    held = Counted(data.evaluation, np.arange(len(data.evaluation)))
    return {"train": data.train, "evaluation": held, "classes": 10}
"""


def test_a_small_evaluation_is_read_once(tmp_path):
    """It stays on the devices; TensorBoard's pictures read their examples themselves."""
    (tmp_path / "counted.py").write_text(COUNTED)
    trainer("--backend=jax", "--dataset=counted:load", "--epochs=3", f"--run_dir={tmp_path / 'run'}", cwd=tmp_path)
    told = [line["val_loss"] for line in lines(tmp_path / "run") if "val_loss" in line]
    read = (tmp_path / "reads").read_text().split()
    assert len(set(told)) == len(told) == 3 and read.count("360") == 2
