"""Whether a start of a run was told to end before the run does: by a signal, or by a file with a time in it."""

import datetime
import pathlib
import signal
import sys
import time
from types import FrameType

DEADLINE = 64  # in a signal's place: above the numbers of all signals


class Preemption:
    """Notes the first SIGTERM, SIGINT, or SIGHUP of a terminal that is gone, and looks for a file with a deadline.

    Args:
      deadline: the file; it holds a time, in seconds since 1970 or as 2026-12-31T23:59 (UTC), or nothing,
        which is now. It is removed when it is obeyed.
      looks: whether this process reads the file; one of a cluster does.
    """

    def __init__(self, deadline: pathlib.Path, looks: bool = True) -> None:
        self._deadline, self._looks = deadline, looks
        self._signal = 0
        self._told_of = ""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == self._signal == signal.SIGHUP:  # of a terminal that closes, shell and kernel tell
            return
        if self._signal:  # the second one leaves at once; the checkpoint's rename makes that harmless
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self._signal = number

    @property
    def told(self) -> int:
        """0, or the number of the signal; DEADLINE where the file's time has come."""
        if not self._signal and self._looks and self._due():
            self._signal = DEADLINE
            self._deadline.unlink(missing_ok=True)
        return self._signal

    def _due(self) -> bool:
        try:
            text = self._deadline.read_text().strip()
        except FileNotFoundError:
            return False
        if not text:
            return True
        try:
            moment = float(text) if text.replace(".", "", 1).isdigit() else _utc(text)
        except ValueError:
            if text != self._told_of:  # a slip of the pen is no reason to end a run
                print(f"{self._deadline} holds {text[:40]!r}, which is no time: it is ignored", file=sys.stderr)
                self._told_of = text
            return False
        return time.time() >= moment


def _utc(text: str) -> float:
    moment = datetime.datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp()


def words(told: int) -> str:
    """What ended the start."""
    return "its deadline" if told == DEADLINE else signal.Signals(told).name
