"""Standard output and error that may be lost, by a closed terminal, a full disk or a locale without a character, and no
program with them."""

import io
import os
import sys
from typing import Any


class Lossy(io.FileIO):
    """A file whose writes may fail: what does not go out is dropped."""

    def write(self, data: Any) -> int:
        try:
            written = super().write(data)
        except OSError:
            written = None
        return memoryview(data).nbytes if written is None else written


def make_lossy() -> None:
    """Has whatever this process prints go out, or be dropped."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:  # started with a closed descriptor, which the next file to be opened would get
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        kept = ("encoding", "line_buffering", "write_through") if stream else ()
        raw = io.BufferedWriter(Lossy(number, "w", closefd=False))
        kwargs = {key: getattr(stream, key) for key in kept}
        setattr(sys, name, io.TextIOWrapper(raw, errors="backslashreplace", **kwargs))
