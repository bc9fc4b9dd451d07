"""What is done on accelerators otherwise than on CPUs does the same: copies for a save, feeding, counting operations.

Here on CPUs, where it is not what a run takes, but possible.
"""

import subprocess
import sys

from tests.running import REPOSITORY, environment

COPY = """
import itertools
import numpy as np
import pytest
from trainer import backend
from trainer.config import Config
from trainer.peers import Peers

backend.prepare("jax", False)
import jax, keras
from trainer.assembly import assemble
from trainer.snapshot import KeptCopies, on_host
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


def test_accelerators_ways_on_a_cpu():
    arguments = [sys.executable, "-c", COPY]
    out = subprocess.run(arguments, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=300)
    assert not out.returncode, out.stderr
