"""The end of a process that leaves Python's own out: tf.data's threads still call sources, and a thread that calls into
an interpreter that is being taken down can wait for ever, or abort the process."""

import atexit
import contextlib
import gc
import io
import multiprocessing.util
import os
import sys
import threading
from typing import NoReturn

from trainer.processes import holding_back

# Of what is to be done at exit, what waits for devices, peers or processes, which may be gone.
_WAITING = (
    ("jax._src.api", "clean_up"),
    ("jax._src.dispatch", "wait_for_tokens"),
    ("multiprocessing.util", "_exit_function"),
)
_FILES = io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom
_PATIENCE = 1.0  # seconds


def leave(code: int) -> NoReturn:
    """Does what others, such as a tracker, have asked for at exit, writes out what files hold, and ends the process."""
    for module, function in _WAITING:
        atexit.unregister(getattr(sys.modules.get(module), function, None))  # type: ignore[arg-type]
    atexit._run_exitfuncs()
    for file in gc.get_objects():
        if issubclass(type(file), _FILES):
            with contextlib.suppress(OSError, ValueError):  # a full disk; a file that is closed
                file.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    leave_at_once(code)


def leave_at_once(code: int) -> NoReturn:
    """Ends the process, and those that it has started by `multiprocessing`, which may wait for its word for ever."""
    with contextlib.suppress(Exception):
        children = multiprocessing.active_children()
        if children or "multiprocessing.synchronize" in sys.modules:  # whose semaphores would be left
            for child in children:
                if not child.daemon:
                    child.terminate()
            tidying = threading.Thread(target=multiprocessing.util._exit_function, daemon=True)  # type: ignore[attr-defined]
            tidying.start()
            tidying.join(_PATIENCE)
            for child in multiprocessing.active_children():
                child.kill()  # it does not end by itself
    holding_back.end_well()
    os._exit(code)
