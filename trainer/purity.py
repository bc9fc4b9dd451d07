"""What call() may not do: a step is a pure function, from the variables that it is given to their values afterwards."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import keras
import keras.src.random.seed_generator as keras_seeds

from trainer.errors import UserError


@contextlib.contextmanager
def pure(model: keras.Model) -> Iterator[None]:
    """Within it a model is traced; afterwards, what the step would lose of it is refused.

    Raises:
      UserError: a variable has changed that is none of the model's, such as a metric's, or random numbers were drawn
        from what is no layer's seed: a compiled step would draw the same ones for ever.
    """
    known = {id(variable) for variable in (*model.trainable_variables, *model.non_trainable_variables)}
    add_update = keras.StatelessScope.add_update
    strays: list[Any] = []  # Keras would wrap what is raised inside a layer

    def noting(scope: Any, update: tuple[Any, Any]) -> None:
        add_update(scope, update)
        if id(update[0]) not in known:
            strays.append(update[0])

    with (
        mock.patch.object(keras.StatelessScope, "add_update", noting),
        # Keras's own is refused by Keras on JAX alone.
        mock.patch.object(keras_seeds, "global_seed_generator", keras_seeds.SeedGenerator),
    ):
        yield
    if any(variable.name == "seed_generator_state" for variable in strays):
        raise UserError(
            "model",
            model.name,
            "draws random numbers in call() from no layer's seed: a compiled step would draw the same at each step",
            "give the layer an attribute, self.seed = keras.random.SeedGenerator(), and draw with seed=self.seed",
        )
    if strays:
        raise UserError(
            "model",
            model.name,
            f"changes {strays[0].path} in call(), which is no variable of a layer's: what it holds would be lost",
            "give a metric to compile(), for an output that tells what it measures; other state is for add_weight()",
        )
