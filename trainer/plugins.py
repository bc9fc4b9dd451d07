"""'mlp(units=256)' or 'my_pkg.my_module:build(units=256)' -> a function and its arguments.

There is no registry: a short name is a module of a package of ours, a dotted path is anybody's.
Values are Python literals; nothing in a spec is evaluated.
"""

import ast
import difflib
import importlib
import importlib.util
import inspect
import os
import pathlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags

from trainer.errors import UserError


def parse(spec: str, flag: str) -> tuple[str, str, dict[str, Any]]:
    """Splits a spec into (module or short name, attribute or '', keyword arguments)."""
    target, parenthesis, rest = spec.strip().partition("(")
    module, _, attribute = target.strip().partition(":")
    names = module.split(".") + ([attribute] if attribute else [])
    if module.endswith(".py"):
        dotted = module.removesuffix(".py").removeprefix("./").replace("/", ".")
        fix = f"name the module that can be imported from {os.getcwd()}: --{flag}={dotted}:{attribute or 'function'}"
        raise UserError(flag, spec, "is the name of a file", fix)
    if module.endswith((".keras", ".h5")):
        fix = f"name a function of a module of yours: def build(): return keras.saving.load_model({module!r})"
        raise UserError(flag, spec, "is the file of a saved model", fix)
    if not all(name.isidentifier() for name in names):
        raise UserError(
            flag,
            spec,
            "is neither a name nor a dotted path",
            "write name, name(argument=value) or package.module:function(argument=value)",
        )
    if not parenthesis:
        return module, attribute, {}
    try:
        call = ast.parse(f"f({rest}", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            raise ValueError
        arguments = {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg}
        if len(arguments) != len(call.keywords):  # some without a name, or twice
            raise ValueError
    except (SyntaxError, ValueError):
        raise UserError(
            flag,
            spec,
            "its arguments are not of the form (argument=value, ...) with literal values",
            f"write --{flag}='{target}(argument=value)', each with its name, a value such as 0.1, 'relu' or (2, 3)",
        ) from None
    return module, attribute, arguments


def resolve(
    spec: str, flag: str, package: str, attribute: str, others: Sequence[str] = ()
) -> tuple[Any, dict[str, Any]]:
    """Finds what a spec names.

    Args:
      spec: a short name is the module of that name in `package`; a dotted path is imported as it is.
      flag: the flag it came from, for errors.
      package: where short names live, such as 'trainer.models'.
      attribute: what is taken from a module when the spec names none, such as 'build'.
      others: names that would have been known, for errors.

    Returns:
      (the object, keyword arguments of the spec). A user's module without `attribute` is itself
      the object.

    Raises:
      UserError: nothing of that name, or its import failed.
    """
    name, given_attribute, arguments = parse(spec, flag)
    if "." not in name and not given_attribute and importlib.util.find_spec(f"{package}.{name}"):
        return getattr(importlib.import_module(f"{package}.{name}"), attribute), arguments
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())  # the user's module stands where they started us
    module = _import(name, spec, flag, [*_modules_with(package, attribute), *others])
    if given_attribute and not hasattr(module, given_attribute):
        close = _suggestion(given_attribute, vars(module))
        raise UserError(flag, spec, f"module {name} has no {given_attribute!r}{close}", "name one that it has")
    return getattr(module, given_attribute or attribute, module), arguments


def _import(name: str, spec: str, flag: str, known: Sequence[str]) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise  # the module is there; what is missing is something that it imports
        parent, _, last = name.rpartition(".")
        in_module = parent and error.name == name and hasattr(sys.modules.get(parent), last)
        close = f"; did you mean '{parent}:{last}'?" if in_module else _suggestion(name, dict.fromkeys(known))
        raise UserError(
            flag,
            spec,
            f"there is no {flag.removesuffix('s')} and no module of that name{close}",
            f"one of {', '.join(known)}, or a path such as my_pkg.my_module:function "
            f"that can be imported from {os.getcwd()}",
        ) from None
    except SystemExit as error:  # of a script, perhaps, which reads a command line of its own
        reason = f"its module ends the program as it is imported (exit {error.code})"
        fix = "put what it does as a program under `if __name__ == '__main__':`"
        raise UserError(flag, spec, reason, fix) from error
    except flags.DuplicateFlagError as error:
        reason = f"its module defines a flag that there is: {str(error).partition('.')[0]}"
        fix = f"give it another name, or let its function take an argument: --{flag}='my_module:function(units=64)'"
        raise UserError(flag, spec, reason, fix) from error


def _modules_with(package: str, attribute: str) -> list[str]:
    """Modules of a package that define an attribute at their top; read, not imported."""
    folder = pathlib.Path(importlib.import_module(package).__path__[0])
    defines = re.compile(rf"^(def {attribute}\b|{attribute} = )", re.MULTILINE)
    return sorted(path.stem for path in folder.glob("*.py") if defines.search(path.read_text("utf-8")))


def _suggestion(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def needed(function: Callable[..., Any]) -> list[str]:
    """Names of the parameters that have no default."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def call(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    offered: Mapping[str, Any],
    *,
    flag: str,
    spec: str,
) -> Any:
    """Calls `function(**arguments)`, adding those of `offered` that its signature names.

    Raises:
      UserError: an argument that it does not take, or one that it needs and nobody gave.
    """
    signature = inspect.signature(function)
    parameters = signature.parameters
    keywords = {k: v for k, v in offered.items() if k in parameters} | dict(arguments)
    for name in (name for name in needed(function) if name not in keywords):
        fix = f"--{flag}='{spec.partition('(')[0]}({name}=...)'; its signature is {signature}"
        raise UserError(flag, spec, f"needs {name!r}", fix)
    try:
        signature.bind(**keywords)
    except TypeError as error:
        raise UserError(flag, spec, str(error), f"its signature is {signature}") from None
    return function(**keywords)
