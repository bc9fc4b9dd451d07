"""Launchers: what starts a run's processes, here or elsewhere, from the run's own flags."""

import sys
from collections.abc import Callable, Sequence

from trainer.errors import UserError


def flags_of(rest: Sequence[str]) -> list[str]:
    """The run's flags among a launcher's arguments: what follows --."""
    return list(rest[1:] if rest[:1] == ["--"] else rest)


def told(main: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """Calls a launcher, and tells a user's mistake as such. Returns the exit code."""
    try:
        return main(argv)
    except UserError as error:
        print(f"onecurve: {error}", file=sys.stderr)
        return error.exit_code
