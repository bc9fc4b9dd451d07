"""What is done on accelerators otherwise than on CPUs does the same: copies for a save, feeding, long steps, FLOPs.

Here on CPUs, where it is not what a run takes, but possible.
"""

import subprocess
import sys

import pytest

from tests.running import REPOSITORY, environment

COPY = """
import dataclasses
import itertools
import numpy as np
import pytest
from trainer import backend
from trainer.config import Config
from trainer.peers import Peers

backend.prepare("jax", False)
import jax, keras
from trainer.assembly import assemble
from trainer.storage.snapshot import KeptCopies, on_host
from trainer.strategies import jax_flops
from trainer.strategies.host_values import copy_by_devices

for layout in ("replicated", "fsdp"):
    config = Config(backend="jax", strategy="device_mesh", devices=2, layout=layout, model="mlp(units=300)",
                    dataset="synthetic(shape=(16, 16, 3), classes=10)", global_batch=32, replicas=2, steps=4)
    parts = assemble(config, Peers())
    program, strategy = parts.program, parts.strategy

    # Copies stay while training goes on.
    block = next(strategy.feed(parts.pipeline(parts.dataset.train, shuffled=True)))
    for number, copy in enumerate((KeptCopies(), copy_by_devices)):
        program.copy = copy
        saved = {path: np.array(value) for path, value in program.values().items()}
        copies = program.snapshot()()
        strategy.train(block, number, 1, number, program.objective.no_totals()).wait()
        copies, now = on_host(copies), program.values()
        assert any((now[path] != saved[path]).any() for path in saved)
        for path, (whole,) in copies.items():
            assert type(whole.values) is np.ndarray and whole.values.tobytes() == saved[path].tobytes(), path

# The same blocks are fed, and as many.
for source, shuffled, first in ((parts.dataset.train, True, 3), (parts.dataset.validation, False, 0)):
    fed = []
    for strategy.on_cpu in (True, False):
        blocks = strategy.feed(parts.pipeline(source, shuffled), first)
        fed.append([jax.tree.map(np.asarray, block) for block in itertools.islice(blocks, 4)])
    assert len(fed[0]) == len(fed[1]) > 0
    assert all((a == b).all() for a, b in zip(*map(jax.tree.leaves, fed), strict=True))

# Steps called one by one are those of a loop, and long ones are called so.
def trained(apart):
    parts = assemble(dataclasses.replace(config, layout="replicated"), Peers())
    strategy, totals = parts.strategy, parts.program.objective.no_totals()
    block = next(strategy.feed(parts.pipeline(parts.dataset.train, shuffled=True)))
    strategy._make_loop = lambda training, block: strategy._fast_loop(training, apart)
    for first, count in ((0, 1), (1, 3)):
        totals = strategy.train(block, first, count, first, totals)
    assert totals.counted.steps == 4
    evaluated = strategy.evaluate(block, 0, 2, parts.program.objective.no_totals())
    assert evaluated.counted.steps == 2
    del strategy._make_loop
    strategy.on_cpu = strategy._exact = False
    assert not strategy._make_loop(True, block).apart
    jax_flops._LONG, long = 1e6, jax_flops._LONG
    assert strategy._make_loop(True, block).apart
    jax_flops._LONG = long
    return [*parts.program.values().values(), np.asarray(totals.amounts), np.asarray(evaluated.amounts)]

for together, singly in zip(trained(apart=False), trained(apart=True), strict=True):
    np.testing.assert_allclose(together, singly, rtol=1e-5, atol=1e-7)

# Nearly all operations of a step are those of its products.
images, language = "synthetic(shape=(32, 32, 3), classes=10)", "transformer(width=32, depth=1, heads=2, groups=1)"
for model, dataset in (("resnet(width=4)", images), (language, "text(context=16)")):
    parts = assemble(dataclasses.replace(config, layout="replicated", model=model, dataset=dataset), Peers())
    spec = parts.pipeline(parts.dataset.train, shuffled=True).spec
    leaf, counted = parts.strategy._step.leaf(True), parts.strategy.flops(spec)
    of_products = jax_flops.of_products(jax.make_jaxpr(leaf)(*parts.strategy._of_replica(spec)))
    assert 0.7 < of_products * parts.program.replicas / counted < 1.4, (model, of_products, counted)

def turns(x):
    return jax.lax.scan(lambda x, _: (x @ x, None), x, length=3)[0]

assert jax_flops.of_products(jax.make_jaxpr(turns)(np.zeros((4, 4)))) == 3 * 2 * 4**3

# Attention is counted as written down, though a kernel be asked for.
batch, time, width = 2, 64, 32
attention = keras.layers.MultiHeadAttention(2, width // 2, use_bias=False, flash_attention=True)
attention.build((batch, time, width), (batch, time, width))
variables = [v.value for v in attention.variables]
x = np.zeros((batch, time, width), np.float32)

def attend(x):
    return attention.stateless_call(variables, [], x, x)[0]

with pytest.raises(RuntimeError, match="cuDNN"):
    attend(x)
operations = 2 * batch * (4 * time * width * width + 2 * time * time * width)
assert jax_flops.count(attend, jax.ShapeDtypeStruct(x.shape, x.dtype)) == pytest.approx(operations, rel=0.1)
"""


@pytest.mark.long
def test_accelerators_ways_on_a_cpu():
    arguments = [sys.executable, "-c", COPY]
    out = subprocess.run(arguments, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=300)
    assert not out.returncode, out.stderr


A_DATASET_S_TENSORFLOW = """
from trainer import backend

backend.prepare("jax", False)
import tensorflow as tf  # as a dataset's module does, before it makes a tf.data.Dataset
from tensorflow.python.eager import context

own = context.context()
assert own._physical_devices is not None, "it was not told which it may see"
assert own._context_handle is None, "what it computes comes first, and then it can't be told any more"
assert not tf.config.get_visible_devices("GPU") and list(tf.data.Dataset.range(2).as_numpy_iterator()) == [0, 1]
"""


def test_a_dataset_s_tensorflow_takes_no_gpu_beside_jax():
    """Told before it can compute: a GPU that it has seen, it has taken."""
    command = [sys.executable, "-c", A_DATASET_S_TENSORFLOW]
    ran = subprocess.run(command, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
