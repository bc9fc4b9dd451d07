"""Keras's own file of weights, written from values on the host."""

import bisect
import contextlib
import functools
import pathlib
import urllib.parse
from collections.abc import Callable
from typing import Any
from unittest import mock

import keras
import numpy as np
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.saving import saving_lib

from trainer.program import Program
from trainer.storage import digests
from trainer.storage.digests import Region
from trainer.storage.hdf5_file import File, datasets

_AS_THEY_ARE = "onecurve"  # where variables are that Keras saves something else for
# Keras makes a layer for each that it saves, to see what attributes all have: it looks for what it saw under another
# name than it keeps it by (3.15).
_attributes_of_all = functools.cache(saving_lib.get_attr_skipset)


def write_weights(
    path: pathlib.Path,
    program: Program,
    values: dict[str, np.ndarray],
    digest: Callable[[memoryview], str] = digests.of_bytes,
) -> list[Region]:
    """Writes what keras.Model.save_weights does, of these values, wherever the variables lie.

    Args:
      path: the file.
      program: whose variables they are.
      values: by path.
      digest: what is told of large arrays.

    Returns:
      where the large arrays are in the file, and their digests.

    Raises:
      OSError: the storage is full, or fails.
    """
    with File(path, digest) as file:
        store = _Store(file, mode="w")
        _attributes_of_all("Optimizer")  # for which it makes one, as it may not in the scope
        variables = program.variables
        scope = keras.StatelessScope()
        # Not by the scope's argument, of which it would make tensors, and copies where memory is not aligned.
        scope.state_mapping = {id(variables[name]): value for name, value in values.items()}
        uncopied = mock.patch.object(keras.Variable, "numpy", _without_a_copy(keras.Variable.numpy))
        with keras.device("cpu"), uncopied, _looked_at_once(), scope:
            saving_lib._save_state(program.model, store, None, "", set())
        entry = store.make(_AS_THEY_ARE)
        for name in _transformed(program):
            entry[urllib.parse.quote(name, safe="")] = values[name]
        store.close()
    return file.arrays


def _looked_at_once() -> contextlib.AbstractContextManager[Any]:
    return mock.patch.object(saving_lib, "get_attr_skipset", _attributes_of_all)


def _without_a_copy(numpy: Callable[[keras.Variable], np.ndarray]) -> Callable[[keras.Variable], np.ndarray]:
    """Has Variable.numpy(), by which optimizers are saved, hand over what the scope holds; other threads have none."""
    return lambda variable: np.asarray(variable.value) if in_stateless_scope() else numpy(variable)


def read_weights(
    path: pathlib.Path, program: Program, arrived: Callable[[str, keras.Variable], object] | None = None
) -> None:
    """Sets a program's variables from a file of `write_weights`, as Keras's load_weights does, and what it can't know.

    Args:
      path: the file.
      program: whose variables they are.
      arrived: called with the path of each variable that was set, and with it; of some twice.

    Raises:
      OSError, ValueError, KeyError, TypeError: the file can't be read, or is of another program.
    """
    variables, assign = program.variables, keras.Variable.assign
    paths = {id(variable): name for name, variable in variables.items()}

    def assign_and_tell(variable: keras.Variable, value: Any) -> Any:
        result = assign(variable, value)
        if arrived and id(variable) in paths:
            arrived(paths[id(variable)], variable)
        return result

    with mock.patch.object(keras.Variable, "assign", assign_and_tell), _looked_at_once():
        store = _Store(path, mode="r")
        saving_lib._load_state(program.model, store, None, "", visited_saveables=set())
        entry = store.get(_AS_THEY_ARE)
        for key in list(entry.keys()):
            program.assign(variables[urllib.parse.unquote(key)], np.asarray(entry[key]).__getitem__)
        store.close()


def _transformed(program: Program) -> list[str]:
    """Paths of variables of which Keras's file has no copy: their layers save something else in their place.

    LoRA's are merged into the layer's kernel, and start from zero when they are loaded; what a class of the user's does
    is not known.
    """

    def transforms(layer: Any) -> bool:
        return getattr(layer, "lora_enabled", False) or not layer.save_own_variables.__module__.startswith("keras.")

    model, optimizer = program.model, program.optimizer
    found = {
        id(variable)
        for layer in filter(transforms, model._flatten_layers())
        for variable in [*layer._trainable_variables, *layer._non_trainable_variables]
    }
    found |= {id(variable) for variable in optimizer.variables if transforms(optimizer)}
    return [path for path, variable in program.variables.items() if id(variable) in found]


class _Store(saving_lib.H5IOStore):  # type: ignore[misc]  # Keras has no types
    """Keras's, but it copies nothing that is on the host already, and looks through the file but once, before it reads.

    Raises:
      ValueError: as `datasets` does.
    """

    def __init__(self, file: Any, mode: str) -> None:
        super().__init__(file, mode=mode)
        self._datasets = datasets(self.h5_file) if mode == "r" else {}
        self._names = sorted(self._datasets)

    def get(self, path: str) -> "_Store":
        prefix = f"{path}/vars/".lstrip("/")
        first, end = (bisect.bisect_left(self._names, text) for text in (prefix, f"{prefix}\uffff"))
        self._h5_entry_group = {name.removeprefix(prefix): self._datasets[name] for name in self._names[first:end]}
        return self

    def __getitem__(self, key: str) -> np.ndarray:
        dataset = self._h5_entry_group[key]
        values = np.empty(dataset.shape, dataset.attrs.get("dtype", dataset.dtype))  # Keras notes "bfloat16" there
        if dataset.size:
            dataset.read_direct(values)
        return values

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, _Uncopied(np.asarray(value)))


class _Uncopied:
    """What numpy.array makes of it are these values themselves."""

    def __init__(self, values: np.ndarray) -> None:
        self._values = values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._values
