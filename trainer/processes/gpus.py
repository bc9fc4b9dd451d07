"""Which of a host's GPUs a process takes, where several processes of a run share the host.

Neither framework sees to it that no two take the same one: TensorFlow takes all that it sees, and JAX goes by Slurm's
local rank, which is wrong where a process was bound to GPUs of its own, or is to have several.
"""

import os
import pathlib
import sys
from collections.abc import Mapping, Sequence

from trainer.cluster import Cluster
from trainer.errors import UserError

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_ON_NODE = "SLURM_GPUS_ON_NODE"  # the job's
NONE = {_VISIBLE: "", "JAX_PLATFORMS": "cpu"}  # the environment of what is to compute on CPUs


def visible(environment: Mapping[str, str]) -> list[str]:
    """The GPUs that a process of this environment sees."""
    for name in (_VISIBLE, "SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):  # with --gpu-bind=none Slurm leaves out the first
        if name in environment:
            return [gpu for gpu in environment[name].split(",") if gpu.strip() not in ("", "-1", "NoDevFiles")]
    if (on_node := environment.get(_ON_NODE, "")).isdigit():  # and in a step alone the others, too
        return list(map(str, range(int(on_node))))
    return sorted((path.name.removeprefix("nvidia") for path in pathlib.Path("/dev").glob("nvidia[0-9]*")), key=int)


def computing(cluster: Cluster) -> list[int]:
    """The processes on this one's host that compute steps: not a chief that hands them out, nor servers."""
    return [i for i in cluster.here if "ps" not in cluster.roles or cluster.roles[i] == "worker"]


def share(cluster: Cluster, gpus: Sequence[str]) -> dict[str, str]:
    """The environment in which this process sees its equal share of its host's GPUs.

    None where it computes no steps; nor where there are too few, for then all are to compute on CPUs.
    """
    sharing = computing(cluster)
    each = len(gpus) // max(1, len(sharing))
    if cluster.index not in sharing or not each:
        return NONE if gpus else {}
    place = sharing.index(cluster.index)
    return {_VISIBLE: ",".join(gpus[each * place : each * (place + 1)])}


def own(cluster: Cluster, environment: Mapping[str, str]) -> dict[str, str]:
    """What this process's environment lacks for it to take its own GPUs and no other's.

    Args:
      cluster: the run's processes.
      environment: this process's.

    Raises:
      UserError: its host has fewer GPUs than processes.
    """
    gpus, on_node = visible(environment), environment.get(_ON_NODE, "")
    if len(cluster.here) == 1 or environment.get("JAX_PLATFORMS") == "cpu":
        return {}
    if on_node.isdigit():
        if len(gpus) < int(on_node):  # it was bound to these
            return {}
    elif _VISIBLE in environment:  # by whoever started it
        return {}
    if 0 < len(gpus) < len(computing(cluster)):
        raise UserError(
            cluster.source,
            f"{len(computing(cluster))} processes on one host",
            f"are more than the GPUs that they see there: {', '.join(gpus)}",
            f"start no more processes than GPUs; or set {_VISIBLE}= for all of them, to compute on CPUs",
        )
    return share(cluster, gpus)


def tell_if_idle(backend: str) -> None:
    """Says that a backend, which has found no GPU, leaves those idle that this process sees."""
    gpus = visible(os.environ)
    if gpus and os.environ.get("JAX_PLATFORMS") != "cpu":
        print(
            f"{backend} computes on CPUs, for it finds none of the GPUs that are there: {', '.join(gpus)}.\n"
            "  Fix: install it for CUDA (make install EXTRAS=dev,cuda, or pip install -e '.[cuda]'), and a driver; or "
            f"set {_VISIBLE}= if CPUs are meant",
            file=sys.stderr,
            flush=True,
        )
