"""Where the time goes, over all starts; and the bottleneck, named where one was planted and nowhere else."""

import json
import os
import pathlib
import signal
import sys
import time

import pytest

from input_pipeline.cores import cores
from launch.local import free_ports
from tests.lab import container, lab
from tests.running import finished, launch, lines, start, summary, trainer, wait_for_checkpoint
from trainer.monitoring.verdict import verdict

FLAGS = ("--model=dense", "--log_every=10", "--evaluate_every=never", "--save_every=never")


def spent(run: pathlib.Path) -> dict[str, float]:
    return dict(summary(run)["seconds"])


def test_a_planted_sleep_is_found_and_all_sums_up(tmp_path):
    begin = time.time()
    flags = ("--backend=jax", *FLAGS, "--steps=200", "--callbacks=tests.faulty:Sleep(seconds=0.3)")
    trainer(*flags, f"--run_dir={tmp_path}")
    wall = (tmp_path / "summary.json").stat().st_mtime - begin  # not until the system has taken the process down
    seconds = spent(tmp_path)
    logged = lines(tmp_path)  # also at each epoch's end
    assert seconds["callbacks"] == pytest.approx(0.3 * len(logged), rel=0.05)
    assert all(line["examples_per_second"] > 0 for line in logged)
    line = json.loads((tmp_path / "starts/000000.json").read_text())
    assert sum(seconds.values()) == pytest.approx(line["updated"] - line["began"], rel=0.02)
    assert sum(seconds.values()) == pytest.approx(wall, abs=2)  # to start a process is not booked
    assert summary(tmp_path)["bottleneck"].startswith("callbacks")


def test_steps_in_flight_are_waited_for_as_steps(tmp_path):
    """JAX returns before a step is done; what asks for its result first must not be booked for it."""
    flags = (
        "--backend=jax",
        "--model=mlp(units=1024)",
        "--global_batch=1024",
        "--steps=20",
        "--log_every=1",
        *FLAGS[2:],
    )
    trainer(*flags, f"--run_dir={tmp_path}")
    seconds = spent(tmp_path)
    assert seconds["step"] > 5 * seconds["other"], seconds


def test_what_evaluations_take_is_no_compiling(tmp_path):
    """Not even the first. The last one, and what reads 360 examples for its pictures, is no bottleneck."""
    # One batch of all 360: of several, those after the first are read while the first is compiled for.
    flags = ("--backend=jax", *FLAGS[:2], "--steps=50", "--evaluate_every=25", "--save_every=never")
    flags += ("--global_batch=360", "--dataset=tests.faulty:slow_data(evaluation=0.01)")
    trainer(*flags, f"--run_dir={tmp_path}")
    seconds = spent(tmp_path)
    assert seconds["evaluate"] > 0.01 * 360 / (1 + cores())  # a thread a core reads a part of them
    assert seconds["last evaluation"] > 0.01 * 360
    only = {"step": 6.0, **{purpose: 60.0 for purpose in seconds if "evaluat" in purpose}}
    assert verdict(only).cause == "evaluate"
    del only["evaluate"]
    assert not verdict(only).cause


@pytest.mark.long
def test_slow_data_are_named(tmp_path):
    trainer(*FLAGS, "--steps=200", "--dataset=tests.faulty:slow_data(seconds=0.002)", f"--run_dir={tmp_path}")
    assert summary(tmp_path)["bottleneck"].startswith("input: devices wait for data")


