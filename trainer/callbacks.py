"""Keras callbacks from the flags, and their state over restarts."""

import contextlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import keras
from keras.src.callbacks.monitor_callback import MonitorCallback

from input_pipeline.dataset import Dataset
from trainer import optimizers, plugins
from trainer.clock import Clock
from trainer.constants import Constants
from trainer.errors import UserError
from trainer.program import Program
from trainer.storage.plain import OTHER, from_json, to_json

_SETTING = (keras.callbacks.LearningRateScheduler, keras.callbacks.ReduceLROnPlateau)  # the learning rate
_KNOWN = {
    name: kind
    for name, kind in vars(keras.callbacks).items()
    if inspect.isclass(kind) and issubclass(kind, keras.callbacks.Callback) and kind is not keras.callbacks.Callback
}
_TELLING = tuple(_KNOWN[name] for name in ("CSVLogger", "ProgbarLogger", "RemoteMonitor", "TensorBoard"))
_UNCALLED = (
    *("on_batch_begin", "on_train_batch_begin"),
    *(f"on_{of}_{when}" for of in ("test", "predict") for when in ("begin", "end", "batch_begin", "batch_end")),
)
_SAVING = ("ModelCheckpoint", "BackupAndRestore", "OrbaxCheckpoint")


class Callbacks(keras.callbacks.CallbackList):
    """A run's callbacks. What they have changed of their plain public attributes is remembered over restarts.

    Args:
      callbacks: Keras's.
      specs: what each was made from.
      program: what is trained.
      told: params, as fit() gives them.

    Attributes:
      constants: what they may not change, and what a rollback leaves as they have set it.
    """

    def __init__(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        specs: Sequence[str],
        program: Program,
        told: Mapping[str, Any],
    ) -> None:
        super().__init__(list(callbacks), model=program.model, **told)
        self._specs, self._program = list(specs), program
        self._fresh: list[dict[str, Any]] = []
        self.constants = Constants(program, self._specs)

    def begin(self, epoch: int, saved: list[dict[str, Any]] | None) -> bool:
        """Begins a start of the run.

        Args:
          epoch: the number of the first; where the run goes on, it may have begun before.
          saved: the memory of the checkpoint's; None in a new run.

        Returns:
          Whether they are those of the checkpoint. If not, those of the same names have their memory back.
        """
        for callback in self.callbacks:
            if saved is not None and isinstance(callback, keras.callbacks.CSVLogger):
                _go_on(callback, epoch)
        with self._program.remembered() as before:
            self.on_train_begin()
            self._fresh = [*map(_plain, self.callbacks)]
            remembered = self._remembered(saved or [])
            self._recall(remembered)
            self.on_epoch_begin(epoch)
            self._recall(remembered)
        if saved is not None and None not in remembered:
            for variable, value in before:  # what they do at an epoch's begin was done before the checkpoint
                self._program.assign(variable, value.__getitem__)
        self.constants.note_numbers()
        return saved is None or [each.get("spec") for each in saved] == self._specs

    def _recall(self, memories: Sequence[dict[str, Any] | None]) -> None:
        for callback, fresh, memory in zip(self.callbacks, self._fresh, memories, strict=True):
            if memory is not None:
                now, then = _plain(callback), fresh | memory
                vars(callback).update({k: from_json(v) for k, v in then.items() if now.get(k, OTHER) != v})

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        with self._checked():
            super().on_train_batch_end(batch, logs)

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        with self._checked():
            super().on_epoch_begin(epoch, logs)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        with self._checked():
            super().on_epoch_end(epoch, logs)

    def _checked(self) -> contextlib.AbstractContextManager[None]:
        return self.constants.kept() if self.callbacks else contextlib.nullcontext()

    def _remembered(self, saved: list[dict[str, Any]]) -> list[dict[str, Any] | None]:
        """The memory of each: of the same one in the same place, or else of the only one of its name."""
        if [each.get("spec") for each in saved] == self._specs:
            return [each["memory"] for each in saved]
        by_name: dict[str, list[Any]] = {}
        for each in saved:
            by_name.setdefault(_name(each.get("spec", "")), []).append(each.get("memory"))
        found = [by_name.get(_name(spec), []) for spec in self._specs]
        return [memories[0] if len(memories) == 1 else None for memories in found]

    def memory(self) -> list[dict[str, Any]]:
        """For each, what it was made from, and what has changed since it began."""
        changed = [
            {k: v for k, v in now.items() if v != fresh.get(k, OTHER)}
            for now, fresh in zip(map(_plain, self.callbacks), self._fresh, strict=True)
        ]
        return [{"spec": spec, "memory": memory} for spec, memory in zip(self._specs, changed, strict=True)]


def _plain(callback: keras.callbacks.Callback) -> dict[str, Any]:
    """Its public attributes that are plain, as JSON."""
    each = {k: to_json(v) for k, v in vars(callback).items() if not k.startswith("_")}
    return {k: v for k, v in each.items() if v is not OTHER}


