"""The optimizer: the flags', or that which the model is compiled with."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import keras
import numpy as np
from keras.src.backend import compute_output_spec

from trainer import plugins, schedules
from trainer.config import Config
from trainer.errors import UserError, said_by_keras
from trainer.objective.trial import dtypes

_NOT_BY_NAME = ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")  # a base class, and two wrappers
_SIMPLE = bool | int | float | str
_NOT_TO_DECAY = "_exclude_from_weight_decay"
# Of Keras's, those that train otherwise on TensorFlow. It takes its momenta from before a step after they have changed:
# what Keras calls a variable's value is the variable itself there.
_WRONG_ON_TENSORFLOW = ("ScheduleFreeAdamW",)
# Methods of an optimizer that a step does not call on each backend; it calls apply(), which calls update_step().
_NOT_CALLED = ("apply_gradients", "get_gradients", "minimize", "stateless_apply")


def create(config: Config, model: keras.Model, steps: int) -> keras.optimizers.Optimizer:
    """The optimizer of a run of `steps` steps, with its schedule, and loss scaling where layers compute in float16."""
    own = None if config.optimizer else compiled_with(model)
    if own is not None and own.built:  # of a model that was trained before and loaded: a run begins at step 0
        own = _anew(own)
    optimizer = _by_name(config, schedules.create(config, steps)) if own is None else own
    for flag in ("learning_rate", "schedule") if own is not None else ():
        if (value := getattr(config, flag)) not in ("", None):
            reason = f"the model is compiled with {type(own).__name__}, which has a learning rate of its own"
            raise UserError(flag, value, reason, "set it in compile(), or name the optimizer, too: --optimizer=adam")
    if any(each.gradient_accumulation_steps for each in each_of(optimizer)):
        raise UserError(
            *whose(config),
            "accumulates gradients in its optimizer, which would change the run with the number of devices",
            "use --replicas: more logical replicas than devices accumulate",
        )
    for each in (optimizer, *each_of(optimizer)):
        each.loss_scale_factor = None  # a run's gradients are sums in float32, which underflow nowhere
    if "float16" in dtypes(model) and not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return keras.optimizers.LossScaleOptimizer(optimizer)
    return optimizer


def _anew(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """The same, not built. Keras leaves out of its config which variables are not to decay."""
    made = type(optimizer).from_config(optimizer.get_config())
    for old, new in zip(each_of(optimizer), each_of(made), strict=True):
        vars(new).update({name: value for name, value in vars(old).items() if name.startswith(_NOT_TO_DECAY)})
    return made


def check_trains(config: Config, optimizer: keras.optimizers.Optimizer) -> None:
    """Raises UserError where one can't train, which may judge what another backend has trained.

    Keras's own trains otherwise on this backend; a user's changes what no step calls, or its rate can't be compiled.
    """
    for each in each_of(optimizer):
        kinds = [kind for kind in type(each).__mro__ if not kind.__module__.startswith("keras.")]
        if own := [name for name in _NOT_CALLED for kind in kinds if name in vars(kind)]:
            raise UserError(
                *whose(config),
                f"trains by {type(each).__name__} with {own[0]}() of its own, which a step does not call",
                "change update_step(gradient, variable, learning_rate), or apply(grads, trainable_variables)",
            )
        if keras.config.backend() == "tensorflow" and type(each).__name__ in _WRONG_ON_TENSORFLOW:
            raise UserError(
                *whose(config),
                f"trains by Keras's {type(each).__name__}, which mixes up its variables' values on TensorFlow",
                "use --backend=jax, or another optimizer, such as adamw",
            )
        if (
            keras.config.backend() == "jax"
            and each.ema_overwrite_frequency
            and len(averages(each)) < len(_averaged(each))
        ):
            raise UserError(
                *whose(config),
                "is to overwrite variables with their moving averages (ema_overwrite_frequency), which Keras can't do "
                "on JAX where layers compute in float8: of their scales there are none",
                "leave that out: evaluations and exports take the averages anyway; or use --backend=tensorflow",
            )
        if wrong := _is_no_function(each._learning_rate, each.iterations):
            raise UserError(
                *(("schedule", config.schedule) if config.schedule else whose(config)),
                f"its schedule {type(each._learning_rate).__name__} {wrong}",
                "compute the rate from the step alone, by keras.ops: ops.where(step < 10, a, b) in the place of an if",
            )


def _is_no_function(schedule: Any, iterations: keras.Variable) -> str:
    """Why a compiled step would not follow a schedule of a user's own, in words; '' if it would."""
    if not isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        return ""
    if type(schedule).__module__.startswith(("keras.", "trainer.")):
        return ""
    rates = [float(keras.ops.convert_to_numpy(schedule(iterations.value))) for _ in range(2)]
    if not math.isfinite(rates[0]):
        return f"gives {rates[0]} for the first step, whose number is 0"
    if rates[0] != rates[1]:
        return f"gives {rates[0]:g} and {rates[1]:g} when it is asked twice about one step"
    try:
        compute_output_spec(schedule, keras.KerasTensor((), iterations.dtype))
    except Exception as error:
        return f"can't be compiled: {said_by_keras(error).partition(chr(10))[0]}"
    return ""


