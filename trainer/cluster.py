"""Who am I: the processes of a run and this one's place among them.

Asked in this order, and the first that speaks is believed:
  1. --cluster=1@host:port,host:port (this is process 1), or 1/2@host:port (of two; the address is process 0's)
  2. TF_CONFIG
  3. ONECURVE_PROCESSES=host:port,host:port, which launch/kubernetes.py sets, with JOB_COMPLETION_INDEX
  4. JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID, as of Kubeflow (a JAXJob's without JAX_)
  5. GKE's slices of TPUs: TPU_WORKER_HOSTNAMES, TPU_WORKER_ID; SkyPilot's SKYPILOT_NODE_IPS, SKYPILOT_NODE_RANK;
     SageMaker's SM_HOSTS, SM_CURRENT_HOST
  6. Slurm, in a step that srun started
  7. mpirun (Open MPI, MPICH, Intel MPI) or torchrun; on several hosts with MASTER_ADDR, that of process 0
What is wrong with the one that speaks is said rather than passed over.
"""

import dataclasses
import os
import pathlib
import re
import socket
import zlib
from collections.abc import Mapping, Sequence

from trainer.processes import addresses, slurm, starters, tf_config
from trainer.processes.addresses import Description
from trainer.processes.connection import resolved


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The processes of a run.

    Attributes:
      addresses: 'host:port' of each process; process 0 is the chief.
      index: this process.
      source: what told us.
      roles: what TF_CONFIG calls each: chief, worker or ps; empty where all are alike.
    """

    addresses: tuple[str, ...] = ("localhost:0",)
    index: int = 0
    source: str = "one process"
    roles: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Number of processes."""
        return len(self.addresses)

    @property
    def is_chief(self) -> bool:
        """Whether this process is the one that writes."""
        return self.index == 0

    @property
    def role(self) -> str:
        """What TF_CONFIG calls this process."""
        return self.roles[self.index] if self.roles else "worker"

    @property
    def here(self) -> list[int]:
        """The processes on this one's host."""
        host = self.addresses[self.index].rpartition(":")[0]
        return [i for i, address in enumerate(self.addresses) if address.rpartition(":")[0] == host]

    @property
    def is_complete(self) -> bool:
        """Whether the hosts of all are known; if not, processes/discovery.py asks them."""
        return not any(address.startswith(addresses.UNKNOWN) for address in self.addresses)

    @property
    def meeting(self) -> tuple[str, int]:
        """Where the processes meet: process 0's host, and the first port above its own that none there has."""
        host, _, port = self.addresses[0].rpartition(":")
        meeting = int(port) + 1
        while f"{host}:{meeting}" in self.addresses:
            meeting += 1
        return host.strip("[]"), meeting

    @property
    def bind_host(self) -> str:
        """The address at which process 0 listens: its own; '' (all) where that name leads the others elsewhere."""
        host = self.meeting[0]
        try:
            family, address = resolved(host)
            with socket.socket(family) as probe:
                probe.bind((str(address), 0))
        except OSError:
            return ""  # behind an address translation
        hosts = {a.rpartition(":")[0] for a in self.addresses}
        return "" if address.is_loopback and len(hosts) > 1 and not _all_loopback(hosts) else str(address)


ALONE = Cluster()
ALONE_FLAG = "--cluster=0@localhost:1"  # one process, whatever its environment says
_HOSTS = {  # a process on each: which this is, by its number or its name; and the job, where hosts have several
    "TPU_WORKER_HOSTNAMES": ("TPU_WORKER_ID", ""),
    "SKYPILOT_NODE_IPS": ("SKYPILOT_NODE_RANK", "SKYPILOT_TASK_ID"),
    "SM_HOSTS": ("SM_CURRENT_HOST", ""),
}


def _all_loopback(hosts: set[str]) -> bool:
    return all(host in ("localhost", "[::1]") or host.startswith("127.") for host in hosts)


def outside_interfaces() -> list[str]:
    """Names of the network interfaces of this machine, but loopback, that are up."""
    found = []
    for _, name in socket.if_nameindex():
        try:
            state = pathlib.Path("/sys/class/net", name, "operstate").read_text().strip()
        except OSError:
            state = "unknown"
        if name not in ("lo", "lo0") and state in ("up", "unknown"):
            found.append(name)
    return found


