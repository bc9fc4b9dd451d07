"""What becomes of several processes when one is killed, frozen, cut off, raises or is stuck: nobody hangs."""

import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time

import h5py
import numpy as np
import pytest

from launch.local import free_ports
from tests.lab import container, lab
from tests.running import (
    REPOSITORY,
    alive,
    children,
    environment,
    finished,
    launch,
    start,
    summary,
    trainer,
    wait_for_checkpoint,
)
from trainer.processes.claims import claim
from trainer.processes.connection import listen

STRATEGY = {"tensorflow": "multi_worker_mirrored", "jax": "device_mesh"}
FLAGS = ("--replicas=4", "--global_batch=80", "--exact", "--log_every=5", "--evaluate_every=never", "--model=dense")
LIMIT = 15  # seconds from the fault to the last process's end

long = pytest.mark.long


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Hash of the run that nothing happened to, by backend and steps."""
    hashes = {}

    def make(backend: str, steps: int, *flags: str) -> str:
        if (backend, steps, flags) not in hashes:
            run = tmp_path_factory.mktemp("whole") / "run"
            trainer(f"--backend={backend}", *FLAGS, *flags, f"--steps={steps}", f"--run_dir={run}")
            hashes[backend, steps, flags] = summary(run)["weights_sha256"]
        return hashes[backend, steps, flags]

    return make


@pytest.mark.parametrize(
    ("backend", "number", "victim"),
    [
        ("tensorflow", signal.SIGKILL, 1),
        pytest.param("jax", signal.SIGKILL, 0, marks=long),
        pytest.param("tensorflow", signal.SIGKILL, 0, marks=long),
        pytest.param("jax", signal.SIGKILL, 1, marks=long),
        ("jax", signal.SIGSTOP, 1),
        pytest.param("tensorflow", signal.SIGSTOP, 1, marks=long),
        pytest.param("tensorflow", signal.SIGSTOP, 0, marks=long),
        pytest.param("jax", signal.SIGSTOP, 0, marks=long),
    ],
)
def test_a_killed_or_frozen_process_ends_the_group_and_a_restart_goes_on(backend, number, victim, whole, tmp_path):
    flags = (f"--strategy={STRATEGY[backend]}", *FLAGS, "--save_every=20", "--steps=400")
    process = launch(*flags, f"--run_dir={tmp_path / 'run'}", restarts=2)
    wait_for_checkpoint(process, tmp_path / "run", 40)
    pids = children(process.pid)
    os.kill(pids[victim], number)
    gone(pids)
    out = finished(process)
    why = "killed, or its machine died" if number == signal.SIGKILL else "it is frozen, or the network to it is cut"
    assert re.search(rf"process {victim} failed first, at step \d+, in \w+: .*{why}", out)
    assert f"this is process {1 - victim}, at step" in out and "it waited here:\n" in out
    assert summary(tmp_path / "run")["weights_sha256"] == whole(backend, 400)


@pytest.mark.parametrize("backend", [pytest.param("tensorflow", marks=long), "jax"])
def test_a_process_that_raises_ends_the_group_and_a_restart_goes_on(backend, whole, tmp_path):
    flags = (*FLAGS, "--save_every=20", "--steps=100")
    failing = f"--callbacks=tests.faulty:Fail(step=50,once={str(tmp_path / 'once')!r})"
    process = launch(f"--strategy={STRATEGY[backend]}", *flags, failing, f"--run_dir={tmp_path / 'run'}", restarts=1)
    out = finished(process)
    told = next(line for line in out.splitlines() if "[0] onecurve: process 1 failed first, at step 5" in line)
    assert "RuntimeError: the planted fault" in out[out.index(told) :]
    assert summary(tmp_path / "run")["weights_sha256"] == whole(backend, 100)


@pytest.mark.parametrize("backend", ["jax", pytest.param("tensorflow", marks=long)])
def test_a_stuck_process_is_noticed_by_its_lack_of_progress(backend, tmp_path):
    flags = (*FLAGS, "--save_every=20", "--steps=100", "--hang_after=15s")
    stuck = f"--callbacks=tests.faulty:Fail(step=50,once={str(tmp_path / 'once')!r},stuck=True)"
    process = launch(f"--strategy={STRATEGY[backend]}", *flags, stuck, f"--run_dir={tmp_path / 'run'}")
    out = finished(process, code=70)
    assert "no progress for 15s" in out and re.search(r"process 1 (failed first, )?at step 5\d, in callbacks", out)
    assert "time.sleep(3600)" in out or "in on_train_batch_end" in out  # the stack of the culprit


@pytest.mark.parametrize(
    ("backend", "host"),
    [
        pytest.param("tensorflow", 1, marks=long),
        ("jax", 0),
        pytest.param("tensorflow", 0, marks=long),
        pytest.param("jax", 1, marks=long),
    ],
)
def test_two_hosts_whose_cable_is_cut_end_and_go_on_when_it_is_back(backend, host, whole, tmp_path):
    with lab(2) as hosts:

        def both():
            workers = [f"{address}:2222" for address in hosts.addresses]
            flags = [f"--strategy={STRATEGY[backend]}", *FLAGS, "--save_every=20", "--steps=400"]
            command = [sys.executable, "-m", "trainer", *flags, f"--run_dir={tmp_path / 'run'}"]
            tasks = [{"cluster": {"worker": workers}, "task": {"type": "worker", "index": i}} for i in range(2)]
            return [hosts.start(i, command, TF_CONFIG=json.dumps(task)) for i, task in enumerate(tasks)]

        processes = both()
        wait_for_checkpoint(processes[0], tmp_path / "run", 40)
        hosts.cut(host)
        gone([process.pid for process in processes])
        for index, process in enumerate(processes):
            out, _ = process.communicate()
            assert process.returncode == 69, out
            assert f"process {1 - index} failed first" in out and "the network to it is cut" in out
        hosts.cut(host, down=False)
        for process in both():
            out, _ = process.communicate(timeout=120)
            assert process.returncode == 0, out
    assert summary(tmp_path / "run")["weights_sha256"] == whole(backend, 400)


def gone(pids: list[int], limit: float = LIMIT) -> None:
    """Waits for processes to end; fails if it takes longer than a limit, in seconds."""
    start = time.monotonic()
    while any(map(alive, pids)) and time.monotonic() - start < 60:
        time.sleep(0.05)
    assert time.monotonic() - start <= limit


def test_a_launcher_that_is_killed_leaves_nobody(tmp_path):
    process = launch(
        "--strategy=device_mesh", *FLAGS, "--steps=100000", "--save_every=20", f"--run_dir={tmp_path / 'run'}"
    )
    wait_for_checkpoint(process, tmp_path / "run", 20)
    pids = children(process.pid)
    process.kill()
    gone(pids)


@pytest.mark.parametrize("backend", ["jax", pytest.param("tensorflow", marks=long)])
def test_processes_that_read_end_with_the_one_that_is_killed(backend, tmp_path):
    """Nor does their share in its connections keep the others from noticing at once."""
    data = "--dataset=tests.faulty:read_by_processes(how='fork')"
    flags = (f"--strategy={STRATEGY[backend]}", "--replicas=2", data, "--save_every=20", "--steps=600")
    process = launch(*flags, f"--run_dir={tmp_path / 'run'}", restarts=1)
    wait_for_checkpoint(process, tmp_path / "run", 40)
    pids = children(process.pid)
    readers = [reader for pid in pids for reader in children(pid)]
    assert len(readers) == 2
    os.kill(pids[1], signal.SIGKILL)
    gone([*pids, *readers], limit=5)
    finished(process)


@pytest.mark.parametrize(
    ("strategy", "servers"),
    [("multi_worker_mirrored", 0), ("device_mesh", 0), pytest.param("parameter_server", 1, marks=pytest.mark.long)],
)
def test_a_signal_is_obeyed_once_the_cluster_is_joined_too(strategy, servers, tmp_path):
    """Where frameworks have services of their own that handle SIGTERM, and data and model are not there yet."""
    flags = (f"--strategy={strategy}", "--model=tests.faulty:slowly_built", f"--run_dir={tmp_path / 'run'}")
    launcher = launch(*flags, servers=servers)
    assert launcher.stdout
    while "building" not in launcher.stdout.readline():
        assert launcher.poll() is None
    launcher.send_signal(signal.SIGTERM)
    told = time.monotonic()
    assert "Stopped by SIGTERM before its first step" in finished(launcher, code=75)
    assert time.monotonic() - told < 5


@long
def test_an_elastic_group_goes_on_with_fewer_processes_and_with_all_again(whole, tmp_path):
    """Three processes, one is killed: two go on (of 6 replicas); then all three again, at the same curve."""
    flags = ("--replicas=6", "--global_batch=90", "--save_every=20", "--steps=600")
    run = tmp_path / "run"
    process = launch(
        "--strategy=device_mesh", *FLAGS, *flags, f"--run_dir={run}", processes=3, restarts=2, elastic=True
    )
    wait_for_checkpoint(process, run, 40)
    os.kill(children(process.pid)[2], signal.SIGKILL)
    while len(children(process.pid)) != 2:
        time.sleep(0.1)
    wait_for_checkpoint(process, run, 200)
    process.send_signal(signal.SIGUSR1)
    out = finished(process)
    assert "2 processes start" in out and "3 processes start" in out
    assert summary(run)["weights_sha256"] == whole("jax", 600, *flags[:2])


def test_a_parameter_server_s_worker_may_die(tmp_path):
    """One of two workers is killed: the run goes on without a new start, and ends."""
    run = tmp_path / "run"
    flags = ("--strategy=parameter_server", "--model=dense", "--steps=300", "--save_every=20", "--log_every=10")
    process = launch(*flags, f"--run_dir={run}", processes=3, servers=2, restarts=2)
    wait_for_checkpoint(process, run, 40)
    os.kill(children(process.pid)[1], signal.SIGKILL)
    out = finished(process)
    assert "worker 1 ended with exit code -9; it is started again" in out
    assert re.search(r"process 1 \(worker, [\d.:]+\) was lost: its steps are for others", out)
    assert out.count("[0]       run ") == 1  # one start of the chief
    assert "Failed to remove function" not in out.partition(" done at ")[2]  # of workers that have left
    final = summary(run)["final"]
    assert summary(run)["step"] == 300 and final["test_accuracy"] > 0.9
    evaluated = trainer("evaluate", f"--run_dir={run}").stdout  # as the run has said: without servers
    assert json.loads(evaluated.splitlines()[-1])["test_loss"] == pytest.approx(final["test_loss"], rel=1e-5)


@pytest.mark.parametrize(
    "told", [3, pytest.param(0, marks=pytest.mark.long), pytest.param(None, marks=pytest.mark.long)]
)
def test_a_signal_to_any_process_of_a_parameter_server_run(told, tmp_path):
    """To a server, the chief, or all at once, as a scheduler does: the chief saves, for which it needs the others."""
    run = tmp_path / "run"
    flags = ("--strategy=parameter_server", "--model=dense", "--steps=3000", "--save_every=40", "--log_every=7")
    process = launch(*flags, f"--run_dir={run}", processes=3, servers=1)
    wait_for_checkpoint(process, run, 40)
    os.kill(process.pid if told is None else children(process.pid)[told], signal.SIGTERM)
    out = finished(process, code=75)
    assert "Traceback" not in out
    stopped = int(re.search(r"Stopped by SIGTERM after step (\d+); its state is saved", out)[1])
    assert (run / "checkpoints" / f"{stopped:08}").is_dir()


@pytest.mark.long
@pytest.mark.parametrize(
    ("index", "number", "words"),
    [
        (3, signal.SIGKILL, r"process 3 \(ps, [\d.:]+\) was lost, and the variables that it held"),
        (3, signal.SIGSTOP, r"process 3 \(ps, [\d.:]+\) was not heard of for 8s"),
        (1, signal.SIGSTOP, r"process 1 \(worker, [\d.:]+\) was not heard of for 8s"),
    ],
)
def test_a_parameter_server_run_names_whom_it_can_t_do_without(index, number, words, tmp_path):
    run = tmp_path / "run"
    flags = ("--strategy=parameter_server", "--model=dense", "--steps=300", "--save_every=20", "--log_every=10")
    process = launch(*flags, f"--run_dir={run}", processes=3, servers=1, restarts=1)
    wait_for_checkpoint(process, run, 40)
    os.kill(children(process.pid)[index], number)
    out = finished(process)
    assert re.search(words, out) and "Traceback" not in out
    assert summary(run)["step"] == 300


@pytest.mark.long
def test_a_worker_that_comes_back_too_late_is_not_waited_for(tmp_path):
    flags = ("--strategy=parameter_server", "--model=dense", "--steps=300", "--save_every=20", "--log_every=10")
    process = launch(*flags, f"--run_dir={tmp_path / 'run'}", processes=3, servers=1, restarts=1)
    wait_for_checkpoint(process, tmp_path / "run", 280)
    os.kill(children(process.pid)[1], signal.SIGKILL)
    assert "it is started again" in finished(process)
    assert time.time() - (tmp_path / "run" / "summary.json").stat().st_mtime < 15


@pytest.mark.long
def test_workers_update_a_variable_one_after_the_other(tmp_path):
    """Adam moves a weight by some thousandths a step; between two workers it leapt by thousands."""
    flags = ("--strategy=parameter_server", "--model=tests.faulty:linear", "--dataset=tests.faulty:rare")
    flags += ("--global_batch=32", "--steps=400", "--save_every=400", f"--run_dir={tmp_path / 'run'}")
    finished(launch(*flags, processes=4, servers=2))
    with h5py.File(tmp_path / "run" / "checkpoints" / "00000400" / "model.weights.h5") as file:
        kernel = np.array(file["layers/dense/vars/0"])
    assert 0.1 < np.max(np.abs(kernel)) < 2


@long
def test_a_parameter_server_run_learns(keras_home, tmp_path):
    """One chief, two workers, two servers; 60,000 real images, 2 epochs.

    One device reaches 0.873. With a constant rate what is reached is the noise of the last steps: 0.842 to 0.858.
    """
    flags = ("--strategy=parameter_server", "--dataset=fashion_mnist", "--epochs=2", f"--run_dir={tmp_path / 'run'}")
    flags += ("--schedule=cosine",)
    finished(launch(*flags, processes=3, servers=2, KERAS_HOME=keras_home))
    assert summary(tmp_path / "run")["final"]["test_accuracy"] >= 0.86


@long
def test_a_parameter_server_s_chief_goes_on_from_its_checkpoint(tmp_path):
    run = tmp_path / "run"
    flags = ("--strategy=parameter_server", "--model=dense", "--steps=300", "--save_every=20", "--log_every=10")
    process = launch(*flags, f"--run_dir={run}", processes=3, servers=2, restarts=2)
    wait_for_checkpoint(process, run, 40)
    os.kill(children(process.pid)[0], signal.SIGKILL)
    out = finished(process)
    assert "restored from" in out
    assert summary(run)["step"] == 300 and summary(run)["final"]["test_accuracy"] > 0.9


@pytest.mark.long
def test_a_run_that_gets_no_further_is_not_started_for_ever(tmp_path):
    """It fails at step 10, before the next save: of ten restarts three are enough."""
    flags = ("--backend=jax", *FLAGS, "--save_every=20", "--steps=40", "--callbacks=tests.faulty:Always(step=10)")
    process = launch(*flags, f"--run_dir={tmp_path / 'run'}", processes=1, restarts=10)
    out = finished(process, code=1)
    assert out.count("RuntimeError: the planted fault") == 4 and "several starts saved no further step" in out


@pytest.mark.long
def test_a_launcher_that_is_told_to_stop_between_two_starts(tmp_path):
    """The third pause is two seconds long, and nothing is started after it."""
    flags = ("--backend=jax", *FLAGS, "--save_every=20", "--steps=40", "--callbacks=tests.faulty:Always(step=10)")
    process = launch(*flags, f"--run_dir={tmp_path / 'run'}", processes=1, restarts=10)
    assert process.stdout
    while "processes start in 2s" not in process.stdout.readline():
        assert process.poll() is None
    process.terminate()
    begin = time.monotonic()
    assert process.wait(10) == 75 and time.monotonic() - begin < 1.5


@pytest.fixture
def small_memory():
    """A container of 2.5 GB."""
    with container("memory", {"memory.limit_in_bytes": "2500000000"}, {"memory.max": "2500000000"}) as group:
        yield group


@pytest.mark.long
def test_a_run_that_the_system_kills_for_lack_of_memory(small_memory, tmp_path):
    """The cause is told, and a run that will not fit is not started again and again. Before it, the run warns."""
    flags = ("--backend=jax", *FLAGS, "--save_every=5", "--steps=40", "--callbacks=tests.faulty:Greedy(step=10)")
    command = f"echo $$ > {small_memory}/cgroup.procs; exec {sys.executable} -m launch.local --processes=1 --restarts=9"
    process = subprocess.Popen(
        ["sh", "-c", " ".join([command, "--", *map(shlex.quote, flags), f"--run_dir={tmp_path / 'run'}"])],
        cwd=REPOSITORY,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    out = finished(process, code=128 + signal.SIGKILL)
    assert out.count("the system killed it for lack of memory; the largest process held") == 2
    assert "not started again: as it is, it will not fit" in out


def test_a_process_that_does_not_come_is_named(tmp_path):
    with listen("127.0.0.1", 0, "test") as taken:
        port = taken.getsockname()[1] + 1
    config = {"cluster": {"worker": [f"127.0.0.1:{port}", "127.0.0.1:9"]}, "task": {"type": "worker", "index": 0}}
    flags = ("--strategy=device_mesh", "--hang_after=3s", f"--run_dir={tmp_path / 'run'}")
    ran = trainer(*flags, code=69, TF_CONFIG=json.dumps(config))
    assert "process 1 (127.0.0.1:9) did not come to 127.0.0.1" in ran.stderr


def test_a_port_in_use_is_named_with_its_holder(tmp_path):
    with listen("127.0.0.1", 0, "test") as taken:
        port = taken.getsockname()[1]
        config = {
            "cluster": {"worker": [f"127.0.0.1:{port - 1}", "127.0.0.1:9"]},
            "task": {"type": "worker", "index": 0},
        }
        start = time.monotonic()
        ran = trainer("--strategy=device_mesh", f"--run_dir={tmp_path / 'run'}", code=2, TF_CONFIG=json.dumps(config))
    assert time.monotonic() - start < 10
    assert f"127.0.0.1:{port}: can't listen there" in ran.stderr and f"held by process {os.getpid()}" in ran.stderr


def test_two_runs_that_begin_at_once_have_no_port_in_common(tmp_path):
    """What neither listens at yet, both find free; two gRPC servers then share it, and take in each other's processes.

    Whoever asks for free ones is not given another's, before any process of it listens.
    """
    ports = free_ports(2)
    asks = f"from trainer.processes.claims import claim; print([claim(f'port {{port}}') for port in {ports}])"
    command = [sys.executable, "-c", asks]
    other = subprocess.run(command, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, check=True)
    assert other.stdout == "[False, False]\n"
    address = f"127.0.0.1:{ports[0]}"
    assert claim(address)  # as process 0 of a run does that begins now
    flags = ("--strategy=device_mesh", f"--cluster=0@{address},127.0.0.1:{ports[1]}", f"--run_dir={tmp_path / 'run'}")
    ran = trainer(*flags, code=2)
    assert f"{address}: another run on this machine, which begins now, will listen there" in ran.stderr


@pytest.mark.long
def test_a_run_goes_on_when_another_is_given_its_addresses(tmp_path):
    """JAX would have the two share a port, and the first be ended by the other's process 1."""
    port, other = free_ports(2)

    def both(name: str, *more: str) -> "list[subprocess.Popen[str]]":
        flags = ("--strategy=device_mesh", *FLAGS, "--steps=100000", "--save_every=20", f"--run_dir={tmp_path / name}")
        return [start(*flags, f"--cluster={i}@127.0.0.1:{port},127.0.0.1:{other}", *more) for i in (0, 1)]

    first = both("first")
    wait_for_checkpoint(first[0], tmp_path / "first", 20)
    for process, code in zip(both("second", "--hang_after=5s"), (2, 69), strict=True):
        _, err = process.communicate(timeout=60)
        assert process.returncode == code, err
        if code == 2:
            assert f":{port}: can't listen there" in err and f"held by process {first[0].pid} (" in err
    for process in first:
        process.terminate()
    for process in first:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 75, err


