"""Who am I: the processes of a run and this one's place among them.

Asked in this order, and the first that speaks is believed:
  1. --cluster=1@host:port,host:port (this is process 1)
  2. TF_CONFIG
  3. ONECURVE_PROCESSES=host:port,host:port, which launch/kubernetes.py sets, with JOB_COMPLETION_INDEX
  4. Kubeflow: JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID (a JAXJob's without JAX_)
  5. GKE's slices of TPUs: TPU_WORKER_HOSTNAMES, TPU_WORKER_ID; and SkyPilot's SKYPILOT_NODE_IPS, SKYPILOT_NODE_RANK
  6. Slurm, in a step that srun started
  7. mpirun (Open MPI, MPICH, Intel MPI) or torchrun; on several hosts with MASTER_ADDR, that of process 0
What is wrong with the one that speaks is said rather than passed over.
"""

import dataclasses
import json
import os
import pathlib
import socket
from collections.abc import Callable, Mapping, Sequence

from trainer.errors import UserError
from trainer.processes import ports, slurm, starters
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
        """Whether the hosts of all are known; if not, roll_call.py asks them."""
        return not any(address.startswith(starters.UNKNOWN) for address in self.addresses)

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
Wrong = Callable[[str, str], UserError]
_JOBS = ("chief", "worker", "ps")
_HOSTS = {"TPU_WORKER_HOSTNAMES": "TPU_WORKER_ID", "SKYPILOT_NODE_IPS": "SKYPILOT_NODE_RANK"}  # a process on each


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
    for source in (_from_tf_config, _from_processes, _from_kubeflow, _from_hosts, _from_slurm, _from_starter):
        cluster = source(environment)
        if cluster is not None:
            return cluster
    return ALONE


def _wrong(source: str, text: str) -> Wrong:
    shown = text if len(text) < 200 else f"{text[:200]}..."
    return lambda reason, fix: UserError(source, shown, reason, fix)


def _from_flag(flag: str) -> Cluster:
    index, _, addresses = flag.partition("@")
    return _listed(addresses, index, "cluster", "for example --cluster=0@host1:2222,host2:2222", flag)


def _from_processes(environment: Mapping[str, str]) -> Cluster | None:
    addresses = environment.get("ONECURVE_PROCESSES", "")
    if not addresses:
        return None
    index = environment.get("JOB_COMPLETION_INDEX", "")
    fix = "set JOB_COMPLETION_INDEX to this process's number"
    return _listed(addresses, index, "ONECURVE_PROCESSES", fix, addresses)


def _from_kubeflow(environment: Mapping[str, str]) -> Cluster | None:
    for prefix in ("JAX_", ""):
        coordinator = environment.get(f"{prefix}COORDINATOR_ADDRESS", "")
        size, index = environment.get(f"{prefix}NUM_PROCESSES", ""), environment.get(f"{prefix}PROCESS_ID", "")
        if not coordinator or not size:
            continue
        if ":" not in coordinator:
            coordinator = f"{coordinator}:{environment.get(f'{prefix}COORDINATOR_PORT', ports.FIRST)}"
        if not size.isdigit() or not 0 < int(size) <= 2**16:
            raise UserError(f"{prefix}NUM_PROCESSES", size, "is no number of processes", "give 1 or more")
        # A pod of theirs is called by its number; the coordinator is number 0.
        host, _, port = coordinator.rpartition(":")
        label, dot, domain = host.partition(".")
        stem = label.removesuffix("-0") if label.endswith("-0") else f"{label}-process"
        others = [f"{stem}-{i}{dot}{domain}:{port}" for i in range(1, int(size))]
        return _listed(
            ",".join([coordinator, *others]), index, f"{prefix}COORDINATOR_ADDRESS", "ask Kubeflow", coordinator
        )
    return None


