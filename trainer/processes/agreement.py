"""What all processes of a run must have in common, told before any of them computes."""

import dataclasses
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import re
import sys
from collections.abc import Iterable

import trainer
from trainer.config import Config

_ONE_S_OWN = ("cluster", "data_dir", "run_dir", "prefetch")  # flags in which processes may differ
_PACKAGES = ("absl-py", "jax", "jaxlib", "keras", "numpy", "tensorflow")


def facts(config: Config) -> dict[str, object]:
    """Flags, versions and code, known before anything heavy is imported."""
    flags = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name not in _ONE_S_OWN}
    return {
        **{f"--{name}": value for name, value in flags.items()},
        "the run directory": config.directory().resolve(),
        **{f"the version of {name}": _version(name) for name in _PACKAGES},
        "the version of Python": platform.python_version(),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "the code of the trainer": _digest(_own_files()),
        **{f"the code of {name}": _digest([path]) for name, path in _plugin_files(config).items()},
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _own_files() -> list[pathlib.Path]:
    ours = pathlib.Path(trainer.__path__[0])
    return [path for package in (ours, ours.with_name("input_pipeline")) for path in sorted(package.rglob("*.py"))]


def _plugin_files(config: Config) -> dict[str, pathlib.Path]:
    """The files of the modules that the flags name by a path, found without importing them."""
    names = ("model", "dataset", "optimizer", "schedule", "strategy", "layout")
    specs = (*(getattr(config, name) for name in names), *config.callbacks)
    modules = [match[1] for spec in specs if (match := re.match(r"([\w.]+):", spec))]
    found = {module: _file(module) for module in modules}
    return {module: path for module, path in found.items() if path}  # what is not there is said where it is loaded


def _file(module: str) -> pathlib.Path | None:
    """A module's source. importlib would import the packages that it is in: what they do has to wait for devices."""
    for entry in (*sys.path, os.getcwd()):
        inner = pathlib.Path(entry, *module.split("."))
        for file in (inner / "__init__.py", inner.with_name(f"{inner.name}.py")):
            if file.is_file():
                return file
    return None


def _digest(paths: Iterable[pathlib.Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