@pytest.mark.parametrize("second", [1, 0])
def test_processes_of_one_number_or_of_other_clusters_are_told(second, tmp_path):
    """Two that both say they are process 1 of three; or whose lists of addresses differ."""
    with listen("127.0.0.1", 0, "test") as taken:
        port = taken.getsockname()[1] + 10
    workers = [f"127.0.0.1:{port + 10 * i}" for i in range(3)]
    lists = [workers, workers, workers if second else [*workers[:2], "127.0.0.1:9"]]
    indices = [0, 1, 1 if second else 2]
    processes = []
    for index, addresses in zip(indices, lists, strict=True):
        flag = f"--cluster={index}@{','.join(addresses)}"
        processes.append(start("--strategy=device_mesh", flag, f"--run_dir={tmp_path / 'run'}"))
    for process in processes:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 2, err
        assert ("two processes say that they are process 1" if second else "describes another cluster") in err


def listening(pid: int) -> list[tuple[str, int]]:
    """(address in hex, port) of a process's listening TCP sockets."""
    held = {os.readlink(d.path) for d in os.scandir(f"/proc/{pid}/fd")}
    found = []
    for table in ("tcp", "tcp6"):
        for line in pathlib.Path("/proc/net", table).read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and f"socket:[{columns[9]}]" in held:
                address, _, port = columns[1].partition(":")
                found.append((address, int(port, 16)))
    return found


