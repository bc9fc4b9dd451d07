"""--exact: the same bits for every number of devices that divides the replicas, and when it changes in mid-run."""

import os

import pytest

from tests import running
from tests.curve_test import agree, run_each
from tests.forks import trainer
from tests.running import summary
from trainer.tree import Tree


def where(backend: str, devices: int) -> tuple[str, ...]:
    if devices == 1:
        return "--strategy=one_device", f"--backend={backend}"
    return f"--strategy={'mirrored' if backend == 'tensorflow' else 'device_mesh'}", f"--devices={devices}"


MODELS = {
    "mlp": ("--model=mlp", "--optimizer=adam(clipnorm=0.5)"),
    "dense": (
        "--model=dense",
        "--optimizer=adam(use_ema=True,ema_overwrite_frequency=4,global_clipnorm=0.5,weight_decay=0.01)",
    ),
    "convnet": ("--model=convnet", "--optimizer=sgd(momentum=0.9)", "--learning_rate=0.01"),
    "transformer": (
        "--dataset=text(context=32)",
        "--model=transformer(width=32,depth=2,heads=4,groups=2,hidden=64,dropout=0.1)",
        "--optimizer=adamw(global_clipnorm=1.0)",
    ),
}


def test_one_device_adds_up_by_the_tree_of_many():
    def add(left: str, right: str) -> str:
        return f"({left} {right})"

    for leaves in range(1, 70):
        nodes: list = [None] * leaves.bit_length()
        for i in range(leaves):
            nodes = Tree.push(nodes, str(i), (~i & (i + 1)).bit_length() - 1, add)
        assert Tree.fold(nodes, leaves, add) == Tree.add_up([*map(str, range(leaves))], add)


def hashes(backend: str, counts: list[int], tmp_path, *flags: str) -> set[str]:
    directories = run_each([where(backend, r) for r in counts], tmp_path, "--exact", "--log_every=10", *flags)
    agree(directories, 0)
    finals = [summary(d)["final"] for d in directories]
    assert all(final == finals[0] for final in finals)  # the uneven rest of the evaluation, too
    return {summary(d)["weights_sha256"] for d in directories}


@pytest.mark.parametrize(
    ("model", "backend"),
    [("dense", "tensorflow"), ("dense", "jax")],  # the others below
)
def test_one_hash(model, backend, tmp_path):
    """Uneven data, dropout, batch statistics, clipping, EMA."""
    flags = (*MODELS[model], "--replicas=4", "--global_batch=40", "--steps=20", "--evaluate_every=never")
    assert len(hashes(backend, [1, 4], tmp_path, *flags)) == 1


@pytest.mark.long
@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
@pytest.mark.parametrize("model", MODELS)
def test_one_hash_over_all_devices(model, backend, tmp_path):
    flags = (*MODELS[model], "--replicas=8", "--global_batch=80", "--steps=50", "--evaluate_every=25")
    assert len(hashes(backend, [1, 2, 4, 8], tmp_path, *flags)) == 1


@pytest.mark.long
@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_any_divisor_of_any_number_of_replicas(backend, tmp_path):
    """Six replicas on two and on three devices: the tree runs across the devices."""
    flags = ("--model=mlp(dropout=0.1)", "--precision=mixed_bfloat16", "--replicas=6", "--global_batch=96")
    assert len(hashes(backend, [1, 2, 3], tmp_path, *flags, "--steps=20", "--evaluate_every=never")) == 1


@pytest.mark.long  # tests/legs_test.py changes them, and more
@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_devices_change_in_mid_run(backend, tmp_path):
    """8, then 2, then 4 devices, each stopped in mid-epoch, against an uninterrupted run on one."""
    flags = (
        "--model=dense",
        "--exact",
        "--replicas=8",
        "--global_batch=80",
        "--save_every=5",
        "--evaluate_every=never",
    )
    trainer(*where(backend, 1), *flags, "--steps=30", f"--run_dir={tmp_path / 'whole'}")
    for devices, steps in ((8, 10), (2, 20), (4, 30)):
        trainer(*where(backend, devices), *flags, f"--steps={steps}", f"--run_dir={tmp_path / 'moved'}")
    assert summary(tmp_path / "moved")["weights_sha256"] == summary(tmp_path / "whole")["weights_sha256"]


def test_a_block_s_length_changes_nothing(tmp_path):
    """Of 514 steps, and 1,024: the former are no multiple of those that are unstacked together."""
    flags = ("--backend=jax", "--exact", "--replicas=2", "--steps=520", "--evaluate_every=never")
    for log_every in ("514", "1epoch"):
        trainer(*flags, f"--log_every={log_every}", f"--run_dir={tmp_path / log_every}")
    assert len({summary(directory)["weights_sha256"] for directory in tmp_path.iterdir()}) == 1


@pytest.mark.long
def test_many_replicas_of_one_device(tmp_path):
    """Each is a result of a program that takes a batch apart, and XLA took minutes to compile one of so many."""
    flags = ("--replicas=192", "--global_batch=384", "--steps=5", "--evaluate_every=never")
    assert len(hashes("jax", [1, 3], tmp_path, *flags)) == 1
    assert max(summary(directory)["seconds"]["compile"] for directory in tmp_path.iterdir()) < 30


def test_cores_don_t_show(tmp_path):
    """One core, such as a scheduler gives a process; and JAX told of seven."""
    flags = ("--exact", "--replicas=2", "--global_batch=1024", "--steps=6", "--evaluate_every=never")
    convnet, mlp = (*flags, "--model=convnet"), (*flags, "--model=mlp(units=512)", "--backend=jax")
    trainer(*convnet, f"--run_dir={tmp_path / 'convnet'}")
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        running.trainer(*convnet, f"--run_dir={tmp_path / 'convnet_by_one'}")
    finally:
        os.sched_setaffinity(0, allowed)
    trainer(*mlp, f"--run_dir={tmp_path / 'mlp'}")
    trainer(*mlp, f"--run_dir={tmp_path / 'mlp_by_seven'}", PJRT_NPROC="7")
    for some, others in (("convnet", "convnet_by_one"), ("mlp", "mlp_by_seven")):
        assert summary(tmp_path / some)["weights_sha256"] == summary(tmp_path / others)["weights_sha256"]


def test_what_can_t_be_exact_is_refused(tmp_path):
    refused = trainer(
        "--exact", "--strategy=device_mesh", "--devices=2", "--layout=fsdp", f"--run_dir={tmp_path}", code=2
    )
    assert "--exact" in refused.stderr and "--layout=fsdp" in refused.stderr
