"""launch.slurm on a real Slurm of two nodes, started here: preempted, queued again, to the uninterrupted hash."""

import os
import pathlib
import re
import shutil
import socket
import stat
import subprocess
import sys
import time

import pytest

from tests.conftest import need
from tests.running import REPOSITORY, environment, summary, trainer

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={dir}/munge/socket,cred_expire=5
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/spool-%n
SlurmctldPidFile={dir}/slurmctld.pid
SlurmdPidFile={dir}/slurmd-%n.pid
SlurmctldLogFile={dir}/slurmctld.log
SlurmdLogFile={dir}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
JobRequeue=1
MessageTimeout=10
TCPTimeout=3
GresTypes=gpu
FirstJobId={first_job}
NodeName=DEFAULT CPUs=2 RealMemory=4000 Gres=gpu:4 State=UNKNOWN
NodeName=127.0.0.2 NodeHostname={host} NodeAddr=127.0.0.2 Port={node_port_1}
NodeName=127.0.0.3 NodeHostname={host} NodeAddr=127.0.0.3 Port={node_port_2}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
ASKING = """
import os, keras
from jax._src import xla_bridge

def build(input_shape, classes):
    gpus = os.environ["CUDA_VISIBLE_DEVICES"].replace(",", ", ")
    print("takes", gpus, "of", xla_bridge.CUDA_VISIBLE_DEVICES.value, flush=True)
    return keras.Sequential([keras.Input(input_shape), keras.layers.Flatten(), keras.layers.Dense(classes)])
"""
TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "sinfo")