@pytest.mark.parametrize("backend", ["jax", pytest.param("tensorflow", marks=long)])
def test_what_listens(backend, tmp_path):
    """Ours and JAX's on loopback alone. TensorFlow's server on all interfaces, and the run says so."""
    flags = (f"--strategy={STRATEGY[backend]}", *FLAGS, "--steps=100000", "--save_every=20")
    process = launch(*flags, f"--run_dir={tmp_path / 'run'}")
    wait_for_checkpoint(process, tmp_path / "run", 20)
    sockets = [socket for pid in children(process.pid) for socket in listening(pid)]
    process.terminate()
    out = finished(process, code=75)
    outside = [port for address, port in sockets if not (address == "0100007F" or address.endswith("0100007F"))]
    if backend == "jax":
        assert sockets and not outside
    else:
        assert len(outside) == 2 and len(sockets) > len(outside) - 1
        assert "listen on all interfaces" in out or not os.path.exists("/sys/class/net/eth0")


@long
def test_a_thousand_steps_on_eight_virtual_devices(tmp_path):
    """Their collectives share threads: several in flight would wait for each other for ever."""
    flags = ("--strategy=device_mesh", "--devices=8", "--replicas=8", "--model=mlp(units=512)", "--steps=1000")
    for name, more in (("data", ()), ("zero1", ("--layout=zero1",)), ("fsdp", ("--layout=fsdp",))):
        trainer(*flags, *more, "--log_every=100", "--evaluate_every=500", f"--run_dir={tmp_path / name}")
        assert summary(tmp_path / name)["step"] == 1000
