"""Names that one process of a machine can have: for what would be shared without a word, as gRPC's servers do ports."""

import errno
import os
import socket
import sys

_held: dict[str, socket.socket] = {}


def claim(name: str) -> bool:
    """Whether this process has a name, which no other can have then until it ends.

    They are names of Linux's abstract sockets: of a network namespace, as ports are. Where there are none, none is
    another's.
    """
    if name in _held or sys.platform != "linux":
        return True
    holder = socket.socket(socket.AF_UNIX)
    try:
        holder.bind(f"\0onecurve {name}")
    except OSError as error:
        holder.close()
        return error.errno != errno.EADDRINUSE
    _held[name] = holder
    return True


def _let_go() -> None:
    while _held:
        _held.popitem()[1].close()


os.register_at_fork(after_in_child=_let_go)  # a fork may outlive the process that has them
