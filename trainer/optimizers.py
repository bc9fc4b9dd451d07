"""Optimizer and learning-rate schedule from the flags."""

import inspect
from typing import Any

import keras

from trainer import plugins
from trainer.config import Config
from trainer.errors import UserError

_NOT_BY_NAME = ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")  # a base class, and two wrappers


def create(config: Config, steps: int) -> keras.optimizers.Optimizer:
    """The optimizer of a run of `steps` steps, with its schedule, and loss scaling under mixed_float16."""
    optimizer = _optimizer(config, _schedule(config, steps))
    if config.precision == "mixed_float16":
        return keras.optimizers.LossScaleOptimizer(optimizer)
    return optimizer


def _optimizer(config: Config, learning_rate: Any) -> keras.optimizers.Optimizer:
    name, attribute, arguments = plugins.parse(config.optimizer, "optimizer")
    known = {
        key.lower(): value
        for key, value in vars(keras.optimizers).items()
        if inspect.isclass(value) and issubclass(value, keras.optimizers.Optimizer) and key not in _NOT_BY_NAME
    }
    if "." in name or attribute:
        factory, arguments = plugins.resolve(config.optimizer, "optimizer", "trainer.models", "create")
    elif name.lower() in known:
        factory = known[name.lower()]
    else:
        raise UserError(
            "optimizer",
            config.optimizer,
            "there is no optimizer of that name",
            f"one of {', '.join(sorted(known))}, or a path such as my_pkg.my_module:function",
        )
    if arguments.get("gradient_accumulation_steps"):
        raise UserError(
            "optimizer",
            config.optimizer,
            "accumulates gradients itself, which would change the run with the number of devices",
            "use --replicas: more logical replicas than devices accumulate",
        )
    try:
        return factory(learning_rate=learning_rate, **arguments)
    except (TypeError, ValueError) as error:
        raise UserError("optimizer", config.optimizer, str(error), "see keras.io/api/optimizers") from None


def _schedule(config: Config, steps: int) -> Any:
    name, _, arguments = plugins.parse(config.schedule, "schedule")
    warmup = arguments.pop("warmup_steps", 0)
    final = arguments.pop("final_fraction", 0.0)
    if name not in ("constant", "cosine", "linear") or arguments:
        raise UserError(
            "schedule",
            config.schedule,
            "there is no such schedule",
            "one of constant, cosine, linear, each with (warmup_steps=0, final_fraction=0.0) where they apply",
        )
    peak = config.learning_rate
    if name == "constant" and not warmup:
        return peak
    if name == "cosine":
        return keras.optimizers.schedules.CosineDecay(
            initial_learning_rate=0.0 if warmup else peak,
            decay_steps=max(1, steps - warmup),
            alpha=final,
            warmup_target=peak if warmup else None,
            warmup_steps=warmup,
        )
    return Trapezoid(peak, warmup, steps, 1.0 if name == "constant" else final)


@keras.saving.register_keras_serializable("onecurve")
class Trapezoid(keras.optimizers.schedules.LearningRateSchedule):
    """Linear rise to a peak over `warmup` steps, then a line to `final_fraction` of it at `steps`."""

    def __init__(self, peak: float, warmup: int, steps: int, final_fraction: float) -> None:
        self.peak, self.warmup, self.steps, self.final_fraction = peak, warmup, steps, final_fraction

    def __call__(self, step: Any) -> Any:
        step = keras.ops.cast(step, "float32")
        rise = step / max(1, self.warmup)
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        fall = 1.0 - (1.0 - self.final_fraction) * keras.ops.clip(done, 0.0, 1.0)
        return self.peak * keras.ops.where(step < self.warmup, rise, fall)

    def get_config(self) -> dict[str, Any]:
        return {
            "peak": self.peak,
            "warmup": self.warmup,
            "steps": self.steps,
            "final_fraction": self.final_fraction,
        }
