"""A Keras object as text, which is the same in every process and wherever its code lies."""

import contextlib
import json
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import keras
from keras.src.saving import serialization_lib
from keras.src.utils import python_utils, rng_utils


def serialized(thing: Any) -> str:
    """The configuration of a Keras object as JSON; '' if it can't be serialized."""
    try:
        with without_tensorflow(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what could not be read back: nothing is
            with mock.patch.object(python_utils, "func_dump", _of_lambda):
                return json.dumps(keras.saving.serialize_keras_object(thing)["config"], sort_keys=True)
    except (NotImplementedError, TypeError, ValueError):
        return ""


def _of_lambda(function: Callable[..., Any]) -> tuple[Any, ...]:
    """What a lambda computes, its defaults and what it encloses. Keras has its file and its line in it, too."""
    enclosed = tuple(cell.cell_contents for cell in function.__closure__ or ())
    return _of_code(function.__code__), function.__defaults__, enclosed or None


def _of_code(code: types.CodeType) -> list[Any]:
    return [code.co_code.hex(), code.co_names, code.co_varnames, code.co_freevars, [_of(c) for c in code.co_consts]]


def _of(constant: Any) -> Any:
    if isinstance(constant, types.CodeType):
        return _of_code(constant)
    return sorted(map(repr, constant)) if isinstance(constant, frozenset) else repr(constant)


class _IfImported:
    """TensorFlow, where it is imported anyhow."""

    @property
    def available(self) -> bool:
        return "tensorflow" in sys.modules

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules["tensorflow"], name)


@contextlib.contextmanager
def without_tensorflow() -> Iterator[None]:
    """Keeps Keras from importing it, for seconds, to see whether a thing is of its types, or to seed what none uses."""
    tensorflow = _IfImported()
    with contextlib.ExitStack() as stack:
        for module in (serialization_lib, rng_utils):
            stack.enter_context(mock.patch.object(module, "tf", tensorflow))
        yield
