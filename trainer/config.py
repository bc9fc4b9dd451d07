"""The run as the user asked for it: one frozen Config, one field per flag.

A field is declared once, with its default and its help; trainer/command_line.py makes the absl flag from it.
"""

import dataclasses
import difflib
import hashlib
import json
import math
import pathlib
import shlex
from collections.abc import Sequence
from typing import Any

from trainer import layouts, policy
from trainer.clock import Interval
from trainer.errors import UserError

STRATEGIES = ("one_device", "mirrored", "multi_worker_mirrored", "parameter_server", "tpu", "device_mesh")
PRECISIONS = ("float32", "bfloat16", "mixed_bfloat16", "mixed_float16")
# Where neither a flag nor compile() of the model says.
_HYPERPARAMETERS = {"optimizer": "adam", "learning_rate": 1e-3, "schedule": "constant"}


def _flag(default: Any, help: str, choices: Sequence[str] = ()) -> Any:
    return dataclasses.field(default=default, metadata={"help": help, "choices": choices})


@dataclasses.dataclass(frozen=True)
class Config:
    """Every flag of the command line, parsed, not yet resolved against a machine or a dataset."""

    # Where it computes; never part of what the run is.
    strategy: str = _flag(
        "one_device", f"Where logical replicas run: {', '.join(STRATEGIES)}, or my_pkg.my_strategy:create."
    )
    backend: str = _flag(
        "",
        "Keras backend. Default: what the strategy implies; for one_device KERAS_BACKEND, else tensorflow.",
        ("", "tensorflow", "jax"),
    )
    devices: int = _flag(
        0,
        "Number of devices; virtual CPU devices stand in if there are fewer real ones. "
        "0: all accelerators of this machine, or one CPU.",
    )
    mesh: str = _flag("", "Axes of the device mesh, for example data=2,model=4. Default: data alone, of all devices.")
    layout: str = _flag(
        "replicated",
        "Where variables lie on the mesh: replicated, zero1, fsdp, a layout of the model such as megatron, several "
        "joined by +, a JSON list of [regex, axes], or my_pkg.my_module:rules.",
    )
    cluster: str = _flag(
        "",
        "All processes and the number of this one: 1@host:port,host:port, or 1/2@host:port with the address of process "
        "0 alone. Default: from the environment.",
    )
    hang_after: str = _flag("10min", "Time without progress after which a process exits and shows where it hung.")
    # What it computes: the run's definition.
    model: str = _flag("mlp", "Model: name(arg=value) or my_pkg.my_module:build(arg=value).")
    dataset: str = _flag("digits", "Dataset: name(arg=value) or my_pkg.my_module:load(arg=value).")
    data_dir: str = _flag("", "Directory, or URL (s3://, gs://, https://) of one, for a dataset that takes data_dir.")
    validation_fraction: float = _flag(
        0.0,
        "Fraction of the training examples held out for the evaluations during the run. "
        "0: these use the dataset's validation source, or else its evaluation source.",
    )
    optimizer: str = _flag(
        "",
        "Optimizer: adam, sgd(momentum=0.9), any of keras.optimizers, or my_pkg.my_module:create(arg=value). "
        "Default: the compiled model's own, else adam.",
    )
    learning_rate: float | None = _flag(None, "Peak learning rate. Default: the compiled optimizer's own, else 0.001.")
    schedule: str = _flag(
        "",
        "Learning rate over the steps: constant, cosine(warmup_steps=100), linear(...), or my_pkg.my_module:create. "
        "Default: the compiled optimizer's own, else constant.",
    )
    precision: str = _flag("float32", "Keras dtype policy of the model.", PRECISIONS)
    seed: int = _flag(0, "Seed of initial weights, data order and dropout.")
    global_batch: int = _flag(64, "Examples per step, over all devices.")
    replicas: int = _flag(
        0,
        "Logical replicas that share a global batch; more of them than devices means gradient accumulation. "
        "0: the devices of the first launch, recorded with the run.",
    )
    exact: bool = _flag(
        False,
        "Equal bits for every number of devices that divides --replicas, on accelerators too, and of a CPU's cores. "
        "Virtual CPU devices always add in that order.",
    )
    steps: int = _flag(-1, "Steps of the whole run. -1: see --epochs.")
    epochs: float = _flag(0.0, "Passes over the training examples. 0: see --steps; 15 if neither is given.")
    initialize_from: str = _flag(
        "", "Run directory or checkpoint whose model variables the run starts from, at step 0."
    )
    # When: an interval is of these forms.
    log_every: str = _flag(
        "100", "Interval between lines of metrics.jsonl and TensorBoard points: 100 (steps), 1epoch, 10min or never."
    )
    evaluate_every: str = _flag("1epoch", "Interval between evaluations: 100 (steps), 1epoch, 10min or never.")
    save_every: str = _flag(
        "1epoch", "Interval between checkpoints: 100 (steps), 1epoch, 10min or never; the end is always saved."
    )
    keep: int = _flag(3, "Number of newest checkpoints to keep, besides the best one.")
    best: str = _flag("val_loss", "What the best checkpoint is best in: val_accuracy, val_errors(mode='min').")
    keep_every: str = _flag("never", "Interval between checkpoints that are never deleted: 1000 (steps), 10epoch.")
    profile_steps: str = _flag("", "Steps first,last between which a profiler trace is written.")
    device_memory: str = _flag("", "Memory of a device that `explain` assumes, for example 80GiB.")
    predict: str = _flag(
        "",
        "Hardware that `explain` assumes: bandwidth, latency and speed of a device, such as 45GB/s,10us,400TFLOP/s; "
        "optionally the rate of the store that all read from, 2Mexamples/s, and hours between failures of a device, "
        "50000h. It then predicts the time of a step on 1 to 4,096 devices, and what saves and failures cost.",
    )
    price_per_device_hour: float = _flag(0.0, "Price of a device for an hour, for the cost of the run at its end.")
    # With what.
    on_nan: str = _flag(
        "stop",
        "What to do about a loss that is not finite: stop; skip that step; or rollback to the last checkpoint, and "
        "continue past the steps at fault. stop(spike=5), rollback(spike=5): also about 5 times the median of the log.",
    )
    run_dir: str = _flag("", "Directory for all files of the run; the same command continues it. Default: runs/<name>.")
    remat: bool = _flag(
        False,
        "Keep fewer activations and recompute them in the backward pass, if the model's build takes remat.",
    )
    cache: str = _flag("none", "Where to keep decoded examples: none, memory, or a file's path.")
    prefetch: int = _flag(2, "Blocks of steps that the input pipeline reads ahead, in parallel.")
    callbacks: tuple[str, ...] = _flag(
        (), "Keras callbacks, repeatable: EarlyStopping(patience=3) or my_pkg.my_module:make(arg=value)."
    )

    def __post_init__(self) -> None:
        """Checks what can be checked without a machine or a dataset."""
        for name in ("log_every", "evaluate_every", "save_every", "keep_every", "hang_after"):
            try:
                Interval.parse(getattr(self, name))
            except ValueError as error:
                raise UserError(name, getattr(self, name), str(error), "for example 100, 1epoch, 10min") from None
        if Interval.parse(self.hang_after).unit != "second" and Interval.parse(self.hang_after).amount:
            raise UserError("hang_after", self.hang_after, "is no time", "for example 10min, 30s or never")
        at_least = {"devices": 0, "replicas": 0, "global_batch": 1, "keep": 1, "prefetch": 1, "seed": 0}
        for name, least in at_least.items():
            if getattr(self, name) < least:
                raise UserError(name, getattr(self, name), f"is less than {least}", f"give {least} or more")
        policy.parse(self.on_nan)
        if Interval.parse(self.keep_every).unit == "second":
            raise UserError("keep_every", self.keep_every, "is a time", "give steps or epochs, such as 1000 or 10epoch")
        if self.steps >= 0 and self.epochs:
            raise UserError("steps", self.steps, f"excludes --epochs={self.epochs:g}", "give one of the two")
        if self.steps < -1 or self.epochs < 0:
            name = "steps" if self.steps < -1 else "epochs"
            raise UserError(name, getattr(self, name), "is negative", "give 0 or more")
        if not 0 <= self.validation_fraction < 1:
            raise UserError("validation_fraction", self.validation_fraction, "is not in [0, 1)", "for example 0.1")
        for name in ("learning_rate", "price_per_device_hour"):
            if (value := getattr(self, name)) is not None and not value >= 0:
                raise UserError(name, value, "is not 0 or more", "for example 0.001")
        if self.strategy == "one_device" and self.devices > 1:
            raise UserError(
                "devices",
                self.devices,
                "contradicts --strategy=one_device",
                "use --strategy=mirrored or --strategy=device_mesh, or --replicas to accumulate",
            )
        if self.strategy not in STRATEGIES and not self.has_own_strategy:
            close = difflib.get_close_matches(self.strategy, STRATEGIES, n=1)
            raise UserError(
                "strategy",
                self.strategy,
                f"there is no such strategy{f'; did you mean {close[0]!r}?' if close else ''}",
                f"one of {', '.join(STRATEGIES)}, or a path such as my_pkg.my_strategy:create",
            )
        for name in ("run_dir", "initialize_from", "cache"):
            if "://" in getattr(self, name):
                reason = "is a URL, and has to be on a file system: files are locked, renamed and mapped into memory"
                fix = "give a path, which all processes share; of remote places --data_dir alone takes URLs"
                raise UserError(name, getattr(self, name), reason, fix)
        self._check_mesh()
        self.profile_range()

    @property
    def has_own_strategy(self) -> bool:
        """Whether --strategy is a path to the user's own."""
        return "." in self.strategy or ":" in self.strategy

    def _check_mesh(self) -> None:
        if self.strategy in STRATEGIES and self.strategy != "device_mesh":
            for name in ("mesh", "layout"):
                if getattr(self, name) not in ("", "replicated"):
                    raise UserError(
                        name,
                        getattr(self, name),
                        f"contradicts --strategy={self.strategy}, which has no mesh to lay variables on",
                        "use --strategy=device_mesh",
                    )
        sizes = self.mesh_sizes()
        if sizes and self.devices and self.devices != math.prod(sizes.values()):
            raise UserError(
                "devices",
                self.devices,
                f"contradicts --mesh={self.mesh}, which has {math.prod(sizes.values())}",
                "drop --devices",
            )

    def mesh_sizes(self) -> dict[str, int]:
        """Sizes of the axes of --mesh by name, data first; empty without --mesh."""
        return layouts.parse_mesh(self.mesh) if self.mesh else {}

    @property
    def patience(self) -> float:
        """--hang_after in seconds."""
        return float(Interval.parse(self.hang_after).amount) or math.inf

    def profile_range(self) -> tuple[int, int] | None:
        """(first, last) of --profile_steps, or None."""
        if not self.profile_steps:
            return None
        try:
            first, last = (int(step) for step in self.profile_steps.split(","))
        except ValueError:
            first, last = 1, 0
        if not 0 <= first < last:
            raise UserError("profile_steps", self.profile_steps, "is not first,last", "for example 20,30")
        return first, last

    def check_batch(self, devices: int, replicas: int) -> None:
        """Raises UserError unless devices divide replicas and replicas divide the global batch."""
        if replicas % devices:
            raise UserError(
                "replicas",
                replicas,
                f"logical replicas are not divisible by {devices} devices",
                f"use --devices={_divisors(replicas)}, or for a new run --replicas={devices} or a multiple",
            )
        if self.global_batch % replicas:
            below = self.global_batch // replicas * replicas
            raise UserError(
                "global_batch",
                self.global_batch,
                f"is not divisible by {replicas} logical replicas (--replicas)",
                f"use {' or '.join(str(b) for b in (below, below + replicas) if b)}",
            )

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """Optimizer, learning rate and schedule of a model that is not compiled with its own."""
        given = {name: getattr(self, name) for name in _HYPERPARAMETERS}
        return _HYPERPARAMETERS | {name: value for name, value in given.items() if value not in ("", None)}

    def definition(self) -> dict[str, Any]:
        """The flags that make the run what it is, wherever and however often it is started."""
        names = (
            "model dataset validation_fraction optimizer precision seed global_batch replicas exact initialize_from "
            "on_nan"
        )
        definition = {name: getattr(self, name) for name in names.split()}
        definition |= {name: self.hyperparameters[name] for name in ("learning_rate", "schedule")}
        if definition["schedule"].partition("(")[0] != "constant":
            definition |= {"steps": self.steps, "epochs": self.epochs}  # the schedule's horizon
        return definition

    def directory(self) -> pathlib.Path:
        """--run_dir, or a name under runs/ that is the same for the same definition."""
        if self.run_dir:
            return pathlib.Path(self.run_dir)
        digest = hashlib.sha256(json.dumps(self.definition(), sort_keys=True).encode()).hexdigest()
        words = [name.partition("(")[0].replace(":", ".") for name in (self.dataset, self.model)]
        return pathlib.Path("runs", "-".join([*words, digest[:6]]))

    def to_flags(self) -> list[str]:
        """Flags that differ from their default, one '--name=value' each; a --flagfile's lines."""
        lines = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value == field.default or field.name == "cluster":  # which process this is, is not the run's
                continue
            values = value if isinstance(value, tuple) else (value,)
            lines += [f"--{field.name}={v}" for v in values]
        return lines

    def command(self, verb: str = "") -> str:
        """The shell command that does `verb` with this configuration."""
        words = ["python", "-m", "trainer", *([verb] if verb else []), *map(_quoted, self.to_flags())]
        return " ".join(words)


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)


def _quoted(word: str) -> str:
    """A word as a shell takes it, and a person reads it, with the quotes of a spec's strings in it."""
    return f'"{word}"' if "'" in word and not set(word) & set('"\\$`!') else shlex.quote(word)