@pytest.mark.long
@pytest.mark.parametrize("backend", ["jax", "tensorflow"])
def test_whose_data_are_slow_is_named_though_all_wait(backend, tmp_path):
    """While it trains, and in the end."""
    strategy = "device_mesh" if backend == "jax" else "multi_worker_mirrored"
    flags = (f"--strategy={strategy}", "--replicas=2", *FLAGS, f"--run_dir={tmp_path}")
    # So slow that neither a start nor the steps, on a busy machine, are more than little beside them.
    flags += ("--dataset=tests.faulty:slow_data(seconds=0.008)", "--steps=800")
    addresses = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
    processes = [
        start(*flags, f"--cluster={index}@{addresses}", **env) for index, env in enumerate(({"FAST": "1"}, {}))
    ]
    outs = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outs
    named = "input: devices wait for data of process 1, "
    assert outs[0][0].count(f"so far, time is lost by {named}") == 1 and f"lost by  {named}" in outs[0][0]
    seconds = spent(tmp_path)
    assert seconds["others' data"] > 0.6 * sum(seconds.values()) and seconds["data"] < 0.1 * sum(seconds.values())
    assert max(line["data_wait"] for line in lines(tmp_path)) > 0.9  # of those that waited for a block


@pytest.mark.long
@pytest.mark.parametrize("backend", ["jax", "tensorflow"])
def test_a_slow_network_is_named(backend, tmp_path):
    """Two hosts that send each other 340 kB a step, by 2.5 MB a second."""
    strategy = "device_mesh" if backend == "jax" else "multi_worker_mirrored"
    flags = (f"--strategy={strategy}", "--replicas=2", "--model=mlp", *FLAGS[1:], "--steps=200")
    command = [sys.executable, "-m", "trainer", *flags, f"--run_dir={tmp_path}"]
    with lab(2) as hosts:
        hosts.throttle("20mbit")
        addresses = ",".join(f"{address}:2222" for address in hosts.addresses)
        processes = [hosts.start(i, [*command, f"--cluster={i}@{addresses}"]) for i in range(2)]
        outs = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outs
    named = "communication: devices add up their gradients (timed alone), "
    assert f"lost by  {named}" in outs[0] and summary(tmp_path)["bottleneck"].startswith(named)
    trainer("report", f"--run_dir={tmp_path}")
    assert f"Lost by: {named}" in (tmp_path / "report.html").read_text()


@pytest.mark.long
def test_a_log_that_takes_longer_than_the_steps_is_named(tmp_path):
    flags = ("--backend=jax", "--model=mlp(units=8,depth=1)", "--steps=15000", "--log_every=1")
    trainer(*flags, "--evaluate_every=never", "--save_every=never", f"--run_dir={tmp_path}")
    assert summary(tmp_path)["bottleneck"].startswith("the log: its lines hold the training up, ")


@pytest.mark.long
def test_a_clean_run_gets_no_verdict(tmp_path):
    flags = ("--model=convnet", "--steps=6000", "--log_every=100", *FLAGS[2:])
    out = trainer(*flags, f"--run_dir={tmp_path}").stdout
    assert summary(tmp_path)["bottleneck"] == "" and "nothing that stands out" in out
    assert sum(v for k, v in spent(tmp_path).items() if k == "step") > 5
    # Two seconds of other work at once, and the peak is measured too low: a share may come out above 1.
    assert 0.02 < summary(tmp_path)["mfu"] < 1.5 and "of matrix products here" in out
    assert lines(tmp_path)[-1]["flops_per_second"] > 1e8


def test_a_crash_and_the_time_until_the_next_start_are_accounted_for(tmp_path):
    flags = ("--backend=jax", "--model=mlp", "--log_every=100", "--evaluate_every=never", f"--run_dir={tmp_path}")
    flags += ("--save_every=2000",)
    process = start(*flags, "--steps=1000000")
    wait_for_checkpoint(process, tmp_path, 4000)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    killed = time.time()
    time.sleep(6)
    began = time.time()
    step = max(int(p.name) for p in (tmp_path / "checkpoints").glob("0*"))
    trainer(*flags, f"--steps={step + 2000}")
    ended = (tmp_path / "summary.json").stat().st_mtime  # to end a process takes a busy machine seconds
    whole, first = summary(tmp_path)["seconds_of_all_starts"], json.loads((tmp_path / "starts/000000.json").read_text())
    assert summary(tmp_path)["starts"] == 2
    assert whole["down"] == pytest.approx(began - killed, abs=1.5)  # a start is noted once a second
    last = json.loads((tmp_path / "starts/000001.json").read_text())
    assert sum(whole.values()) == pytest.approx(last["updated"] - first["began"], rel=0.02)
    assert last["updated"] == pytest.approx(ended, abs=2)
    assert whole["lost"] >= 0 and 0 < summary(tmp_path)["goodput"] < 1
    # A run that was at its end and is made longer has no summary until it is at its end again.
    process = start(*flags, "--steps=1000000")
    wait_for_checkpoint(process, tmp_path, step + 4000)
    page = tmp_path / "report.html"
    trainer("report", f"--run_dir={tmp_path}")
    assert "<td>goes on" in page.read_text() and "not at its end" in page.read_text()
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    trainer("report", f"--run_dir={tmp_path}")
    assert page.read_text().count("<td>broke off") == 2 and not (tmp_path / "summary.json").exists()


