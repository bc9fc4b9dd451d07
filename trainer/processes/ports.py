"""Ports of processes to which none are given: a scheduler's, and those that are told names of hosts alone."""

from collections.abc import Sequence

FIRST = 61_440  # above those that Linux gives away by itself
_COUNT = 65_536 - FIRST


def addresses(hosts: Sequence[str], start: int) -> list[str]:
    """'host:port' of each process of a scheduler's start, of which several may share a node.

    Args:
      hosts: of the processes, in their order.
      start: a number of the start's, from which follow its ports: the fewer processes there are, the more starts
        have ports of their own.
    """
    # A port of its own for each, whatever its host, for several names may be one machine's.
    block = 1 << len(hosts).bit_length()  # one more than processes, to meet at
    return [f"{host}:{FIRST + (start * block + i) % _COUNT}" for i, host in enumerate(hosts)]
