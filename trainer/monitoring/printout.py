"""What a run says of itself at its start and at its end, and the facts by which it is known again."""

import importlib.metadata
import pathlib
import platform
import re
import shlex
from collections.abc import Mapping
from typing import Any

import keras

from trainer import preemption
from trainer.assembly import Assembly
from trainer.clock import Interval
from trainer.cluster import outside_interfaces
from trainer.config import Config
from trainer.monitoring import tracing
from trainer.monitoring.host_memory import HostMemory
from trainer.monitoring.readable import duration, size, words
from trainer.objective.trial import dtypes


def facts(parts: Assembly) -> dict[str, Any]:
    """What the flags came to; definition.json keeps it, and a later start must find the same."""
    return {
        "variables": parts.program.signature(),
        "architecture": parts.program.architecture(),
        "hyperparameters": parts.program.hyperparameters,
        "data": parts.dataset.facts(),
    }


def texts(parts: Assembly) -> dict[str, str]:
    """Flags, environment and variables as Markdown, for TensorBoard's Text page."""
    environment = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "backend": keras.config.backend(),
        "devices": parts.strategy.description,
        **_versions(),
    }
    rows = ["| variable | shape | dtype | bytes on a device |", "|---|---|---|---:|"]
    for path, variable in parts.program.variables.items():
        held = parts.strategy.elements_on_device(variable) * itemsize(variable.dtype)
        rows.append(f"| {path} | {tuple(variable.shape)} | {variable.dtype} | {held:,} |")
    shards = "\n\n".join(parts.strategy.pictures())
    return {
        "run/variables": "\n".join(rows),
        **({"run/shards": f"```\n{shards}\n```"} if shards else {}),
        "run/flags": "\n".join(f"    {line}" for line in parts.config.to_flags()) or "all at their defaults",
        "run/environment": "\n".join(f"- {k}: {v}" for k, v in environment.items()),
    }


def _versions() -> dict[str, str]:
    packages = ("keras", "tensorflow", "jax", "numpy")
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def opening(parts: Assembly, directory: pathlib.Path, origin: str, step: int) -> str:
    """The print-out at a start: everything that a person would ask before leaving it alone."""
    config, program, strategy = parts.config, parts.program, parts.strategy
    v, r, b = program.replicas, strategy.devices, config.global_batch
    n = len(parts.dataset.train)
    versions = ", ".join(f"{k} {version}" for k, version in _versions().items() if k != "numpy")
    variables = sum(strategy.elements_on_device(x) * itemsize(x.dtype) for x in program.variables.values())
    gradients = sum(4 * strategy.elements_on_device(x) for x in program.model.trainable_variables)
    parameters, how = program.model.count_params(), program.hyperparameters
    own = [each for each in dtypes(program.model) if each != keras.DTypePolicy(config.precision).compute_dtype]
    precision = config.precision + (f", layers in {', '.join(own)}" if own else "")
    lengths = [
        f"{len(source):,} {name}"
        for name, source in (
            ("examples to train on", parts.dataset.train),
            ("to validate on", parts.dataset.validation),
            ("to test on", parts.dataset.evaluation),
        )
        if source is not None and not (name == "to validate on" and source is parts.dataset.evaluation)
    ]
    done = f" ({step} are done)" if step else ""
    often = f"every {config.save_every}" if Interval.parse(config.save_every).amount else "at the end"
    lines = {
        "run": f"{directory}; {origin}",
        "versions": f"{versions}; Keras on {keras.config.backend()}",
        "strategy": f"{config.strategy}: {strategy.description}",
        "batch": f"{b} examples a step = {v} logical replicas x {b // v} examples; "
        f"each of {_count(r, 'device')} computes {_count(v // r, 'replica')} a step",
        "data": f"{config.dataset}: {', '.join(lengths)}",
        "length": f"{parts.steps} steps{done} = {parts.steps * b / n:.4g} epochs of {n / b:.4g} steps",
        "model": f"{config.model}: {parameters:,} parameters, {precision}; {how['optimizer']}, "
        f"learning rate {how['learning_rate']:g} ({how['schedule']})",
        **program.doubts,
        "memory": f"{size(variables)} of variables + {size(gradients)} of gradients on each device, and activations",
        "saving": f"{often} to {directory / 'checkpoints'}, the newest {config.keep} and the best by {config.best} are "
        "kept",
        **({"tracing": traced} if (traced := tracing.words(config, parts.steps, directory / "tensorboard")) else {}),
        "continue": config.command(),
        "watch": f"tensorboard --logdir {shlex.quote(str(directory / 'tensorboard'))}",
    }
    outside = outside_interfaces()
    if parts.peers.cluster.size > 1 and outside and keras.config.backend() == "tensorflow":
        lines["network"] = (
            f"TensorFlow's servers listen on all interfaces, here {', '.join(outside)}, whatever address they are "
            "given, and obey whoever connects: close their ports to strangers (README, Security)"
        )
    return "\n".join(f"{name:>9}  {text}" for name, text in lines.items()) + "\n"


