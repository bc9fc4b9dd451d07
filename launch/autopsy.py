"""Why a process was killed, as far as the system tells; and whether a run gets on between its starts."""

import pathlib
import re
import resource

from input_pipeline import cgroups

_PATIENCE = 3  # starts in a row that may end without a newer checkpoint


def kills_for_memory() -> int:
    """How many processes of this container the system has killed for lack of memory; 0 where it does not tell."""
    for folder in cgroups.folders("memory"):
        for file in (folder / "memory.events", folder / "memory.oom_control"):  # of either version of cgroups
            if file.exists():
                return sum(int(n) for n in re.findall(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE))
    return 0


def lack_of_memory() -> str:
    """What a person is told when that was the cause."""
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return (
        f"the system killed it for lack of memory; the largest process held {peak / 1e9:.1f} GB. Lower --global_batch, "
        "or raise --replicas, so that a device takes fewer examples at a time; lower --prefetch; --cache=none; or "
        "give the host more memory"
    )


class Standstill:
    """Notices a run, of these checkpoints, that starts again and again, and gets no further."""

    def __init__(self, checkpoints: pathlib.Path) -> None:
        self._checkpoints, self._starts = checkpoints, 0
        self._newest = self._step()

    def ended(self, gained: bool = False) -> bool:
        """Called when a start has failed; whether there is no sense in another.

        Args:
          gained: whether it is known to have got further.
        """
        step = self._step()
        self._starts = 0 if step > self._newest or gained else self._starts + 1
        self._newest = max(step, self._newest)
        return self._starts >= _PATIENCE

    def _step(self) -> int:
        if not self._checkpoints.is_dir():
            return -1
        return max((int(path.name) for path in self._checkpoints.iterdir() if path.name.isdigit()), default=-1)
