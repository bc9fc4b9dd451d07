"""Where the processes of a run are, if they were told of process 0's host alone: they come there, and are told."""

import dataclasses
import functools
import ipaddress
import socket
from collections.abc import Sequence

from trainer.cluster import Cluster
from trainer.errors import PEER_LOST
from trainer.processes.meeting import meet, wrong

_IP = ipaddress.IPv4Address | ipaddress.IPv6Address


def discover(cluster: Cluster, patience: float) -> Cluster:
    """The cluster with all hosts; at once where they are known.

    Raises:
      UserError: some did not come in `patience` seconds.
    """
    return cluster if cluster.is_complete else _discovered(cluster, patience)


@functools.cache  # it is done once in a process
def _discovered(cluster: Cluster, patience: float) -> Cluster:
    connections = sorted(meet(cluster, patience), key=lambda peer: peer.index)
    if cluster.is_chief:
        hosts = _hosts([peer.socket for peer in connections])
        for peer in connections:
            peer.send(hosts=hosts)
    else:
        hosts = (connections[0].receive() or {}).get("hosts", [])
        if not hosts:
            raise wrong(cluster, "process 0 left while the others came", PEER_LOST)
    for peer in connections:
        peer.socket.close()
    ports = (address.rpartition(":")[2] for address in cluster.addresses)
    return dataclasses.replace(cluster, addresses=tuple(f"{h}:{p}" for h, p in zip(hosts, ports, strict=True)))


def _hosts(others: Sequence[socket.socket]) -> list[str]:
    """The host of each process, at process 0, which has a connection to each other: as other hosts reach it."""
    ends = [(_ip(other.getsockname()), _ip(other.getpeername())) for other in others]
    # From its own host they come from the address that they have gone to, or by loopback.
    distant = [ours for ours, theirs in ends if not (theirs == ours or theirs.is_loopback)]
    first = distant[0] if distant else ipaddress.ip_address("127.0.0.1")
    hosts = [first, *(first if theirs == ours or theirs.is_loopback else theirs for ours, theirs in ends)]
    return [f"[{ip}]" if ip.version == 6 else str(ip) for ip in hosts]


def _ip(address: tuple[str, ...]) -> _IP:
    ip = ipaddress.ip_address(address[0].partition("%")[0])
    return getattr(ip, "ipv4_mapped", None) or ip
