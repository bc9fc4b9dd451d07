"""SIGKILL at any moment, two runs in one directory, damaged checkpoints, SIGTERM: the run goes on or says why."""

import fcntl
import os
import random
import signal
import time

import pytest
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

from tests.forks import trainer
from tests.running import alive, children, curve, lines, stall, start, summary, wait_for_checkpoint

FLAGS = (
    "--model=mlp(dropout=0.2)",
    "--steps=6000",
    "--log_every=500",
    "--evaluate_every=1000",
    "--save_every=200",
)


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(("--strategy=one_device", "--backend=jax"), id="jax"),
        pytest.param(("--strategy=one_device", "--backend=tensorflow"), id="tensorflow", marks=pytest.mark.long),
        pytest.param(("--strategy=device_mesh", "--devices=2", "--replicas=4"), id="mesh", marks=pytest.mark.long),
    ],
)
def test_ten_kills_change_nothing(strategy, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    trainer(*strategy, *FLAGS, f"--run_dir={whole}")
    moments = random.Random(0)
    landed, saved = 0, set()
    for i in range(10):
        logs = len(list((killed / "tensorboard").glob("*")))
        process = start(*strategy, *FLAGS, f"--run_dir={killed}")
        # Three kills fall into the start; the others into the training, however slow the machine is.
        while i % 3 and process.poll() is None and len(list((killed / "tensorboard").glob("*"))) == logs:
            time.sleep(0.02)
        time.sleep(moments.uniform(0, 1.5))
        landed += process.poll() is None
        process.kill()
        process.communicate()
        checkpoints = killed / "checkpoints"
        saved |= {p.name for p in checkpoints.glob("0*")} if checkpoints.exists() else set()
    assert landed == 10, "a kill must hit a living process"
    assert saved, "no kill fell into the training"
    trainer(*strategy, *FLAGS, f"--run_dir={killed}")
    assert summary(killed)["weights_sha256"] == summary(whole)["weights_sha256"]
    assert [line["step"] for line in lines(killed)] == [line["step"] for line in lines(whole)]
    assert curve(killed) == curve(whole)


OWING = """
import os
import pathlib
import signal
import time

import keras
from input_pipeline.digits import load as digits

ARMED, STOPPED, KILLED = map(pathlib.Path, ("armed", "stopped", "killed"))


class Slow:
    '''Has the run told to stop when it is first read for an evaluation.'''

    def __init__(self, source):
        self.source = source

    def __len__(self):
        return len(self.source)

    def read(self, ids):
        if ARMED.exists():
            ARMED.rename(STOPPED)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(2)
        return self.source.read(ids)


def load():
    found = digits()
    return {"train": found.train, "evaluation": Slow(found.evaluation), "classes": 10}


class Kills(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 21 and not STOPPED.exists():
            ARMED.touch()

    def on_epoch_end(self, epoch, logs=None):
        if STOPPED.exists() and not KILLED.exists():
            KILLED.touch()
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_stop_left_to_do_is_told_once(tmp_path):
    """The next start is killed when it has told of the step that it begins with, and the one after it tells it anew.

    TensorBoard has each step, too, also those that starts begin with.
    """
    (tmp_path / "owing.py").write_text(OWING)
    flags = ("--dataset=owing:load", "--callbacks=owing:Kills", "--backend=jax", "--log_every=1", "--run_dir=run")
    for steps, code in ((40, 75), (40, -signal.SIGKILL), (40, 0), (50, 0)):
        trainer(*flags, f"--steps={steps}", "--save_every=never", code=code, cwd=tmp_path)
    run = tmp_path / "run"
    assert [line["step"] for line in lines(run)] == [*range(1, 51)]
    assert [line["step"] for line in lines(run) if "val_loss" in line] == [23, 40, 45, 50]
    board = EventAccumulator(str(run / "tensorboard"), {"tensors": 0}).Reload()
    assert [event.step for event in board.Tensors("loss/train")] == [*range(1, 51)]


@pytest.mark.long  # tests/exact_test.py moves a run, too
def test_a_run_moves_between_devices_and_backends(tmp_path):
    """8 -> 2 -> 4 devices in mid-epoch keep the hash; a change of backend keeps the curve."""
    flags = ("--replicas=8", "--global_batch=128", "--save_every=1")
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    trainer("--strategy=mirrored", "--devices=8", *flags, "--steps=45", f"--run_dir={whole}")
    for devices, steps in ((8, 13), (2, 29), (4, 45)):
        trainer("--strategy=mirrored", f"--devices={devices}", *flags, f"--steps={steps}", f"--run_dir={moved}")
    assert summary(moved)["weights_sha256"] == summary(whole)["weights_sha256"]
    for run_dir, strategy in ((whole, "mirrored"), (moved, "device_mesh")):
        flags_now = (f"--strategy={strategy}", "--devices=2", *flags, "--steps=60", "--log_every=1")
        trainer(*flags_now, f"--run_dir={run_dir}")
    assert curve(moved)[-15:] == pytest.approx(curve(whole)[-15:], rel=1e-4)


def wait_for_steps(process, run):
    while not (run / "metrics.jsonl").exists() or not lines(run):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def test_sigterm_saves_and_the_same_command_continues(tmp_path):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    flags = ("--backend=jax", "--steps=4000", "--log_every=500", "--evaluate_every=never", "--save_every=never")
    trainer(*flags, f"--run_dir={whole}")
    process = start(*flags, f"--run_dir={stopped}")
    wait_for_steps(process, stopped)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert "Continue with" in out
    trainer(*flags, f"--run_dir={stopped}")
    assert summary(stopped)["weights_sha256"] == summary(whole)["weights_sha256"]


SLOW = """
import pathlib, time
from input_pipeline import digits

def load(seconds):
    pathlib.Path("loading").touch()
    time.sleep(seconds)
    return digits.load()
"""


def test_a_signal_before_the_first_step(tmp_path):
    """A start that was told to stop while it still reads its data has lost nothing, and is to be started again."""
    (tmp_path / "slow.py").write_text(SLOW)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        process = start("--backend=jax", "--dataset=slow:load(seconds=60)", "--run_dir=run", cwd=tmp_path)
        while not (tmp_path / "loading").exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        (tmp_path / "loading").unlink()
        process.send_signal(number)
        out, err = process.communicate(timeout=5)
        assert process.returncode == 75 and not err, err
        assert f"Stopped by {number.name} before its first step" in out


@pytest.mark.parametrize("backend", [pytest.param("tensorflow", marks=pytest.mark.long), "jax"])
def test_a_signal_that_also_ends_the_processes_that_read(backend, tmp_path):
    """Ctrl-C reaches all processes of a terminal, a scheduler's SIGTERM those of a job, and what is read then fails."""
    data = "--dataset=tests.faulty:read_by_processes(how='spawn', seconds=0.5)"
    flags = (f"--backend={backend}", data, "--model=mlp(units=8)", "--save_every=never")
    process = start(*flags, "--steps=1000000", "--run_dir=run", cwd=tmp_path)
    wait_for_steps(process, tmp_path / "run")
    time.sleep(1)  # it waits for data, most likely
    readers = children(process.pid)
    assert readers
    for pid in (process.pid, *readers):
        os.kill(pid, signal.SIGTERM)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 75, err
    step = int(out.partition("Stopped by SIGTERM after step ")[2].split(";")[0])
    assert step and (tmp_path / "run" / "checkpoints" / f"{step:08d}").is_dir()
    trainer(*flags, f"--steps={step + 100}", "--run_dir=run", cwd=tmp_path)


@pytest.mark.parametrize("how", ["fork", "ours"])
def test_processes_of_a_killed_run_are_not_in_its_way_and_end(how, tmp_path):
    """A fork has what the process had that was killed: the lock of the run's directory, too, if nobody sees to it."""
    data = f"--dataset=tests.faulty:read_by_processes(how={how!r})"
    flags = ("--backend=jax", data, "--save_every=20", "--run_dir=run")
    process = start(*flags, "--steps=1000000", cwd=tmp_path)
    wait_for_checkpoint(process, tmp_path / "run", 20)
    readers = children(process.pid)
    assert readers
    for reader in readers:
        os.kill(reader, signal.SIGSTOP)  # or they might end before the next start
    process.kill()
    process.wait()
    trainer(*flags, "--steps=100", cwd=tmp_path)
    for reader in readers:
        os.kill(reader, signal.SIGCONT)
    until = time.monotonic() + 10
    while any(map(alive, readers)):
        assert time.monotonic() < until, "they do not end with the process that has started them"
        time.sleep(0.1)


@pytest.mark.parametrize("backend", [pytest.param("tensorflow", marks=pytest.mark.long), "jax"])
def test_a_signal_is_obeyed_while_the_data_stall(backend, tmp_path):
    whole, stopped, stalls = tmp_path / "whole", tmp_path / "stopped", tmp_path / "stalls"
    flags = (f"--backend={backend}", "--dataset=tests.faulty:stalling_data", "--log_every=500", "--save_every=never")
    # Of smaller batches, thousands of steps are read ahead.
    flags += ("--evaluate_every=never", "--model=mlp(units=32)", "--global_batch=512")
    process = start(*flags, "--steps=1000000", f"--run_dir={stopped}", STALLS=str(stalls))
    stall(process, stopped, stalls)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 75, err
    step = int(out.partition("Stopped by SIGTERM after step ")[2].split(";")[0])
    stalls.unlink()
    flags += (f"--steps={step + 500}",)
    trainer(*flags, f"--run_dir={stopped}")
    trainer(*flags, f"--run_dir={whole}")
    assert summary(stopped)["weights_sha256"] == summary(whole)["weights_sha256"]
    told = [[(line["step"], line["ids"]) for line in lines(run)] for run in (stopped, whole)]
    assert told[0] == told[1]  # lines that waited to be told, too


@pytest.mark.long
def test_a_signal_is_obeyed_while_the_examples_of_pictures_stall(tmp_path):
    run, stalls = tmp_path / "run", tmp_path / "stalls"
    flags = ("--backend=jax", "--dataset=tests.faulty:stalling_pictures", "--steps=20", "--log_every=10")
    flags += (f"--callbacks=tests.faulty:Touch(step=10, file={str(stalls)!r})", f"--run_dir={run}")
    process = start(*flags, STALLS=str(stalls))
    while not stalls.with_suffix(".met").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 75 and "Stopped by SIGTERM after step 20" in out, err
    stalls.unlink()
    assert "test_accuracy" in trainer(*flags).stdout
    assert list((run / "tensorboard").glob("*")) and summary(run)["step"] == 20


@pytest.mark.long
def test_twenty_stops_at_any_moment_lose_nothing(tmp_path):
    """SIGTERM, from the start on: each start ends with 75 at the step that it had reached."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    flags = ("--steps=60000", "--log_every=500", "--evaluate_every=never", "--save_every=never")
    trainer(*flags, f"--run_dir={whole}")
    moments, reached = random.Random(0), 0
    for _ in range(20):
        logs = len(list((stopped / "tensorboard").glob("*")))
        process = start(*flags, f"--run_dir={stopped}")
        while process.poll() is None and len(list((stopped / "tensorboard").glob("*"))) == logs:
            time.sleep(0.02)
        time.sleep(moments.uniform(0, 1))
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 75, err
        step = int(out.partition("Stopped by SIGTERM after step ")[2].split(";")[0])
        assert step >= reached and (stopped / "checkpoints" / f"{step:08d}").is_dir()
        reached = step
    assert reached
    trainer(*flags, f"--run_dir={stopped}")
    assert summary(stopped)["weights_sha256"] == summary(whole)["weights_sha256"]
    assert curve(stopped) == curve(whole)


def test_a_line_whose_evaluation_is_broken_off_is_the_next_start_s(tmp_path):
    data = "--dataset=tests.faulty:slow_data(evaluation=0.02)"  # 7 seconds
    flags = ("--backend=jax", data, "--steps=20", "--log_every=5", "--evaluate_every=10", "--save_every=never")
    process = start(*flags, f"--run_dir={tmp_path}")
    while not (tmp_path / "metrics.jsonl").exists() or not lines(tmp_path):  # told where the evaluation begins
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75 and "Stopped by SIGTERM after step 10" in out, err
    assert [line["step"] for line in lines(tmp_path)] == [5]
    trainer(*flags, f"--run_dir={tmp_path}", FAST="1")
    assert [(line["step"], "val_loss" in line) for line in lines(tmp_path)] == [(5, 0), (10, 1), (15, 0), (20, 1)]


@pytest.mark.long
def test_steps_of_an_evaluation_that_take_seconds(tmp_path):
    """A signal is obeyed between two of them, though a block holds 32."""
    flags = ("--backend=jax", "--model=tests.faulty:slow_to_evaluate", "--steps=20", f"--run_dir={tmp_path}")
    process = start(*flags, "--dataset=synthetic(examples=1000, evaluation_examples=4000)", "--evaluate_every=10")
    while not (tmp_path / "checkpoints" / "00000000" / "manifest.json").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    time.sleep(10)
    process.send_signal(signal.SIGTERM)
    begin = time.monotonic()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 75 and "after step 10" in out, err
    assert time.monotonic() - begin < 15


def test_a_second_run_in_the_same_directory_is_refused(tmp_path):
    trainer("--backend=jax", "--steps=1", f"--run_dir={tmp_path}")
    with open(tmp_path / "lock", "r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as a living run holds it
        err = trainer("--backend=jax", "--steps=2", f"--run_dir={tmp_path}", code=76).stderr
    assert "is in use by process" in err


@pytest.mark.parametrize("damage", ["flip", *(pytest.param(d, marks=pytest.mark.long) for d in ("cut", "manifest"))])
def test_a_damaged_checkpoint_is_set_aside(damage, tmp_path):
    flags = ("--backend=jax", "--steps=60", "--save_every=20", "--evaluate_every=never", f"--run_dir={tmp_path}")
    trainer(*flags)
    expected = summary(tmp_path)["weights_sha256"]
    weights = tmp_path / "checkpoints" / "00000060" / "model.weights.h5"
    content = bytearray(weights.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 4
    elif damage == "cut":
        del content[len(content) // 3 :]
    else:
        weights.with_name("manifest.json").write_text("{")
    weights.write_bytes(content)
    (tmp_path / "summary.json").unlink()
    out = trainer(*flags).stdout
    assert "set aside as damaged" in out and "restored from" in out and "00000040" in out
    assert (tmp_path / "checkpoints" / "damaged-00000060").is_dir()
    assert summary(tmp_path)["weights_sha256"] == expected


def test_retention(tmp_path):
    trainer("--backend=jax", "--steps=200", "--save_every=10", "--keep=2", f"--run_dir={tmp_path}")
    kept = sorted(int(p.name) for p in (tmp_path / "checkpoints").iterdir())
    best = summary(tmp_path)["best"]["step"]
    assert set(kept) == {190, 200, best} | set(kept[-2:])
    assert len(kept) <= 3


@pytest.mark.parametrize(("best", "of"), [("val_accuracy", max), ("val_accuracy(mode='min')", min), ("val_loss", min)])
def test_the_best_checkpoint_is_best_in_what_is_asked_for(best, of, tmp_path):
    """Over a stop in between, too."""
    flags = ("--backend=jax", "--optimizer=sgd", "--learning_rate=1", "--keep=1", f"--run_dir={tmp_path}")
    for steps in (120, 200):
        trainer(*flags, f"--best={best}", f"--steps={steps}")
    found = {line["step"]: line[best.partition("(")[0]] for line in lines(tmp_path) if "val_loss" in line}
    told = summary(tmp_path)["best"]
    assert len(found) > 8 and told["step"] == of(found, key=found.get)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {f"{told['step']:08d}", "00000200"}
