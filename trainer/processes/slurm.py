"""The tasks of a Slurm step as the processes of a run: who they are, where, and at which ports."""

import re
import zlib
from collections.abc import Mapping

from trainer.errors import UserError
from trainer.processes import addresses

_APART = 37  # blocks of ports, between steps of a job


def processes(environment: Mapping[str, str]) -> tuple[list[str], int] | None:
    """The 'host:port' of each task of the step that this process is in, and its own number; None outside one.

    Raises:
      UserError: what Slurm says contradicts itself, or does not tell where the others are.
    """
    if "SLURM_PROCID" not in environment or "SLURM_STEP_NODELIST" not in environment:
        return None  # not in a step that srun started
    try:
        rank, tasks = int(environment["SLURM_PROCID"]), int(environment["SLURM_STEP_NUM_TASKS"])
        per_node = _expand_counts(environment["SLURM_STEP_TASKS_PER_NODE"])
        job, step = int(environment["SLURM_JOB_ID"]), int(environment.get("SLURM_STEP_ID", 0))
    except (KeyError, ValueError) as error:
        raise UserError("SLURM_*", error, "is missing or no number", "start the processes by srun") from None
    if tasks == 1:
        return None
    nodes = expand_nodes(environment["SLURM_STEP_NODELIST"])
    if len(nodes) != len(per_node) or sum(per_node) != tasks:
        raise UserError("SLURM_STEP_TASKS_PER_NODE", per_node, f"does not fit {nodes}", "start the processes by srun")
    hosts = [node for node, count in zip(nodes, per_node, strict=True) for _ in range(count)]
    if (here := environment.get("SLURMD_NODENAME", hosts[rank])) != hosts[rank]:
        dealt = environment.get("SLURM_DISTRIBUTION", "cyclic")
        reason = f"has task {rank} on {here}, where tasks of consecutive numbers would be on {hosts[rank]}"
        raise UserError("SLURM_DISTRIBUTION", dealt, reason, "start them by srun --distribution=block")
    if len(nodes) == 1:
        hosts = [addresses.loopback(zlib.crc32(f"{job} {step}".encode()))] * tasks
    return addresses.of(hosts, job + _APART * step), rank


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
