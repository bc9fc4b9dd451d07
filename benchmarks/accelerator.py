"""How much of an accelerator does training use? Beside what the device was seen to do in the same minutes.

python -m benchmarks.accelerator [--small]

On JAX, one device; a machine without TensorFlow will do. --small has models that a CPU trains in seconds, to try the
program itself: what it finds is printed, and not kept.
"""

import dataclasses
import functools
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

import numpy as np

from benchmarks import page, save_stall, step_time
from benchmarks.paired import in_turn, ratio
from benchmarks.rounds import run, training
from trainer import backend
from trainer.config import Config

_HALF = 0.5  # of what products of matrices reach
_KEPT, _BY_HAND = "its blocks kept on the device", "loop by hand"
_SHORT = "short steps"
_TARGETS = {_BY_HAND: 1 / 0.95, _KEPT: 1.02}
_SAVES, _STALL = 5, 1.2
_APART = 128  # steps between saves: a disk takes a few seconds for what a device copies in milliseconds
_ROUNDS, _WARM_UP = 4, 1  # an accelerator that nobody else uses takes the same time each time
_COPIED = 2**26  # floats of an array that shows how fast the host is given one


def tokens(examples: int, context: int, vocabulary: int) -> Any:
    """Random tokens, each to be told from those before it: x and y int32 (examples, context)."""
    text = np.random.default_rng(0).integers(0, vocabulary, (examples, context + 1)).astype(np.int32)
    return {"train": (text[:, :-1], text[:, 1:]), "evaluation": (text[:8, :-1], text[:8, 1:]), "classes": vocabulary}


def main(small: bool = False) -> None:
    """Times a language model of GPT-2's shape and a ResNet-50, in bfloat16, and what a save holds the first one up."""
    backend.prepare("jax")
    with backend.quiet():
        import jax

        from trainer.monitoring.utilization import matrix_product
    jax.config.update("jax_num_cpu_devices", 1)  # as a run will, who can't once devices have been asked for
    device = jax.devices()[0]
    if device.platform == "cpu" and not small:
        raise SystemExit("JAX finds no accelerator here; --small tries this program on a CPU")
    language, images, short = cases = _small() if small else _large()
    peak = matrix_product("bfloat16", device.platform == "cpu")
    rows: list[page.Row] = []
    for part in (
        functools.partial(_steps, "language model", language, peak, _HALF),
        functools.partial(_save, "language model, a save", language),
        functools.partial(_steps, "images", images, peak, None),
        functools.partial(_steps, _SHORT, short, peak, None),
    ):
        rows += (found := part())
        print(*map(page.line, found), sep="\n", file=sys.stderr, flush=True)  # minutes pass until the next
    question = "How much of an accelerator does training use?"
    models = "; ".join(f"{each.model}, batch {each.global_batch}, {each.dataset}" for each in cases)
    conditions = (
        f"One {device.device_kind}; {models}; {language.precision}, Adam; FLOPs as XLA counts them in the step's "
        "arithmetic as written down, attention's masked half among it; the same losses to 2 %"
    )
    if device.platform == "cpu":
        page.show(question, conditions, rows)
    else:
        page.record("accelerator", question, conditions, rows)


def _large() -> tuple[Config, Config, Config]:
    """A language model of GPT-2's shape (162 M parameters: embeddings and logits apart), a ResNet-50; short steps."""
    common: dict[str, Any] = {"backend": "jax", "precision": "mixed_bfloat16", "cache": "memory", "learning_rate": 1e-4}
    language = Config(
        model="transformer(width=768, depth=12, heads=12, groups=12, hidden=2048)",
        dataset="benchmarks.accelerator:tokens(examples=1024, context=1024, vocabulary=50304)",
        steps=16,
        global_batch=32,
        **common,
    )
    images = Config(
        model="resnet(depth=50)",
        dataset="synthetic(examples=512, shape=(224, 224, 3))",
        steps=16,
        global_batch=256,
        **common,
    )
    short = dataclasses.replace(
        language,
        model="transformer(size='10M')",
        dataset="benchmarks.accelerator:tokens(examples=4096, context=128, vocabulary=256)",
        steps=100,
    )
    return language, images, short