def preempted(parts: Assembly, told: int, step: int) -> str:
    """Said when a signal or a deadline ended this start."""
    why = preemption.words(told)
    return f"\nStopped by {why} after step {step}; its state is saved. Continue with\n  {parts.config.command()}"


def scarce(memory: HostMemory, parts: Assembly) -> str:
    """Said when the host has hardly any memory left."""
    return (
        f"host memory runs out: {size(memory.free)} of {size(memory.whole)} are free, and this process held up to "
        f"{size(memory.peak)}. When none is left, the system kills it. --prefetch={parts.config.prefetch} and "
        f"--cache={parts.config.cache} keep data in memory; so may the dataset itself"
    )


def ending(parts: Assembly, directory: pathlib.Path, summary: Mapping[str, Any]) -> str:
    """The print-out at the end: results, where the time went, what to do next."""
    best = dict(summary["best"])
    at = best.pop("step", None)
    seconds = {k: v for k, v in summary["seconds"].items() if v >= 0.05}
    ledger = ", ".join(f"{k} {v:.1f}s" for k, v in sorted(seconds.items(), key=lambda kv: -kv[1]))
    kept = ""
    if at not in (None, summary["step"]):
        kept = f", kept: evaluate and export it by {_where(directory / 'checkpoints' / f'{at:08d}')}"
    lines = {
        "": f"{summary['status']} at step {summary['step']} after {duration(sum(summary['seconds'].values()))}",
        "final": words(summary["final"]),
        "best": f"{words(best)} at step {at}{kept}" if at is not None else "no evaluation",
        "weights": f"sha256 {summary['weights_sha256']}",
        "time": ledger,
        **({"compute": _compute(summary)} if "mfu" in summary else {}),
        **({"cost": _cost(parts.config, summary["device_hours"])} if parts.config.price_per_device_hour else {}),
        "lost by": summary["bottleneck"] or "nothing that stands out",
        "evaluate": f"python -m trainer evaluate {_where(directory)}",
        "export": f"python -m trainer export {_where(directory)}",
    }
    return "\n" + "\n".join(f"{name:>9}  {text}" for name, text in lines.items())


def _where(path: pathlib.Path) -> str:
    """The flag that names a directory, as a shell takes it."""
    return shlex.quote(f"--run_dir={path}")


def _compute(summary: Mapping[str, Any]) -> str:
    speed, share = summary["flops_per_second"], summary["mfu"]
    return f"{speed / 1e9:,.4g} GFLOP/s, {share:.1%} of the {speed / share / 1e9:,.4g} GFLOP/s of matrix products here"


def _cost(config: Config, hours: float) -> str:
    price = config.price_per_device_hour
    return f"{hours * price:.4g} = {hours:.4g} device-hours over all starts x {price:g}"


def itemsize(dtype: Any) -> int:
    """Bytes of an element."""
    bits = re.search(r"\d+$", keras.backend.standardize_dtype(dtype))
    return int(bits[0]) // 8 if bits else 1


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'s' if n != 1 else ''}"
