"""What a run's steps are compiled for, and callbacks may not change: it would do nothing, or on one backend alone."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import keras
import numpy as np

from trainer import optimizers
from trainer.errors import UserError
from trainer.program import Program

_PLAIN = (bool, int, float, str)
_AS_IS = (
    "end the run there (self.model.stop_training = True), and start another from it by --initialize_from; a learning "
    "rate may be set to a number where it follows no schedule"
)


class Constants:
    """Which variables are trained, the optimizer, its and the layers' plain attributes, variables that no layer has.

    Args:
      program: of the run.
      specs: the callbacks, for errors.
    """

    def __init__(self, program: Program, specs: list[str]) -> None:
        self._program, self._specs = program, specs
        self._trained, self._optimizers = self._trainable(), self._optimizing()
        losses = [loss for loss in keras.tree.flatten(program.model.loss) if isinstance(loss, keras.losses.Loss)]
        layers = program.model._flatten_layers(include_self=False)
        each = [program.model, *layers, *optimizers.each_of(program.optimizer), *losses]
        # Those that they have when the run begins: what callbacks note in a model is no matter.
        self._plain = [(thing, name) for thing in each for name in _plain(thing)]
        rates = [rate for rate in self._optimizers[1:] if isinstance(rate, keras.Variable)]
        # What callbacks have assigned to, by id, and numbers with the last values. Rates: before this start, perhaps.
        self._assigned: dict[int, tuple[keras.Variable, Any]] = {id(v): (v, None) for v in rates}

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Within it callbacks are called.

        Raises:
          UserError: they have changed something.
        """
        before, assign = self._plain_now(), keras.Variable.assign

        def assigning(variable: keras.Variable, value: Any) -> Any:
            self._assigned[id(variable)] = variable, value if variable.shape == () else None
            return assign(variable, value)

        with mock.patch.object(keras.Variable, "assign", assigning):
            yield
        if self._trainable() != self._trained:
            raise self._error("which of the model's variables are trained", _AS_IS)
        if any(a is not b for a, b in zip(self._optimizing(), self._optimizers, strict=True)):
            raise self._error("the model's optimizer, or its schedule, for another", _AS_IS)
        for (thing, name), was, value in zip(self._plain, before, self._plain_now(), strict=True):
            if value is not was and value != was:
                raise self._error(
                    f"{name} of {thing.name} from {was} to {value}, no variable",
                    f"make it a variable of the model's or a layer's, self.{name} = self.add_weight(shape=(), "
                    "trainable=False, initializer=...), and assign to it; of an optimizer's numbers, the learning rate "
                    "is one",
                )
        of_optimizer = set(map(id, self._program.optimizer.variables))  # each step is given those that it reads
        outside = {id(v) for v in self._program.objective.outside} - of_optimizer
        if theirs := self._assigned.keys() & outside:
            raise self._error(
                f"{self._assigned[min(theirs)][0].path}, which call() or a loss uses, and no layer has",
                "make it an attribute of the model or a layer, such as by add_weight(trainable=False): so its value "
                "is seen on either backend, and is in the checkpoints",
            )

    def note_numbers(self) -> None:
        """Takes numbers for set by callbacks as they are: a start puts back what callbacks do anew when it begins."""
        for variable, _ in self._assigned.values():
            if variable.shape == ():
                self._assigned[id(variable)] = variable, self._program.to_host(variable)

    @contextlib.contextmanager
    def numbers_left(self) -> Iterator[None]:
        """Within it a checkpoint is restored, but for the numbers that callbacks have set and no step has changed.

        Such as the learning rate: the callbacks, which are not restored, take it for set. All processes call it
        together.
        """
        numbers = [(v, self._program.to_host(v), value) for v, value in self._assigned.values() if v.shape == ()]
        yield
        for variable, now, value in numbers:
            if np.array_equal(now, keras.ops.convert_to_numpy(keras.ops.cast(value, variable.dtype))):
                self._program.assign(variable, now.__getitem__)

    def _error(self, changed: str, fix: str) -> UserError:
        return UserError(
            "callbacks",
            ", ".join(self._specs),
            f"changed {changed}; those of a run stay the same, for its step is compiled for them",
            fix,
        )

    def _plain_now(self) -> list[Any]:
        return [getattr(thing, name, None) for thing, name in self._plain]

    def _trainable(self) -> list[str]:
        return [variable.path for variable in self._program.model.trainable_variables]

    def _optimizing(self) -> list[Any]:
        rates = [optimizer._learning_rate for optimizer in optimizers.each_of(self._program.optimizer)]
        return [self._program.model.optimizer, *rates]


def _plain(thing: Any) -> list[str]:
    """Names of its public attributes that are Python's numbers, words or switches, but those that end fit()."""
    return [k for k, v in vars(thing).items() if type(v) in _PLAIN and not k.startswith(("_", "stop_"))]
