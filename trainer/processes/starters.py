"""The processes that mpirun or torchrun has started: Open MPI's mpirun, and Hydra's, which MPICH and Intel MPI have."""

import contextlib
import os
import pathlib
import zlib
from collections.abc import Mapping
from typing import NamedTuple

from trainer.errors import UserError
from trainer.processes import addresses
from trainer.processes.addresses import UNKNOWN

# starter: (how many, which of them, how many on this host)
_STARTERS = {
    "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "MPICH": ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"),
    "PyTorch's torchrun": ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE"),
}


class Started(NamedTuple):
    """What a starter told.

    Attributes:
      starter: its name.
      hosts: of the processes; UNKNOWN but for the first, where they are on several.
      rank: this process's number.
      start: a number of the start's, the same in each process.
    """

    starter: str
    hosts: list[str]
    rank: int
    start: int


def processes(environment: Mapping[str, str]) -> Started | None:
    """What the starter told; None if there was none.

    Raises:
      UserError: they are on several hosts, and not even that of process 0 is told.
    """
    for starter, (size, rank, here) in _STARTERS.items():
        if rank not in environment or environment.get(size, "1") == "1":
            continue
        try:
            count, number = int(environment[size]), int(environment[rank])
        except ValueError as error:
            raise UserError(f"{size}, {rank}", environment[size], str(error), f"unset {rank}, or set both") from None
        first, on_one = environment.get("MASTER_ADDR", ""), environment.get(here) == environment[size]
        if not first and not on_one:
            raise UserError(
                size,
                environment[size],
                f"{starter} tells no process of several hosts where the others are",
                "set MASTER_ADDR for all of them to the host of process 0 (docs/clusters.md), or start them by srun",
            )
        start = environment.get("PMIX_NAMESPACE") or (_parent() if on_one else environment.get("MASTER_PORT"))
        digest = zlib.crc32(f"{start} {environment.get('TORCHELASTIC_RESTART_COUNT', 0)}".encode())
        hosts = [addresses.loopback(digest)] * count
        if not on_one:
            hosts = [f"[{first}]" if first.count(":") > 1 else first, *[UNKNOWN] * (count - 1)]
        return Started(starter, hosts, number, digest)
    return None


def _parent() -> int:
    """The process that has started those of this host, each with a session of its own, as Hydra and torchrun do."""
    with contextlib.suppress(OSError):
        stat = pathlib.Path(f"/proc/{os.getsid(0)}/stat").read_text()
        return int(stat.rpartition(")")[2].split()[1])
    return os.getppid()
