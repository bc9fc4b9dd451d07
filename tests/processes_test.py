"""Several processes: the one-device bits, no hang when one dies, and restarts that carry the run to its end."""

import dataclasses
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

from input_pipeline.cores import allowed, cores, share
from launch.local import free_ports
from tests.conftest import need
from tests.forks import trainer
from tests.lab import container
from tests.running import REPOSITORY, curve, deviation, environment, finished, launch, lines, stall, start, summary
from trainer.cluster import Cluster, resolve
from trainer.errors import UserError
from trainer.processes import gpus
from trainer.processes.connection import listen
from trainer.processes.slurm import expand_nodes

STRATEGY = {"tensorflow": "multi_worker_mirrored", "jax": "device_mesh"}
FLAGS = ("--replicas=4", "--global_batch=80", "--log_every=5", "--evaluate_every=never")


MODELS = {
    "dense": (),
    "mlp": ("--optimizer=sgd",),  # with adam, a relu's kink may part curves of other sums: docs/decisions.md
    "convnet": ("--optimizer=sgd",),
    "transformer": ("--dataset=text(context=32)", "--global_batch=16"),
}
SMALL = {"transformer": "transformer(width=64,depth=2,heads=4,groups=2,hidden=128)"}


@pytest.mark.parametrize("backend", STRATEGY)
@pytest.mark.parametrize(
    ("model", "processes"),
    [("dense", 2), *(pytest.param(m, n, marks=pytest.mark.long) for m in MODELS for n in (1, 2, 4) if m != "dense")],
)
def test_processes_don_t_show_in_the_bits(backend, model, processes, tmp_path):
    """Uneven data, and the evaluation's rest; on JAX two processes have two devices each. Also without --exact."""
    flags = (
        *FLAGS[:2],
        f"--model={SMALL.get(model, model)}",
        *MODELS[model],
        "--steps=25",
        "--log_every=5",
        "--evaluate_every=never",
    )
    one, many, fast = tmp_path / "one", tmp_path / "many", tmp_path / "fast"
    trainer(f"--backend={backend}", *flags, "--exact", f"--run_dir={one}")
    devices = 4 if (backend, processes) == ("jax", 2) else processes
    where = (f"--strategy={STRATEGY[backend]}", f"--devices={devices}")
    proxy = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy")}  # nobody is there
    out = finished(launch(*where, *flags, "--exact", f"--run_dir={many}", processes=processes, **proxy))
    assert summary(many)["weights_sha256"] == summary(one)["weights_sha256"]
    assert summary(many)["final"] == summary(one)["final"]
    assert not re.search(r"\[1\].* loss ", out)  # one process speaks
    if model != "dense":
        finished(launch(*where, *flags, f"--run_dir={fast}", processes=processes))
        assert deviation(curve(fast), curve(one)) <= 1e-5


# By sgd where units have kinks: Adam can make percents of a difference in rounding (docs/decisions.md).
DENSE = ("--model=dense", '--layout=[["dense/hidden/kernel", [null, "model"]]]')
TRANSFORMER = (
    "--model=transformer(width=64,depth=2,heads=4,groups=2,hidden=128)",
    "--dataset=text(context=32)",
    "--optimizer=sgd",
    "--layout=megatron",
)


MLP = ("--model=mlp", "--optimizer=sgd", '--layout=[["mlp/dense_0/kernel", [null, "model"]]]')
CONVNET = (
    "--model=convnet",
    "--optimizer=sgd",
    '--layout=[["conv_1/kernel", [null, null, null, "model"]]]',
)
SLOTS = ("--model=mlp(units=512)", "--optimizer=sgd(momentum=0.9)", "--layout=zero1")


