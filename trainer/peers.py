"""The processes of a run in touch with each other, beside what their backend exchanges: none waits in vain.

Each holds a TCP connection to process 0, over which go lines of JSON: a heartbeat each second, the
values of `gather`, and which process failed first and why. Who leaves without a goodbye was killed; who is
silent is frozen or cut off. Every process that learns of it says so, shows where it waited itself, and ends.
"""

import contextlib
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NoReturn

from trainer.cluster import ALONE, Cluster
from trainer.connection import Connection, listen
from trainer.errors import HUNG, PEER_LOST, USER_ERROR, UserError

_BEAT = 1.0  # seconds between heartbeats
SILENCE = 8.0  # seconds without a heartbeat after which a process is given up
_STARTING = 60.0  # the same until the first step is near: loading a framework holds Python's lock for seconds
# What the backends raise in a process whose peer is gone; by name, since no backend may be imported here.
_LOST = ("UnavailableError", "DeadlineExceededError", "AbortedError", "InternalError", "JaxRuntimeError")
_LOST_WORDS = re.compile("gloo|nccl|peer|connect|collective|coordination|socket|heartbeat|unavailable", re.IGNORECASE)


class Peers:
    """Joins the processes of a cluster, and watches over them and over this one's progress.

    A context manager: leaving it by an exception tells the others why before this process ends.

    Args:
      cluster: the processes.
      patience: seconds that may pass without any progress, here or in waiting for the others to come.

    Raises:
      UserError: others did not come in time, describe another cluster, or a port is taken.
    """

    def __init__(self, cluster: Cluster = ALONE, patience: float = float("inf")) -> None:
        self.cluster, self._patience = cluster, patience
        self.step = 0
        self._raised = ""  # what the backend raised here, perhaps for another's fault
        self._doing, self._since, self._started = "starting", time.monotonic(), False
        self._closed, self._ending = threading.Event(), threading.Lock()
        joined = [] if cluster.size == 1 else self._meet() if cluster.is_chief else [self._join()]
        self._peers = {peer.index: peer for peer in joined}
        for peer in joined:
            threading.Thread(target=self._listen, args=(peer,), daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()

    def __enter__(self) -> "Peers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._tell(error)
        self._closed.set()
        for peer in self._peers.values():
            peer.send(goodbye=True)

    def gather(self, value: Any) -> list[Any]:
        """The JSON value that each process gave, in their order; all must call it, and wait for each other."""
        if self.cluster.size == 1:
            return [value]
        if not self.cluster.is_chief:
            self._peers[0].send(value=value)
            return list(self._peers[0].values.get())
        values = [value, *(self._peers[index].values.get() for index in range(1, self.cluster.size))]
        for peer in self._peers.values():
            peer.send(value=values)
        return values

    def agree(self, facts: Mapping[str, object]) -> None:
        """Raises UserError unless all processes give the same facts; it names the processes and the fact."""
        everyones = self.gather({name: str(value) for name, value in facts.items()})
        for name in dict.fromkeys(name for theirs in everyones for name in theirs):
            values = [theirs.get(name, "absent") for theirs in everyones]
            others = [index for index, value in enumerate(values) if value != values[0]]
            if others:
                raise UserError(
                    self.cluster.source,
                    f"{self.cluster.size} processes",
                    f"process {', '.join(map(str, others))} differs from process 0 in {name}: "
                    f"{values[others[0]]} there, {values[0]} in process 0",
                    "start all processes with the same flags, code, data and packages",
                )

    def doing(self, what: str) -> None:
        """Notes progress, and what this process turns to."""
        self._doing, self._since = what, time.monotonic()
        self._started |= what == "step"

    @property
    def where(self) -> str:
        """What this process is doing, in words."""
        return f"at step {self.step}, in {self._doing}"

    def _meet(self) -> list[Connection]:
        """Process 0: waits for all others."""
        host, port = self.cluster.meeting
        listening = listen(self.cluster.bind_host, port, self.cluster.source)
        found: dict[int, Connection] = {}
        deadline, said = time.monotonic() + self._patience, time.monotonic()
        while missing := [i for i in range(1, self.cluster.size) if i not in found]:
            names = ", ".join(f"{i} ({self.cluster.addresses[i]})" for i in missing)
            if time.monotonic() > deadline:
                raise self._wrong(f"process {names} did not come to {host}:{port} in {self._patience:g}s", PEER_LOST)
            if time.monotonic() - said > 10:
                print(f"waiting for process {names} at {host}:{port}", file=sys.stderr, flush=True)
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
            if hello.get("cluster") != list(self.cluster.addresses):
                refusal = f"process {peer.index} describes another cluster: {hello.get('cluster')}"
            elif peer.index in found or not 0 < peer.index < self.cluster.size:
                refusal = f"two processes say that they are process {peer.index}"
            if refusal and "process" not in hello:  # a stranger, such as a port scanner
                connection.close()
                continue
            if refusal:
                self._refuse([*found.values(), peer], listening, refusal)
            connection.settimeout(None)
            found[peer.index] = peer
        listening.close()
        for peer in found.values():
            peer.send(welcome=True)
        return list(found.values())

    def _refuse(self, found: list[Connection], listening: socket.socket, reason: str) -> NoReturn:
        """Sends all away: those that are there, and those that come in the next seconds."""
        for peer in found:
            peer.send(refused=reason)
        deadline = time.monotonic() + SILENCE
        while len(found) < self.cluster.size - 1 and (left := deadline - time.monotonic()) > 0:
            listening.settimeout(left)
            with contextlib.suppress(TimeoutError):
                found.append(Connection(-1, listening.accept()[0]))
                found[-1].send(refused=reason)
        raise self._wrong(reason)

    def _join(self) -> Connection:
        """Another process: goes to process 0."""
        address, deadline = self.cluster.meeting, time.monotonic() + self._patience
        while True:
            try:
                connection = socket.create_connection(address, timeout=5.0)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    where = f"{address[0]}:{address[1]}"
                    raise self._wrong(f"no process 0 at {where} for {self._patience:g}s: {error}", PEER_LOST) from None
                time.sleep(0.25)
        connection.settimeout(None)
        peer = Connection(0, connection)
        peer.send(process=self.cluster.index, cluster=list(self.cluster.addresses))
        answer = peer.receive() or {"refused": "process 0 left while the others came"}
        if "refused" in answer:
            raise self._wrong(answer["refused"])
        return peer

    def _wrong(self, reason: str, code: int = USER_ERROR) -> UserError:
        fix = "give each process the same addresses and a number of its own"
        if code == PEER_LOST:
            fix = "look at the other processes' logs; python -m trainer doctor tests names and ports"
        return UserError(self.cluster.source, ",".join(self.cluster.addresses), reason, fix, code)

    # What the threads do.

    def _listen(self, peer: Connection) -> None:
        while message := peer.receive():
            if "value" in message:
                peer.values.put(message["value"])
            elif "failed" in message:
                self._end(**message["failed"])
            elif "goodbye" in message:
                peer.left = True
            else:
                peer.where = message.get("beat", peer.where)
        if not peer.left and not self._closed.is_set():
            self._end(peer.index, peer.where, "it went away without a word: killed, or its machine died")

    def _watch(self) -> None:
        woke = time.monotonic()
        while not self._closed.wait(_BEAT):
            now = time.monotonic()
            slept, woke = now - woke, now
            for peer in self._peers.values():
                if slept > 3 * _BEAT:  # this process was stopped itself: it can't tell who was silent meanwhile
                    peer.heard = now
                peer.send(beat=self.where)
                limit = SILENCE if self._started else _STARTING
                if now - peer.heard > limit and not peer.left:
                    why = f"nothing was heard of it for {limit:g}s: it is frozen, or the network to it is cut"
                    self._end(peer.index, peer.where, why)
            if slept > 3 * _BEAT:
                self._since += slept
            if now - self._since > self._patience:
                others = "".join(f"\n    process {peer.index} {peer.where}" for peer in self._peers.values())
                why = f"no progress for {self._patience:g}s (--hang_after){others}"
                self._end(self.cluster.index, self.where, why, HUNG)

    # Failing.

    def _tell(self, error: BaseException) -> None:
        """Before this process ends by an error: tells the others, unless the fault is another's."""
        why = str(error) if isinstance(error, UserError) else "".join(traceback.format_exception(error))
        code = getattr(error, "exit_code", 1)
        if self._peers and type(error).__name__ in _LOST and _LOST_WORDS.search(str(error)):
            self._raised, code = why, PEER_LOST
            time.sleep(SILENCE + 2 * _BEAT)  # who failed first is known by then, and this process ended
        if self._ending.acquire(blocking=False):
            self._broadcast(process=self.cluster.index, where=self.where, why=why, code=code)
        if code == PEER_LOST and not isinstance(error, UserError):
            raise self._wrong(f"what process {self.cluster.index} exchanges with others broke off", code) from error

    def _broadcast(self, **failed: Any) -> None:
        for peer in self._peers.values():
            peer.send(failed=failed)

    def _end(self, process: int, where: str, why: str, code: int = PEER_LOST) -> NoReturn:
        """Ends this process because of a failure: says which was first, and where this one waited."""
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # another thread ends this process already
        if self.cluster.is_chief or process == self.cluster.index:
            self._broadcast(process=process, where=where, why=why, code=code)
        frames = traceback.format_stack(sys._current_frames()[threading.main_thread().ident or 0])
        stack = self._raised or "".join(frames[-8:])
        lines = [f"onecurve: process {process} failed first, {where}: {why.rstrip()}"]
        if process != self.cluster.index and code != USER_ERROR:
            lines += [f"onecurve: this is process {self.cluster.index}, {self.where}; it waited here:"]
        if code != USER_ERROR:
            lines += [stack.rstrip()]
            lines += ["The same command, in all processes, continues the run from its last checkpoint."]
        print("\n".join(lines), file=sys.stderr, flush=True)
        os._exit(code if code in (USER_ERROR, HUNG) else PEER_LOST)