def whose(config: Config) -> tuple[str, str]:
    """Which flag an optimizer comes from, and its value."""
    return ("optimizer", config.optimizer) if config.optimizer else ("model", config.model)


def build(optimizer: keras.optimizers.Optimizer, trainable: Sequence[keras.Variable]) -> None:
    """Makes an optimizer's variables: first those of one that is wrapped to scale the loss.

    What it makes within the wrapper's build(), such as Nadam's product of momenta, Keras counts among nobody's
    variables: on JAX it would never change, on TensorFlow no checkpoint have it.
    """
    for each in (getattr(optimizer, "inner_optimizer", optimizer), optimizer):
        each.build(trainable)


def copies(
    optimizer: keras.optimizers.Optimizer, to_host: Callable[[keras.Variable], np.ndarray]
) -> list[tuple[keras.Variable, keras.Variable]]:
    """(what an optimizer keeps of a variable, that variable), where it has copies of all: ScheduleFreeAdamW begins so.

    Where all are 0, so is what Adam keeps of them, which is no copy.
    """
    trained = optimizer._trainable_variables

    def are_copies(kept: Any) -> bool:
        if not isinstance(kept, list) or kept is trained or len(kept) != len(trained):
            return False
        pairs = list(zip(kept, trained, strict=True))
        if not all(isinstance(mine, keras.Variable) and mine.shape == theirs.shape for mine, theirs in pairs):
            return False
        equal = all(np.array_equal(to_host(mine), to_host(theirs)) for mine, theirs in pairs)
        return equal and any(np.any(to_host(variable)) for variable in trained)

    return [pair for kept in vars(optimizer).values() if are_copies(kept) for pair in zip(kept, trained, strict=True)]


def compiled_with(model: keras.Model) -> keras.optimizers.Optimizer | None:
    """The optimizer that compile() was given, if any."""
    return model.optimizer if getattr(model, "optimizer_is_given", False) else None


