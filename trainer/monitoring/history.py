"""All starts of a run: where their time went, what was lost between them, and what came of it."""

import json
import pathlib
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from trainer.monitoring.ledger import Ledger
from trainer.storage.append import records
from trainer.storage.replacing import replace


class Account(NamedTuple):
    """The time of a run from its first start to its last sign of life.

    Attributes:
      seconds: by purpose, over all starts; 'down' is what lies between them, 'lost' the steps that were done again.
      starts: how many there were.
      device_hours: hours of all devices together, down times not counted.
    """

    seconds: dict[str, float]
    starts: int
    device_hours: float

    @property
    def goodput(self) -> float:
        """The share of the time in which steps were done that count."""
        return self.seconds.get("step", 0.0) / max(1e-9, sum(self.seconds.values()))


class History:
    """Writes a line for this start of a run, anew each time.

    Args:
      directory: of the lines, one file each.
      ledger: of this start.
      facts: what else the line says: 'devices' and the like.
      step: where it starts.
    """

    def __init__(self, directory: pathlib.Path, ledger: Ledger, facts: Mapping[str, Any], step: int) -> None:
        earlier = [int(path.stem) for path in directory.glob("[0-9]*.json")]
        self._path = directory / f"{max(earlier, default=-1) + 1:06d}.json"
        self._ledger, self._written, self._told = ledger, 0.0, False
        self._facts = {**facts, "began": time.time() - ledger.elapsed, "first_step": step}

    def write(self, step: int, ended: str = "") -> None:
        """Notes that the start is alive at a step, once a second at most; or how it ended.

        What can't be written, on a full disk, is left out and said once: training goes on.

        Raises:
          FileNotFoundError: the run directory is gone.
        """
        if not ended and time.monotonic() - self._written < 1:
            return
        self._written = time.monotonic()
        now = {"step": step, "ended": ended, "updated": time.time(), "seconds": self._ledger.table()}
        try:
            # Where storage is slow, to wait for the disk each second would hold the steps up.
            replace(self._path, json.dumps(self._facts | now), wait=bool(ended))
        except FileNotFoundError:
            raise
        except OSError as error:
            if not self._told:
                print(f"{self._path} can't be written, and stays as it was: {error}", file=sys.stderr, flush=True)
            self._told = True


def read(directory: pathlib.Path) -> list[dict[str, Any]]:
    """The lines of all starts, in their order, but those that a disk has spoilt."""
    return [line for path in sorted(directory.glob("[0-9]*.json")) for line in records(path)]


def account(starts: list[dict[str, Any]]) -> Account:
    """Adds the starts up."""
    seconds: dict[str, float] = {}
    hours = 0.0
    for number, start in enumerate(starts):
        own = dict(start["seconds"])
        hours += sum(own.values()) * start["devices"] / 3600
        following = starts[number + 1] if number + 1 < len(starts) else None
        if following:
            done = start["step"] - start["first_step"]
            lost = max(0, start["step"] - max(start["first_step"], following["first_step"]))
            again = own.get("step", 0.0) * lost / max(1, done)
            own["step"] = own.get("step", 0.0) - again
            own["lost"] = again
            own["down"] = max(0.0, following["began"] - start["updated"])
        for purpose, value in own.items():
            seconds[purpose] = seconds.get(purpose, 0.0) + value
    return Account({k: round(v, 3) for k, v in seconds.items()}, len(starts), hours)