@pytest.mark.parametrize(
    ("processes", "what"),
    [
        (2, DENSE),
        pytest.param(4, DENSE, marks=pytest.mark.long),
        *(pytest.param(n, what, marks=pytest.mark.long) for what in (TRANSFORMER, MLP, CONVNET, SLOTS) for n in (2, 4)),
    ],
)
def test_a_layout_over_processes(processes, what, tmp_path):
    """The axis of the shares runs across processes: trained, evaluated, saved, and continued by one process alone."""
    *what, layout = what
    flags = (*FLAGS[:2], *what, "--log_every=5", "--evaluate_every=never", "--save_every=10")
    one, many = tmp_path / "one", tmp_path / "many"
    trainer("--backend=jax", *flags, "--steps=40", f"--run_dir={one}")
    axes = f"data={processes // 2},model=2" if "model" in layout or "megatron" in layout else f"data={processes}"
    mesh = (f"--mesh={axes}", layout)
    finished(launch("--strategy=device_mesh", *mesh, *flags, "--steps=20", f"--run_dir={many}", processes=processes))
    out = finished(
        launch("--strategy=device_mesh", *mesh, *flags, "--steps=30", f"--run_dir={many}", processes=processes)
    )
    assert "restored from" in out
    # Each process has written its own shards, and no one the whole.
    newest = many / "checkpoints" / "00000030"
    assert sorted(p.name for p in newest.iterdir())[1:] == [f"shards-{i:05d}.bin" for i in range(processes)]
    assert "whole" in trainer("checkpoints", f"--run_dir={many}").stdout
    trainer("--backend=jax", *flags, "--steps=40", f"--run_dir={many}")
    assert len(curve(many)) == 8 and deviation(curve(many), curve(one)) <= 1e-5
    assert "not compared, for other processes" in trainer("diff", str(one), str(many), code=1).stdout


@pytest.mark.parametrize("backend", STRATEGY)
@pytest.mark.parametrize(
    ("different", "named"),
    [
        ("--learning_rate=0.01", "--learning_rate"),
        ("--dataset=synthetic", "--dataset"),
        ("absl-py 0.1", "the version of absl-py"),
    ],
)
def test_processes_that_differ_are_told(backend, different, named, tmp_path):
    """Both end with the user's exit code, naming process and key, before anything is trained."""
    workers = [f"127.0.0.1:{port}" for port in free_ports(2)]
    processes = []
    for index in range(2):
        task = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
        flags = [f"--strategy={STRATEGY[backend]}", f"--run_dir={tmp_path / 'run'}"]
        env = {"TF_CONFIG": json.dumps(task)}
        if index and different.startswith("--"):
            flags.append(different)
        elif index:  # metadata of another version, found before the environment's
            package, version = different.split()
            (tmp_path / f"{package.replace('-', '_')}-{version}.dist-info").mkdir()
            metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
            (tmp_path / f"{package.replace('-', '_')}-{version}.dist-info/METADATA").write_text(metadata)
            env["PYTHONPATH"] = f"{tmp_path}:{REPOSITORY}"
        processes.append(start(*flags, **env))
    for process in processes:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 2, err
        assert f"process 1 differs from process 0 in {named}" in err
    assert not (tmp_path / "run" / "definition.json").exists()


@pytest.mark.parametrize("file", ["trainer/step.py", "trainer/strategies/exact.py", "input_pipeline/order.py"])
def test_processes_with_other_code_are_told(file, tmp_path):
    for package in ("trainer", "input_pipeline"):
        shutil.copytree(REPOSITORY / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / file).write_text(f"{(REPOSITORY / file).read_text()}\n# changed\n")
    cluster = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
    flags = ("--strategy=device_mesh", "--steps=10", f"--run_dir={tmp_path / 'run'}")
    places = (REPOSITORY, tmp_path)
    for process in [start(*flags, f"--cluster={i}@{cluster}", cwd=place) for i, place in enumerate(places)]:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 2 and "process 1 differs from process 0 in the code of the trainer" in err, err


