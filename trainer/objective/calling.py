"""How a model's call() is called: with `training` for all layers within it."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import keras
from keras.src.layers.layer import CallContext

from trainer.objective.inputs import mode, taken
from trainer.objective.patched import patched


def stateless_call(model: keras.Model, trainable: Any, state: Any, x: Any, training: bool, **more: Any) -> Any:
    """Keras's, of a batch as it is read, with `training` for all layers."""
    for layer in model._flatten_layers():
        # By the ids of what they gave add_loss() Keras tells the layers' losses apart: one that another layer's tensor
        # has got since, for the former is gone, would make that loss count twice.
        layer._loss_ids.clear()
    with _told(model, training):
        return model.stateless_call(trainable, state, taken(model, x), **mode(model, training), **more)


@contextlib.contextmanager
def beside(pairs: Iterable[tuple[keras.Variable, Any]]) -> Iterator[None]:
    """Within it, variables that a scope has no values for have these while it is traced."""
    current, found = keras.StatelessScope.get_current_value, {id(variable): value for variable, value in pairs}

    def current_or_beside(scope: Any, variable: Any) -> Any:
        value = current(scope, variable)
        return found.get(id(variable)) if value is None else value

    with patched(keras.StatelessScope, "get_current_value", current_or_beside):
        yield


@contextlib.contextmanager
def _told(model: keras.Model, training: bool) -> Iterator[None]:
    """Within it, layers that call() calls without `training` take this, as in model(x, training=training).

    Keras's stateless_call() tells call() alone, and not even that if it does not name `training`: dropout would be off.
    What one layer is given goes to the layers within it; in Keras to those after it, too, so that a backbone which is
    called with training=False would switch off the dropout behind it.
    """
    contexts = [CallContext(model)]
    contexts[0].set_value("training", training)

    def enter(layer: Any) -> CallContext:
        inner = CallContext(model)
        vars(inner).update(vars(contexts[-1]))
        contexts.append(inner)
        return inner

    def leave(layer: Any) -> None:
        contexts.pop()

    with (
        patched(keras.layers.Layer, "_get_call_context", enter),
        patched(keras.layers.Layer, "_maybe_reset_call_context", leave),
    ):
        yield
