"""Who of a parameter_server run is there: the chief's list of them, and the part of those that are on it.

Each worker and server keeps a connection to the chief, with a heartbeat each second, over which it tells them when the
run, or a start of it, is over. Until then they stay whatever signal they are sent: the chief obeys it, for it can only
save while they are there.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Collection
from types import FrameType

import tensorflow as tf

from trainer.cluster import Cluster
from trainer.errors import PEER_LOST, PREEMPTED, UserError
from trainer.peers import BEAT, SILENCE, STARTING
from trainer.preemption import have_handled, leave_when_told
from trainer.processes.connection import Connection, listen, send_all
from trainer.processes.leaving import leave_at_once
from trainer.strategies.tf_devices import find_gpus

_JOBS = ("chief", "worker", "ps")


def addresses(cluster: Cluster) -> dict[str, list[str]]:
    """The addresses of each of TensorFlow's jobs."""
    pairs = list(zip(cluster.addresses, cluster.roles, strict=True))
    return {job: [address for address, role in pairs if role == job] for job in _JOBS}


def serve(cluster: Cluster, patience: float) -> int:
    """A worker's or a server's part: computes, or holds, what the chief says, until it says goodbye.

    Returns:
      The exit code: the chief's, which a launcher goes by to start all of them again, or none.
    """
    role, port = cluster.role, int(cluster.addresses[cluster.index].rpartition(":")[2])
    listen("", port, cluster.source).close()
    if role == "worker":
        find_gpus()
    index = cluster.index - cluster.roles.index(role)
    # Kept in a variable: the server ends with it.
    server = tf.distribute.Server(addresses(cluster), job_name=role, task_index=index, protocol="grpc")
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        try:
            connection = Connection(0, socket.create_connection(cluster.meeting, timeout=5.0))
        except OSError:
            time.sleep(0.25)
            continue
        began = connection.heard
        connection.socket.settimeout(STARTING)  # the chief compiles meanwhile
        connection.send(process=cluster.index, cluster=list(cluster.addresses))
        if (code := _stay(connection)) is not None:
            return code
        leave_when_told()
        if connection.heard > began:
            deadline = time.monotonic() + patience  # the chief was lost: it may be started again
    del server
    return PEER_LOST


def _stay(connection: Connection) -> int | None:
    """Waits for the chief's goodbye, and returns its exit code; None where the chief was lost."""
    told = set[int]()

    def tell(number: int, frame: FrameType | None) -> None:
        first = not told
        told.add(number)  # before it is sent: another signal meanwhile would wait for the same lock
        if first:
            connection.send(told=number)
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)  # the second Ctrl-C leaves at once

    have_handled(tell)
    _beat([connection])
    while message := connection.receive():
        if "goodbye" in message:
            return int(message["goodbye"])
    return PREEMPTED if told else None


def _beat(connections: Collection[Connection]) -> None:
    """Tells other processes each second, to the end of this one, that it is there."""

    def beat() -> None:
        while True:
            send_all(list(connections), beat=True)
            time.sleep(BEAT)

    threading.Thread(target=beat, daemon=True).start()


class Presence:
    """The chief's list of who is there.

    A signal that one of them is sent is the chief's own. The chief ends with PEER_LOST if a server is lost, and with it
    the variables that it held, or if one of them is frozen, whom the coordinator would wait for. A worker that is
    lost may come back.

    Args:
      cluster: chief, workers, servers.
      patience: seconds that they have to come.

    Raises:
      UserError: one of them did not come in time.
    """

    def __init__(self, cluster: Cluster, patience: float) -> None:
        self._cluster, self._closed = cluster, False
        self._there: dict[int, Connection] = {}
        self._listening = listen(cluster.bind_host, cluster.meeting[1], cluster.source)
        threading.Thread(target=self._take_in, daemon=True).start()
        _beat(self._there.values())
        deadline = time.monotonic() + patience
        while missing := [i for i in range(1, cluster.size) if i not in self._there]:
            if time.monotonic() > deadline:
                raise UserError(
                    cluster.source,
                    ",".join(cluster.addresses),
                    f"process {', '.join(map(self._name, missing))} did not come in {patience:g}s",
                    "look at its log",
                    PEER_LOST,
                )
            time.sleep(0.05)

    def close(self, code: int) -> None:
        """Says goodbye to all, who end with this exit code."""
        self._closed = True
        for connection in self._there.values():
            connection.send(goodbye=code)

    def _name(self, index: int) -> str:
        return f"{index} ({self._cluster.roles[index]}, {self._cluster.addresses[index]})"

    def _take_in(self) -> None:
        while True:
            connection = Connection(-1, self._listening.accept()[0])
            connection.socket.settimeout(SILENCE)
            hello = connection.receive() or {}
            index = hello.get("process", 0)
            if index in range(1, self._cluster.size):
                connection.index = index
                self._there[index] = connection
                threading.Thread(target=self._listen, args=(connection,), daemon=True).start()

    def _listen(self, connection: Connection) -> None:
        while message := connection.receive():
            if "told" in message:  # as SIGTERM: of SIGINT a second one, which a terminal sends to all, leaves at once
                os.kill(os.getpid(), signal.SIGTERM)
        if self._closed:
            return
        why, ends = "was lost, and the variables that it held", True
        if time.monotonic() - connection.heard >= SILENCE:
            why = f"was not heard of for {SILENCE:g}s: it is frozen, or the network to it is cut"
        elif self._cluster.roles[connection.index] == "worker":
            why, ends = "was lost: its steps are for others, or for itself once it is back", False
        print(f"onecurve: process {self._name(connection.index)} {why}", file=sys.stderr, flush=True)
        if ends:
            more = "The same command, in all processes, continues the run from its last checkpoint."
            print(more, file=sys.stderr, flush=True)
            leave_at_once(PEER_LOST)
