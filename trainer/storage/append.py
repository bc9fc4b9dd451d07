"""Records as JSON, and files that grow by them, each of which is there whole or not at all."""

import itertools
import json
import math
import os
import pathlib
import sys
from collections.abc import Mapping
from typing import Any


def records(path: pathlib.Path) -> list[dict[str, Any]]:
    """The records of a file of JSON objects, a line each, up to the first that is not whole.

    A process that is writing may have got no further, and a disk that lost its power may leave anything.
    """
    with open(path, "rb") as file:
        return list(itertools.takewhile(lambda record: record is not None, map(record_of, file)))


def record_of(line: bytes) -> Any:
    """The record, a dict, that a line is; None if it is none, or not whole."""
    try:
        record = decoded(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def encoded(record: Mapping[str, Any], indent: int | None = None) -> str:
    """A record as JSON that every reader takes: numbers that are not finite, for which it has no words, are null."""
    return json.dumps(_finite(record), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _with_nan(record: dict[str, Any]) -> dict[str, Any]:
    return {name: math.nan if value is None else value for name, value in record.items()}


def decoded(text: str | bytes) -> Any:
    """What was encoded, with NaN for each null.

    Raises:
      ValueError: it is no JSON.
    """
    nulls = b"null" in text if isinstance(text, bytes) else "null" in text
    return json.loads(text, object_hook=_with_nan if nulls else None)  # which takes four times as long


class Appender:
    """Appends records to a file. What can't be written, on a full disk, is left out and said once: training goes on.

    Args:
      path: the file; made if it is not there.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._told = False

    def write(self, record: bytes) -> None:
        """Appends a record."""
        before = os.fstat(self._file).st_size
        try:
            if os.write(self._file, record) == len(record):
                return
            error = OSError(f"only a part of {len(record)} bytes found room")
        except OSError as caught:
            error = caught
        os.ftruncate(self._file, before)
        if not self._told:
            print(f"{self._path} can't be written, and lacks what follows: {error}", file=sys.stderr, flush=True)
            self._told = True

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)
