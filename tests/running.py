"""Starts the real program in subprocesses, the way a user does."""

import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
TIMEOUT = 300  # seconds; a hang is a failure


def environment(**extra: str) -> dict[str, str]:
    """The environment of a child: ours, with bytecode caching on, which triples the speed of imports."""
    # TensorFlow sets its log level where it is imported, here too.
    ours = ("PYTHONDONTWRITEBYTECODE", "KERAS_BACKEND", "TF_CPP_MIN_LOG_LEVEL")
    env = {k: v for k, v in os.environ.items() if k not in ours}
    env["PYTHONPATH"] = str(REPOSITORY)
    return env | extra


def start(*arguments: str, cwd: pathlib.Path = REPOSITORY, **env: str) -> "subprocess.Popen[str]":
    """Starts `python -m trainer` and returns at once."""
    return subprocess.Popen(
        [sys.executable, "-m", "trainer", *map(str, arguments)],
        cwd=cwd,
        env=environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )


def trainer(
    *arguments: str, code: int = 0, cwd: pathlib.Path = REPOSITORY, timeout: float = TIMEOUT, **env: str
) -> "subprocess.CompletedProcess[str]":
    """Runs `python -m trainer` to its end and checks its exit code."""
    process = start(*arguments, cwd=cwd, **env)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode == code, f"exit code {process.returncode}, not {code}\n{out}\n{err}"
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def summary(run_dir: pathlib.Path) -> dict[str, Any]:
    """summary.json of a finished run."""
    return dict(json.loads((run_dir / "summary.json").read_text()))


def lines(run_dir: pathlib.Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def curve(run_dir: pathlib.Path) -> list[float]:
    """The loss of each logged step."""
    return [line["loss"] for line in lines(run_dir)]


def deviation(a: list[float], b: list[float]) -> float:
    """Largest relative difference between two curves."""
    assert len(a) == len(b) and a
    return max(abs(x - y) / abs(x) for x, y in zip(a, b, strict=True))


def launch(
    *arguments: str, processes: int = 2, restarts: int = 0, servers: int = 0, elastic: bool = False, **env: str
) -> "subprocess.Popen[str]":
    """Starts launch.local and returns at once."""
    options = [f"--processes={processes}", f"--restarts={restarts}", f"--servers={servers}", *["--elastic"] * elastic]
    return subprocess.Popen(
        [sys.executable, "-m", "launch.local", *options, "--", *map(str, arguments)],
        cwd=REPOSITORY,
        env=environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
    )


def finished(process: "subprocess.Popen[str]", code: int = 0) -> str:
    """The output of a launch that ends with an exit code."""
    out, _ = process.communicate(timeout=240)
    assert process.returncode == code, out
    return out


def wait_for_checkpoint(process: "subprocess.Popen[str]", run: pathlib.Path, step: int) -> None:
    """Waits until a checkpoint of a step or later is there."""
    deadline = time.monotonic() + 120
    while not any(path.name.isdigit() and int(path.name) >= step for path in (run / "checkpoints").glob("*")):
        assert process.poll() is None, process.communicate()[0]
        if time.monotonic() > deadline:
            process.kill()
            raise AssertionError("no checkpoint in time")
        time.sleep(0.05)


def stall(process: "subprocess.Popen[str]", run: pathlib.Path, file: pathlib.Path) -> None:
    """Lets the reads of tests.faulty:stalling_data stall, and waits until a run has used up what was read before."""

    deadline = time.monotonic() + 120

    def logged() -> int:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it does not train, or does not stall"
        time.sleep(0.05)
        return len(lines(run)) if (run / "metrics.jsonl").exists() else 0

    seen = logged()
    while (now := logged()) <= seen:  # it trains
        seen = now
    file.touch()
    since = time.monotonic()
    while not file.with_suffix(".met").exists() or time.monotonic() - since < 2:
        if (now := logged()) != seen:
            seen, since = now, time.monotonic()


def children(pid: int) -> list[int]:
    """Process ids of a process's children, in their order."""
    tasks = pathlib.Path(f"/proc/{pid}/task").glob("*/children")
    return sorted(int(child) for task in tasks for child in task.read_text().split())


def alive(pid: int) -> bool:
    """Whether a process is there, and has not ended."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
