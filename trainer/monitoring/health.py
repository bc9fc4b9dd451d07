"""Warnings of what goes wrong while steps go right: no memory left, a process slower than the others, slow sums."""

import concurrent.futures
import math
import statistics
import sys
import time
from collections.abc import Mapping

import numpy as np

from input_pipeline.cores import cores
from trainer.assembly import Assembly
from trainer.monitoring import host_memory
from trainer.monitoring.ledger import Ledger
from trainer.monitoring.printout import scarce
from trainer.monitoring.verdict import Verdict, verdict

_MEMORY_EVERY, _PACE_EVERY = 1.0, 10.0  # seconds between two looks
_LOOKS = 3  # at the pace, whose median counts
# Seconds of work in a look: a period of Linux's CPU quotas, so that what a process saved up does not hide one.
_WORK = 0.1
_SLOW = 2.0  # times as long as the others
_SIDE = 256  # of the matrices of a piece of work
_FLOATS = 2**24  # that are added up at most, to time it; more take in proportion


class Health:
    """Looks at this process and, together with all others, at their pace.

    Args:
      parts: of the run.
      ledger: of this process.
      step: steps done before this start.
    """

    def __init__(self, parts: Assembly, ledger: Ledger, step: int) -> None:
        self._parts, self._ledger, self._first_step = parts, ledger, step
        virtual = parts.strategy.on_cpu and parts.peers.cluster.size == 1
        self._linked = parts.strategy.devices > 1 and not virtual  # by something that can be slow
        self._memory_told = False
        self._looked_at_memory = self._looked_at_pace = 0.0
        self._matrix = np.random.default_rng(0).normal(size=(_SIDE, _SIDE))
        self._paces: list[list[float]] = []  # seconds of a piece of work, of each process
        self._straggler = ""  # which process is slow, in words
        self._waits: list[float] = []  # seconds that each process has waited for its own data
        self._looks = 0  # at the pace
        self._exchange = 0.0  # seconds in which the devices add up a step's gradients, alone

    def look(self) -> None:
        """All processes call it at the same steps; it says what is new."""
        now, peers = time.monotonic(), self._parts.peers
        if now - self._looked_at_memory > _MEMORY_EVERY:
            self._looked_at_memory = now
            self._look_at_memory()
        if peers.cluster.size == 1 and not self._linked:
            return
        is_due = now - self._looked_at_pace > _PACE_EVERY
        gathered = peers.gather([is_due, self._ledger.seconds.get("data", 0.0)])
        self._waits = [waited for _, waited in gathered]
        if not gathered[0][0]:
            return
        self._looked_at_pace = now
        self._looks += 1
        if self._looks == 2 and self._linked:  # once the steps have their pace
            with self._ledger("measure"):
                self._exchange = self._time_exchange()
        if peers.cluster.size > 1:
            self._paces = [*self._paces, peers.gather(self._pace())][-_LOOKS:]
            self._compare()

    def _look_at_memory(self) -> None:
        memory = host_memory.read()
        if memory and memory.is_scarce and not self._memory_told:
            self._memory_told = True
            print(scarce(memory, self._parts), file=sys.stderr, flush=True)

    def _pace(self) -> float:
        """Seconds that a small piece of work takes with all cores: each does its own, before any waits for another.

        The time of this process's other threads, which read data or end a step, counts as had: it is no other job's.
        """
        n = cores()
        begin, had = time.perf_counter(), time.process_time()
        with concurrent.futures.ThreadPoolExecutor(n) as pool:
            done = list(pool.map(lambda _: self._work(), range(n)))
        pieces, of_pieces = map(sum, zip(*done, strict=True))
        cores_had = (time.process_time() - had) / (time.perf_counter() - begin)
        return of_pieces / pieces / cores_had

    def _work(self) -> tuple[int, float]:
        """(pieces of work, seconds of a core's time that they took)."""
        begin, on_core, pieces = time.perf_counter(), time.thread_time(), 0
        while time.perf_counter() - begin < _WORK:
            # Not by a BLAS, whose threads wait for each other: two processes on the same cores, and one looks slow.
            np.einsum("ij,jk->ik", self._matrix, self._matrix)
            pieces += 1
        return pieces, time.thread_time() - on_core

    def _time_exchange(self) -> float:
        floats = sum(math.prod(v.shape) for v in self._parts.program.model.trainable_variables)
        few = min(floats, _FLOATS)
        return self._parts.strategy.exchange(few) * floats / few if few else 0.0

    def _compare(self) -> None:
        if len(self._paces) < _LOOKS:
            return
        usual = [statistics.median(of_process) for of_process in zip(*self._paces, strict=True)]
        slowest = max(range(len(usual)), key=lambda p: usual[p])
        times = usual[slowest] / statistics.median([pace for p, pace in enumerate(usual) if p != slowest])
        self._straggler = ""
        if times > _SLOW:
            words = f"process {slowest} takes {times:.1f} times as long as the others for the same work, and all wait"
            self._straggler = words

    def verdict(self, seconds: Mapping[str, float]) -> Verdict:
        """What this start, of which so many seconds went to each purpose, loses time by."""
        steps = self._parts.peers.step - self._first_step
        return verdict(seconds, self._straggler, self._waits, self._exchange * steps)
