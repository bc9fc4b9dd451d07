"""Addresses of processes, 'host:port': what is wrong with those that are given, and ports where none are."""

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from trainer.errors import UserError

UNKNOWN = "?"  # a host that no process was told; see discovery.py
MOST = 2**15  # processes of which one address is told
_LEAST = 1024  # below, ports are the system's
FIRST = 61_440  # above those that Linux gives away by itself
_COUNT = 65_536 - FIRST


class Description(NamedTuple):
    """How a process was told of the others.

    Attributes:
      source: what told.
      text: what it said.
      example: of what would be right.
    """

    source: str
    text: str
    example: str

    def wrong(self, reason: str, fix: str = "") -> UserError:
        """The error of something in it."""
        shown = self.text if len(self.text) < 200 else f"{self.text[:200]}..."
        return UserError(self.source, shown, reason, fix or self.example)


def of(hosts: Sequence[str], start: int) -> list[str]:
    """'host:port' of each process of a scheduler's start, of which several may share a node.

    Args:
      hosts: of the processes, in their order.
      start: a number of the start's, from which follow its ports: the fewer processes there are, the more starts
        have ports of their own.
    """
    # A port of its own for each, whatever its host, for several names may be one machine's.
    block = 1 << len(hosts).bit_length()  # one more than processes, to meet at
    return [f"{host}:{FIRST + (start * block + i) % _COUNT}" for i, host in enumerate(hosts)]


def loopback(start: int) -> str:
    """The host of all processes of a start on one machine: ports are few, but of Linux's loopback addresses few alike.

    Args:
      start: a number of the start's; of its 32 bits, the upper half.
    """
    return f"127.{start >> 24 & 255}.{start >> 16 & 255}.1" if sys.platform == "linux" else "127.0.0.1"


def unknown(first: str, count: int) -> list[str]:
    """Those of so many processes beside the first, until they are known: their ports are the ones above its own."""
    port = int(first.rpartition(":")[2]) - _LEAST
    return [f"{UNKNOWN}:{_LEAST + (port + i) % (65_536 - _LEAST)}" for i in range(1, count + 1)]


def check(addresses: Sequence[str], wrong: Callable[[str, str], UserError]) -> None:
    """Raises the error of a description (Description.wrong) unless they are the addresses of so many processes."""
    if not addresses:
        raise wrong("names no process", "list each process as 'host:port'")
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or "," in host or not port.isdigit() or not 0 < int(port) < 65_536:
            raise wrong(f"its address {address!r} is not host:port", "for example 10.0.0.1:2222")
    twice = sorted({a for a in addresses if addresses.count(a) > 1})
    if twice:
        raise wrong(f"names {twice[0]} twice", "give each process an address of its own")
    local = [a for a in addresses if a.rpartition(":")[0] in ("localhost", "127.0.0.1", "[::1]")]
    if local and len(local) < len(addresses):
        raise wrong(
            f"mixes {local[0]}, which each host takes for itself, with addresses of other hosts",
            "give the address under which the others reach that host",
        )
