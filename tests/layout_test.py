"""Meshes and layouts: the one-device curve, the memory they promise, rules that are checked, and explain."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests.forks import trainer
from tests.running import REPOSITORY, curve, deviation, start, summary

TRANSFORMER = (
    "--dataset=text(context=32)",
    "--model=transformer(width=64,depth=2,heads=8,groups=8,hidden=128)",
    "--optimizer=adamw",
    "--global_batch=16",
    "--replicas=8",
)
# A sum over devices is rounded otherwise than one device's. 30 steps of this smooth model keep that below 1e-6.
WITHIN = 1e-5
LONG = pytest.mark.long
MESHES = [
    pytest.param("data=8/fsdp", marks=LONG),
    "data=2,model=4/megatron",
    pytest.param("data=4,model=2/megatron+fsdp", marks=LONG),
    pytest.param("data=4,model=2/megatron", marks=LONG),
    pytest.param("data=1,model=8/megatron", marks=LONG),
]


@pytest.fixture(scope="module")
def one_device(tmp_path_factory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("layout") / "one"
    trainer("--backend=jax", *TRANSFORMER, "--steps=30", "--log_every=1", f"--run_dir={directory}")
    return directory


@pytest.mark.parametrize("mesh", MESHES)
def test_sharding_doesn_t_show_in_the_curve(mesh, one_device, tmp_path):
    sizes, layout = mesh.split("/")
    flags = ("--strategy=device_mesh", f"--mesh={sizes}", f"--layout={layout}", *TRANSFORMER)
    ran = trainer(*flags, "--steps=30", "--log_every=1", f"--run_dir={tmp_path / 'run'}")
    assert deviation(curve(one_device), curve(tmp_path / "run")) <= WITHIN
    final, expected = summary(tmp_path / "run")["final"], summary(one_device)["final"]
    assert abs(final["test_loss"] - expected["test_loss"]) <= WITHIN * expected["test_loss"]
    events = b"".join(path.read_bytes() for path in (tmp_path / "run/tensorboard").rglob("*tfevents*"))
    by = "nothing: all have all" if sizes.startswith("data=1,") else "dim 0 down"
    assert b"run/shards" in events and f"logical replicas of a batch (8,): devices by {by}".encode() in events
    # What lies on a device, measured on the live arrays, is what explain said beforehand.
    held = re.search(r"memory  (.*?) of variables", ran.stdout)
    explained = trainer("explain", *flags).stdout
    predicted = [re.search(rf"{part}  (\S+ \S+) on each", explained) for part in ("parameters", "optimizer")]
    assert held and all(predicted)
    assert size(held[1]) == pytest.approx(sum(size(p[1]) for p in predicted if p), rel=0.01)
    whole = [re.search(rf"{part}  .*, of (\S+ \S+)", explained) for part in ("parameters", "optimizer")]
    if "fsdp" in layout:
        assert size(held[1]) == pytest.approx(sum(size(w[1]) for w in whole if w) / 8, rel=0.05)


ZERO1 = [
    # Of lamb, a step depends on the norms of whole variables; of a clipped gradient, on that of all.
    (("--mesh=data=4", "--layout=zero1"), ("--model=mlp(units=512)", "--optimizer=lamb")),
    pytest.param(
        ("--mesh=data=2,model=2", "--layout=megatron+zero1"),
        ("--dataset=text(context=32)", "--model=transformer(width=256,depth=1)", "--optimizer=adamw"),
        marks=LONG,
    ),
    pytest.param(
        ("--mesh=data=2,model=2", "--layout=megatron+zero1"),
        ("--model=vit(width=256,depth=1)", "--optimizer=sgd(momentum=0.9)"),
        marks=LONG,
    ),
    pytest.param(
        ("--mesh=data=4", "--layout=zero1"),
        ("--model=convnet(filters=(16,48,64),dropout=0)", "--optimizer=sgd(momentum=0.9,global_clipnorm=0.5)"),
        marks=LONG,
    ),
]


@pytest.mark.parametrize(("layout", "what"), ZERO1)
def test_updates_in_shares(layout, what, tmp_path):
    """zero1: the one-device curve, with the promised part of the slots; continued on fewer devices, then on one."""
    flags = (*what, "--global_batch=32", "--replicas=8", "--log_every=1")
    run = f"--run_dir={tmp_path / 'run'}"
    trainer("--backend=jax", *flags, "--steps=40", f"--run_dir={tmp_path / 'one'}")
    ran = trainer("--strategy=device_mesh", *layout, *flags, "--steps=20", run)
    trainer("--strategy=device_mesh", "--devices=2", "--layout=zero1", *flags, "--steps=30", run)
    trainer("--backend=jax", *flags, "--steps=40", run)
    assert deviation(curve(tmp_path / "one"), curve(tmp_path / "run")) <= WITHIN
    explained = trainer("explain", "--strategy=device_mesh", *layout, *flags).stdout
    assert "reduce-scatter" in explained or "model" in layout[0]
    held = re.search(r"memory  (.*?) of variables", ran.stdout)
    parts = [
        re.search(rf"{part}  (\S+ \S+) on each device, of (\S+ \S+)", explained) for part in ("parameters", "optimizer")
    ]
    assert held and size(held[1]) == pytest.approx(sum(size(part[1]) for part in parts if part), rel=0.01)
    assert parts[1] and size(parts[1][1]) < 0.7 * size(parts[1][2])


def size(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]


@pytest.mark.parametrize("sizes", [pytest.param(f"data={d},model={8 // d}", marks=LONG) for d in (8, 4, 2, 1)])
def test_rules_of_the_guides(sizes, tmp_path):
    """The shapes of Keras's guide, rules given as JSON, one of them for a layer's output; and a sharded run moves."""
    flags = ("--model=mlp", "--replicas=8", "--global_batch=64", "--log_every=1", "--optimizer=sgd")
    layout = '[["mlp/dense_0/kernel|dense_0/kernel", [null, "model"]], [".*dense_0/output", ["data", "model"]]]'
    layout = layout if "model=1" not in sizes else '[[".*dense_0/kernel", ["data", null]]]'
    mesh = ("--strategy=device_mesh", f"--mesh={sizes}", f"--layout={layout}")
    trainer("--backend=jax", *flags, "--steps=20", f"--run_dir={tmp_path / 'one'}")
    trainer(*mesh, *flags, "--steps=10", f"--run_dir={tmp_path / 'moved'}")
    trainer("--backend=jax", *flags, "--steps=20", f"--run_dir={tmp_path / 'moved'}")
    assert deviation(curve(tmp_path / "one"), curve(tmp_path / "moved")) <= WITHIN


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (('--layout=[["dense.*kernel", [null, "data"]]]',), "matches no variable"),
        (('--layout=[[".*kernel", [null, "data"]], [".*dense_0/kernel", ["data", null]]]',), "match .*dense_0/kernel"),
        (('--layout=[[".*logits/kernel", [null, "data"]]]',), "not divisible"),
        (('--layout=[[".*kernel", [null, "model"]]]',), "no axis of the mesh"),
        (("--layout=megatron",), "there is no layout 'megatron' for this model"),
        (("--mesh=data",), "not axis=size"),
        (("--mesh=data=2,model=2", "--devices=8"), "contradicts --mesh"),
    ],
)
def test_rules_are_checked(flags, reason, tmp_path):
    devices = () if any("mesh" in flag for flag in flags) else ("--devices=4",)
    ran = trainer("--strategy=device_mesh", *devices, *flags, f"--run_dir={tmp_path / 'run'}", code=2)
    assert re.search(reason, ran.stderr), ran.stderr
    assert "Traceback" not in ran.stderr


def test_explain_256_devices():
    """Nothing of the model's size is allocated: this would be 100 GB of variables."""
    text = trainer(
        "explain",
        "--dataset=text(context=512)",
        "--model=transformer(size='7B',depth=4)",
        "--global_batch=64",
        "--strategy=device_mesh",
        "--mesh=data=32,model=8",
        "--layout=megatron+fsdp",
        "--device_memory=80GiB",
    ).stdout
    for word in ("256 devices", "megatron+fsdp", "(data, model)", "all-gather", "GFLOP", "fits into", "explained in"):
        assert word in text, text


