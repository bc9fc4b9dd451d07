"""TF_CONFIG: TensorFlow's own way to tell a process of the others."""

import json
from collections.abc import Mapping
from typing import NamedTuple

from trainer.processes import addresses

_JOBS = ("chief", "worker", "ps")


class Found(NamedTuple):
    """What TF_CONFIG says.

    Attributes:
      addresses: 'host:port' of each process, the chief's first.
      rank: this process.
      roles: what it calls each: chief, worker or ps.
    """

    addresses: list[str]
    rank: int
    roles: list[str]


def processes(environment: Mapping[str, str]) -> Found | None:
    """The processes that TF_CONFIG names; None without it.

    Raises:
      UserError: it contradicts itself; what is wrong is named.
    """
    text = environment.get("TF_CONFIG", "").strip()
    if not text:
        return None
    example = """for example {"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 0}}"""
    wrong = addresses.Description("TF_CONFIG", text, example).wrong
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise wrong(f"is no JSON: {error}") from None
    cluster = given.get("cluster") if isinstance(given, dict) else None
    task = given.get("task") if isinstance(given, dict) else None
    if not isinstance(cluster, dict) or not isinstance(task, dict):
        raise wrong("has no 'cluster' and 'task' objects")
    if given["task"].get("type") == "evaluator" or "evaluator" in cluster:
        raise wrong("has an evaluator, but the run evaluates itself (--evaluate_every)", "leave it out")
    unknown = sorted(set(cluster) - set(_JOBS))
    if unknown:
        raise wrong(f"has jobs {', '.join(unknown)}", f"name {', '.join(_JOBS)} only")
    for job, of_job in cluster.items():
        if not isinstance(of_job, list) or not all(isinstance(a, str) for a in of_job):
            raise wrong(f"its job {job!r} is not a list of 'host:port'")
    if len(cluster.get("chief", [])) > 1:
        raise wrong("names more than one chief", "name one; others are workers")
    listed = [address for name in _JOBS for address in cluster.get(name, [])]
    roles = [name for name in _JOBS for _ in cluster.get(name, [])]
    addresses.check(listed, wrong)
    job, index = task.get("type"), task.get("index")
    if job not in cluster or not isinstance(index, int) or isinstance(index, bool):
        raise wrong("its task has no 'type' of the cluster's and integer 'index'")
    if not 0 <= index < len(cluster[job]):
        raise wrong(f"its task's index {index} is not in 0 to {len(cluster[job]) - 1}", "number the processes from 0")
    return Found(listed, roles.index(str(job)) + index, roles)
