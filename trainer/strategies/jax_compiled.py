"""The programs that JAX keeps from start to start: one that a kill has cut is compiled, and kept, anew."""

import contextlib
import pathlib
import sys
from typing import Any

from jax._src import compilation_cache, config

_read = compilation_cache.get_executable_and_time


def mend() -> None:
    """From here on, what can't be read is removed.

    JAX writes them in place, so that a kill leaves a part of one. It would warn of that, compile the program and leave
    the file as it is, at each start again.
    """
    compilation_cache.get_executable_and_time = _read_or_remove


def _read_or_remove(
    cache_key: str, compile_options: Any, backend: Any, executable_devices: Any
) -> tuple[Any | None, int | None]:
    try:
        return _read(cache_key, compile_options, backend, executable_devices)
    except Exception as error:  # of whatever library has compressed it
        kept = pathlib.Path(config.compilation_cache_dir.value, f"{cache_key}-cache")
        with contextlib.suppress(OSError):
            kept.unlink()
        print(f"{kept} can't be read, and is compiled anew: {error}", file=sys.stderr, flush=True)
        return None, None
