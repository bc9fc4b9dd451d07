"""Processes started by what others have: mpirun, torchrun, and what names a TPU slice's hosts, or SkyPilot's."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from launch.local import free_ports
from tests.conftest import need
from tests.lab import lab
from tests.running import REPOSITORY, environment, start, summary, trainer
from trainer.cluster import resolve
from trainer.errors import UserError

MAKES = {"mpirun.openmpi": "openmpi-bin", "mpirun.mpich": "mpich"}
FLAGS = ("--strategy=device_mesh", "--replicas=2", "--steps=30")
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1"}


def python() -> str:
    """A folder whose `python` is ours, for commands as they are in the docs."""
    return os.path.dirname(sys.executable)


@pytest.mark.parametrize(("mpirun", "package"), MAKES.items())
def test_runs_of_mpirun_that_share_a_host(mpirun, package, tmp_path):
    need(shutil.which(mpirun), f"no {mpirun} here; on Debian: apt-get install {package}")
    command = [mpirun, "-np", "2", sys.executable, "-m", "trainer", *FLAGS]
    pipe = subprocess.PIPE
    runs = [tmp_path / name for name in ("first", "second")]
    started = [
        subprocess.Popen(
            [*command, f"--run_dir={run}"], cwd=REPOSITORY, env=environment(**ROOT), stdout=pipe, stderr=pipe, text=True
        )
        for run in runs
    ]
    for run, process in zip(runs, started, strict=True):
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert summary(run)["step"] == 30


def test_mpirun_over_several_hosts_as_the_docs_have_it(tmp_path):
    need(shutil.which("mpirun.openmpi"), "no Open MPI here; on Debian: apt-get install openmpi-bin")
    text = (REPOSITORY / "docs" / "clusters.md").read_text()
    found = re.search(r"```bash\n(# mpi\.sh.*?)```", text, re.DOTALL)
    assert found
    agent, flags = tmp_path / "agent", f"{' '.join(FLAGS)} --run_dir={tmp_path / 'run'}"
    with lab(2) as hosts:
        there = hosts.on(1, ["sh", "-c", '"$*"'])
        agent.write_text(f"#!/bin/sh\nshift\nexec {' '.join(there)}\n")  # as in: ssh HOST COMMAND...
        agent.chmod(0o755)
        where = f"--host {','.join(hosts.addresses)} --mca plm rsh --mca plm_rsh_agent {agent} -x PATH"
        script = (
            found[1]
            .replace("$(hostname)", hosts.addresses[0])
            .replace("mpirun ", f"mpirun.openmpi {where} ")
            .replace("--strategy=device_mesh", flags)
        )
        path = {"PATH": f"{python()}:{os.environ['PATH']}"}
        run = hosts.start(0, ["bash", "-euc", script], **ROOT | path)
        said, _ = run.communicate(timeout=120)
    assert run.returncode == 0, said
    assert said.count("2 virtual CPU devices") == 1 and summary(tmp_path / "run")["step"] == 30


@pytest.mark.parametrize(
    ("hosts", "number", "named", "numbers"),
    [
        pytest.param("TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID", "127.0.0.2,127.0.0.3", "01", marks=pytest.mark.long),
        pytest.param("SKYPILOT_NODE_IPS", "SKYPILOT_NODE_RANK", "127.0.0.4\n127.0.0.5", "01", marks=pytest.mark.long),
        ("SM_HOSTS", "SM_CURRENT_HOST", '["127.0.0.6","127.0.0.7"]', ("127.0.0.6", "127.0.0.7")),
    ],
)
def test_hosts_that_are_named(hosts, number, named, numbers, tmp_path):
    """Each on hosts of its own: these starters name no ports, so that two runs at once would meet at the same ones."""
    told = {hosts: named}
    processes = [start(*FLAGS, f"--run_dir={tmp_path / 'run'}", **told, **{number: i}) for i in numbers]
    for process in processes:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    trainer(*FLAGS, "--devices=2", f"--run_dir={tmp_path / 'alone'}")
    assert summary(tmp_path / "run")["weights_sha256"] == summary(tmp_path / "alone")["weights_sha256"]
    assert "this process's number ''" in trainer(*FLAGS, f"--run_dir={tmp_path / 'run'}", code=2, **told).stderr
    other = trainer("report", f"--run_dir={tmp_path / 'run'}", **told, **{number: numbers[1]})
    assert not other.stdout and f"process 1 of 2, as {hosts} says: process 0 does 'report'" in other.stderr
    assert "report.html" in trainer("report", f"--run_dir={tmp_path / 'run'}", **told, **{number: numbers[0]}).stdout
    assert resolve("", {hosts: "one"}).size == 1


def test_jobs_of_skypilot_that_share_hosts_have_ports_of_their_own():
    def ports(job: str, rank: int) -> list[str]:
        told = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_TASK_ID": job}
        return [address.rpartition(":")[2] for address in resolve("", told).addresses]

    jobs = [ports(f"sky-2026-11-28-10-00-00-000000_cluster_{i}", 0) for i in range(3)]
    assert len({port for job in jobs for port in job}) == 6
    assert jobs[0] == ports("sky-2026-11-28-10-00-00-000000_cluster_0", 1)


def test_slices_of_which_none_knows_the_others_are_told(tmp_path):
    told = {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "0", "MEGASCALE_NUM_SLICES": "2"}
    err = trainer(*FLAGS, f"--run_dir={tmp_path / 'run'}", code=2, **told).stderr
    assert "TPU_WORKER_HOSTNAMES" in err and "one slice of several" in err


def test_what_torchrun_tells(tmp_path):
    """With its variables alone, for torch is no package of ours."""
    told = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    processes = [start(*FLAGS, f"--run_dir={tmp_path / 'run'}", RANK=str(i), **told) for i in range(2)]
    for process in processes:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    assert summary(tmp_path / "run")["step"] == 30
    of_two_hosts = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "RANK": "0"}
    err = trainer(*FLAGS, f"--run_dir={tmp_path / 'run'}", code=2, **of_two_hosts).stderr
    assert "torchrun tells no process of several hosts where the others are" in err and "set MASTER_ADDR" in err
    assert resolve("", told).size == 1, "one that no starter has numbered"


@pytest.mark.parametrize("strategy", ["device_mesh", pytest.param("multi_worker_mirrored", marks=pytest.mark.long)])
def test_processes_of_several_hosts_that_know_that_of_the_first(strategy, tmp_path):
    """As torchrun's do; process 0 may know its own host as no other does, as in Kubeflow's PyTorchJob."""
    run = tmp_path / "run"
    flags = (f"--strategy={strategy}", "--model=dense", "--replicas=4", "--steps=30", f"--run_dir={run}")

    def all_say(*words: str) -> list[str]:
        told = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": "29500"}
        command = [sys.executable, "-m", "trainer", *words, *flags]
        first = {"MASTER_ADDR": "localhost"}
        started = [hosts.start(i // 2, command, RANK=str(i), **told | (first if not i else {})) for i in range(4)]
        said = [process.communicate(timeout=180)[0] for process in started]
        assert [process.returncode for process in started] == [0] * 4, said
        return said

    with lab(2) as hosts:
        for said in all_say("doctor"):
            found = re.findall(r"process (\d): ([\d.]+):", said)
            assert found == [(str(i), hosts.addresses[i // 2]) for i in range(4)], said
        all_say()
    alone = tmp_path / "alone"
    trainer(*flags[1:-1], "--backend=" + ("jax" if strategy == "device_mesh" else "tensorflow"), f"--run_dir={alone}")
    assert summary(run)["weights_sha256"] == summary(alone)["weights_sha256"]


@pytest.mark.parametrize("told", ["--cluster", pytest.param("JAX_COORDINATOR_ADDRESS", marks=pytest.mark.long)])
def test_processes_that_are_told_the_address_of_the_first(told, tmp_path):
    run, first = tmp_path / "run", f"127.0.0.1:{free_ports(1)[0]}"
    processes = []
    for index in range(2):
        flag = [f"--cluster={index}/2@{first}"] if told == "--cluster" else []
        variables = {"JAX_COORDINATOR_ADDRESS": first, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(index)}
        processes.append(start(*FLAGS, *flag, f"--run_dir={run}", **({} if flag else variables)))
    for process in processes:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    trainer(*FLAGS, "--devices=2", f"--run_dir={tmp_path / 'alone'}")
    assert summary(run)["weights_sha256"] == summary(tmp_path / "alone")["weights_sha256"]
    assert json.loads(next((run / "starts").glob("*.json")).read_text())["devices"] == 2


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("2/2@a:2222", "number '2' is not in 0 to 1"),
        ("0/two@a:2222", "'two' is no number of processes"),
        ("0/2@a", "'a' is not host:port"),
        ("0/2@a:2222,b:2222", "is not host:port"),
    ],
)
def test_what_is_wrong_with_a_first_address(flag, told):
    with pytest.raises(UserError, match=told):
        resolve(flag, {})


def test_numbers_that_are_none():
    with pytest.raises(UserError, match="WORLD_SIZE, RANK"):
        resolve("", {"WORLD_SIZE": "two", "RANK": "0"})


def test_doctor_tells_what_it_found_where_somebody_does_not_come(tmp_path):
    cluster = f"--cluster=0/2@127.0.0.1:{free_ports(1)[0]}"
    flags = ("--strategy=device_mesh", cluster, "--hang_after=3s", f"--run_dir={tmp_path / 'run'}")
    out = trainer("doctor", *flags, code=69).stdout
    assert "process 1 did not come" in out and "wrong: meeting" in out and "ok  run directory" in out
