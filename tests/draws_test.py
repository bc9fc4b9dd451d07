"""Initial weights: drawn on the host, the same on every backend."""

import json
import subprocess
import sys

import pytest

from tests.running import REPOSITORY, environment, trainer

DRAWN = """
import json, hashlib, keras, numpy as np
from trainer import draws

shape = (1100, 1000)  # more than a generator draws
of = keras.initializers
with draws.on_host():
    normal = of.RandomNormal(1.0, 0.5, seed=1)(shape)
    truncated = of.TruncatedNormal(1.0, 0.5, seed=1)(shape)
    uniform = of.RandomUniform(-3.0, 1.0, seed=1)(shape)
    halves = of.GlorotUniform(seed=2**31 + 7)(shape, "bfloat16")
    doubles = of.HeNormal(seed=-1)(shape, "float64")
    going_on = of.RandomNormal(seed=keras.random.SeedGenerator(3))
    first, second = going_on((4,)), going_on((4,))
    rotation = np.asarray(of.Orthogonal(seed=4)((64, 32)))
    one = of.RandomNormal(seed=1)(())
found = [normal, truncated, uniform, halves, doubles, first, second, one]
assert all(isinstance(values, np.ndarray) for values in found)
assert [v.dtype.name for v in found[2:5]] == ["float32", "bfloat16", "float64"], [v.dtype for v in found]
assert abs(normal.mean() - 1) < 3e-3 and abs(normal.std() - 0.5) < 3e-3 and normal.max() > 2.5
assert 1.999 < truncated.max() <= 2 and 0 <= truncated.min() < 1e-3 and abs(truncated.std() - 0.8796 / 2) < 3e-3
assert -3 <= uniform.min() < -2.99 and 0.99 < uniform.max() <= 1 and abs(uniform.mean() + 1) < 5e-3
assert abs(doubles.std() - (2 / 1100) ** 0.5) < 3e-4
assert len(np.unique(normal[:, 0])) == len(normal) and (first != second).all()
assert abs(rotation.T @ rotation - np.eye(32)).max() < 1e-5
assert not isinstance(of.RandomNormal(seed=1)((2,)), np.ndarray)  # elsewhere, Keras is as it was
print(json.dumps([hashlib.sha256(values.tobytes()).hexdigest() for values in found]))
"""


def test_what_is_drawn():
    found = []
    for backend in ("tensorflow", "jax"):
        env = environment(KERAS_BACKEND=backend)
        command = [sys.executable, "-c", DRAWN]
        done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found.append(done.stdout)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "model",
    ["convnet", *(pytest.param(m, marks=pytest.mark.long) for m in ("mlp", "resnet(width=4)", "vit"))],
)
def test_one_seed_gives_one_initial_state(model, tmp_path):
    saved = []
    for backend in ("tensorflow", "jax"):
        run = tmp_path / backend
        trainer(f"--backend={backend}", f"--model={model}", "--steps=1", "--evaluate_every=never", f"--run_dir={run}")
        saved.append(json.loads((run / "checkpoints" / "00000000" / "manifest.json").read_text())["variables"])
    assert saved[0] == saved[1]
