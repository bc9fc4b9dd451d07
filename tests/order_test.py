"""Data order is a function: permutations, in range, independent of how it is asked; and the clock's arithmetic."""

import dataclasses
import itertools
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import input_pipeline.pipeline as pipeline_module
from input_pipeline import memory, order, reader
from input_pipeline.blocks import block_steps, pace
from input_pipeline.pipeline import Pipeline
from input_pipeline.source import Arrays
from input_pipeline.structure import Spec, flatten, map_structure
from trainer import peers
from trainer.clock import Clock, Interval


@given(st.integers(1, 3000), st.integers(0, 2**40), st.integers(0, 10**9))
def test_each_pass_holds_each_example_once(n, seed, p):
    ids = order.order(seed, np.arange(p * n, (p + 1) * n), n)
    assert sorted(ids) == list(range(n))


@given(st.integers(2, 10**12), st.integers(0, 2**32), st.lists(st.integers(0, 2**60), min_size=1, max_size=20))
def test_a_position_does_not_depend_on_its_neighbours(n, seed, positions):
    together = order.order(seed, positions, n)
    alone = [int(order.order(seed, [p], n)[0]) for p in positions]
    assert together.tolist() == alone
    assert all(0 <= i < n for i in alone)


def test_the_order_is_what_it_was():
    """Golden values: a change here is another run for everybody."""
    assert order.order(0, np.arange(10), 10).tolist() == GOLDEN_ORDER
    assert order.keys(0, 5, 3).tolist() == GOLDEN_KEY


GOLDEN_ORDER = [9, 8, 5, 4, 0, 6, 3, 1, 2, 7]
GOLDEN_KEY = [2653958190, 3465120688]


def test_every_place_is_equally_likely():
    counts = np.zeros((12, 12))
    for seed in range(6000):
        counts[np.arange(12), order.order(seed, np.arange(12), 12)] += 1
    chi_squared = ((counts - 500) ** 2 / 500).sum()
    assert chi_squared < 190, "11 * 11 degrees of freedom: the 0.9999 quantile is about 188"


def pipeline(replicas, shares, block, shuffled=True, n=103):
    source = Arrays(np.arange(n), np.arange(n))
    return Pipeline(source, 7, 24, replicas, shares, block, shuffled=shuffled)


def examples(p, blocks):
    """Ids by (step, replica, index), whatever the blocks and shares."""
    parts = [p.read_block(i) for i in range(blocks * len(p.shares))]
    shares = len(p.shares)
    rows = [np.concatenate([part["x"] for part in parts[i : i + shares]], 1) for i in range(0, len(parts), shares)]
    return np.concatenate(rows, 0)


def test_shares_and_blocks_don_t_show():
    whole = examples(pipeline(4, [range(4)], 8), 2)
    by_device = examples(pipeline(4, [range(0, 2), range(2, 4)], 4), 4)
    assert np.array_equal(whole, by_device)
    assert np.array_equal(whole.reshape(16, -1), examples(pipeline(1, [range(1)], 2), 8).reshape(16, -1))


@pytest.mark.parametrize("shares", [[range(4)], [range(0, 2), range(2, 4)]])
def test_no_more_is_read_than_a_run_needs(shares):
    """Ten steps in blocks of four: the rest of the last block is there, for a program takes arrays of one shape."""
    read = []

    class Noting(Arrays):
        def read(self, ids):
            read.extend(ids)
            return super().read(ids)

    p = pipeline(4, shares, 4)
    run = dataclasses.replace(p, source=Noting(*p.source.arrays), most=10)
    read.clear()  # what told it the examples' shapes
    blocks = list(run.blocks())
    assert len(blocks) == 3 * len(shares) and {len(block["x"]) for block in blocks} == {4}
    assert len(read) == 10 * 24 and run.fed(0, 10) % 2**64 == int(order.checksums([read])[0])
    assert np.array_equal(examples(run, 3)[:10], examples(p, 3)[:10])
    assert not list(run.blocks(3))


def test_evaluation_counts_each_example_once():
    p = pipeline(4, [range(0, 2), range(2, 4)], 4, shuffled=False)
    parts = list(itertools.islice(p.dataset().as_numpy_iterator(), p.blocks_from(0) * len(p.shares)))
    assert p.steps == 5
    counted = np.concatenate([part["x"][part["weight"] > 0] for part in parts])
    assert sorted(counted) == list(range(103))


