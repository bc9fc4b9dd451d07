"""launch.kubernetes: its manifests against the real schemas, what those can't know, and the pods' environment."""

import json
import re
import subprocess
import sys

import pytest
import yaml

from tests.running import REPOSITORY
from trainer.cluster import resolve

KINDS = ("job", "jobset", "trainjob")


def rendered(
    *options: str, kind: str = "job", processes: int = 3, directory: tuple[str, ...] = ("--run_dir=/runs/one",)
) -> dict[str, dict]:
    """Manifests by their kind."""
    command = [sys.executable, "-m", "launch.kubernetes", "--image=a/b@sha256:0", f"--kind={kind}"]
    flags = ["--", "--strategy=device_mesh", *directory, "--model=mlp(units=8)"]
    ran = subprocess.run(
        [*command, f"--processes={processes}", *options, *flags],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    return {manifest["kind"]: manifest for manifest in yaml.safe_load_all(ran.stdout)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [(), ("--claim=runs", "--gpus=2", "--name=my-run", "--namespace=ml")])
def test_manifests_fit_the_schemas(kind, options):
    import kubeflow_trainer_api.models as kubeflow
    import kubernetes_validate

    models = {
        "JobSet": kubeflow.JobsetV1alpha2JobSet,
        "TrainJob": kubeflow.TrainerV1alpha1TrainJob,
        "ClusterTrainingRuntime": kubeflow.TrainerV1alpha1ClusterTrainingRuntime,
    }
    seen = rendered(*options, kind=kind)
    for name, manifest in seen.items():
        if name in models:
            # Unknown fields are dropped in silence: what comes back must be what went in.
            again = models[name].from_dict(manifest).to_dict()
            assert comparable(again) == comparable(manifest), name
        else:
            kubernetes_validate.validate(manifest, "1.32", strict=True)
    for job in jobs(seen):
        kubernetes_validate.validate(
            {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": job}, "1.32", strict=True
        )


def comparable(value):
    """Without empty values, which a model may leave out, and with numbers as text, which a quantity may be."""
    if isinstance(value, dict):
        return {k: comparable(v) for k, v in value.items() if v not in ({}, [], None)}
    if isinstance(value, list):
        return [comparable(v) for v in value]
    return value if isinstance(value, bool) else str(value)


def jobs(manifests: dict[str, dict]) -> list[dict]:
    """The specs of all Jobs that the manifests come to."""
    found = [manifests["Job"]["spec"]] if "Job" in manifests else []
    for name, path in (("JobSet", ("spec",)), ("ClusterTrainingRuntime", ("spec", "template", "spec"))):
        if name in manifests:
            spec = manifests[name]
            for key in path:
                spec = spec[key]
            found += [job["template"]["spec"] for job in spec["replicatedJobs"]]
    return found


def test_a_run_outlives_its_pods():
    def arguments(*directory):
        (spec,) = jobs(rendered("--name=two", directory=directory))
        return spec["template"]["spec"]["containers"][0]["args"]

    assert arguments() == ["--strategy=device_mesh", "--model=mlp(units=8)", "--run_dir=/runs/two"]
    assert arguments("--run_dir", "/runs/x").count("/runs/x") == 1
    assert "--run_dir=/runs/two" not in arguments("evaluate", "/runs/x")
    assert "--run_dir=/runs/two" not in arguments("--flagfile=/app/launch/recipes/digits.flags")
    with pytest.raises(subprocess.CalledProcessError) as wrong:
        arguments("--run_dir=runs/x")
    assert wrong.value.returncode == 2 and "--run_dir=runs/x would be gone with its pod" in wrong.value.stderr


def test_a_typo_is_found():
    """That the checks of the schemas can fail."""
    import kubernetes_validate

    manifest = rendered()["Job"]
    manifest["spec"]["completionmode"] = "Indexed"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, "1.32", strict=True)


@pytest.mark.parametrize("kind", KINDS)
def test_what_schemas_do_not_know(kind):
    manifests = rendered("--name=my-run", kind=kind)
    (job,) = jobs(manifests)
    pod = job["template"]["spec"]
    assert job["completions"] == job["parallelism"] == 3 and job["completionMode"] == "Indexed"
    assert pod["restartPolicy"] == "Never"  # what a Job with a podFailurePolicy must have
    assert pod["securityContext"]["runAsNonRoot"]
    rules = job["podFailurePolicy"]["rules"]
    by_code = {code: rule["action"] for rule in rules for code in rule.get("onExitCodes", {}).get("values", ())}
    assert by_code[75] == "Ignore" and by_code[2] == "FailJob" and 69 not in by_code and 1 not in by_code
    if kind == "job":
        service = manifests["Service"]
        assert service["metadata"]["name"] == pod["subdomain"] and service["spec"]["clusterIP"] == "None"
        assert service["spec"]["selector"].items() <= job["template"]["metadata"]["labels"].items()
    policy = manifests["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]
    assert policy.items() <= job["template"]["metadata"]["labels"].items()
    for name in (m["metadata"]["name"] for m in manifests.values()):
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)


@pytest.mark.parametrize(
    ("kind", "host"), [("job", "r-{}.r"), ("jobset", "r-process-0-{}.r"), ("trainjob", "r-node-0-{}.r")]
)
def test_pods_find_each_other(kind, host):
    """The environment of each pod, as its controller completes it, gives the cluster of the pods' own names."""
    manifests = rendered("--name=r", kind=kind)
    env = jobs(manifests)[0]["template"]["spec"]["containers"][0]["env"]
    if kind == "trainjob":
        assert manifests["TrainJob"]["spec"]["trainer"]["env"] == env
    for index in range(3):
        cluster = resolve("", {e["name"]: e["value"] for e in env} | {"JOB_COMPLETION_INDEX": str(index)})
        assert cluster.addresses == tuple(f"{host.format(i)}:2222" for i in range(3))
        assert cluster.index == index


def test_one_process_needs_no_cluster():
    assert jobs(rendered(processes=1))[0]["template"]["spec"]["containers"][0]["env"] == []


def test_kubeflow_s_own_variables_are_understood():
    env = {"JAX_COORDINATOR_ADDRESS": "j-node-0-0.j:29500", "JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": "2"}
    cluster = resolve("", env)
    assert cluster.addresses == ("j-node-0-0.j:29500", "?:29501", "?:29502") and not cluster.is_complete
    assert cluster.index == 2
    config = {
        "cluster": {"chief": ["t-chief-0:2222"], "worker": ["t-worker-0:2222"]},
        "task": {"type": "worker", "index": 0},
    }
    assert resolve("", env | {"TF_CONFIG": json.dumps(config)}).index == 1  # TF_CONFIG goes before


def test_a_bad_name_is_refused():
    command = [sys.executable, "-m", "launch.kubernetes", "--image=x", "--name=My_Run", "--", "--steps=1"]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert ran.returncode == 2 and "no DNS label" in ran.stderr
