"""What forks of this process, such as those that a source reads by, have no share in: they may live on when it is
killed, and what they hold then is in the next start's way."""

import os
import signal
import socket
import stat


def keep_apart() -> None:
    """From now on a fork takes signals as any process does, and holds none of this process's connections and ports."""
    os.register_at_fork(after_in_child=_take_signals_as_usual)
    os.register_at_fork(after_in_child=_let_go_of_the_network)


def _take_signals_as_usual() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)


def _let_go_of_the_network() -> None:
    """Also of what frameworks have opened. Whoever still has one of the numbers finds nothing there."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in map(int, os.listdir("/dev/fd")):
        try:
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode) and _family(descriptor) in (socket.AF_INET, socket.AF_INET6):
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