@pytest.fixture
def slurm():
    """Environment in which sbatch and its kin speak to a Slurm of two nodes on loopback."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
    missing = [tool for tool in TOOLS if not shutil.which(tool, path=path)]
    need(not missing, f"no {', '.join(missing)}: apt-get install slurmctld slurmd slurm-client munge")
    need(os.getuid() == 0, "its daemons are started as root")
    directory = pathlib.Path("/tmp", f"slurm{os.getpid()}")  # short: the path of a socket has a limit
    for name in ("munge", "state", "spool-127.0.0.2", "spool-127.0.0.3"):
        (directory / name).mkdir(parents=True, mode=0o755)
    (directory / "munge").chmod(0o700)
    (directory / "munge" / "key").write_bytes(os.urandom(128))
    (directory / "munge" / "key").chmod(0o600)
    for i in range(4):  # what Slurm takes for GPUs; nothing answers behind them
        os.mknod(directory / f"nvidia{i}", 0o600 | stat.S_IFCHR, os.makedev(195, i))
    gpus = (f"NodeName={node} Name=gpu File={directory}/nvidia[0-3]\n" for node in ("127.0.0.2", "127.0.0.3"))
    (directory / "gres.conf").write_text("".join(gpus))
    port = 7100 + os.getpid() % 500 * 4
    numbers = {"port": port, "node_port_1": port + 1, "node_port_2": port + 2}
    # A job's number says which ports its processes take, and another worker's Slurm has its nodes on this machine, too.
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    numbers["first_job"] = 100 * worker + 1
    configuration = directory / "slurm.conf"
    configuration.write_text(CONFIGURATION.format(dir=directory, host=socket.gethostname(), **numbers))
    env = environment(SLURM_CONF=str(configuration), PATH=path)
    del env["CUDA_VISIBLE_DEVICES"]  # which is Slurm's to say
    munge = directory / "munge"
    daemons = [
        start(env, "munged", "--foreground", "--force", f"--key-file={munge}/key", f"--socket={munge}/socket",
              f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed"),
    ]  # fmt: skip
    wait_until(lambda: (munge / "socket").exists())
    daemons.append(start(env, "slurmctld", "-D"))
    daemons += [start(env, "slurmd", "-D", "-N", node) for node in ("127.0.0.2", "127.0.0.3")]
    wait_until(lambda: len(said(env, "sinfo", "-h", "-N", "-t", "idle").splitlines()) == 2)
    yield env
    subprocess.run(["scancel", "--user=root"], env=env, check=False, capture_output=True)
    for daemon in reversed(daemons):
        daemon.terminate()
    for daemon in daemons:
        try:
            daemon.wait(timeout=10)
        except subprocess.TimeoutExpired:
            daemon.kill()
    shutil.rmtree(directory, ignore_errors=True)


def start(env, *command):
    return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def said(env, *command) -> str:
    return subprocess.run(command, env=env, check=False, capture_output=True, text=True).stdout


def wait_until(true, seconds: float = 60.0, log: pathlib.Path | None = None) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, log.read_text() if log else ""
        time.sleep(0.1)


@pytest.mark.parametrize("backend", ["jax", pytest.param("tensorflow", marks=pytest.mark.long)])
def test_a_preempted_job_is_queued_again_and_ends_on_the_uninterrupted_hash(backend, slurm, tmp_path):
    strategy = {"tensorflow": "multi_worker_mirrored", "jax": "device_mesh"}[backend]
    flags = ("--model=dense", "--replicas=2", "--exact", "--steps=1500", "--save_every=100", "--evaluate_every=never")
    log, run = tmp_path / "log", tmp_path / "run"
    options = ("--nodes=2", "--time=10", f"--output={log}")
    command = [
        sys.executable,
        "-m",
        "launch.slurm",
        *options,
        "--",
        f"--strategy={strategy}",
        *flags,
        f"--run_dir={run}",
    ]
    sent = subprocess.run(command, env=slurm, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert "Submitted batch job" in sent.stdout, sent
    job = sent.stdout.split()[-1]
    wait_until(lambda: any((run / "checkpoints").glob("[0-9]*")), 120, log)
    assert said(slurm, "scancel", "--signal=TERM", f"{job}.0") == ""
    wait_until(lambda: "again: yes" in log.read_text(), log=log)
    assert "exit code 75 after start 1; again: yes" in log.read_text()
    wait_until(lambda: (run / "summary.json").exists(), 180, log)
    wait_until(lambda: "after start 2" in log.read_text())
    assert "exit code 0 after start 2; again: no" in log.read_text()
    assert "restored from" in log.read_text()
    trainer(f"--backend={backend}", *flags, f"--run_dir={tmp_path / 'whole'}")
    assert summary(run)["weights_sha256"] == summary(tmp_path / "whole")["weights_sha256"]


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        (("--gres=gpu:4",), ("0, 1", "2, 3")),  # each task sees all that the job has on the node
        (("--gpus-per-task=1",), ("0", "1")),  # each is bound to its own
        pytest.param(("--gres=gpu:4", "--gpu-bind=map_gpu:3,2"), ("3", "2"), marks=pytest.mark.long),
        pytest.param(("--gpus-per-task=2", "--gpu-bind=none"), ("0, 1", "2, 3"), marks=pytest.mark.long),
        (("--nodes=2", "--ntasks-per-node=1", "--gres=gpu:4"), ("0, 1, 2, 3", "0, 1, 2, 3")),
    ],
)
def test_processes_take_the_gpus_that_slurm_gives_them(options, taken, slurm, tmp_path):
    """No two the same, and all of them. JAX alone would have each take the one of its place on the node."""
    (tmp_path / "asking.py").write_text(ASKING)
    options = ("--nodes=1", "--ntasks-per-node=2", *options)
    flags = ("--strategy=device_mesh", "--model=asking:build", "--steps=1", f"--run_dir={tmp_path / 'run'}")
    command = ["srun", "--wait=30", *options, sys.executable, "-m", "trainer", *flags]
    ran = subprocess.run(command, env=slurm, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert sorted(re.findall("takes (.*) of (.*)", ran.stdout)) == sorted((gpus, "all") for gpus in taken)


@pytest.mark.long
def test_tasks_that_are_dealt_out_in_turn_are_refused(slurm):
    """Each would take another for itself: Slurm tells a task of no other's node."""
    command = ["srun", "--nodes=2", "--ntasks-per-node=2", "--distribution=cyclic", sys.executable, "-m", "trainer"]
    ran = subprocess.run([*command, "doctor"], env=slurm, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert "SLURM_DISTRIBUTION=cyclic: has task 1 on 127.0.0.3" in ran.stderr and "--distribution=block" in ran.stderr


def test_the_script_can_be_seen_without_slurm():
    command = [
        sys.executable,
        "-m",
        "launch.slurm",
        "--nodes=4",
        "--gpus_per_task=1",
        "--cpus_per_task=6",
        "--tasks_per_node=8",
        "--dry_run",
    ]
    flags = ["--", "--model=mlp(name='a b')", "--run_dir=/shared/run"]
    ran = subprocess.run([*command, *flags], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    for line in ("--nodes=4", "--ntasks-per-node=8", "--gpus-per-node=8", "--requeue", "--signal=TERM@120"):
        assert f"#SBATCH {line}\n" in ran.stdout
    assert "\nsrun --cpus-per-task=6 --kill-on-bad-exit=0 " in ran.stdout
    assert """-m trainer '--model=mlp(name='"'"'a b'"'"')' --run_dir=/shared/run\n""" in ran.stdout
    subprocess.run(["bash", "-n"], input=ran.stdout, text=True, check=True)
