"""Modules that the frameworks import and few runs use: loaded when they are first looked into."""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
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