def resolve(flag: str = "", environment: Mapping[str, str] = os.environ) -> Cluster:
    """The cluster that --cluster or the environment describes; one process if nothing does.

    Raises:
      UserError: the description contradicts itself; what is wrong is named.
    """
    if flag:
        return _from_flag(flag)
    for source in (_from_tf_config, _from_processes, _from_jax, _from_hosts, _from_slurm, _from_starter):
        cluster = source(environment)
        if cluster is not None:
            return cluster
    return ALONE


def _from_flag(flag: str) -> Cluster:
    said = Description("cluster", flag, "for example --cluster=0@host1:2222,host2:2222, or 0/2@host1:2222")
    index, _, text = flag.partition("@")
    index, several, size = index.partition("/")
    return _of_first(said, text, size, index) if several else _listed(said, text, index)


def _from_processes(environment: Mapping[str, str]) -> Cluster | None:
    text = environment.get("ONECURVE_PROCESSES", "")
    if not text:
        return None
    said = Description("ONECURVE_PROCESSES", text, "set JOB_COMPLETION_INDEX to this process's number")
    return _listed(said, text, environment.get("JOB_COMPLETION_INDEX", ""))


def _from_jax(environment: Mapping[str, str]) -> Cluster | None:
    for prefix in ("JAX_", ""):
        coordinator = environment.get(f"{prefix}COORDINATOR_ADDRESS", "")
        size, index = environment.get(f"{prefix}NUM_PROCESSES", ""), environment.get(f"{prefix}PROCESS_ID", "")
        if not coordinator or not size:
            continue
        if ":" not in coordinator:
            coordinator = f"{coordinator}:{environment.get(f'{prefix}COORDINATOR_PORT', addresses.FIRST)}"
        fix = f"set {prefix}NUM_PROCESSES and {prefix}PROCESS_ID"
        said = Description(f"{prefix}COORDINATOR_ADDRESS", f"{coordinator}, {size} processes", fix)
        return _of_first(said, coordinator, size, index)
    return None


def _from_hosts(environment: Mapping[str, str]) -> Cluster | None:
    for name, (number, job) in _HOSTS.items():
        hosts = re.findall(r"[^\s,\[\]\"]+", environment.get(name, ""))  # by commas, lines, or as JSON
        if len(hosts) > 1:
            said = Description(name, ",".join(hosts), f"set {number} to this process's")
            if environment.get("MEGASCALE_NUM_SLICES", "1") != "1":
                raise said.wrong("are those of one slice of several", "give --cluster, of all")
            listed = addresses.of(hosts, zlib.crc32(environment.get(job, "").encode()))
            this = environment.get(number, "")
            return _listed(said, ",".join(listed), str(hosts.index(this)) if this in hosts else this)
    return None


def _of_first(said: Description, first: str, size: str, index: str) -> Cluster:
    """Processes of which the address of the first is told."""
    if not size.isdigit() or not 0 < int(size) <= addresses.MOST:
        raise said.wrong(f"{size!r} is no number of processes")
    addresses.check([first], said.wrong)
    return _numbered(said, [first, *addresses.unknown(first, int(size) - 1)], index)


def _listed(said: Description, text: str, index: str) -> Cluster:
    listed = [address.strip() for address in text.split(",") if address.strip()]
    addresses.check(listed, said.wrong)
    return _numbered(said, listed, index)


def _numbered(said: Description, listed: Sequence[str], index: str) -> Cluster:
    if not index.isdigit() or int(index) >= len(listed):
        raise said.wrong(f"this process's number {index!r} is not in 0 to {len(listed) - 1}")
    return Cluster(tuple(listed), int(index), said.source)


def _from_tf_config(environment: Mapping[str, str]) -> Cluster | None:
    found = tf_config.processes(environment)
    return Cluster(tuple(found.addresses), found.rank, "TF_CONFIG", tuple(found.roles)) if found else None


def _from_slurm(environment: Mapping[str, str]) -> Cluster | None:
    found = slurm.processes(environment)
    return Cluster(tuple(found[0]), found[1], "Slurm") if found else None


def _from_starter(environment: Mapping[str, str]) -> Cluster | None:
    found = starters.processes(environment)
    return Cluster(tuple(addresses.of(found.hosts, found.start)), found.rank, found.starter) if found else None