def test_processes_that_would_begin_with_other_variables_are_told(tmp_path):
    """By what a model draws for itself, its order, or what lies under one name on each host: nothing is trained."""
    for index in range(2):
        (host := tmp_path / str(index)).mkdir()
        trainer("--backend=jax", "--steps=10", f"--seed={index}", f"--run_dir={host / 'before'}")
    others = "begins with other variables in process 1 than in process 0"
    for flags, told in {
        ("--model=tests.faulty:unseeded",): others,
        ("--model=tests.faulty:unseeded", "--layout=fsdp"): others,  # each would keep a part of its own
        ("--model=tests.faulty:in_any_order",): "differs from process 0 in the model's layers (does build() go through",
        ("--model=tests.faulty:of_any_width", "--strategy=multi_worker_mirrored"): "build different variables",
        ("--initialize_from=before",): "differs from process 0 in the checkpoint of --initialize_from: 00000010",
    }.items():
        cluster = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
        flags = ("--strategy=device_mesh", "--steps=10", f"--run_dir={tmp_path / 'run'}", *flags)
        hosts = [(f"--cluster={i}@{cluster}", tmp_path / str(i), {"PYTHONHASHSEED": str(i)}) for i in range(2)]
        for process in [start(*flags, which, cwd=host, **env) for which, host, env in hosts]:
            _, err = process.communicate(timeout=120)
            assert process.returncode == 2 and told in err, err
        shutil.rmtree(tmp_path / "run")


MEMBER = """
import sys
import time

from trainer.cluster import Cluster
from trainer.peers import Peers

index, *addresses = sys.argv[1:]
with Peers(Cluster(tuple(addresses), int(index), "a test"), 120.0) as peers:
    peers.all_started()
    for turn in range(3):
        assert peers.gather([turn, peers.cluster.index]) == [[turn, i] for i in range(len(addresses))]
    print("met", flush=True)
    time.sleep(60)
"""


def test_forty_processes_meet_and_one_dies():
    """As processes of a run do, without a backend: all learn at once which was lost."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(40)]
    command, pipes = [sys.executable, "-c", MEMBER], {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    members = [
        subprocess.Popen([*command, str(i), *addresses], env=environment(), text=True, **pipes) for i in range(40)
    ]
    assert all(member.stdout.readline() == "met\n" for member in members)
    members[17].kill()
    begin = time.monotonic()
    told = [member.communicate(timeout=60)[1] for member in members]
    assert time.monotonic() - begin < 10 and [member.returncode for member in members] == [69] * 17 + [-9] + [69] * 22
    assert all("process 17 failed first" in words for i, words in enumerate(told) if i != 17)


def test_processes_share_the_cores_of_their_host(tmp_path):
    """To read data by; but where a scheduler has given each its own, it has these."""
    flags = ("--strategy=device_mesh", "--replicas=2", "--steps=5", "--dataset=tests.faulty:says_cores")
    out = finished(launch(*flags, f"--run_dir={tmp_path}"))
    whole, ours = cores(), allowed()
    assert out.count(f"cores: {max(1, whole // 2)}\n") == 2
    try:
        share(ours, [ours, [max(ours) + 1]])
        assert cores() == whole
    finally:
        share(ours, [ours])


def test_a_container_s_share_of_time_is_how_many_cores_it_has():
    quota = {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "90000"}
    with container("cpu", quota, {"cpu.max": "90000 100000"}) as group:
        command = f"{sys.executable} -c 'from input_pipeline.cores import cores; print(cores())'"
        asked = f"echo $$ > {group}/cgroup.procs; exec {command}"
        ran = subprocess.run(["sh", "-c", asked], cwd=REPOSITORY, env=environment(), capture_output=True, text=True)
        assert ran.stdout == "1\n", ran.stderr


def test_the_memory_of_a_job_is_what_its_group_may_hold(tmp_path):
    """Though its files lie below the machine's own, as a Slurm job's do; what it keeps of files is free."""
    program = f"""
