"""Prints the Kubernetes manifests of a run, made from its own flags; kubectl apply -f - takes them.

python -m launch.kubernetes --image=IMAGE --processes=2 --claim=runs -- --strategy=device_mesh ...

--kind=job      headless Service, Indexed Job, NetworkPolicy: nothing but Kubernetes itself
--kind=jobset   JobSet, which restarts all processes together
--kind=trainjob Kubeflow TrainJob, and the training runtime for TensorFlow and JAX that it refers to

A pod is a process of the run. 75 (preempted, saved) starts it again and counts for nothing; 2 (the user's mistake)
ends the job at once; all else counts as a restart. --claim is the PersistentVolumeClaim that holds the run directory.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any

import yaml

from launch import flags_of
from trainer.errors import BUSY, PREEMPTED, USER_ERROR

Manifest = dict[str, Any]
_LABEL = "app.kubernetes.io/instance"


def main(argv: Sequence[str]) -> int:
    """Prints the manifests. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m launch.kubernetes", description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=("job", "jobset", "trainjob"), default="job", help="what to render")
    parser.add_argument("--image", required=True, help="image, best by digest: name@sha256:...")
    parser.add_argument("--processes", type=int, default=1, help="number of pods")
    parser.add_argument("--name", default="onecurve", type=_dns_label, help="name of the job")
    parser.add_argument("--namespace", default="default", type=_dns_label, help="namespace")
    parser.add_argument("--claim", default="", help="PersistentVolumeClaim mounted at /runs; '': nothing is kept")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of a pod")
    parser.add_argument("--cpu", default="2", help="cores of a pod")
    parser.add_argument("--memory", default="8Gi", help="memory of a pod")
    parser.add_argument("--port", type=int, default=2222, help="port of each process; they meet at the next one")
    parser.add_argument(
        "--restarts", type=int, default=5, help="restarts after a lost process; preemptions don't count"
    )
    parser.add_argument("--grace", type=int, default=120, help="seconds that a preempted pod has to save")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="-- and the flags of python -m trainer")
    arguments = parser.parse_args(argv)
    arguments.flags = _kept(parser, arguments)
    manifests = {"job": job, "jobset": jobset, "trainjob": trainjob}[arguments.kind](arguments)
    print(yaml.safe_dump_all(manifests, sort_keys=False, width=120), end="")
    return 0


def _kept(parser: argparse.ArgumentParser, run: argparse.Namespace) -> list[str]:
    """The run's flags, with a directory that outlives its pods.

    Not by the trainer's own reading of them: what they name, such as a file of flags, is in the image, not here.
    """
    flags = flags_of(run.flags)
    given = re.findall(r"(?:^|\n)--?run_dir[=\n]([^\n]*)", "\n".join(flags))
    if given and not f"{given[-1]}/".startswith("/runs/"):
        parser.error(
            f"--run_dir={given[-1]} would be gone with its pod: give one under /runs, where --claim is mounted"
        )
    if given or any(flag.lstrip("-").startswith(("flagfile", "/runs/")) for flag in flags):  # or as evaluate /runs/one
        return flags
    return [*flags, f"--run_dir=/runs/{run.name}"]


def job(run: argparse.Namespace) -> list[Manifest]:
    """Service, Indexed Job and NetworkPolicy."""
    hosts = [f"{run.name}-{i}.{run.name}" for i in range(run.processes)]
    spec = _job_spec(run, hosts, restarts=run.restarts * run.processes)
    spec["template"]["spec"]["subdomain"] = run.name
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": _metadata(run),
            # Processes look each other up before they are ready.
            "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {_LABEL: run.name}},
        },
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(run), "spec": spec},
        _network_policy(run),
    ]


def jobset(run: argparse.Namespace) -> list[Manifest]:
    """JobSet and NetworkPolicy."""
    return [
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": _metadata(run),
            "spec": _jobset_spec(run, "process"),
        },
        _network_policy(run),
    ]


