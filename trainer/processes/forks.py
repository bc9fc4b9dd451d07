"""Forks of this process, such as a source may read by, and what it starts. Where it is killed they would live on, and
what forks still held of it would be in the next start's way."""

import contextlib
import ctypes
import functools
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Sequence

_NETWORK = socket.AF_INET, socket.AF_INET6
_LOOK_EVERY = 1.0  # seconds
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def keep_apart(signals: Sequence[signal.Signals]) -> None:
    """From now on forks take signals as any process does, hold none of our connections and ports, and end with us."""
    for function in (functools.partial(_take_as_usual, signals), _let_go_of_the_network, _end_with_us):
        os.register_at_fork(after_in_child=function)


def end_with_parent() -> None:
    """In a child, before it runs another program: a parent that is killed, or just then told to stop, leaves nobody."""
    with contextlib.suppress(AttributeError):  # Linux alone can do that
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _take_as_usual(signals: Sequence[signal.Signals]) -> None:
    for number in signals:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)


def _let_go_of_the_network() -> None:
    """Also of what frameworks have opened. Whoever still has one of the numbers finds nothing there."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in map(int, os.listdir("/dev/fd")):
        try:
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode) and _family(descriptor) in _NETWORK:
                os.dup2(nothing, descriptor, inheritable=False)
        except OSError:  # the one that listed them
            continue
    os.close(nothing)


def _family(descriptor: int) -> int:
    found = socket.socket(fileno=descriptor)
    try:
        return found.family
    finally:
        found.detach()


def _end_with_us() -> None:
    """Soon after the process that it is a fork of, unless it has taken a session of its own, as daemons do."""
    parent, session = os.getppid(), os.getsid(0)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_EVERY)
        if os.getsid(0) == session:
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
