"""Where the processes of a run are, if they were told of process 0's host alone: they come there, and are told."""

import contextlib
import dataclasses
import functools
import ipaddress
import os
import pathlib
import socket
from typing import Any

from trainer.cluster import Cluster
from trainer.errors import PEER_LOST
from trainer.processes.connection import Connection
from trainer.processes.meeting import meet, wrong


def completed(cluster: Cluster, patience: float) -> Cluster:
    """The cluster with all hosts; at once where they are known.

    Raises:
      UserError: some did not come in `patience` seconds.
    """
    return cluster if cluster.is_complete else _called(cluster, patience)


@functools.cache  # a process is called once
def _called(cluster: Cluster, patience: float) -> Cluster:
    connections = sorted(meet(cluster, patience), key=lambda peer: peer.index)
    if cluster.is_chief:
        hosts = _hosts([(_heard(cluster, peer, "machine"), peer.socket) for peer in connections])
        for peer in connections:
            peer.send(hosts=hosts)
    else:
        connections[0].send(machine=_machine())
        hosts = _heard(cluster, connections[0], "hosts")
    for peer in connections:
        peer.socket.close()
    ports = (address.rpartition(":")[2] for address in cluster.addresses)
    return dataclasses.replace(cluster, addresses=tuple(f"{h}:{p}" for h, p in zip(hosts, ports, strict=True)))


def _heard(cluster: Cluster, peer: Connection, name: str) -> Any:
    """What another process tells under a name."""
    if name not in (told := peer.receive() or {}):
        raise wrong(cluster, f"process {peer.index} left while the processes came", PEER_LOST)
    return told[name]


def _hosts(others: list[tuple[str, socket.socket]]) -> list[str]:
    """The host of each process, at process 0: one of a machine, as the other machines reach it.

    Args:
      others: the machine of each other process, and the connection to it.
    """
    ours = _machine()
    reached = [_host(connection.getsockname()) for machine, connection in others if machine != ours]
    hosts = {ours: reached[0] if reached else "127.0.0.1"}
    for machine, connection in others:
        hosts.setdefault(machine, _host(connection.getpeername()))
    return [hosts[machine] for machine in (ours, *(machine for machine, _ in others))]


def _host(address: tuple[Any, ...]) -> str:
    """The host of a socket's address, as it is written in a cluster's."""
    ip = ipaddress.ip_address(address[0].partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        return str(ip.ipv4_mapped) if ip.ipv4_mapped else f"[{ip}]"
    return str(ip)


def _machine() -> str:
    """What processes have in common that reach each other by loopback."""
    with contextlib.suppress(OSError):
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    return socket.gethostname()
