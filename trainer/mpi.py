"""The processes of an mpirun: Open MPI's, and Hydra's, which MPICH and Intel MPI have."""

import contextlib
import os
import pathlib
import zlib
from collections.abc import Mapping

from trainer.errors import UserError

# make: (how many, which of them, how many on this host)
_MAKES = {
    "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "MPICH": ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"),
}


def processes(environment: Mapping[str, str]) -> tuple[str, int, int, int] | None:
    """The make, how many processes there are, this one's number, and a number of the start; None outside an mpirun.

    Raises:
      UserError: they are on several hosts, which no process is told.
    """
    for make, (size, rank, here) in _MAKES.items():
        if environment.get(size, "1") == "1":
            continue
        if environment.get(here) != environment[size]:
            raise UserError(
                size,
                environment[size],
                f"{make} tells no process the hosts of the others",
                f"give each --cluster=${rank}@host:port,host:port (docs/clusters.md), or start them by srun",
            )
        start = environment.get("PMIX_NAMESPACE", "") or str(_starter())
        return make, int(environment[size]), int(environment[rank]), zlib.crc32(start.encode())
    return None


def _starter() -> int:
    """The process that has started those of this host, each with a session of its own, as Hydra's proxy does."""
    with contextlib.suppress(OSError):
        stat = pathlib.Path(f"/proc/{os.getsid(0)}/stat").read_text()
        return int(stat.rpartition(")")[2].split()[1])
    return os.getppid()
