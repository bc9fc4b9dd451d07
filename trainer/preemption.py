"""Whether a start of a run was told to end before the run does: by a signal, or by a file with a time in it."""

import contextlib
import datetime
import math
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from types import FrameType
from typing import Any, TypeVar

from trainer.errors import PREEMPTED
from trainer.peers import Peers
from trainer.processes.leaving import leave_at_once

Block = TypeVar("Block")

DEADLINE = 64  # in a signal's place: above the numbers of all signals
# Of schedulers, terminals and people. Where the last three are ignored (nohup), or a user handles them, that stays.
SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2
_OURS: list[Callable[[int, FrameType | None], None]] = []  # handlers
_LOOK_EVERY = 0.5  # seconds; less than the processes' heartbeats
_EMPTY = 1.0  # seconds for which a deadline's file holds nothing, and then means now
_LEFT: list[Iterator[Any]] = []  # kept from being cleaned up: tf.data's iterators would wait for what is being read


class Preemption:
    """Notes the first signal, and looks for a file with a deadline.

    Args:
      deadline: the file; it holds a time, in seconds since 1970 or as 2026-12-31T23:59 (UTC), or nothing,
        which is now. It is removed when it is obeyed.
      looks: whether this process reads the file; one of a cluster does.
    """

    def __init__(self, deadline: pathlib.Path, looks: bool = True) -> None:
        self._deadline, self._looks = deadline, looks
        self._signal, self._interrupted = 0, False
        self._told_of, self._empty_since = "", math.inf
        have_handled(self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # A person's second Ctrl-C leaves at once; the checkpoint's rename makes that harmless. Others come again and
        # mean nothing new: a scheduler's warning, and its SIGTERM when the time is up; a terminal's shell and kernel.
        if number == signal.SIGINT and self._interrupted:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self._interrupted |= number == signal.SIGINT
        self._signal = self._signal or number

    @property
    def told(self) -> int:
        """0, or the number of the signal; DEADLINE where the file's time has come."""
        if not self._signal and self._looks and self._due():
            self._signal = DEADLINE
            self._deadline.unlink(missing_ok=True)
        return self._signal

    def _due(self) -> bool:
        try:
            text = self._deadline.read_text(errors="replace").strip()
        except FileNotFoundError:
            return False
        if not text:  # or a shell has made it, and what is to write the time has not begun
            self._empty_since = min(self._empty_since, time.monotonic())
            return time.monotonic() - self._empty_since >= _EMPTY
        self._empty_since = math.inf
        try:
            moment = float(text) if text.replace(".", "", 1).isdigit() else _utc(text)
        except ValueError:
            if text != self._told_of:  # a slip of the pen is no reason to end a run
                print(f"{self._deadline} holds {text[:40]!r}, which is no time: it is ignored", file=sys.stderr)
                self._told_of = text
            return False
        return time.time() >= moment


def leave_when_told() -> None:
    """Until there is a Preemption: a start that has done no step has nothing to save, and is as well begun anew."""

    def leave(number: int, frame: FrameType | None) -> None:
        told = f"Stopped by {signal.Signals(number).name} before its first step. Continue with the same command.\n"
        with contextlib.suppress(OSError):
            os.write(1, told.encode())  # print may be at work already
        leave_at_once(PREEMPTED)

    have_handled(leave)


def take_back() -> None:
    """Has Python handle SIGTERM as before a cluster was joined: TensorFlow's and JAX's services then handle it, in C++,
    and nobody is told."""
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


def have_handled(handler: Callable[[int, FrameType | None], None]) -> None:
    """Has a handler called for all signals that tell a process to stop, in the place of the one before."""
    for number in SIGNALS:
        if number in (signal.SIGTERM, signal.SIGINT) or signal.getsignal(number) in (signal.SIG_DFL, *_OURS):
            signal.signal(number, handler)
    _OURS.append(handler)


def _utc(text: str) -> float:
    moment = datetime.datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp()


def words(told: int) -> str:
    """What ended the start."""
    return "its deadline" if told == DEADLINE else signal.Signals(told).name


def until_told(
    blocks: Iterator[Block],
    peers: Peers,
    told: Callable[[], object],
    for_others: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> Iterator[Block]:
    """The blocks as they come, and no more of them where a process is told to stop while one has to wait for its own.

    A thread takes them, one ahead, so that a block's way to the devices overlaps the steps of the block before; and
    a source that stalls, as on a disk that does not answer, keeps nobody from obeying. No process goes on to compute
    before all have their block, for in what they compute together they could not be reached. Where a source fails and
    nobody is told to stop, its error is raised.

    Args:
      blocks: of this process; every process has as many.
      peers: the processes.
      told: whether any of them is; all ask together.
      for_others: what is entered while this process has its block and others have not.
    """

    def all_have() -> bool:
        mine = bool(futures.wait([coming], _LOOK_EVERY).done)
        if mine and coming.exception():  # a signal that has ended the source's workers may reach this process later
            time.sleep(_LOOK_EVERY)
            mine = False
        with for_others() if mine and peers.cluster.size > 1 else contextlib.nullcontext():
            return all(peers.gather(mine))

    pool = futures.ThreadPoolExecutor(1, "take")
    try:
        coming = pool.submit(next, blocks, None)
        while True:
            while not all_have():
                if told():
                    return
                if coming.done():
                    coming.result()
                    peers.doing("data, which another process waits for")  # it is not this one that makes no progress
            if (block := coming.result()) is None:
                return
            coming = pool.submit(next, blocks, None)
            yield block
    finally:
        _LEFT.append(blocks)
        pool.shutdown(wait=False, cancel_futures=True)
