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
from trainer.utilization import matrix_product
for model, dataset in json.loads(sys.argv[2]):
    config = Config(backend=name, model=model, dataset=dataset, global_batch=32, replicas=4, steps=1)
    with Peers(ALONE, 600) as peers:
        parts = assemble(config, peers)
        train, held_out = parts.dataset.train, parts.dataset.validation
        parts.pipeline(train, shuffled=True)
        train.read = held_out.read = None  # in mid-run a source may stall: it is asked in threads alone
        parts.pipeline(held_out, shuffled=False)
        counted[model] = parts.strategy.flops(parts.pipeline(train, shuffled=True).spec)
counted["peaks"] = [matrix_product("float32"), matrix_product("bfloat16")]
print(json.dumps(counted))
"""
IMAGES, TOKENS = "synthetic(shape=(16, 16, 3), classes=10)", "text(context=64)"
MODELS = [
    ("mlp(units=128)", IMAGES),
    ("convnet", IMAGES),
    ("transformer(width=64, depth=2, heads=4, groups=2, hidden=128)", TOKENS),
]


def counted(backend: str) -> dict[str, float]:
    arguments = [sys.executable, "-c", COUNT, backend, json.dumps(MODELS)]
    out = subprocess.run(arguments, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=300)
    assert not out.returncode, out.stderr
    return dict(json.loads(out.stdout.splitlines()[-1]))


def test_operations_of_a_step():
    jax, tensorflow = counted("jax"), counted("tensorflow")
    # Forward, gradients of the weights, and of the inputs, which the first layer's are not asked for.
    first, others = 768 * 128, 128 * 128 + 128 * 10
    for ours in (jax, tensorflow):
        assert ours["mlp(units=128)"] == pytest.approx(2 * 32 * (2 * first + 3 * others), rel=0.05)
        assert all(1e8 < peak < 1e14 for peak in ours["peaks"])
    # JAX leaves out products with a convolution's padding, and counts elementwise operations, too.
    for model, _ in MODELS:
        assert jax[model] == pytest.approx(tensorflow[model], rel=0.25), model
