"""Lines of JSON between two processes, and sockets that say who holds their port."""

import contextlib
import dataclasses
import ipaddress
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Iterable
from typing import Any

from trainer.errors import UserError

_LONGEST = 2**24  # bytes of a message


@dataclasses.dataclass
class Connection:
    """The connection to another process.

    Attributes:
      socket, stream: the connection, and its lines.
      heard: when the last line came, by the monotonic clock.
      where: what the process last said that it was doing.
      values: what it gave to `gather` (at process 0), or what all gave (elsewhere).
      left: whether it said goodbye.
    """

    index: int
    socket: socket.socket
    heard: float = 0.0
    where: str = "starting"
    values: "queue.SimpleQueue[Any]" = dataclasses.field(default_factory=queue.SimpleQueue)
    left: bool = False

    def __post_init__(self) -> None:
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.stream = self.socket.makefile("rb")
        self.heard = time.monotonic()
        self._lock = threading.Lock()

    def send(self, **message: Any) -> None:
        """Sends a line. A broken connection is noticed by who reads."""
        send_all([self], **message)

    def _send(self, line: bytes) -> None:
        with contextlib.suppress(OSError), self._lock:
            self.socket.sendall(line)

    def receive(self) -> dict[str, Any] | None:
        """The next line; None at the connection's end."""
        try:
            line = self.stream.readline(_LONGEST)
            message = json.loads(line) if line.endswith(b"\n") else None
        except (OSError, ValueError):
            return None
        self.heard = time.monotonic()
        return message if isinstance(message, dict) else None


def send_all(connections: Iterable[Connection], **message: Any) -> None:
    """Sends a line to each; it is written down once, for it may be of a hundred processes, to as many."""
    line = json.dumps(message).encode() + b"\n"
    for connection in connections:
        connection._send(line)


def resolved(host: str) -> tuple[socket.AddressFamily, ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The family and the address of a host: of version 4 if it has one.

    Raises:
      OSError: it has no address.
    """
    found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    family, *_, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    return family, ipaddress.ip_address(str(address[0]).partition("%")[0])


def listen(host: str, port: int, source: str) -> socket.socket:
    """A socket that listens at an address of this machine; '' is all of them.

    Raises:
      UserError: the port is taken; by whom is said where it can be seen.
    """
    both = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128, dualstack_ipv6=both)
    except OSError as error:
        raise UserError(
            source,
            f"{host or '*'}:{port}",
            f"can't listen there: {os.strerror(error.errno or 0)}{holder(port)}",
            "end that process, or give this one another port",
        ) from None


def holder(port: int) -> str:
    """', held by process 123 (its command)' of a TCP port that listens on this machine; '' where it can't be seen."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table) as file:
                rows = [line.split() for line in file][1:]
        except OSError:
            continue
        inodes |= {
            f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port
        }
    for process in filter(str.isdigit, os.listdir("/proc") if inodes else ()):
        try:
            for descriptor in os.scandir(f"/proc/{process}/fd"):
                if os.readlink(descriptor.path) in inodes:
                    with open(f"/proc/{process}/cmdline", errors="replace") as file:
                        return f", held by process {process} ({file.read(200).strip(chr(0)).replace(chr(0), ' ')})"
        except OSError:
            continue
    return ""