class Slow:
    """103 examples, each of which takes its time, as does each read; it notes what is read, and by how many at once."""

    def __init__(self, seconds=0.0, a_read=0.0):
        self._seconds, self._a_read, self.ids = seconds, a_read, []
        self._reading = self.most = 0

    def __len__(self):
        return 103

    def read(self, ids):
        self._reading += 1
        self.most = max(self.most, self._reading)
        self.ids += ids.tolist()
        time.sleep(self._a_read + self._seconds * len(ids))
        self._reading -= 1
        return ids, ids


def test_evaluation_reads_each_example_once():
    source = Slow()
    p = Pipeline(source, 7, 24, 4, [range(4)], 32, shuffled=False)
    source.ids.clear()
    batch = p.read_block(0)
    assert source.ids == list(range(103))  # not those of 27 batches that nobody asks for
    last = batch["x"][4]
    counts = np.bincount(last.ravel())[96:]
    assert last.min() == 96 and set(counts) == {3, 4} and batch["weight"][4].sum() == 7  # padded by a mix of its own


@pytest.mark.parametrize(
    ("seconds", "a_read", "steps"), [(0.0, 0.0, 1024), (1e-3, 0.0, 32), (0.02, 0.0, 2), (0.0, 0.05, 1024)]
)
def test_a_block_of_slow_examples_is_short(seconds, a_read, steps):
    source = Slow(seconds, a_read)
    assert block_steps(source, 24, pace(source)) in (steps, steps // 2)  # sleep() takes some longer than it is told


@pytest.mark.parametrize(
    ("logged", "most", "steps"),
    [(0, 1024, 1024), (100, 1024, 800), (10, 256, 160), (97, 256, 194), (100, 20, 20), (100, 17, 16)],
)
def test_lines_of_the_log_fall_between_blocks(logged, most, steps):
    assert block_steps(Slow(), 24, most=most, logged=logged) == steps


def test_what_changes_examples_takes_its_time_too():
    # Long enough that a sleep which a busy machine draws out does not show.
    assert pace(Slow(), lambda example, keys: time.sleep(0.05 * len(keys))) == pytest.approx(0.05, rel=0.2)


def test_as_many_read_at_once_as_are_read_ahead():
    for threaded in (True, False):
        source = Slow(a_read=0.1)
        p = Pipeline(source, 7, 24, 4, [range(4)], 2, prefetch=12)
        next(p.blocks() if threaded else p.dataset().as_numpy_iterator())
        assert source.most >= 8


class Nested:
    """103 examples of several arrays, in a dict whose names are in no order and a list."""

    def __len__(self):
        return 103

    def read(self, ids):
        rows = np.asarray(ids, np.float32)[:, None] * np.ones(3, np.float32)
        return {"b": [rows, rows[:, :2] + 0.5], "a": rows[:, :1] + 0.25}, ids


def moved(example, keys):
    """An augmentation: each example moved by its own key."""
    x, y = example
    shift = (keys % np.uint64(100)).astype(np.float32)[:, None]
    return {"b": [x["b"][0] + shift, x["b"][1]], "a": x["a"]}, y


@pytest.mark.parametrize("shuffled", [True, False])
@pytest.mark.parametrize("cores", [1, 3, 64])
def test_a_block_that_takes_long_is_read_by_several_threads(shuffled, cores, monkeypatch):
    monkeypatch.setattr(pipeline_module, "cores", lambda: cores)
    monkeypatch.setattr(reader, "cores", lambda: cores)

    def read(source, pace, augment=None):
        p = Pipeline(source, 7, 24, 4, [range(4)], 4, shuffled=shuffled, augment=augment, pace=pace)
        return [p.read_block(i) for i in range(2)]

    together, apart = read(Nested(), 0.0, moved), read(Nested(), 0.02, moved)
    for a, b in zip(together, apart, strict=True):
        assert map_structure(type, a) == map_structure(type, b)
        assert all(map(np.array_equal, flatten(a), flatten(b)))
    source, threads = Slow(seconds=0.01), min(cores, 9)  # 0.96 s of reading, at least 0.1 s for each
    read(source, 0.01)
    assert threads / 2 < source.most <= threads  # a busy machine may begin some late


@pytest.mark.parametrize(
    ("cores", "pace", "threads"), [(2, 0.0, 2), (64, 0.0, 64), (64, 0.01, 8), (64, 1.0, 2), (128, 9.0, 2)]
)
def test_as_many_blocks_are_read_at_once_as_keep_the_cores_busy(cores, pace, threads, monkeypatch):
    monkeypatch.setattr(pipeline_module, "cores", lambda: cores)
    monkeypatch.setattr(reader, "cores", lambda: cores)
    p = Pipeline(Nested(), 7, 24, 4, [range(4)], 4, pace=pace)
    assert p.threads == threads
    assert p.size == 32 * 96 + 8 * 16  # bytes of 96 examples, and of a key for each replica and step
    monkeypatch.setattr(pipeline_module, "_AHEAD", 10 * p.size)
    assert p.threads == min(10, threads)


def test_tf_data_and_read_block_agree():
    p = pipeline(4, [range(4)], 8)
    for i, element in zip(range(3, 6), p.blocks(3), strict=False):
        expected = p.read_block(i)
        assert all(np.array_equal(element[k], expected[k]) for k in expected)


@pytest.mark.parametrize(("text", "examples", "batch"), [("1epoch", 1437, 64), ("0.5epoch", 103, 24), ("7", 50, 8)])
def test_what_is_due_does_not_depend_on_the_chunks(text, examples, batch):
    def due_steps(block, start, most=256):
        clock = Clock(200, examples, batch, {"it": Interval.parse(text)}, now=lambda: 0.0, most=most)
        step, due = start, []
        while step < 200:
            for end in clock.chunks(step, (step // block + 1) * block):
                if clock.due(end):
                    due.append(end)
                step = end
        return due

    every = due_steps(1, 0)
    assert every == due_steps(32, 0) == due_steps(32, 0, most=3)
    assert [s for s in every if s > 57] == due_steps(8, 57)
    if text == "1epoch":
        assert every[0] == 23 and every[1] == 45  # 22.45 steps an epoch: the step that uses its last example


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 1025, 123_457, 200_704])
def test_squares_added_up_in_stages(size):
    from trainer.strategies.jax_norms import in_stages

    array = np.random.default_rng(0).normal(size=size).astype(np.float32)
    assert float(in_stages(array)) == pytest.approx(np.square(array, dtype=np.float64).sum(), rel=1e-6)


def test_memory_is_used_again_when_nobody_refers_to_it():
    array = np.arange(2**20, dtype=np.int32).reshape(-1, 16)
    rng = np.random.default_rng(0)

    def gathered() -> tuple[np.ndarray, np.ndarray]:
        ids = rng.integers(0, len(array), 2**15)
        return ids, memory.gather(array, ids)

    first_ids, first = gathered()
    view = first.reshape(2, -1, 16)[1]  # as batches are cut from it
    address = first.ctypes.data
    del first
    others = [gathered() for _ in range(12)]  # more than are kept
    assert (view == array[first_ids[len(first_ids) // 2 :]]).all()
    for ids, found in others:
        assert (found == array[ids]).all()
        assert found.ctypes.data % 64 == 0
        assert found.ctypes.data != address
    addresses = {found.ctypes.data for _, found in others}
    del others, found, view
    assert gathered()[1].ctypes.data in addresses | {address}


@pytest.mark.parametrize("pace", [0.0, 1.0])
def test_the_place_where_a_source_stands_is_shown(pace, monkeypatch):
    """Of one thread that reads, or of several that share in a block."""
    monkeypatch.setattr(reader, "cores", lambda: 2)
    stands, goes_on = threading.Event(), threading.Event()

    class Slow:
        def __len__(self):
            return 8

        def read(self, ids):
            stands.set()
            goes_on.wait()  # a line of the source's
            return np.zeros((len(ids), 1)), np.zeros(len(ids))

    read = reader.Reader(Slow(), (Spec((1,), np.dtype(float)), Spec((), np.dtype(float))), None, pace)
    thread = threading.Thread(target=read, args=(np.arange(8),))
    thread.start()
    assert stands.wait(60)
    shown = "".join(peers._stacks())
    goes_on.set()
    thread.join()
    assert "a thread that reads data is here" in shown and "a line of the source's" in shown


@pytest.mark.parametrize("ids", [[0, -1], [0, 2**16]])
def test_examples_that_are_not_there(ids):
    with pytest.raises(IndexError, match="65536 examples"):
        memory.gather(np.zeros((2**16, 64), np.uint8), np.array(ids))
