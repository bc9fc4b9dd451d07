"""Where Linux tells of this process's container."""

import pathlib
from collections.abc import Iterator

_HIERARCHY, _OURS = pathlib.Path("/sys/fs/cgroup"), pathlib.Path("/proc/self/cgroup")


def folders(controller: str) -> Iterator[pathlib.Path]:
    """Of this process's group for a controller, such as 'memory', and of those above it, in either version of cgroups.

    Not all need be there: a container may see its own group as the topmost, and a path that its host knows.
    """
    for line in _OURS.read_text().splitlines() if _OURS.exists() else ():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):  # the second version has one hierarchy
            root = _HIERARCHY / controller if controllers else _HIERARCHY
            group = root / path.lstrip("/")
            yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(root))
