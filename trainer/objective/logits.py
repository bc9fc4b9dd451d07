"""Whether a model gives logits or probabilities, and which of them a loss takes.

Mistaken for the other, it learns badly, in silence.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras.src import backend

from trainer.objective.patched import patched

_ACTIVATIONS = ("softmax", "sigmoid")
_CROSSENTROPIES = ("categorical_crossentropy", "sparse_categorical_crossentropy", "binary_crossentropy")
_PROBABILITIES = (keras.activations.softmax, keras.activations.sigmoid)


@contextlib.contextmanager
def remembered() -> Iterator[None]:
    """Within it, a cross-entropy of what softmax or sigmoid gave is computed from its logits, on JAX as on TensorFlow.

    Keras does so on TensorFlow alone. Elsewhere it clips probabilities to 1e-7: where a model is sure and wrong,
    loss and gradients are others, and training on the two backends is not one curve.
    """
    if backend.backend() != "jax":
        yield
        return
    known: dict[int, tuple[Any, Any]] = {}  # id of an output -> the output, which keeps its id, and its logits

    def remembering(activation: Callable[..., Any]) -> Callable[..., Any]:
        def activate(x: Any, *args: Any, **kwargs: Any) -> Any:
            output = activation(x, *args, **kwargs)
            known[id(output)] = output, x
            return output

        return activate

    def of_logits(crossentropy: Callable[..., Any]) -> Callable[..., Any]:
        def compute(target: Any, output: Any, from_logits: bool = False, **kwargs: Any) -> Any:
            if id(output) in known:
                output, from_logits = known[id(output)][1], True
            return crossentropy(target, output, from_logits=from_logits, **kwargs)

        return compute

    with contextlib.ExitStack() as stack:
        for wrapped, names in ((remembering, _ACTIVATIONS), (of_logits, _CROSSENTROPIES)):
            for name in names:
                stack.enter_context(patched(backend.nn, name, wrapped(getattr(backend.nn, name))))
        yield


def gives_logits(model: keras.Model) -> list[bool | None]:
    """For each output, whether it is logits or, False, probabilities; None where its layer does not tell.

    A subclassed model tells nothing: [].
    """
    return [_is_logits(output) for output in keras.tree.flatten(getattr(model, "outputs", None) or [])]


def takes_logits(loss: Any) -> bool | None:
    """Whether a loss takes logits or, False, probabilities; None where it is none of Keras's cross-entropies."""
    function = getattr(loss, "fn", None)
    if function is None or "from_logits" not in inspect.signature(function).parameters:
        return None
    return bool(getattr(loss, "_fn_kwargs", {}).get("from_logits", False))


def _is_logits(output: keras.KerasTensor) -> bool | None:
    layer, _, index = output._keras_history
    if isinstance(layer, keras.Model):
        inner = keras.tree.flatten(getattr(layer, "outputs", None) or [])
        return _is_logits(inner[index]) if inner else None
    if isinstance(layer, keras.layers.TimeDistributed):
        layer = layer.layer
    activation = getattr(layer, "activation", None)
    if activation in _PROBABILITIES or isinstance(layer, keras.layers.Softmax):
        return False
    # Of others than those that multiply by a kernel, what comes before may have made probabilities.
    return True if activation is keras.activations.linear and hasattr(layer, "kernel") else None
