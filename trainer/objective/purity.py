"""What call() may not do: a step is a pure function, from the variables that it is given to their values afterwards."""

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import keras
import keras.src.random.seed_generator as keras_seeds
import numpy as np

from trainer.errors import UserError
from trainer.objective.randomness import is_seed


@contextlib.contextmanager
def pure(model: keras.Model, flag: str) -> Iterator[None]:
    """Within it a model is traced; afterwards, what the step would lose of it is refused.

    Args:
      model: the model.
      flag: which --model it is, for errors.

    Raises:
      UserError: a variable that is none of the model's has changed, such as a metric's, or was used though it is to be
        trained; or random numbers were drawn from what is no layer's seed: of Keras's own, or of Python's or numpy's, a
        compiled step would draw the same for ever; the state of TensorFlow's is in no checkpoint.
    """
    known = {id(variable) for variable in (*model.trainable_variables, *model.non_trainable_variables)}
    add_update, get_current_value = keras.StatelessScope.add_update, keras.StatelessScope.get_current_value
    strays: list[Any] = []  # noted, for Keras would wrap what is raised inside a layer
    hidden: list[Any] = []
    drawn: list[Any] = []
    thread = threading.get_ident()  # others may read data

    def noting(scope: Any, update: tuple[Any, Any]) -> None:
        add_update(scope, update)
        if id(update[0]) not in known:
            strays.append(update[0])

    def reading(scope: Any, variable: Any) -> Any:
        if variable.trainable and id(variable) not in known:
            hidden.append(variable)
        return get_current_value(scope, variable)

    def seed_of_tensorflow(seed: int | None) -> tuple[int, int]:
        drawn.append(seed)
        return 0, 1

    def of_host(draw: Callable[..., Any]) -> Callable[..., Any]:
        def drawing(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:
                drawn.append(draw)
            return draw(*args, **kwargs)

        return drawing

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(keras.StatelessScope, "add_update", noting))
        stack.enter_context(mock.patch.object(keras.StatelessScope, "get_current_value", reading))
        # Keras's own is refused by Keras on JAX alone.
        stack.enter_context(mock.patch.object(keras_seeds, "global_seed_generator", keras_seeds.SeedGenerator))
        if keras.config.backend() == "tensorflow":  # what its stateful operations ask
            of_tensorflow = "tensorflow.python.framework.random_seed.get_seed"
            stack.enter_context(mock.patch(of_tensorflow, seed_of_tensorflow))
        for module, generator in ((random, random._inst), (np.random, np.random.mtrand._rand)):
            for name, draw in list(vars(module).items()):
                if getattr(draw, "__self__", None) is generator:
                    stack.enter_context(mock.patch.object(module, name, of_host(draw)))
        yield
    if drawn or any(map(is_seed, strays)):
        raise UserError(
            "model",
            flag,
            "draws random numbers in call() from no layer's seed: they would be the same at each step, or others after "
            "each start",
            "give the layer an attribute, self.seed = keras.random.SeedGenerator(), and draw by keras.random with "
            "seed=self.seed",
        )
    if strays:
        raise UserError(
            "model",
            flag,
            f"changes {strays[0].path} in call(), which is no variable of a layer's: what it holds would be lost",
            "give a metric to compile(), for an output that tells what it measures; other state is for add_weight()",
        )
    if hidden:
        raise UserError(
            "model",
            flag,
            f"uses {hidden[0].path} in call(), which is no variable of the model's: it would not be trained, nor saved",
            "make it, or the layer that has it, an attribute of the model or a layer: a Lambda's, or another object's, "
            "is not seen; what is to stay as it is, is made with trainable=False",
        )
