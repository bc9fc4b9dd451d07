"""Keras callbacks from the flags, and their state over restarts."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from input_pipeline.dataset import Dataset
from trainer import optimizers, plugins
from trainer.clock import Clock
from trainer.errors import UserError
from trainer.program import Program

_SAVING = ("ModelCheckpoint", "BackupAndRestore", "OrbaxCheckpoint")


def create(specs: Sequence[str], program: Program, dataset: Dataset, clock: Clock) -> keras.callbacks.CallbackList:
    """The callbacks of --callbacks, by a name of keras.callbacks or a dotted path, bound to the model.

    Batch hooks are called at the ends of chunks of steps, where the host looks in anyway, with the
    number of steps done; epoch hooks at the ends of epochs, with the newest 'val_' metrics.

    Args:
      specs: the flag's.
      program: what is trained.
      dataset: what it is trained and evaluated on.
      clock: tells when epochs end.

    Raises:
      UserError: no such callback, or one that would do nothing, or harm, in a run.
    """
    callbacks = []
    for spec in specs:
        name, attribute, arguments = plugins.parse(spec, "callbacks")
        factory = getattr(keras.callbacks, name, None)
        if factory is None or attribute:
            factory, arguments = plugins.resolve(spec, "callbacks", "trainer.models", "create")
        try:
            callback = factory(**arguments)
        except (TypeError, ValueError) as error:
            raise UserError("callbacks", spec, str(error), "see keras.io/api/callbacks") from None
        if not isinstance(callback, keras.callbacks.Callback):
            raise UserError("callbacks", spec, f"made a {type(callback).__name__}", "give a keras.callbacks.Callback")
        if any(kind.__name__ in _SAVING for kind in type(callback).__mro__):
            raise UserError(
                "callbacks",
                spec,
                "would save beside the run's own checkpoints",
                "use --save_every and --keep",
            )
        if getattr(callback, "restore_best_weights", False):
            raise UserError(
                "callbacks",
                spec,
                "would change the variables after the last checkpoint is written; the best one is kept by the run",
                "leave restore_best_weights out, and evaluate or export the checkpoint that the end of the run names",
            )
        if isinstance(callback, keras.callbacks.SwapEMAWeights):
            raise UserError(
                "callbacks",
                spec,
                "would swap variables that a run does not need swapped: where the optimizer keeps moving averages, "
                "evaluations, pictures and exports are of them",
                "leave it out",
            )
        watched = getattr(callback, "monitor", None)
        if isinstance(watched, str) and watched not in (names := _logged(program, dataset, clock)):
            raise UserError(
                "callbacks",
                spec,
                f"watches {watched!r}, which an epoch of this run does not give",
                f"monitor one of {', '.join(sorted(names))}",
            )
        callbacks.append(callback)
    told = {"epochs": clock.epochs_ended(clock.steps), "steps": clock.epoch_steps, "verbose": 0}  # as by fit()
    return keras.callbacks.CallbackList(callbacks, model=program.model, **told)


def _logged(program: Program, dataset: Dataset, clock: Clock) -> list[str]:
    """Names of the metrics that an epoch's end is given."""
    names = list(program.objective.results(program.objective.no_totals()))
    evaluates = dataset.validation is not None and clock.intervals["evaluate"].amount
    return [*names, *(f"val_{name}" for name in names if evaluates)]


def state(callbacks: keras.callbacks.CallbackList) -> list[dict[str, Any]]:
    """What the callbacks remember: their public attributes that are numbers, strings or None."""
    plain = (int, float, str, bool, type(None))

    def value(v: Any) -> Any:
        return v.item() if isinstance(v, np.generic) else v

    return [
        {k: value(v) for k, v in vars(c).items() if not k.startswith("_") and isinstance(value(v), plain)}
        for c in callbacks.callbacks
    ]


def begin(
    callbacks: keras.callbacks.CallbackList, epoch: int, saved: list[dict[str, Any]] | None, program: Program
) -> bool:
    """Begins a start of the run, at an epoch.

    Args:
      callbacks: of the run.
      epoch: the number of the first; where the run goes on, it may have begun before.
      saved: what they remembered at the checkpoint; None in a new run.
      program: what is trained.

    Returns:
      Whether they are those of the checkpoint, and have their memory back.
    """
    rates = [o._learning_rate for o in optimizers.each_of(program.optimizer)]
    before = [(rate, np.array(program.to_host(rate))) for rate in rates if isinstance(rate, keras.Variable)]
    callbacks.on_train_begin()
    restored = _restore(callbacks, saved)
    callbacks.on_epoch_begin(epoch)
    if saved is not None and restored:  # what they do to a rate at an epoch's begin was done before the checkpoint
        for rate, value in before:
            program.assign(rate, value.__getitem__)
    return restored


def _restore(callbacks: keras.callbacks.CallbackList, saved: list[dict[str, Any]] | None) -> bool:
    """Gives the callbacks back what they remembered; False, and nothing done, if they are other ones."""
    if saved is None:
        return True
    pairs = list(zip(callbacks.callbacks, saved, strict=False))
    if len(saved) != len(callbacks.callbacks) or any(a.keys() - vars(c).keys() for c, a in pairs):
        return False
    for callback, attributes in pairs:
        vars(callback).update(attributes)
    return True