import pathlib
from trainer.monitoring import host_memory
pathlib.Path({str(tmp_path / "data")!r}).write_bytes(bytes(150 * 2**20))
print(host_memory.read().whole, host_memory.read().is_scarce)
held = bytearray(b"1") * (185 * 2**20)
print(host_memory.read().is_scarce)
"""
    limit = str(200 * 2**20)
    with container("memory", {"memory.limit_in_bytes": limit}, {"memory.max": limit}) as group:
        asked = f'echo $$ > {group}/cgroup.procs; exec {sys.executable} -c "$PROGRAM"'
        given = environment() | {"PROGRAM": program}
        ran = subprocess.run(["sh", "-c", asked], cwd=REPOSITORY, env=given, capture_output=True, text=True)
        assert ran.stdout == f"{limit} False\nTrue\n", ran.stderr


def test_a_callback_of_one_process_ends_the_run_of_all(tmp_path):
    flags = ("--strategy=device_mesh", *FLAGS, "--steps=60", "--callbacks=tests.faulty:EndsOne(step=20)")
    finished(launch(*flags, f"--run_dir={tmp_path}"))
    assert summary(tmp_path)["status"] == "stopped by a callback" and summary(tmp_path)["step"] == 20


@pytest.mark.long
def test_variables_of_types_that_tensorflow_does_not_broadcast(tmp_path):
    flags = ("--model=tests.counting", "--precision=bfloat16", "--replicas=2", "--steps=20")
    trainer(*flags, f"--run_dir={tmp_path / 'one'}")
    finished(launch("--strategy=multi_worker_mirrored", *flags, f"--run_dir={tmp_path / 'two'}"))
    assert summary(tmp_path / "one")["weights_sha256"] == summary(tmp_path / "two")["weights_sha256"]


@pytest.mark.parametrize("backend", ["jax", pytest.param("tensorflow", marks=pytest.mark.long)])
def test_addresses_of_version_six(backend, tmp_path):
    need(socket.has_dualstack_ipv6(), "this machine has no IPv6")
    addresses = ",".join(f"[::1]:{port}" for port in free_ports(2))
    flags = (f"--strategy={STRATEGY[backend]}", "--steps=10", "--replicas=2", f"--run_dir={tmp_path / 'run'}")
    processes = [start(*flags, f"--cluster={index}@{addresses}") for index in range(2)]
    for process in processes:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    assert summary(tmp_path / "run")["step"] == 10


@pytest.mark.long
def test_an_evaluation_is_broken_off_by_a_signal_to_one_process(tmp_path):
    """At an epoch's end: nothing that was due there is left out, or done twice, when one process goes on."""
    flags = ("--strategy=device_mesh", "--model=mlp", "--replicas=2", "--steps=40", "--log_every=10")
    flags += ("--dataset=synthetic(examples=2000, evaluation_examples=400000)", "--save_every=never")
    flags += ("--callbacks=ReduceLROnPlateau(patience=1, factor=0.5, min_delta=100)",)  # at each end but the first
    whole, run = tmp_path / "whole", tmp_path / "run"
    trainer(*flags, f"--run_dir={whole}")
    addresses = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
    processes = [start(*flags, f"--run_dir={run}", f"--cluster={index}@{addresses}") for index in range(2)]
    while not (run / "metrics.jsonl").exists() or len(lines(run)) < 3:
        assert all(process.poll() is None for process in processes), [p.communicate() for p in processes]
        time.sleep(0.02)
    processes[1].send_signal(signal.SIGTERM)
    for process in processes:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 75, err
    assert lines(run)[-1]["step"] == 30, "of 32, with which the epoch ends"
    assert sorted(p.name for p in (run / "checkpoints").glob("0*")) == ["00000000", "00000032"]
    trainer(*flags, f"--run_dir={run}")
    for name in ("loss", "val_loss", "learning_rate", "ids"):
        assert [line.get(name) for line in lines(run)] == [line.get(name) for line in lines(whole)]
    assert summary(run)["weights_sha256"] == summary(whole)["weights_sha256"]
    assert summary(run)["best"] == summary(whole)["best"]
    (run / "summary.json").unlink()  # as if it had been killed at the very end
    trainer(*flags, f"--run_dir={run}")
    assert summary(run)["final"] == summary(whole)["final"]


