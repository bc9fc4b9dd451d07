"""What does a device hold, and what does it send? Of real variables, and of the program that XLA compiled.

python -m benchmarks.memory
"""

from typing import Any

from benchmarks import page
from trainer import backend
from trainer.config import Config

DEVICES = 8


def main() -> None:
    """Lays the variables of a model over virtual devices, and compiles its step."""
    backend.prepare("jax")
    with backend.quiet():
        from trainer import assembly
    rows = []
    for layout in ("replicated", "zero1", "fsdp"):
        config = Config(
            strategy="device_mesh",
            layout=layout,
            devices=DEVICES,
            replicas=DEVICES,
            model="mlp(units=1024)",
            dataset="synthetic(examples=4096, shape=(28, 28, 1))",
        )
        rows += _rows(layout, assembly, config)
    page.record(
        "memory",
        "What does a device hold, and what does it send?",
        f"mlp(units=1024) and Adam on {DEVICES} virtual devices of JAX; matrices are those that the layout cuts; bytes "
        "of the arrays that are there; what the compiled step would send, were its collectives done by rings",
        rows,
    )


def _rows(layout: str, assembly: Any, config: Config) -> list[page.Row]:
    from trainer.explain import collectives
    from trainer.peers import Peers

    parts = assembly.assemble(config, Peers())
    strategy, program = parts.strategy, parts.program
    model, slots = [v.value for v in program.model.trainable_variables], [v.value for v in program.optimizer.variables]
    rows = []
    for name, arrays in (("the model's", model), ("the optimizer's", slots)):
        cut = [a for a in arrays if a.addressable_shards[0].data.nbytes < a.nbytes]
        held = sum(a.addressable_shards[0].data.nbytes for a in arrays)
        whole = sum(a.nbytes for a in arrays)
        if cut:
            value = DEVICES * sum(a.addressable_shards[0].data.nbytes for a in cut) / sum(a.nbytes for a in cut)
            ours, theirs = f"{held / 1e6:.2f} MB on a device", f"{whole / 1e6:.2f} MB in all"
            case = f"--layout={layout}, {name} variables held by a device"
            rows.append(page.Row(case, f"matrices: 1/{DEVICES} of them", ours, theirs, f"{value:.3f}", value, 1.02))
    block = next(strategy.feed(parts.pipeline(parts.dataset.train, shuffled=True)))
    found = collectives(strategy.lower(block).compile().as_text() or "")
    # What a device sends, where they are done by rings; the program's text has the bytes of results.
    sends = {"all-reduce": 2 * (DEVICES - 1) / DEVICES, "reduce-scatter": DEVICES - 1}
    sent = sum(entry.bytes * sends.get(kind, (DEVICES - 1) / DEVICES) for kind, entry in found.items())
    gradients = sends["all-reduce"] * sum(v.nbytes for v in model)
    what = ", ".join(f"{entry.count} x {kind}" for kind, entry in sorted(found.items()))
    value, target = sent / gradients, 1.05 if layout != "fsdp" else None  # which gathers variables for each use
    ours, theirs = f"{sent / 1e6:.2f} MB ({what})", f"{gradients / 1e6:.2f} MB"
    case, rival = f"--layout={layout}, sent by a device in a step", "all-reduce of the gradients, by a ring"
    rows.append(page.Row(case, rival, ours, theirs, f"{value:.3f}", value, target))
    return rows


if __name__ == "__main__":
    main()
