"""A step's floating-point operations are counted right, on both backends, and the peak is of this machine."""

import json
import subprocess
import sys

import pytest

from tests.running import REPOSITORY, environment

COUNT = """
import json, sys
from trainer import backend
from trainer.config import Config
from trainer.cluster import ALONE
from trainer.peers import Peers

counted, name = {}, sys.argv[1]
backend.prepare(name, False)
from trainer.assembly import assemble
from trainer.monitoring.utilization import matrix_product
for model, dataset in json.loads(sys.argv[2]):
    config = Config(backend=name, model=model, dataset=dataset, global_batch=32, replicas=4, steps=1)
    with Peers(ALONE, 600) as peers:
        parts = assemble(config, peers)
        train, held_out = parts.dataset.train, parts.dataset.validation
        parts.pipeline(train, shuffled=True)
        train.read = held_out.read = None  # in mid-run a source may stall: it is asked in threads alone
        parts.pipeline(held_out, shuffled=False)
        counted[model] = parts.strategy.flops(parts.pipeline(train, shuffled=True).spec)
counted["peaks"] = [matrix_product(dtype, on_cpu=True) for dtype in ("float32", "bfloat16")]
print(json.dumps(counted))
"""
IMAGES, TOKENS = "synthetic(shape=(16, 16, 3), classes=10)", "text(context=64)"
TRANSFORMER = "transformer(width=64, depth=2, heads=4, groups=2, hidden=128)"
MODELS = [
    ("mlp(units=128)", IMAGES),
    ("convnet", IMAGES),
    (TRANSFORMER, TOKENS),
    (TRANSFORMER.replace(")", ", remat=True)"), TOKENS),
]


def counted(backend: str) -> dict[str, float]:
    arguments = [sys.executable, "-c", COUNT, backend, json.dumps(MODELS)]
    out = subprocess.run(arguments, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=300)
    assert not out.returncode, out.stderr
    return dict(json.loads(out.stdout.splitlines()[-1]))


@pytest.mark.long
def test_operations_of_a_step():
    jax, tensorflow = counted("jax"), counted("tensorflow")
    # Forward, gradients of the weights, and of the inputs, which the first layer's are not asked for.
    first, others = 768 * 128, 128 * 128 + 128 * 10
    for ours in (jax, tensorflow):
        assert ours["mlp(units=128)"] == pytest.approx(2 * 32 * (2 * first + 3 * others), rel=0.05)
        assert all(1e8 < peak < 1e14 for peak in ours["peaks"])
        again, once = (ours[model] for model, _ in MODELS[:1:-1])
        assert again == once > 1e8  # what is computed again in the backward pass counts once
    # JAX leaves out products with a convolution's padding, and counts elementwise operations, too.
    for model, _ in MODELS:
        assert jax[model] == pytest.approx(tensorflow[model], rel=0.25), model


STAY = """
import json
from trainer import backend
from trainer.cluster import ALONE
from trainer.config import Config
from trainer.peers import Peers

backend.prepare("jax", False)
import jax.monitoring
from trainer.assembly import assemble
from trainer.step import Objective
compiled = []
def note(event, seconds, fun_name="", **others):
    if event.endswith("backend_compile_duration") and "_finish_step" in fun_name:
        compiled.append(fun_name)
jax.monitoring.register_event_duration_secs_listener(note)
traced, call = [], Objective.__call__
def traced_call(objective, trainable, state, batch, training):
    traced.append(training)
    return call(objective, trainable, state, batch, training)
Objective.__call__ = traced_call
dataset = "synthetic(shape=(16, 16, 3), classes=10)"
# The most first: a process's virtual devices are made for its first run.
for devices, model in ((2, "mlp"), (2, "convnet"), (1, "mlp"), (1, "convnet")):
    strategy = "device_mesh" if devices > 1 else "one_device"
    config = Config(backend="jax", strategy=strategy, devices=devices if devices > 1 else 0, model=model,
                    dataset=dataset, global_batch=32, replicas=2, steps=2)
    with Peers(ALONE, 600) as peers:
        parts = assemble(config, peers)
        pipeline = parts.pipeline(parts.dataset.train, shuffled=True)
        block = next(parts.strategy.feed(pipeline))
        traced.clear()
        compiled.clear()
        totals = parts.strategy.train(block, 0, 2, 0, parts.program.objective.no_totals())
        parts.strategy.train(block, 0, 1, 2, totals)
        parts.strategy.evaluate(block, 0, 1, parts.program.objective.no_totals())
        parts.strategy.flops(pipeline.spec)
        left = [variable.value for variable in parts.program.variables.values()]
        taken = {id(value) for group in parts.strategy._state.values() for value in group}
        stays = sum(id(value) in taken for value in left) / len(left)
        print(json.dumps([devices, model, stays, traced, len(compiled)]))
"""


@pytest.mark.long
def test_what_a_step_leaves_is_taken_as_it_is():
    """Of many small variables, to place them anew takes longer than the step.

    And a model is traced once in training and once in evaluation (and once to be counted), and what follows from its
    sums compiled once for each device.
    """
    arguments = [sys.executable, "-c", STAY]
    out = subprocess.run(arguments, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=300)
    assert not out.returncode, out.stderr
    found = [json.loads(line) for line in out.stdout.splitlines()]
    assert len(found) == 4, out.stdout
    for devices, _, stays, traced, compiled in found:
        assert stays == 1.0 and traced == [True, False, True] and compiled == 2 * devices, found


@pytest.mark.long
def test_the_benchmark_of_accelerators_does_all_it_is_to_do():
    """On a CPU, with small models: a line of each question."""
    arguments = [sys.executable, "-m", "benchmarks.accelerator", "--small"]
    out = subprocess.run(arguments, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=600)
    assert not out.returncode, out.stderr
    lines = out.stdout.splitlines()[2:]
    asked = ("products of two", "loop by hand", "fit, arrays", "kept on the device", "holds it up", "copies alone")
    assert all(any(words in line for line in lines) for words in asked), out.stdout
