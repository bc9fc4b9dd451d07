"""The processes that mpirun or torchrun has started: Open MPI's mpirun, and Hydra's, which MPICH and Intel MPI have."""

import contextlib
import os
import pathlib
import zlib
from collections.abc import Mapping

from trainer.errors import UserError

# starter: (how many, which of them, how many on this host)
_STARTERS = {
    "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "MPICH": ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"),
    "torchrun": ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE"),
}


def processes(environment: Mapping[str, str]) -> tuple[str, int, int, int] | None:
    """The starter, how many processes there are, this one's number, and a number of the start; None if nobody told.

    Raises:
      UserError: they are on several hosts, which no process is told.
    """
    for starter, (size, rank, here) in _STARTERS.items():
        if rank not in environment or environment.get(size, "1") == "1":
            continue
        if environment.get(here) != environment[size]:
            raise UserError(
                size,
                environment[size],
                f"{starter} tells no process the hosts of the others",
                f"give each --cluster=${rank}@host:port,host:port (docs/clusters.md), or start them by srun",
            )
        start = environment.get("PMIX_NAMESPACE") or f"{_parent()} {environment.get('TORCHELASTIC_RESTART_COUNT', 0)}"
        return starter, int(environment[size]), int(environment[rank]), zlib.crc32(start.encode())
    return None


def _parent() -> int:
    """The process that has started those of this host, each with a session of its own, as Hydra and torchrun do."""
    with contextlib.suppress(OSError):
        stat = pathlib.Path(f"/proc/{os.getsid(0)}/stat").read_text()
        return int(stat.rpartition(")")[2].split()[1])
    return os.getppid()
