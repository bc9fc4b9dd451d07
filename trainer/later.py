"""What waits for an import: modules that few runs use, till they are looked into; and what is to be done with one."""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

_SELDOM = (
    "jax.experimental.sparse.linalg",  # with SciPy's solvers, a seventh of all that Keras on JAX imports
    "jax.experimental.pallas.tpu",  # kernels of TPUs
    "requests",  # of Keras's RemoteMonitor
)


class _Later(importlib.abc.MetaPathFinder):
    """Finds what is to be loaded later; everything else is for the finders after it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _SELDOM:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec and spec.loader:
            spec.loader = importlib.util.LazyLoader(spec.loader)
        return spec


def put_off() -> None:
    """Puts the loading of these modules off. Who imports one a second time, or takes a name from it, has it loaded."""
    if not any(isinstance(finder, _Later) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Later())


class _Followed(importlib.abc.MetaPathFinder):
    """Finds a module of which something is to be done as soon as it is loaded, by whoever imports it."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name, self._then = name, then

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if name == self._name else None
        if spec and spec.loader:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                self._then(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def when_imported(name: str, then: Callable[[ModuleType], None]) -> None:
    """Calls a function with a module: now, if it is loaded, or before whoever will import it can use it."""
    if module := sys.modules.get(name):
        then(module)
    else:
        sys.meta_path.insert(0, _Followed(name, then))