@pytest.mark.long
@pytest.mark.parametrize("backend", ["jax", "tensorflow"])
def test_data_that_stall_in_one_process(backend, tmp_path):
    """All obey a signal to any; the start that was given none ends by --hang_after, and the culprit is named."""
    flags = (f"--strategy={STRATEGY[backend]}", "--dataset=tests.faulty:stalling_data", *FLAGS, "--save_every=never")
    flags += ("--log_every=100",)  # few lines: nobody reads them before the end, and a pipe holds 64 kB
    flags += ("--global_batch=1280",)  # a block is of 100 steps, not of 800: those that were read before are done soon
    run, whole, stalls = tmp_path / "run", tmp_path / "whole", tmp_path / "stalls"

    def stalled(*more):
        stalls.unlink(missing_ok=True)
        addresses = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
        where = [(f"--cluster={index}@{addresses}", *more, f"--run_dir={run}") for index in range(2)]
        processes = [start(*flags, *where[0]), start(*flags, *where[1], STALLS=str(stalls))]
        stall(processes[0], run, stalls)
        return processes

    processes = stalled("--steps=1000000")
    processes[0].send_signal(signal.SIGTERM)
    outs = [process.communicate(timeout=30) for process in processes]
    assert [process.returncode for process in processes] == [75, 75], outs
    step = int(outs[0][0].partition("Stopped by SIGTERM after step ")[2].split(";")[0])
    # Longer than two processes take to import TensorFlow while others have the cores.
    processes = stalled("--steps=2000000", "--hang_after=15s")
    # First it does the hundreds of steps that were read before; a step took 35 ms where others had the cores.
    outs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [70, 70], outs
    assert all(re.search("process 1 failed first, at step [0-9]+, in data: no progress for 15s", e) for _, e in outs)
    assert "tests/faulty.py" in outs[1][1] and "time.sleep(0.01)" in outs[1][1], "where the source stands"
    stalls.unlink()
    finished(launch(*flags, f"--steps={step + 20}", f"--run_dir={run}"))
    finished(launch(*flags, f"--steps={step + 20}", f"--run_dir={whole}"))
    assert summary(run)["weights_sha256"] == summary(whole)["weights_sha256"]


