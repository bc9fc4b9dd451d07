"""The command line: a verb and flags, one of each field of Config, and those that a run was started with."""

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from absl import flags

from trainer import run_directory
from trainer.config import Config
from trainer.errors import UserError

VERBS = (
    *("train", "evaluate", "export", "explain", "probe", "verify"),
    *("doctor", "checkpoints", "audit", "diff", "drill", "report", "input"),
)
# These start from the flags that a run was started with.
ON_A_RUN = ("evaluate", "export", "checkpoints", "audit", "report")
_PATHS = ("run_dir", "data_dir", "initialize_from", "cache")
WHERE = ("strategy", "backend", "devices", "mesh", "layout", "remat")  # flags that mean nothing elsewhere


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines one absl flag per field of Config."""
    define: dict[Any, Any] = {
        str: flags.DEFINE_string,
        int: flags.DEFINE_integer,
        bool: flags.DEFINE_bool,
        float: flags.DEFINE_float,
        float | None: flags.DEFINE_float,
        tuple[str, ...]: flags.DEFINE_multi_string,
    }
    for field in dataclasses.fields(Config):
        default: Any = field.default
        choices, help = field.metadata["choices"], field.metadata["help"]
        if choices:
            flags.DEFINE_enum(field.name, default, choices, help, flag_values=values)
        else:
            define[field.type](field.name, default, help, flag_values=values)


def from_flags(values: flags.FlagValues = flags.FLAGS) -> Config:
    """The Config of parsed flags.

    Raises:
      UserError: values that contradict each other or make no sense.
    """
    given: dict[str, Any] = {field.name: getattr(values, field.name) for field in dataclasses.fields(Config)}
    given |= {name: os.path.expanduser(given[name]) for name in _PATHS}  # bash leaves --run_dir=~/runs as it is
    given["callbacks"] = tuple(map(_on_one_line, given["callbacks"]))
    return Config(**{name: _on_one_line(value) for name, value in given.items()})


def _on_one_line(value: Any) -> Any:
    """What a shell takes in quotes over several lines, as a flag's line in run.flags holds it."""
    return value.replace("\n", " ") if isinstance(value, str) else value


def config_of(words: Sequence[str]) -> Config:
    """The Config of what is to follow `python -m trainer`, so that a launcher tells mistakes before anything starts.

    Raises:
      UserError: see parse and from_flags.
    """
    define_flags()
    parse(["trainer", *words])
    return from_flags()


def parse(argv: Sequence[str]) -> list[str]:
    """Parses the command line into flags.FLAGS; the verbs on a run start from the flags that it was run with.

    Returns:
      the program, the verb and what else is no flag.

    Raises:
      UserError: there is no such verb, flag or run, or a word that nothing takes.
    """
    try:
        words = flags.FLAGS(list(argv))
        verb, *others = words[1:] or ["train"]
        if verb not in VERBS:
            raise UserError(
                "verb", verb, "there is no such verb", f"one of {', '.join(VERBS)}; --help has what each does"
            )
        if verb in ON_A_RUN:
            given = list(argv[1:])
            if others and not flags.FLAGS["run_dir"].present:  # report RUN
                given.append(f"--run_dir={others.pop(0)}")
                flags.FLAGS(["", given[-1]])
            recorded = _recorded_flags()
            flags.FLAGS.unparse_flags()
            flags.FLAGS([argv[0], *recorded, *given])
    except flags.Error as error:
        # Of --batch_size, absl finds nothing that is spelt alike.
        words, names = getattr(error, "flagname", "").split("_"), [field.name for field in dataclasses.fields(Config)]
        alike = ", ".join(f"--{name}" for name in names if not set(words).isdisjoint(name.split("_")))
        fix = f"see {alike} in python -m trainer --help" if alike else "see python -m trainer --help"
        raise UserError("flags", " ".join(argv[1:]), str(error), fix) from None
    if others and verb != "diff":
        raise UserError("flags", " ".join(argv[1:]), f"{others[0]!r} is no flag", "give flags as --name=value")
    return [argv[0], verb, *others]


def _recorded_flags() -> list[str]:
    """The flags in --run_dir's run.flags; without where it ran, if the command line says where."""
    known = run_directory.split(pathlib.Path(flags.FLAGS.run_dir).expanduser())[0] / "run.flags"
    if not flags.FLAGS.run_dir or not known.exists():
        raise UserError("run_dir", flags.FLAGS.run_dir, "holds no run (no run.flags)", "give the directory of a run")
    elsewhere = any(flags.FLAGS[name].present for name in WHERE)
    lines = list(filter(None, os.fsdecode(known.read_bytes()).split("\n")))
    for line in lines:
        if not line.startswith("--"):
            fix = "put back a copy, or start the run once more with its flags"
            raise UserError("run_dir", flags.FLAGS.run_dir, f"its run.flags is damaged: {line!r} is no flag", fix)
    return [line for line in lines if not (elsewhere and line[2:].partition("=")[0] in WHERE)]
