"""Who am I: the processes of a run and this one's place among them, from TF_CONFIG, Slurm or Open MPI.

The sources are asked in that order; the first that speaks is believed, and what is wrong with it is said
rather than passed over.
"""

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence

from trainer.errors import UserError

PORT = 61_440  # base of the ports that a scheduler's job gets: above those that Linux gives away by itself


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The processes of a run.

    Attributes:
      addresses: 'host:port' of each process; process 0 is the chief.
      index: this process.
      source: what told us.
    """

    addresses: tuple[str, ...] = ("localhost:0",)
    index: int = 0
    source: str = "one process"

    @property
    def size(self) -> int:
        """Number of processes."""
        return len(self.addresses)

    @property
    def is_chief(self) -> bool:
        """Whether this process is the one that writes."""
        return self.index == 0


ALONE = Cluster()


def resolve(environment: Mapping[str, str] = os.environ) -> Cluster:
    """The cluster that the environment describes; one process if nothing does.

    Raises:
      UserError: the description contradicts itself; what is wrong is named.
    """
    for source in (_from_tf_config, _from_slurm, _from_open_mpi):
        cluster = source(environment)
        if cluster is not None:
            return cluster
    return ALONE


def _from_tf_config(environment: Mapping[str, str]) -> Cluster | None:
    text = environment.get("TF_CONFIG", "").strip()
    if not text:
        return None

    def wrong(reason: str, fix: str) -> UserError:
        return UserError("TF_CONFIG", text if len(text) < 200 else f"{text[:200]}...", reason, fix)

    example = """for example {"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 0}}"""
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise wrong(f"is no JSON: {error}", example) from None
    cluster = given.get("cluster") if isinstance(given, dict) else None
    task = given.get("task") if isinstance(given, dict) else None
    if not isinstance(cluster, dict) or not isinstance(task, dict):
        raise wrong("has no 'cluster' and 'task' objects", example)
    unknown = sorted(set(cluster) - {"chief", "worker"})
    if unknown:
        raise wrong(f"has jobs {', '.join(unknown)}, which this strategy has no use for", "name chief and worker only")
    for job, addresses in cluster.items():
        if not isinstance(addresses, list) or not all(isinstance(a, str) for a in addresses):
            raise wrong(f"its job {job!r} is not a list of 'host:port'", example)
    if len(cluster.get("chief", [])) > 1:
        raise wrong("names more than one chief", "name one; others are workers")
    addresses = [*cluster.get("chief", []), *cluster.get("worker", [])]
    _check_addresses(addresses, wrong)
    job, index = task.get("type"), task.get("index")
    if job not in cluster or not isinstance(index, int) or isinstance(index, bool):
        raise wrong("its task has no 'type' of the cluster's and integer 'index'", example)
    if not 0 <= index < len(cluster[job]):
        raise wrong(f"its task's index {index} is not in 0 to {len(cluster[job]) - 1}", "number the processes from 0")
    offset = len(cluster.get("chief", [])) if job == "worker" else 0
    return Cluster(tuple(addresses), offset + index, "TF_CONFIG")


def _check_addresses(addresses: Sequence[str], wrong: object) -> None:
    assert callable(wrong)
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
    if "SLURM_PROCID" not in environment or "SLURM_STEP_NODELIST" not in environment:
        return None  # not in a step that srun started
    try:
        rank, tasks = int(environment["SLURM_PROCID"]), int(environment["SLURM_STEP_NUM_TASKS"])
        per_node = _expand_counts(environment["SLURM_STEP_TASKS_PER_NODE"])
        job = int(environment["SLURM_JOB_ID"])
    except (KeyError, ValueError) as error:
        raise UserError("SLURM_*", error, "is missing or no number", "start the processes by srun") from None
    if tasks == 1:
        return None
    nodes = expand_nodes(environment["SLURM_STEP_NODELIST"])
    if len(nodes) != len(per_node) or sum(per_node) != tasks:
        raise UserError("SLURM_STEP_TASKS_PER_NODE", per_node, f"does not fit {nodes}", "start the processes by srun")
    base = PORT + job % 4096 // 64 * 64
    addresses = [f"{node}:{base + i}" for node, count in zip(nodes, per_node, strict=True) for i in range(count)]
    return Cluster(tuple(addresses), rank, "Slurm")


def _from_open_mpi(environment: Mapping[str, str]) -> Cluster | None:
    if "OMPI_COMM_WORLD_SIZE" not in environment or environment["OMPI_COMM_WORLD_SIZE"] == "1":
        return None
    rank, size = int(environment["OMPI_COMM_WORLD_RANK"]), int(environment["OMPI_COMM_WORLD_SIZE"])
    if environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") != str(size):
        raise UserError(
            "OMPI_COMM_WORLD_SIZE",
            size,
            "Open MPI tells no process the hosts of the others",
            "set TF_CONFIG on each, or start them by srun",
        )
    return Cluster(tuple(f"127.0.0.1:{PORT + i}" for i in range(size)), rank, "Open MPI")


def expand_nodes(text: str) -> list[str]:
    """'n[1-3,07],gpu-a' -> names in the order of Slurm's ranks, leading zeros kept."""
    nodes: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        nodes += _expand_brackets(part)
    return nodes


def _expand_brackets(part: str) -> list[str]:
    match = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", part)
    if not match:
        return [part]
    names = []
    for piece in match[2].split(","):
        first, _, last = piece.partition("-")
        for number in range(int(first), int(last or first) + 1):
            names += [f"{match[1]}{number:0{len(first)}d}{tail}" for tail in _expand_brackets(match[3])]
    return names


def _expand_counts(text: str) -> list[int]:
    """'2(x3),1' -> [2, 2, 2, 1]."""
    counts: list[int] = []
    for piece in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", piece)
        if not match:
            raise ValueError(text)
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
