"""The learning rate over the steps, as --learning_rate and --schedule say."""

import inspect
from typing import Any

import keras

from trainer import plugins
from trainer.config import Config
from trainer.errors import UserError

_PEAK = "learning_rate", "initial_learning_rate"  # the latter of Keras's own schedules


def create(config: Config, steps: int) -> float | keras.optimizers.schedules.LearningRateSchedule:
    """The learning rate of a run of `steps` steps: a number, or a schedule.

    Raises:
      UserError: there is no such schedule, or a user's own is none.
    """
    peak, schedule = (config.hyperparameters[name] for name in ("learning_rate", "schedule"))
    name, attribute, arguments = plugins.parse(schedule, "schedule")
    if "." in name or attribute:
        return _of_a_user(config, peak, steps)
    warmup = arguments.pop("warmup_steps", 0)
    final = arguments.pop("final_fraction", 0.0)
    if name not in ("constant", "cosine", "linear") or arguments:
        raise UserError(
            "schedule",
            schedule,
            "there is no such schedule",
            "one of constant, cosine, linear, each with (warmup_steps=0, final_fraction=0.0) where they apply; "
            "or a path such as my_pkg.my_module:function",
        )
    if not (isinstance(warmup, int) and warmup >= 0 and isinstance(final, int | float) and final >= 0):
        reason = "warmup_steps is a number of steps, and final_fraction of the peak learning rate, neither below 0"
        raise UserError("schedule", schedule, reason, f"for example {name}(warmup_steps=100, final_fraction=0.1)")
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


def _of_a_user(config: Config, peak: float, steps: int) -> keras.optimizers.schedules.LearningRateSchedule:
    make, arguments = plugins.resolve(config.schedule, "schedule", "trainer.models", "create")
    for name in arguments.keys() & set(_PEAK):
        fix = f"leave it out, and give --learning_rate={arguments[name]}"
        raise UserError("schedule", config.schedule, "has the learning rate, which is a flag of its own", fix)
    if not any(name in inspect.signature(make).parameters for name in _PEAK):
        fix = "give its function that parameter: the peak, as --learning_rate says, which it is to multiply"
        raise UserError("schedule", config.schedule, "takes no learning_rate, which is a flag of its own", fix)
    offered = dict.fromkeys(_PEAK, peak) | {"steps": steps}
    made = plugins.call(make, arguments, offered, flag="schedule", spec=config.schedule)
    if not isinstance(made, keras.optimizers.schedules.LearningRateSchedule):
        fix = "return a keras.optimizers.schedules.LearningRateSchedule; for a number there is --learning_rate"
        raise UserError("schedule", config.schedule, f"returned a {type(made).__name__}", fix)
    return made


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
