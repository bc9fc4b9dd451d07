"""A run that the drill starts, watches and disturbs."""

import contextlib
import dataclasses
import json
import os
import pathlib
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from trainer import checkpoint
from trainer.cluster import ALONE_FLAG
from trainer.config import Config
from trainer.errors import PREEMPTED
from trainer.monitoring.readable import OF_TIME
from trainer.processes import forks
from trainer.storage.append import records

ENOUGH = 600.0  # seconds for one start


class NotCaused(Exception):
    """The run ended before the fault could be caused."""


class Patient:
    """A run, started as often as need be.

    Args:
      config: its flags.
      directory: its run directory.
    """

    def __init__(self, config: Config, directory: pathlib.Path) -> None:
        flags = dataclasses.replace(config, run_dir=str(directory)).to_flags()
        command = ["-m", "trainer", ALONE_FLAG, *flags]
        if config.strategy == "multi_worker_mirrored" or config.cluster:
            command = ["-m", "launch.local", "--processes=2", "--", *flags]
        self._command = [sys.executable, *command]
        self.checkpoints, self._directory = directory / "checkpoints", directory
        self.log = directory.with_suffix(".log")
        self.starts = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, limit: int = 0) -> "subprocess.Popen[bytes]":
        """Starts it; no file of it may grow over `limit` bytes, which is how a full disk looks."""
        self.starts += 1

        def prepare() -> None:
            forks.end_with_parent()
            if limit:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=prepare,
            )
        return self._process

    def finish(self) -> int:
        """Starts it until it is done, or ends otherwise than by having been told to stop. Returns the exit code."""
        code = PREEMPTED
        while code == PREEMPTED:
            code = self.start().wait(ENOUGH)
        return code

    def wait_for(self, true: Callable[[], bool], what: str) -> None:
        """Waits, as closely as can be, for something of a running start."""
        assert self._process
        deadline = time.monotonic() + ENOUGH
        while not true():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise NotCaused(f"the run ended before {what}")
            time.sleep(0.0005)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Signals the whole start."""
        if self._process and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            if number == signal.SIGKILL:
                self._process.wait()

    def ended(self) -> int:
        """Waits for the start to end. Returns its exit code."""
        assert self._process
        return self._process.wait(ENOUGH)

    def saved(self) -> list[int]:
        """Steps of the checkpoints that are there."""
        return checkpoint.steps(self.checkpoints) if self.checkpoints.exists() else []

    def result(self) -> tuple[str, list[dict[str, object]]]:
        """Hash of the weights, and the log without its times."""
        summary = json.loads((self._directory / "summary.json").read_text())
        lines = records(self._directory / "metrics.jsonl")
        return summary["weights_sha256"], [{k: v for k, v in line.items() if k not in OF_TIME} for line in lines]

    def last_words(self) -> str:
        """The last line that it printed."""
        return (self.log.read_text(errors="replace").strip().splitlines() or [""])[-1][:160]
