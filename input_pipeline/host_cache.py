"""Where this host keeps what took long to get: copies of remote files, tokens of texts."""

import os
import pathlib

from input_pipeline.source import DataError


def directory() -> pathlib.Path:
    """$XDG_CACHE_HOME/onecurve, by default ~/.cache/onecurve. What is there may be deleted: it is made anew.

    Raises:
      DataError: it can't be made.
    """
    place = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        found = pathlib.Path(place).expanduser() / "onecurve"
        found.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # also of a user without a home
        raise DataError(f"data can't be kept in {place} ({error}): set XDG_CACHE_HOME to another directory") from None
    return found


def state(path: pathlib.Path) -> list[int]:
    """By which a file is known to be another than the one that something was made of."""
    facts = path.stat()
    return [facts.st_size, facts.st_mtime_ns]