def _go_on(log: keras.callbacks.CSVLogger, epoch: int) -> None:
    """Keeps the lines of the epochs before one, where Keras's would begin the file anew, or tell epochs twice."""
    log.append = True
    with contextlib.suppress(FileNotFoundError), open(log.filename, "r+", encoding="utf-8") as file:
        numbered = [(line.partition(log.sep)[0], line) for line in file]
        file.seek(0)
        file.writelines(line for number, line in numbered if not number.isdigit() or int(number) < epoch)
        file.truncate()


def _name(spec: str) -> str:
    return spec.partition("(")[0].strip()


def _check_saves(spec: str, kind: Any) -> None:
    if any(each.__name__ in _SAVING for each in getattr(kind, "__mro__", ())):
        raise UserError(
            "callbacks",
            spec,
            "would save beside the run's own checkpoints",
            "use --save_every, --keep and --best",
        )


def create(specs: Sequence[str], program: Program, dataset: Dataset, clock: Clock, chief: bool) -> Callbacks:
    """The callbacks of --callbacks, by a name of keras.callbacks or a dotted path, bound to the model.

    Batch hooks are called at the ends of chunks of steps, where the host looks in anyway, with the
    number of steps done; epoch hooks at the ends of epochs, with the epoch's means and the newest 'val_' metrics.

    Args:
      specs: the flag's.
      program: what is trained.
      dataset: what it is trained and evaluated on.
      clock: tells when epochs end.
      chief: whether this process tells of the run. In others, those of Keras's that only tell do nothing.

    Raises:
      UserError: no such callback, or one that would do nothing, or harm, in a run.
    """
    callbacks = []
    for spec in specs:
        name, attribute, arguments = plugins.parse(spec, "callbacks")
        factory = _KNOWN.get(name)
        if factory is None or attribute:
            factory, arguments = plugins.resolve(spec, "callbacks", "trainer.models", "create", list(_KNOWN))
        _check_saves(spec, factory)  # before it is made, for which Orbax's needs a package
        try:
            callback = factory(**arguments)
        except (TypeError, ValueError) as error:
            raise UserError("callbacks", spec, str(error), "see keras.io/api/callbacks") from None
        if not isinstance(callback, keras.callbacks.Callback):
            raise UserError("callbacks", spec, f"made a {type(callback).__name__}", "give a keras.callbacks.Callback")
        _check_saves(spec, type(callback))
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
        if isinstance(callback, _SETTING) and (why := optimizers.why_no_rate_can_be_set(program.optimizer)):
            raise UserError("callbacks", spec, *why)
        watched = getattr(callback, "monitor", None)
        if isinstance(watched, str) and watched not in (names := _logged(program, dataset, clock)):
            raise UserError(
                "callbacks",
                spec,
                f"watches {watched!r}, which an epoch of this run does not give",
                f"monitor one of {', '.join(sorted(names))}",
            )
        if chief and (words := _otherwise(callback, program.config.log_every)):
            print(f"callbacks  {spec}: {words}", flush=True)
        silent = not chief and type(callback) in _TELLING
        callbacks.append(keras.callbacks.Callback() if silent else callback)
    told = {"epochs": clock.epochs_ended(clock.steps), "steps": clock.epoch_steps, "verbose": 0}  # as by fit()
    together = Callbacks(callbacks, specs, program, told)
    for callback, spec in zip(callbacks, specs, strict=True):
        if isinstance(callback, MonitorCallback):
            try:
                callback._set_monitor_op()  # they would at the first epoch's end, and turn min_delta's sign
            except ValueError as error:
                raise UserError("callbacks", spec, str(error), "add mode='max' or mode='min'") from None
    return together


def _otherwise(callback: keras.callbacks.Callback, often: str) -> str:
    """What of a user's callback is called otherwise than by fit(), in words."""
    kind = type(callback)
    if kind.__module__.startswith(("keras.", "trainer.")) and kind is not keras.callbacks.LambdaCallback:
        return ""

    def has(name: str) -> bool:
        return getattr(getattr(callback, name), "__func__", None) is not getattr(keras.callbacks.Callback, name)

    found = [f"a run does not call {', '.join(names)}"] if (names := [*filter(has, _UNCALLED)]) else []
    if often != "1" and (has("on_train_batch_end") or has("on_batch_end")):
        found.append(f"told of a batch's end with each line of the log (--log_every={often}; 1: at each step)")
    return "; ".join(found)


def _logged(program: Program, dataset: Dataset, clock: Clock) -> list[str]:
    """Names of the metrics that an epoch's end is given."""
    names = list(program.objective.results(program.objective.no_totals()))
    evaluates = dataset.validation is not None and clock.intervals["evaluate"].amount
    return [*names, *(f"val_{name}" for name in names if evaluates)]
