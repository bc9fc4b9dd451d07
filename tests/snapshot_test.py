"""What a save copies is the variables of its step, whichever way it is copied, and stays so while training goes on."""

import subprocess
import sys

from tests.running import REPOSITORY, environment

COPY = """
import numpy as np
from trainer import backend
from trainer.config import Config
from trainer.peers import Peers

backend.prepare("jax", False)
from trainer.assembly import assemble
from trainer.snapshot import KeptCopies, on_host
from trainer.strategies.host_values import copy_by_devices

for layout in ("replicated", "fsdp"):
    config = Config(backend="jax", strategy="device_mesh", devices=2, layout=layout, model="mlp(units=300)",
                    dataset="synthetic(shape=(16, 16, 3), classes=10)", global_batch=32, replicas=2, steps=4)
    parts = assemble(config, Peers())
    program, strategy = parts.program, parts.strategy
    block = next(strategy.feed(parts.pipeline(parts.dataset.train, shuffled=True)))

    def step(number):
        strategy.train(block, number, 1, number, program.objective.no_totals()).wait()

    step(0)
    for number, copy in enumerate((KeptCopies(), copy_by_devices), 1):
        program.copy = copy
        saved = {path: np.array(value) for path, value in program.values().items()}
        copies = program.snapshot()()
        step(number)
        copies = on_host(copies)
        now = program.values()
        assert any((now[path] != saved[path]).any() for path in saved)
        for path, (whole,) in copies.items():
            assert type(whole.values) is np.ndarray and whole.values.tobytes() == saved[path].tobytes(), path
    print(layout)
"""


def test_copies_stay_while_training_goes_on():
    arguments = [sys.executable, "-c", COPY]
    out = subprocess.run(arguments, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=300)
    assert not out.returncode, out.stderr
    assert out.stdout.split() == ["replicated", "fsdp"], out.stdout
