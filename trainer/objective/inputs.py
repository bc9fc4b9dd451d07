"""What a model takes of an example's x, and what it then gives."""

import functools
import inspect
from typing import Any

import keras
import keras.src.backend as keras_backend
from keras.src.models.functional import Functional

from input_pipeline.structure import flatten, map_structure, pack

_PLAIN = Functional.call, keras.Sequential.call


def symbols(specs: Any) -> Any:
    """Symbolic arrays of a batch of one example; None stays."""
    return map_structure(lambda spec: spec and keras.KerasTensor((1, *spec.shape), str(spec.dtype)), specs)


def mode(model: keras.Model, training: bool) -> dict[str, bool]:
    """What tells call() whether it is training, if it asks."""
    return {"training": training} if "training" in inspect.signature(model.call).parameters else {}


def taken(model: keras.Model, x: Any) -> Any:
    """What a model takes of x: of a dict, the arrays that its inputs name; None for an optional one that is not there.

    Keras would pair all arrays with the inputs, both in the order of their names, and say so in a warning. A call() of
    its own is given a dict that it may change, as under fit().
    """
    declared = _declared(model)
    return _named(declared.input, x) if declared else map_structure(lambda array: array, x)


def inputs_of(model: keras.Model, x: Any) -> list[keras.KerasTensor | None]:
    """For each array of x (Specs), the model's input to which Keras gives it; None where it is not known, or none."""
    found: list[keras.KerasTensor | None] = [None] * len(flatten(x))
    if declared := _declared(model):
        numbers = flatten(taken(model, pack(x, iter(range(len(found))))))
        if len(numbers) == len(declared.inputs):
            for number, each in zip(numbers, declared.inputs, strict=True):
                if number is not None:
                    found[number] = each
    return found


def outputs(model: keras.Model, x: Any) -> Any:
    """Symbolic outputs in training of a batch of one example of such Specs; it builds a subclassed model, too.

    Raises:
      ValueError, TypeError, RuntimeError: what Keras says of a model that does not take it.
    """
    for spec, of in zip(flatten(x), inputs_of(model, x), strict=True):  # Keras lets a last dim of 1 pass for any other
        if of is None or len(of.shape) != len(spec.shape) + 1:
            continue
        if any(expected not in (None, dim) for expected, dim in zip(of.shape[1:], spec.shape, strict=True)):
            raise ValueError(f"its input {of.name!r} is {('batch', *of.shape[1:])}")
    training = mode(model, training=True)
    given = symbols(taken(model, x))
    declared = _declared(model)
    if not declared or _is_like(declared.input, given):
        found = model(given, **training)
        # Of a subclass of these two they are the layers' outputs, and not what call() returns; a layer may leave a dim
        # open.
        by_layers = isinstance(model, Functional | keras.Sequential) and type(model).call not in _PLAIN
        if not by_layers and all(None not in output.shape for output in keras.tree.flatten(found)):
            return found
    # As with real arrays, whose structures and dims Keras fits to the inputs; of symbolic ones it does not.
    return keras_backend.compute_output_spec(functools.partial(model, **training), given)


def _declared(model: keras.Model) -> Functional | None:
    """What declares a model's inputs; None where nothing does, or call() is of its own."""
    functional = getattr(model, "_functional", model)  # Sequential has one inside, once it knows its input
    return functional if type(model).call in _PLAIN and isinstance(functional, Functional) else None


def _named(inputs: Any, x: Any) -> Any:
    if not isinstance(x, dict):
        return x
    known = inputs if isinstance(inputs, dict) else {each.name: each for each in keras.tree.flatten(inputs)}
    if any(name not in x and not _is_optional(each) for name, each in known.items()):
        return x
    if isinstance(inputs, dict):
        return {name: _named(each, x.get(name)) for name, each in inputs.items()}
    return keras.tree.map_structure(lambda each: x.get(each.name), inputs)


def _is_optional(tensor: Any) -> bool:
    history: Any = getattr(tensor, "_keras_history", None)
    return bool(history) and getattr(history.operation, "optional", False)


def _is_like(inputs: Any, given: Any) -> bool:
    """Whether symbolic arrays have the structure and the dims of a model's inputs."""
    ranks = [[None if each is None else len(each.shape) for each in flatten(some)] for some in (given, inputs)]
    return isinstance(given, dict) == isinstance(inputs, dict) and ranks[0] == ranks[1]