def describe(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """'optimizer', 'learning_rate' of its next step, and 'schedule', as the flags would say them."""
    names, schedules = [], []
    for each in each_of(optimizer):
        with mock.patch.object(keras.optimizers.schedules.LearningRateSchedule, "get_config", _arguments):
            given = each.get_config()
        rate = given.pop("learning_rate", None)
        names.append(_spelt(type(each).__name__, given))
        schedules.append(_spelt(rate["class_name"], rate["config"]) if isinstance(rate, dict) else "constant")
    rate = float(str(keras.ops.convert_to_numpy(each_of(optimizer)[0].learning_rate)))  # 0.01, not 0.009999999776
    return {"optimizer": " + ".join(names), "learning_rate": rate, "schedule": " + ".join(schedules)}


def each_of(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """The optimizers that wrappers wrap, each with a learning rate of its own; else the optimizer alone."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return list(inner.optimizers) if isinstance(inner, keras.optimizers.MultiOptimizer) else [inner]


def why_no_rate_can_be_set(optimizer: keras.optimizers.Optimizer) -> tuple[str, str] | None:
    """Why Keras's callbacks can't set its learning rate, and what to do, in words; None if they can."""
    if not all(isinstance(each._learning_rate, keras.Variable) for each in each_of(optimizer)):
        return (
            "sets the learning rate, and that follows a schedule already",
            "leave one of the two out: --schedule=constant, without warmup_steps, leaves the rate to callbacks",
        )
    if not (hasattr(optimizer, "learning_rate") or hasattr(optimizer, "optimizers")):
        return (
            "sets the learning rate, and does not find those of a MultiOptimizer that is wrapped to scale the loss",
            "compute in another precision, or set them by a callback of your own, which finds each of "
            "self.model.optimizer.inner_optimizer.optimizers",
        )
    return None


def counters(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """What counts the steps of a run, left out or not. What is wrapped to scale the loss counts its own alone."""
    wrapped = [] if hasattr(optimizer, "dynamic_scale") else each_of(optimizer)
    return list({id(each): each.iterations for each in (optimizer, *wrapped)}.values())


def averages(optimizer: keras.optimizers.Optimizer) -> list[tuple[keras.Variable, keras.Variable]]:
    """(a variable, its moving average), where it keeps some: of what steps overwrite, such as float8's scales, none."""
    return [pair for pair in _averaged(optimizer) if pair[1] is not None]


def _averaged(optimizer: keras.optimizers.Optimizer) -> list[tuple[keras.Variable, Any]]:
    if not optimizer.use_ema:
        return []
    return list(zip(optimizer._trainable_variables, optimizer._model_variables_moving_average, strict=True))


def _arguments(schedule: keras.optimizers.schedules.LearningRateSchedule) -> dict[str, Any]:
    """What stands for the config of a schedule that gives none."""
    return {name: value for name, value in vars(schedule).items() if isinstance(value, _SIMPLE)}


def _spelt(name: str, config: Mapping[str, Any]) -> str:
    simple = [f"{k}={v}" for k, v in config.items() if k != "name" and v and isinstance(v, _SIMPLE)]
    return f"{name}({', '.join(simple)})"


def _by_name(config: Config, learning_rate: Any) -> keras.optimizers.Optimizer:
    name, attribute, arguments = plugins.parse(config.hyperparameters["optimizer"], "optimizer")
    if "learning_rate" in arguments:
        fix = f"leave it out, and give --learning_rate={arguments['learning_rate']}"
        raise UserError("optimizer", config.optimizer, "has the learning rate, which is a flag of its own", fix)
    known = {
        key.lower(): value
        for key, value in vars(keras.optimizers).items()
        if inspect.isclass(value) and issubclass(value, keras.optimizers.Optimizer) and key not in _NOT_BY_NAME
    }
    fix = "see keras.io/api/optimizers"
    if "." in name or attribute:
        factory, arguments = plugins.resolve(config.optimizer, "optimizer", "trainer.models", "create")
        fix = "it is called with learning_rate, a number or a schedule, and with what stands in parentheses, by name"
    elif name.lower() in known:
        factory = known[name.lower()]
    else:
        raise UserError(
            "optimizer",
            config.optimizer,
            "there is no optimizer of that name",
            f"one of {', '.join(sorted(known))}, or a path such as my_pkg.my_module:function",
        )
    try:
        made = factory(learning_rate=learning_rate, **arguments)
    except (TypeError, ValueError) as error:
        raise UserError("optimizer", config.optimizer, str(error), fix) from error
    if not isinstance(made, keras.optimizers.Optimizer):
        reason = f"returned a {type(made).__module__}.{type(made).__qualname__}"
        raise UserError("optimizer", config.optimizer, reason, "return a keras.optimizers.Optimizer")
    return made