def _small() -> tuple[Config, Config, Config]:
    """The same by far smaller."""
    language, images, short = _large()
    return (
        dataclasses.replace(
            language,
            model="transformer(width=32, depth=1, heads=2, groups=2, hidden=64)",
            dataset="benchmarks.accelerator:tokens(examples=64, context=16, vocabulary=64)",
            steps=8,
            global_batch=8,
        ),
        dataclasses.replace(
            images,
            model="resnet(width=4)",
            dataset="synthetic(examples=64, shape=(32, 32, 3))",
            steps=4,
            global_batch=16,
        ),
        dataclasses.replace(
            short,
            model="transformer(width=16, depth=1, heads=2, groups=2, hidden=32)",
            dataset="benchmarks.accelerator:tokens(examples=256, context=16, vocabulary=64)",
        ),
    )


def _steps(case: str, config: Config, peak: float, share: float | None) -> list[page.Row]:
    """A run's steps beside the peak (FLOP/s), of which they should reach a share, and beside the rivals'."""
    from trainer.assembly import assemble
    from trainer.peers import Peers

    ways = step_time.sides(config, singly=case == _SHORT)
    parts = assemble(config, Peers())
    ways[_KEPT] = training(parts, kept=True)
    measured = in_turn(ways, _ROUNDS, _WARM_UP, tolerance=2e-2)
    ours, steps = measured.pop("ours"), config.steps
    flops = parts.strategy.flops(parts.pipeline(parts.dataset.train, shuffled=True).spec)
    reached = flops * steps / ours.median
    own, theirs = (f"{value / 1e12:.3g} TFLOP/s" for value in (reached, peak))
    of_peak = reached / peak
    rows = [page.Row(case, "products of two matrices", own, theirs, f"{of_peak:.2f}", of_peak, share, most=False)]
    for rival, side in measured.items():
        found, target = ratio(ours, side), _TARGETS.get(rival)
        rows.append(page.compared(case, rival, ours, side, found, steps * 1e-3, "ms a step", target))
    return rows


def _save(case: str, config: Config) -> list[page.Row]:
    """How long saves hold a run up, beside the time in which the host is given as many bytes."""
    from trainer import checkpoint

    every = str(_APART)
    with tempfile.TemporaryDirectory() as scratch:
        config = dataclasses.replace(
            config, run_dir=f"{scratch}/run", log_every=every, save_every=every, evaluate_every="never", keep=1
        )
        with run(dataclasses.replace(config, steps=10**7), _APART) as (parts, more):
            size = sum(variable.value.nbytes for variable in parts.program.variables.values())
            for _ in range(_SAVES + 2):  # the first save compiles the probe; the last one's line is not told yet
                done = more()
                while checkpoint.steps(pathlib.Path(config.run_dir, "checkpoints"))[-1] < done:
                    time.sleep(0.1)
                time.sleep(1)  # lines that have waited so long are told
        stall = statistics.median(save_stall.seen(pathlib.Path(config.run_dir))[1:])
        copies = []
        for _ in range(_SAVES):
            begin = time.perf_counter()
            parts.program.snapshot()()
            copies.append(time.perf_counter() - begin)
    bound = size / _to_host()
    rival = f"{size / 1e9:.2g} GB at the rate of copies to the host"
    return [
        page.Row(what, rival, f"{1e3 * own:.3g} ms", f"{1e3 * bound:.3g} ms", f"{own / bound:.2f}", own / bound, _STALL)
        for what, own in ((f"{case} holds it up", stall), (f"{case}'s copies alone", statistics.median(copies)))
    ]


def _to_host() -> float:
    """Bytes a second of the fastest copy from the device to memory of the host that it can reach."""
    import jax
    import jax.numpy as jnp

    best = 0.0
    for i in range(20):
        array = jax.block_until_ready(jnp.full(_COPIED, i, jnp.float32))
        begin = time.perf_counter()
        jax.block_until_ready(jax.device_put(array, array.sharding.with_memory_kind("pinned_host")))
        best = max(best, array.nbytes / (time.perf_counter() - begin))
    return best


if __name__ == "__main__":
    main("--small" in sys.argv[1:])