AS_IT_RUNS = """
import sys
from absl import flags
from trainer import backend, command_line
command_line.define_flags()
flags.FLAGS(sys.argv)
config = backend.without_accelerators(command_line.from_flags())
backend.prepare("jax")
from trainer import explain, loading, program
from trainer.strategies import device_mesh
data, strategy = loading.load_dataset(config), device_mesh.create(config, abstract=True)
strategy.compile(program.Program(config, data, 1, 8, strategy.scope()))
compiled = strategy.lower(explain._block(config, data, 8)).compile()
print(explain._step(strategy, compiled, 0.0, None))
"""


@pytest.mark.long
@pytest.mark.parametrize("layout", ["replicated", "fsdp", "megatron+fsdp"])
def test_explain_tells_of_the_step_as_it_runs(layout):
    """Compiled without optimized machine code, it moves the same, and holds the same."""
    flags = ("--strategy=device_mesh", "--mesh=data=4,model=2", f"--layout={layout}", *TRANSFORMER)
    explained = trainer("explain", *flags).stdout
    command = (sys.executable, "-c", AS_IT_RUNS, *flags)
    as_it_runs = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY).stdout
    assert re.findall("moves  .*", explained) == re.findall("moves  .*", as_it_runs)
    memory = [re.search(r"memory  (\S+ \S+) in all", text) for text in (explained, as_it_runs)]
    assert size(memory[0][1]) == pytest.approx(size(memory[1][1]), rel=0.1)


@pytest.mark.long
def test_explain_7b():
    """Under 2 GB of memory; 15 seconds are aimed at, which machines at half their speed miss."""
    flags = ("--dataset=text(context=2048)", "--model=transformer(size='7B')", "--global_batch=64")
    mesh = ("--strategy=device_mesh", "--mesh=data=32,model=8", "--layout=megatron")
    process = start("explain", *flags, *mesh)
    assert process.stdout
    text = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    assert not status and used.ru_maxrss < 2e6  # kB
    assert float(re.search(r"explained in ([\d.]+)s", text)[1]) < 40


def test_explain_predicts_a_step_on_other_numbers_of_devices():
    """The table is made of the step's own FLOPs and bytes, and a wrong --predict is named."""
    flags = ("--strategy=device_mesh", "--devices=4", "--model=mlp")
    out = trainer("explain", "--predict=1GB/s,10us,1GFLOP/s", *flags).stdout
    gflop = float(re.search(r"GFLOP a step, ([\d.]+) on each device", out)[1])
    rows = {int(row[0]): row[1:] for line in out.splitlines() if (row := line.split()) and row[0].isdigit()}
    assert sorted(rows) == [2**i for i in range(13)]
    seconds = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
    compute, ring = (float(rows[4][i]) * seconds[rows[4][i + 1]] for i in (0, 2))
    assert compute == pytest.approx(gflop, rel=0.02)  # at 1 GFLOP/s
    assert ring == pytest.approx(6 * 10e-6 + 1.5 * 4 * 85_002 / 1e9, rel=0.02)
    assert rows[1][-1] == "100.0%" and float(rows[4096][-1][:-1]) < float(rows[2][-1][:-1])
    assert "is not bandwidth,latency,speed" in trainer("explain", "--predict=fast", *flags, code=2).stderr