@pytest.mark.long
def test_a_log_is_gone_on_with_where_it_is_whole_and_drawn_by_what_can_be_seen_of_it(tmp_path):
    flags = ("--backend=jax", "--model=dense", "--log_every=1", "--steps=20", f"--run_dir={tmp_path}")
    trainer(*flags)
    log = tmp_path / "metrics.jsonl"
    whole = log.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    for more in (last.replace(b'"step": 20', b'"step": 21') + last[:30], bytes(4096) + last):
        log.write_bytes(whole + more)
        trainer(*flags)
        assert log.read_bytes() == whole
    record = json.loads(last)
    losses = {step: 7.25 if step == 70_007 else 1 / step for step in range(1, 100_000)}
    log.write_text("".join(json.dumps({**record, "step": step, "loss": loss}) + "\n" for step, loss in losses.items()))
    trainer("report", f"--run_dir={tmp_path}")
    page = (tmp_path / "report.html").read_text()
    assert len(page) < 150_000 and '<text x="2" y="18">7.25</text>' in page  # and not 30 bytes for each step
    curve = page.partition("<figcaption>loss")[2].partition("points=")[2]
    assert f",{15:.1f} " in curve.partition("<title>")[0]  # the one spike


@pytest.fixture
def slow_cpu():
    """A container that gets a fifth of a processor."""
    quota = {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "20000"}
    with container("cpu", quota, {"cpu.max": "20000 100000"}) as group:
        yield group


@pytest.mark.long
@pytest.mark.parametrize("backend", ["jax", "tensorflow"])
def test_a_slow_process_is_named_though_all_wait_for_each_other(backend, slow_cpu, tmp_path):
    strategy = "device_mesh" if backend == "jax" else "multi_worker_mirrored"
    flags = (f"--strategy={strategy}", "--replicas=2", *FLAGS, "--steps=1000000")
    process = launch(*flags, f"--run_dir={tmp_path}", processes=2)
    wait_for_checkpoint(process, tmp_path, 0)
    from tests.running import children

    (slow_cpu / "cgroup.procs").write_text(str(children(process.pid)[1]))
    time.sleep(50)
    process.terminate()
    out = finished(process, code=75)
    assert "process 1 takes" in out and "times as long as the others for the same work" in out


def test_a_report_is_one_page_that_needs_nothing_else(tmp_path):
    flags = ("--backend=jax", *FLAGS, "--dataset=tests.poisoned:load", "--on_nan=rollback", "--epochs=2")
    flags += (f"--run_dir={tmp_path}",)
    trainer(*flags, "--steps=-1")
    trainer("report", f"--run_dir={tmp_path}")
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") >= 4 and "polyline" in page and "were rolled back: the loss or a gradient" in page
    assert summary(tmp_path)["weights_sha256"] in page and "--on_nan" in page and "Goodput" in page
    assert "http" not in page.replace("http-equiv", "") and "<script" not in page
    (tmp_path / "summary.json").write_text('{"status": "comp')  # by a disk
    trainer("report", f"--run_dir={tmp_path}")
    page = (tmp_path / "report.html").read_text()
    assert "summary.json is damaged" in page and "polyline" in page
