"""How the processes of a run come together: each goes to process 0, which waits for all, or says who is missing."""

import contextlib
import socket
import sys
import time
from typing import NoReturn

from trainer.cluster import Cluster
from trainer.errors import PEER_LOST, USER_ERROR, UserError
from trainer.processes.claims import claim
from trainer.processes.connection import Connection, listen, send_all

_LATE = 8.0  # seconds for which those that come late to a meeting that failed are told so


def meet(cluster: Cluster, patience: float) -> list[Connection]:
    """Connections to the other processes; each goes to process 0, which waits for all.

    Raises:
      UserError: some did not come in `patience` seconds, describe another cluster, or a port is taken.
    """
    if cluster.size == 1:
        return []
    return _wait_for_all(cluster, patience) if cluster.is_chief else [_go_to_chief(cluster, patience)]


def _wait_for_all(cluster: Cluster, patience: float) -> list[Connection]:
    host, port = cluster.meeting
    # gRPC's servers share a port without a word: another run's coordinator there would take this one's for its own.
    own_port = int(cluster.addresses[0].rpartition(":")[2])
    listen(cluster.bind_host, own_port, cluster.source).close()
    if not claim(own := f"{cluster.bind_host or '*'}:{own_port}"):
        fix = "start this one again, or give it another port"
        raise UserError(cluster.source, own, "another run on this machine, which begins now, will listen there", fix)
    listening = listen(cluster.bind_host, port, cluster.source)
    found: dict[int, Connection] = {}
    deadline, said = time.monotonic() + patience, time.monotonic()

    def missing() -> str:
        names = cluster.addresses if cluster.is_complete else ()
        left = (i for i in range(1, cluster.size) if i not in found)
        return ", ".join(f"{i} ({names[i]})" if names else str(i) for i in left)

    while len(found) < cluster.size - 1:
        if time.monotonic() > deadline:
            raise wrong(cluster, f"process {missing()} did not come to {host}:{port} in {patience:g}s", PEER_LOST)
        if time.monotonic() - said > 10:
            print(f"waiting for process {missing()} at {host}:{port}", file=sys.stderr, flush=True)
            said = time.monotonic()
        listening.settimeout(1.0)
        try:
            connection, _ = listening.accept()
        except TimeoutError:
            continue
        connection.settimeout(5.0)
        peer = Connection(-1, connection)
        hello = peer.receive() or {}
        peer.index, refusal = hello.get("process", -1), None
        if hello.get("cluster") != _described(cluster):
            refusal = f"process {peer.index} describes another cluster: {hello.get('cluster')}"
        elif peer.index in found or not 0 < peer.index < cluster.size:
            refusal = f"two processes say that they are process {peer.index}"
        if refusal and "process" not in hello:  # a stranger, such as a port scanner
            connection.close()
            continue
        if refusal:
            _refuse(cluster, [*found.values(), peer], listening, refusal)
        connection.settimeout(None)
        found[peer.index] = peer
    listening.close()
    send_all(found.values(), welcome=True)
    return list(found.values())


def _refuse(cluster: Cluster, found: list[Connection], listening: socket.socket, reason: str) -> NoReturn:
    """Sends all away: those that are there, and those that come in the next seconds."""
    send_all(found, refused=reason)
    deadline = time.monotonic() + _LATE
    while len(found) < cluster.size - 1 and (left := deadline - time.monotonic()) > 0:
        listening.settimeout(left)
        with contextlib.suppress(TimeoutError):
            found.append(Connection(-1, listening.accept()[0]))
            found[-1].send(refused=reason)
    raise wrong(cluster, reason)


def _go_to_chief(cluster: Cluster, patience: float) -> Connection:
    address, deadline = cluster.meeting, time.monotonic() + patience
    while True:
        try:
            connection = socket.create_connection(address, timeout=5.0)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                where = f"{address[0]}:{address[1]}"
                raise wrong(cluster, f"no process 0 at {where} for {patience:g}s: {error}", PEER_LOST) from None
            time.sleep(0.25)
    connection.settimeout(None)
    peer = Connection(0, connection)
    peer.send(process=cluster.index, cluster=_described(cluster))
    answer = peer.receive() or {"refused": "process 0 left while the others came"}
    if "refused" in answer:
        raise wrong(cluster, answer["refused"])
    return peer


def _described(cluster: Cluster) -> list[str]:
    """What all must describe alike. Where no more than process 0's host is told, that may be 'localhost' to itself."""
    return list(cluster.addresses if cluster.is_complete else cluster.addresses[1:])


def wrong(cluster: Cluster, reason: str, code: int = USER_ERROR) -> UserError:
    """What is wrong with the cluster, for people; with PEER_LOST, another start may find it well."""
    fix = "give each process the same addresses and a number of its own"
    if code == PEER_LOST:
        fix = "look at the other processes' logs; python -m trainer doctor tests names and ports"
    return UserError(cluster.source, ",".join(cluster.addresses), reason, fix, code)