def trainjob(run: argparse.Namespace) -> list[Manifest]:
    """ClusterTrainingRuntime, TrainJob and NetworkPolicy."""
    runtime = f"{run.name}-runtime"
    template = _jobset_spec(run, "node")
    pod = template["replicatedJobs"][0]["template"]["spec"]["template"]
    template["replicatedJobs"][0]["template"]["metadata"] = {
        "labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    }
    container = pod["spec"]["containers"][0]
    trainer = {
        "image": run.image,
        "command": container["command"],
        "args": container["args"],
        "env": container["env"],
        "numNodes": run.processes,
        "resourcesPerNode": container["resources"],
    }
    return [
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "ClusterTrainingRuntime",
            "metadata": {"name": runtime, "labels": {"trainer.kubeflow.org/framework": "onecurve"}},
            "spec": {"mlPolicy": {"numNodes": run.processes}, "template": {"spec": template}},
        },
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": _metadata(run),
            "spec": {"runtimeRef": {"name": runtime, "kind": "ClusterTrainingRuntime"}, "trainer": trainer},
        },
        _network_policy(run),
    ]


def _jobset_spec(run: argparse.Namespace, job_name: str) -> Manifest:
    hosts = [f"{run.name}-{job_name}-0-{i}.{run.name}" for i in range(run.processes)]
    return {
        "network": {"enableDNSHostnames": True, "subdomain": run.name, "publishNotReadyAddresses": True},
        "failurePolicy": {
            "maxRestarts": run.restarts,
            "rules": [{"name": "usererror", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
        },
        # One lost pod fails the Job, and the JobSet starts all of them again.
        "replicatedJobs": [{"name": job_name, "replicas": 1, "template": {"spec": _job_spec(run, hosts, restarts=0)}}],
    }


def _job_spec(run: argparse.Namespace, hosts: Sequence[str], restarts: int) -> Manifest:
    container = {
        "name": "node",
        "image": run.image,
        "command": ["python", "-m", "trainer"],
        "args": run.flags,
        # JOB_COMPLETION_INDEX, the process's number, is set by the Job itself.
        "env": [{"name": "ONECURVE_PROCESSES", "value": ",".join(f"{host}:{run.port}" for host in hosts)}]
        if run.processes > 1
        else [],
        "ports": [{"containerPort": port, "protocol": "TCP"} for port in (run.port, run.port + 1)],
        "resources": _resources(run),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "runs", "mountPath": "/runs"}, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": run.grace,
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "fsGroup": 1000,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            {
                "name": "runs",
                **({"persistentVolumeClaim": {"claimName": run.claim}} if run.claim else {"emptyDir": {}}),
            },
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
    return {
        "completions": run.processes,
        "parallelism": run.processes,
        "completionMode": "Indexed",
        "backoffLimit": restarts,
        "podReplacementPolicy": "Failed",  # never two processes of one number
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": "node", "operator": "In", "values": [USER_ERROR, BUSY]},
                },
                {"action": "Ignore", "onExitCodes": {"containerName": "node", "operator": "In", "values": [PREEMPTED]}},
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": {"metadata": {"labels": {_LABEL: run.name}}, "spec": pod},
    }


def _resources(run: argparse.Namespace) -> Manifest:
    wanted = {"cpu": run.cpu, "memory": run.memory}
    gpus = {"nvidia.com/gpu": str(run.gpus)} if run.gpus else {}
    return {"requests": wanted | gpus, "limits": {"memory": run.memory} | gpus}


def _network_policy(run: argparse.Namespace) -> Manifest:
    """Lets the processes talk to each other, and nobody else to them: their channels are unauthenticated."""
    own = {"podSelector": {"matchLabels": {_LABEL: run.name}}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(run),
        "spec": {**own, "policyTypes": ["Ingress"], "ingress": [{"from": [own]}]},
    }


def _metadata(run: argparse.Namespace) -> Manifest:
    return {"name": run.name, "namespace": run.namespace, "labels": {_LABEL: run.name}}


def _dns_label(text: str) -> str:
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,40}[a-z0-9])?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no DNS label: a to z, 0 to 9 and -, at most 42, a letter first")
    return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