TASK = {"type": "worker", "index": 0}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("{", "is no JSON"),
        ("{}", "no 'cluster' and 'task'"),
        ({"cluster": {"worker": []}, "task": TASK}, "names no process"),
        ({"cluster": {"worker": ["a:1", "a:1"]}, "task": TASK}, "names a:1 twice"),
        ({"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 2}}, "index 2 is not in 0 to 1"),
        ({"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker"}}, "integer 'index'"),
        ({"cluster": {"worker": ["a:1", "b"]}, "task": TASK}, "'b' is not host:port"),
        ({"cluster": {"worker": ["a:1", "localhost:1"]}, "task": TASK}, "mixes localhost:1"),
        ({"cluster": {"ps": ["a:1"], "worker": ["b:1"]}, "task": TASK}, "has no use for servers"),
        ({"cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, "task": TASK}, "runs in one process"),
    ],
)
def test_a_wrong_cluster_is_named(config, reason, tmp_path):
    text = config if isinstance(config, str) else json.dumps(config)
    ran = trainer(f"--run_dir={tmp_path / 'run'}", code=2, TF_CONFIG=text)
    assert re.search(re.escape(reason), ran.stderr), ran.stderr
    assert "Traceback" not in ran.stderr


def test_many_processes_need_a_cluster(tmp_path):
    ran = trainer("--strategy=multi_worker_mirrored", f"--run_dir={tmp_path / 'run'}", code=2)
    assert "launch.local" in ran.stderr


def test_slurm_s_node_lists():
    assert expand_nodes("n[1-3,07],gpu-a,h[9-10]x[1-2]") == [
        *("n1", "n2", "n3", "n07", "gpu-a", "h9x1", "h9x2", "h10x1", "h10x2"),
    ]


def test_jobs_of_slurm_that_share_a_node_have_ports_of_their_own():
    def cluster_of(job, tasks, step=0):
        numbers = {"JOB_ID": job, "STEP_ID": step, "PROCID": 0, "STEP_NUM_TASKS": tasks, "STEP_TASKS_PER_NODE": tasks}
        told = {f"SLURM_{name}": str(number) for name, number in numbers.items()}
        return resolve("", told | {"SLURM_STEP_NODELIST": "n1"})

    def ports(*of):
        cluster = cluster_of(*of)
        return {int(address.rpartition(":")[2]) for address in cluster.addresses} | {cluster.meeting[1]}

    for tasks in (2, 8, 64):
        jobs = [ports(70_000 + job, tasks) for job in range(4096 // (2 * tasks))]
        assert len(set().union(*jobs)) == len(jobs) * (tasks + 1)
        assert not ports(70_000, tasks) & ports(70_000, tasks, 1)
        assert min(map(min, jobs)) >= 61_440 and max(map(max, jobs)) < 65_536
    # There are not as many ports as jobs: those of one node also have loopback addresses of their own.
    same = [cluster_of(70_000 + 1024 * job, 2) for job in range(64)]
    assert len({each.meeting[1] for each in same}) == 1 and len({each.meeting[0] for each in same}) == 64


def test_doctor_says_who_one_is_and_meets_the_others(tmp_path):
    out = finished(launch("doctor", "--strategy=device_mesh", f"--run_dir={tmp_path / 'run'}"))
    assert out.count("TF_CONFIG; this is process") == 2 and out.count("nothing is wrong") == 2
    assert out.count("all 2 came, from ") == 2 and "is free" in out


@pytest.mark.parametrize(
    ("visible", "servers", "taken"),
    [
        ("4,5,6,7", 0, ["4, 5", "6, 7"]),
        ("4", 0, ["none", "none"]),
        ("GPU-a,GPU-b", 1, ["none", "GPU-a", "GPU-b", "none"]),  # a chief and a server compute no steps
    ],
)
def test_processes_of_one_machine_share_its_gpus(visible, servers, taken, tmp_path):
    strategy = "parameter_server" if servers else "device_mesh"
    flags = ("doctor", f"--strategy={strategy}", f"--run_dir={tmp_path / 'run'}")
    group = launch(*flags, processes=3 if servers else 2, servers=servers, CUDA_VISIBLE_DEVICES=visible)
    seen = [share for share in taken if share != "none"]
    out, _ = group.communicate(timeout=120)
    assert out.count(f"finds 0 of {len(visible.split(',')) // 2} GPUs") == len(seen)  # here
    assert re.findall(r"\[(\d)\] .* this process takes (.*)", "\n".join(sorted(out.splitlines()))) == [
        (str(i), share) for i, share in enumerate(taken)
    ]
    assert ("2 processes are more than the GPUs here, 4: they compute on CPUs" in out) == (visible == "4")


def test_processes_started_by_hand_share_a_machine_s_gpus():
    """Who says which GPUs are whose, by hand or by Slurm, is believed."""
    many = Cluster(("a:1", "a:2", "b:1"), 1, "TF_CONFIG")
    slurm = {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_GPUS_ON_NODE": "4"}
    assert gpus.own(many, slurm) == {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert gpus.own(dataclasses.replace(many, index=2), slurm) == {}
    assert gpus.own(many, slurm | {"CUDA_VISIBLE_DEVICES": "2,3"}) == {}
    assert gpus.own(many, {"CUDA_VISIBLE_DEVICES": "2,3"}) == {}
    assert gpus.own(many, {"CUDA_VISIBLE_DEVICES": "-1"}) == {}
    with pytest.raises(UserError, match="2 processes on one host: are more than the GPUs that they see there: 5"):
        gpus.own(many, {"CUDA_VISIBLE_DEVICES": "5", "SLURM_GPUS_ON_NODE": "1"})


@pytest.mark.parametrize("backend", [pytest.param("tensorflow", marks=pytest.mark.long), "jax"])
def test_gpus_that_stand_idle_are_told(backend, tmp_path):
    ran = trainer(f"--backend={backend}", "--steps=1", f"--run_dir={tmp_path / 'run'}", CUDA_VISIBLE_DEVICES="0,1")
    told = f"{backend} computes on CPUs, for it finds none of the GPUs that are there: 0, 1.\n  Fix: install"
    assert told in ran.stderr
    ran = trainer(f"--backend={backend}", "--steps=1", f"--run_dir={tmp_path / 'cpu'}", CUDA_VISIBLE_DEVICES="")
    assert "GPUs that are there" not in ran.stderr


def test_doctor_finds_what_is_wrong(tmp_path):
    """A name that leads nowhere, a taken port, a strategy for one process."""
    with listen("127.0.0.2", 0, "test") as taken:
        address = f"127.0.0.2:{taken.getsockname()[1]}"
        flag = f"--cluster=1@no.such.host:2222,{address}"
        ran = trainer(
            "doctor", "--strategy=mirrored", "--hang_after=1s", flag, f"--run_dir={tmp_path / 'run'}", code=69
        )
    assert "no.such.host can't be resolved" in ran.stdout
    assert "held by process" in ran.stdout and "runs in one process" in ran.stdout
    assert "wrong: strategy, name, port, meeting" in ran.stdout


def test_a_tpu_that_is_not_there(tmp_path):
    ran = trainer("--strategy=tpu", f"--run_dir={tmp_path / 'run'}", code=2)
    assert "has no TPU" in ran.stderr and "--strategy=device_mesh" in ran.stderr


@pytest.mark.parametrize(
    ("flag", "reason"),
    [("2@a:1,b:1", "number '2' is not in 0 to 1"), ("a:1", "names no process"), ("0@a:1,a:1", "names a:1 twice")],
)
def test_a_wrong_flag_is_named(flag, reason, tmp_path):
    ran = trainer("--strategy=device_mesh", f"--cluster={flag}", f"--run_dir={tmp_path / 'run'}", code=2)
    assert reason in ran.stderr


@pytest.mark.long
def test_a_framework_that_waits_with_python_s_lock_held_is_ended(tmp_path):
    """One of two can't start TensorFlow's server; the other waits for it in C, where no thread of ours can run."""
    with listen("127.0.0.2", 0, "test") as taken:
        port = taken.getsockname()[1] + 1
    workers = [f"127.0.0.2:{port}", f"127.0.0.3:{port}"]  # two names of one machine: TensorFlow takes all interfaces
    begin = time.monotonic()
    processes = []
    for index in range(2):
        task = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
        flags = ("--strategy=multi_worker_mirrored", f"--run_dir={tmp_path / 'run'}")
        processes.append(start(*flags, TF_CONFIG=json.dumps(task)))
    errors = [process.communicate(timeout=60)[1] for process in processes]
    assert time.monotonic() - begin < 40
    assert all(process.returncode for process in processes)
    assert any("can't listen there" in e or "Could not start gRPC server" in e for e in errors)


HOLDING = """
import ctypes, json, os, time
import keras

def hold():
    ctypes.PyDLL(None).sleep(11)  # Python's lock is not given back meanwhile

def lag():
    time.sleep(35 * json.loads(os.environ["TF_CONFIG"])["task"]["index"])

class Holding(keras.layers.Layer):
    def call(self, x, training=False):
        if training:
            {wait}()
        return x

def build(input_shape, classes):
    layers = [keras.Input(input_shape), keras.layers.Flatten(), Holding(), keras.layers.Dense(classes)]
    return keras.Sequential(layers)
"""


@pytest.mark.long
@pytest.mark.parametrize("wait", ["hold", "lag"])
def test_a_process_that_compiles_for_long_is_waited_for(wait, tmp_path):
    """XLA's front end holds Python's lock, and longer where there are more processes than cores; gloo waits 30 s."""
    (tmp_path / "holding.py").write_text(HOLDING.format(wait=wait))
    flags = ("--strategy=device_mesh", "--model=holding:build", "--steps=3", f"--run_dir={tmp_path / 'run'}")
    finished(launch(*flags, PYTHONPATH=f"{REPOSITORY}:{tmp_path}"))


def test_what_one_process_compiles_all_find(tmp_path):
    """At their next start none compiles a step, on none of its devices: process 0 alone keeps what it compiles."""
    flags = ("--strategy=device_mesh", "--devices=4", "--replicas=4", f"--run_dir={tmp_path}")
    finished(launch(*flags, "--steps=3"))
    out = finished(launch(*flags, "--steps=6", JAX_EXPLAIN_CACHE_MISSES="true"))
    missed = re.findall(r"COMPILATION CACHE MISS for 'jit_(\w+)'", out)
    assert not {"_lambda", "_finish_step", "_unstack", "sum_over_devices"} & {*missed}, missed
