"""The memory of this host, as far as this process may use it: the machine's, or its container's or job's."""

import contextlib
import ctypes
import os
import pathlib
import resource
from typing import NamedTuple

from input_pipeline import cgroups

_SYSTEM = pathlib.Path("/proc/meminfo")
# Files of a control group: use and limit, by version.
_OF_A_GROUP = (("memory.current", "memory.max"), ("memory.usage_in_bytes", "memory.limit_in_bytes"))

# What malloc is to keep, by its name among glibc's tunables: mallopt(3)'s number of it, and bytes (docs/strategies.md).
_KEPT = {"mmap_threshold": (-3, 32 * 2**20), "trim_threshold": (-1, 64 * 2**20), "top_pad": (-2, 64 * 2**20)}
# A call of a compiled program allocates some hundred small things in one thread and frees them in another; what is
# more than 7 of a size goes through a heap that all threads share.
_ASKED = {"hugetlb": 1, **{name: size for name, (_, size) in _KEPT.items()}, "tcache_count": 127}
TUNABLES = ":".join(f"glibc.malloc.{name}={value}" for name, value in _ASKED.items())


class HostMemory(NamedTuple):
    """Bytes.

    Attributes:
      peak: the most that this process has held.
      free: what is left before the system ends somebody.
      whole: what there is.
    """

    peak: int
    free: int
    whole: int

    @property
    def is_scarce(self) -> bool:
        """Whether less than a twentieth is left."""
        return self.free < self.whole / 20


def read() -> HostMemory | None:
    """The present state; None where the system does not tell."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    try:
        lines = dict(line.split(":") for line in _SYSTEM.read_text().splitlines())
        free, machine = (int(lines[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
    except (OSError, ValueError, KeyError):
        return None
    whole = machine
    for group in cgroups.folders("memory"):
        for used, limit in _OF_A_GROUP:
            with contextlib.suppress(OSError, ValueError):  # another version's names, or 'max'
                if (most := int((group / limit).read_text())) < machine:
                    left = most - int((group / used).read_text()) + _files(group / "memory.stat")
                    free, whole = min(free, left), min(whole, most)
    return HostMemory(peak, free, whole)


def _files(stat: pathlib.Path) -> int:
    """What a group, with those below it, keeps of files, which can be given back."""
    lines = dict(line.split() for line in stat.read_text().splitlines())
    names = [f"total_{name}" if f"total_{name}" in lines else name for name in ("inactive_file", "active_file")]
    return sum(int(lines.get(name, 0)) for name in names)


def keep_freed() -> None:
    """Has the C library keep what a step frees for the next one, unless the environment says what it is to do.

    Left alone it gives memory back to the system, and maps it anew, page by page: half the time of a small step.
    """
    if "glibc.malloc" not in os.environ.get("GLIBC_TUNABLES", ""):
        with contextlib.suppress(AttributeError):  # another C library
            mallopt = ctypes.CDLL(None).mallopt
            for parameter, size in _KEPT.values():
                mallopt(parameter, size)
