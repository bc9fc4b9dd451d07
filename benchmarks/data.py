"""Do the data come as fast as this machine can move them? Shuffled, resumable blocks beside usual tf.data pipelines.

python -m benchmarks.data
"""

import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import page
from benchmarks.paired import WARM_UP, Side, in_turn, ratio
from benchmarks.rounds import training

EXAMPLES, BATCH = 60_000, 512
_SHAPE = (28, 28, 1)


def main() -> None:
    """Times a pass over 60,000 images each way, and going on at far positions."""
    from input_pipeline import arrays
    from input_pipeline.blocks import block_steps
    from input_pipeline.cache import cached
    from input_pipeline.domains import Categories
    from input_pipeline.pipeline import Pipeline
    from input_pipeline.source import Arrays, Subset

    x = np.random.default_rng(0).integers(0, 256, (EXAMPLES, *_SHAPE), np.uint8)
    y = (np.arange(EXAMPLES) % 10).astype(np.int32)
    whole = float(x.sum(dtype=np.int64))
    steps = EXAMPLES // BATCH
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        for name, array in {"x_train": x, "y_train": y}.items():
            np.save(folder / f"{name}.npy", array)
        records = str(folder / "train.tfrecord")
        fed = _fed(folder)  # before TensorFlow's threads are there
        import tensorflow as tf

        _write(tf, records, x, y)
        source = cached(Subset(arrays.load(scratch).train, np.arange(EXAMPLES)), str(folder / "cache"))
        memory = Arrays(x, y)

        def ours(source: Any, shuffled: bool = True) -> Callable[[], float]:
            block = block_steps(source, BATCH)

            def once() -> float:
                pipeline = Pipeline(source, 0, BATCH, 1, [range(1)], block, [Categories(10)], shuffled=shuffled)
                blocks, total = pipeline.blocks(), 0.0
                for _ in range(-(-steps // block)):
                    total += float(next(blocks)["x"].shape[0])
                return total

            return once

        def naive(ds: Any) -> Callable[[], float]:
            def once() -> float:
                return float(sum(len(batch[1]) for batch in ds.as_numpy_iterator()))

            return once

        features = {"image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}

        def one(record: Any) -> Any:
            parsed = tf.io.parse_single_example(record, features)
            return tf.reshape(tf.io.decode_raw(parsed["image"], tf.uint8), _SHAPE), parsed["label"]

        def many(batch: Any) -> Any:
            parsed = tf.io.parse_example(batch, features)
            return tf.reshape(tf.io.decode_raw(parsed["image"], tf.uint8), (-1, *_SHAPE)), parsed["label"]

        auto = tf.data.AUTOTUNE
        read = tf.data.TFRecordDataset(records)
        shuffled = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(EXAMPLES, seed=0)
        sides = {
            "ours, cache file": ours(source),
            "ours, memory": ours(memory),
            "TFRecord, map, batch": naive(read.map(one, auto).batch(BATCH).prefetch(auto)),
            "TFRecord, shuffle 10,000, batch, map": naive(
                read.shuffle(10_000, seed=0).batch(BATCH).map(many, auto).prefetch(auto)
            ),
            "from_tensor_slices, shuffle": naive(shuffled.batch(BATCH).prefetch(auto)),
            "memcpy": lambda: float(x.copy().nbytes),
        }
        measured = in_turn(sides, rounds=5, tolerance=float("inf"))
        _check(memory, source, x, whole)
        rows = [
            _row("shuffled pass, cached in a file", rival, measured["ours, cache file"], measured[rival], target)
            for rival, target in {
                "TFRecord, map, batch": 1 / 35,
                "TFRecord, shuffle 10,000, batch, map": 1 / 7,
                "from_tensor_slices, shuffle": None,
                "memcpy": 1 / 0.14,
            }.items()
        ]
        rows.append(fed)
        rows += [_seek(memory, position, tf, x, y) for position in (10**3, 10**5, 10**7)]
    page.record(
        "data",
        "Do the data come as fast as the machine can move them?",
        f"{EXAMPLES:,} images of 784 bytes, uint8, batches of {BATCH}; ours shuffled over all; million examples "
        "a second, fastest round in brackets; each example is counted, and ours are compared with the arrays",
        rows,
    )


def _write(tf: Any, path: str, x: Any, y: Any) -> None:
    with tf.io.TFRecordWriter(path) as writer:
        for image, label in zip(x, y, strict=True):
            feature = {
                "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image.tobytes()])),
                "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[int(label)])),
            }
            writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())


def _check(memory: Any, source: Any, x: Any, whole: float) -> None:
    """The cache gives the same blocks as memory does, and a pass has each example once."""
    from input_pipeline.pipeline import Pipeline

    blocks = [Pipeline(s, 0, 500, 1, [range(1)], 120).read_block(0)["x"] for s in (memory, source)]
    if not (blocks[0] == blocks[1]).all() or float(blocks[0].sum(dtype=np.int64)) != whole:
        raise SystemExit("the pipelines give other examples than the arrays hold")


def _row(case: str, rival: str, ours: Side, theirs: Side, target: float | None) -> page.Row:
    found = ratio(ours, theirs)

    def speed(side: Side) -> str:
        return f"{EXAMPLES / side.median / 1e6:.3g} M/s ({EXAMPLES / side.least / 1e6:.3g})"

    text = f"{found.paired:.3f} ({found.least:.3f}, {found.cpu:.2f})"
    noisy = found.noisy or page.busy()
    return page.Row(case, rival, speed(ours), speed(theirs), text, found.paired, target, True, noisy)


def _fed(folder: pathlib.Path) -> page.Row:
    """Training from a cache file beside training on blocks of it that stay on the device."""
    from trainer import backend
    from trainer.config import Config

    backend.prepare("jax")
    with backend.quiet():
        from trainer.assembly import assemble
    from trainer.peers import Peers

    data = f"arrays(data_dir={str(folder)!r})"
    config = Config(backend="jax", dataset=data, cache=str(folder / "fed"), global_batch=BATCH, steps=260)
    parts = assemble(config, Peers())
    measured = in_turn({"fed": training(parts), "kept": training(assemble(config, Peers()), kept=True)})
    found = ratio(measured["kept"], measured["fed"])
    own, theirs = (f"{1e3 * measured[side].median / config.steps:.3g} ms a step" for side in ("fed", "kept"))
    text, noisy = f"{found.paired:.3f} ({found.least:.3f})", found.noisy or page.busy()
    case = "time that training does not wait for it, mlp on jax"
    return page.Row(case, "the same blocks kept on the device", own, theirs, text, found.paired, 0.95, False, noisy)


def _seek(source: Any, position: int, tf: Any, x: Any, y: Any) -> page.Row:
    """How long the first block takes at a far position, beside skip()."""
    from input_pipeline.blocks import block_steps
    from input_pipeline.domains import Categories
    from input_pipeline.pipeline import Pipeline

    block = block_steps(source, BATCH)

    def ours() -> float:
        pipeline = Pipeline(source, 0, BATCH, 1, [range(1)], block, [Categories(10)])
        return float(pipeline.read_block(position // BATCH // block)["y"].size > 0)

    repeated = tf.data.Dataset.from_tensor_slices((x, y)).repeat()

    def skip() -> float:
        return float(next(repeated.skip(position).batch(BATCH).as_numpy_iterator())[1].size > 0)

    begin = time.perf_counter()
    skip()
    slow = time.perf_counter() - begin > 1  # then once more will do
    measured = in_turn({"ours": ours, "skip": skip}, *((1, 0) if slow else (5, WARM_UP)))
    found = ratio(measured["ours"], measured["skip"])
    own, theirs = (f"{1e3 * measured[side].median:.3g} ms" for side in ("ours", "skip"))
    text, value = f"{found.paired:.3g}", 1e3 * measured["ours"].median
    return page.Row(f"going on at example {position:,}", "Dataset.skip", own, theirs, text, value, 50.0)


if __name__ == "__main__":
    main()