def _from_hosts(environment: Mapping[str, str]) -> Cluster | None:
    for name, number in _HOSTS.items():
        hosts = environment.get(name, "").replace(",", " ").split()
        if len(hosts) > 1:
            if environment.get("MEGASCALE_NUM_SLICES", "1") != "1":
                raise UserError(name, ",".join(hosts), "are those of one slice of several", "give --cluster, of all")
            addresses = ",".join(f"{host}:{ports.FIRST}" for host in hosts)
            return _listed(addresses, environment.get(number, ""), name, f"set {number} to its number", addresses)
    return None


def _listed(addresses: str, index: str, source: str, example: str, shown: str) -> Cluster:
    wrong = _wrong(source, shown)
    listed = [address.strip() for address in addresses.split(",") if address.strip()]
    _check_addresses(listed, wrong)
    if not index.isdigit() or int(index) >= len(listed):
        raise wrong(f"this process's number {index!r} is not in 0 to {len(listed) - 1}", example)
    return Cluster(tuple(listed), int(index), source)


def _from_tf_config(environment: Mapping[str, str]) -> Cluster | None:
    text = environment.get("TF_CONFIG", "").strip()
    if not text:
        return None
    wrong = _wrong("TF_CONFIG", text)
    example = """for example {"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 0}}"""
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise wrong(f"is no JSON: {error}", example) from None
    cluster = given.get("cluster") if isinstance(given, dict) else None
    task = given.get("task") if isinstance(given, dict) else None
    if not isinstance(cluster, dict) or not isinstance(task, dict):
        raise wrong("has no 'cluster' and 'task' objects", example)
    if given["task"].get("type") == "evaluator" or "evaluator" in cluster:
        raise wrong("has an evaluator, but the run evaluates itself (--evaluate_every)", "leave it out")
    unknown = sorted(set(cluster) - set(_JOBS))
    if unknown:
        raise wrong(f"has jobs {', '.join(unknown)}", f"name {', '.join(_JOBS)} only")
    for job, addresses in cluster.items():
        if not isinstance(addresses, list) or not all(isinstance(a, str) for a in addresses):
            raise wrong(f"its job {job!r} is not a list of 'host:port'", example)
    if len(cluster.get("chief", [])) > 1:
        raise wrong("names more than one chief", "name one; others are workers")
    addresses = [address for name in _JOBS for address in cluster.get(name, [])]
    roles = [name for name in _JOBS for _ in cluster.get(name, [])]
    _check_addresses(addresses, wrong)
    job, index = task.get("type"), task.get("index")
    if job not in cluster or not isinstance(index, int) or isinstance(index, bool):
        raise wrong("its task has no 'type' of the cluster's and integer 'index'", example)
    if not 0 <= index < len(cluster[job]):
        raise wrong(f"its task's index {index} is not in 0 to {len(cluster[job]) - 1}", "number the processes from 0")
    return Cluster(tuple(addresses), roles.index(str(job)) + index, "TF_CONFIG", tuple(roles))


def _check_addresses(addresses: Sequence[str], wrong: Wrong) -> None:
    if not addresses:
        raise wrong("names no process", "list each process as 'host:port'")
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65_536:
            raise wrong(f"its address {address!r} is not host:port", "for example 10.0.0.1:2222")
    twice = sorted({a for a in addresses if addresses.count(a) > 1})
    if twice:
        raise wrong(f"names {twice[0]} twice", "give each process an address of its own")
    local = [a for a in addresses if a.rpartition(":")[0] in ("localhost", "127.0.0.1", "[::1]")]
    if local and len(local) < len(addresses):
        raise wrong(
            f"mixes {local[0]}, which each host takes for itself, with addresses of other hosts",
            "give the address under which the others reach that host",
        )


def _from_slurm(environment: Mapping[str, str]) -> Cluster | None:
    found = slurm.processes(environment)
    return Cluster(tuple(found[0]), found[1], "Slurm") if found else None


def _from_starter(environment: Mapping[str, str]) -> Cluster | None:
    found = starters.processes(environment)
    return Cluster(tuple(ports.addresses(found.hosts, found.start)), found.rank, found.starter) if found else None
