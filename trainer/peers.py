"""The processes of a run in touch with each other, beside what their backend exchanges: none waits in vain.

Each holds a TCP connection to process 0, over which go lines of JSON: a heartbeat each second, the
values of `gather`, and which process failed first and why. Who leaves without a goodbye was killed; who is
silent is frozen or cut off. Every process that learns of it says so, shows where it waited itself, and ends.
"""

import contextlib
import faulthandler
import os
import queue
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from trainer.cluster import ALONE, Cluster
from trainer.errors import HUNG, PEER_LOST, USER_ERROR, UserError, as_raised
from trainer.processes.connection import Connection, send_all
from trainer.processes.leaving import leave_at_once
from trainer.processes.meeting import meet, wrong

BEAT = 1.0  # seconds between heartbeats
SILENCE = 8.0  # seconds without a heartbeat after which a process is given up
STARTING = 60.0  # the same while frameworks are loaded or the step is compiled, which holds Python's lock for seconds
_COMPILING = ("in compile", "in measure")  # so does `where` end meanwhile
_READING = "read_part"  # what calls the source; by name, for the input pipeline is a floor above
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
        # While frameworks are imported, the usual one is held back.
        self._stderr = os.fdopen(os.dup(2), "w", errors="backslashreplace")
        self.step = 0
        self._raised = ""  # what the backend raised here, perhaps for another's fault
        self._doing, self._since, self._limit = "starting", time.monotonic(), STARTING
        self._closed, self._ending = threading.Event(), threading.Lock()
        self._peers = {peer.index: peer for peer in meet(cluster, patience)}
        for peer in self._peers.values():
            threading.Thread(target=self._listen, args=(peer,), daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()

    def __enter__(self) -> "Peers":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._tell(error)
        self._closed.set()
        faulthandler.cancel_dump_traceback_later()
        send_all(self._peers.values(), goodbye=True)

    def gather(self, value: Any) -> list[Any]:
        """The JSON value that each process gave, in their order; all must call it, and wait for each other."""
        if self.cluster.size == 1:
            return [value]
        if not self.cluster.is_chief:
            self._peers[0].send(value=value)
            return list(self._from(0))
        values = [value, *(self._from(index) for index in range(1, self.cluster.size))]
        send_all(self._peers.values(), value=values)
        return values

    def _from(self, index: int) -> Any:
        """The next value of a process. While that gets on, so does this one."""
        doing, known = self._doing, self._peers[index].where
        while True:
            try:
                value = self._peers[index].values.get(timeout=BEAT)
            except queue.Empty:
                if (where := self._peers[index].where) != known:
                    self.doing(f"{doing}, waiting for process {index} {where}")
                    known = where
            else:
                self._doing = doing
                return value

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
        compiled = self.where.endswith(_COMPILING)
        self._doing, self._since = what, time.monotonic()
        if compiled or self.where.endswith(_COMPILING):  # told at once: for how long others wait depends on it
            self._beat()

    @contextlib.contextmanager
    def compiling(self, kept: bool) -> Iterator[Callable[[], None]]:
        """Within it a program is compiled that runs over processes; after it, all have: in a sum, gloo waits for 30 s.

        Args:
          kept: whether what process 0 compiles is kept, so that others of its host, who share its cores, find it.

        Yields:
          What waits until they can; to be called once, before the compiler is.
        """
        doing, hosts = self._doing, [address.rpartition(":")[0] for address in self.cluster.addresses]
        finds = kept and not self.cluster.is_chief and hosts[self.cluster.index] == hosts[0]

        def wait_for_turn() -> None:
            if finds:
                self.gather(0)
                self.doing("compile")  # from here on it is this one's time that --hang_after counts

        self.doing("compile")
        yield wait_for_turn
        if not finds:
            self.gather(0)
        self.gather(0)
        self.doing(doing)

    def all_started(self) -> None:
        """Waits until all have imported what they need: from now on nobody is silent for long."""
        self.gather(0)
        self._limit = SILENCE
        self._beat()

    @property
    def where(self) -> str:
        """What this process is doing, in words."""
        return f"at step {self.step}, in {self._doing}"

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

    def _beat(self) -> None:
        """Tells the others that this process is there.

        Should a call into a framework hold Python's lock, our threads could do nothing. faulthandler's can: it ends us.
        """
        send_all(self._peers.values(), beat=self.where)
        if self._peers:
            faulthandler.dump_traceback_later(self._silence(self.where) + 2 * BEAT, exit=True, file=self._stderr)

    def _silence(self, where: str) -> float:
        """Seconds for which a process may be silent that is there."""
        return STARTING if where.endswith(_COMPILING) else self._limit

    def _watch(self) -> None:
        woke = time.monotonic()
        while not self._closed.wait(BEAT):
            now = time.monotonic()
            slept, woke = now - woke, now
            self._beat()
            for peer in self._peers.values():
                if slept > 3 * BEAT:  # this process was stopped itself: it can't tell who was silent meanwhile
                    peer.heard = now
                if now - peer.heard > (limit := self._silence(peer.where)) and not peer.left:
                    why = f"nothing was heard of it for {limit:g}s: it is frozen, or the network to it is cut"
                    self._end(peer.index, peer.where, why)
            if slept > 3 * BEAT:
                self._since += slept
            if now - self._since > self._patience:
                others = "".join(f"\n    process {peer.index} {peer.where}" for peer in self._peers.values())
                why = f"no progress for {self._patience:g}s (--hang_after){others}"
                self._end(self.cluster.index, self.where, why, HUNG)

    # Failing.

    def _tell(self, error: BaseException) -> None:
        """Before this process ends by an error: tells the others, unless the fault is another's."""
        why = str(error) if isinstance(error, UserError) else "".join(traceback.format_exception(as_raised(error)))
        code = getattr(error, "exit_code", 1)
        if self._peers and type(error).__name__ in _LOST and _LOST_WORDS.search(str(error)):
            self._raised, code = why, PEER_LOST
            time.sleep(SILENCE + 2 * BEAT)  # who failed first is known by then, and this process ended
        if self._ending.acquire(blocking=False):
            self._broadcast(process=self.cluster.index, where=self.where, why=why, code=code)
        if code == PEER_LOST and not isinstance(error, UserError):
            why = f"what process {self.cluster.index} exchanges with others broke off"
            raise wrong(self.cluster, why, code) from error

    def _broadcast(self, **failed: Any) -> None:
        send_all(self._peers.values(), failed=failed)

    def _end(self, process: int, where: str, why: str, code: int = PEER_LOST) -> NoReturn:
        """Ends this process because of a failure: says which was first, and where this one waited."""
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # another thread ends this process already
        if self.cluster.is_chief or process == self.cluster.index:
            self._broadcast(process=process, where=where, why=why, code=code)
        stack = self._raised or "".join(_stacks())
        lines = [f"onecurve: process {process} failed first, {where}: {why.rstrip()}"]
        if process != self.cluster.index and code != USER_ERROR:
            lines += [f"onecurve: this is process {self.cluster.index}, {self.where}; it waited here:"]
        if code != USER_ERROR:
            lines += [stack.rstrip()]
            lines += ["The same command, in all processes, continues the run from its last checkpoint."]
        print("\n".join(lines), file=self._stderr, flush=True)
        leave_at_once(code if code in (USER_ERROR, HUNG) else PEER_LOST)


def _stacks() -> list[str]:
    """Where the main thread stands, and each other place where one reads data, for which the main one may wait."""
    frames = sys._current_frames()
    main = frames.pop(threading.main_thread().ident or 0)
    stacks = {thread: traceback.extract_stack(frame) for thread, frame in frames.items()}
    reading = ["".join(stack.format()[-8:]) for stack in stacks.values() if any(f.name == _READING for f in stack)]
    places = [f"a thread that reads data is here:\n{place}" for place in dict.fromkeys(reading)]
    return ["".join(traceback.format_stack(main)[-8:]), *places]
