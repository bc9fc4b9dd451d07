"""Runs of the program for the price of one import of JAX and Keras: forks of a process that has imported them.

For tests of what is told, not of how a process starts.
"""

import json
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from tests.running import REPOSITORY, TIMEOUT, environment


class Forks:
    """A process that is ready for `python -m trainer --backend=jax`; a context manager."""

    def __enter__(self) -> "Forks":
        command = [sys.executable, "-m", "tests.forks"]
        pipe = subprocess.PIPE
        self._ready = subprocess.Popen(command, cwd=REPOSITORY, env=environment(), stdin=pipe, stdout=pipe, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._ready.stdin
        self._ready.stdin.close()
        self._ready.wait()

    def trainer(self, *arguments: str, code: int, cwd: pathlib.Path) -> "subprocess.CompletedProcess[str]":
        """As tests.running.trainer, on JAX."""
        assert self._ready.stdin and self._ready.stdout
        with tempfile.TemporaryDirectory() as scratch:
            out, err = pathlib.Path(scratch, "out"), pathlib.Path(scratch, "err")
            print(json.dumps([arguments, str(cwd), str(out), str(err)]), file=self._ready.stdin, flush=True)
            found = int(self._ready.stdout.readline())
            said = out.read_text(), err.read_text()
        assert found == code, f"exit code {found}, not {code}\n{said[0]}\n{said[1]}"
        return subprocess.CompletedProcess(arguments, found, *said)


def _run(arguments: Sequence[str], cwd: str, out: str, err: str) -> None:
    """In a fork: becomes the program."""
    signal.alarm(TIMEOUT)
    for number, path in ((0, os.devnull), (1, out), (2, err)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    os.chdir(cwd)
    sys.path.insert(0, cwd)
    sys.argv = ["trainer", *arguments]
    runpy.run_module("trainer", run_name="__main__", alter_sys=True)  # leaves by os._exit


def main() -> None:
    """Forks for each line of stdin: what to run, where, and where to leave what it prints; prints its exit code."""
    from trainer import backend

    backend.prepare("jax")
    with backend.quiet():
        import trainer.train  # noqa: F401
    for line in sys.stdin:
        child = os.fork()
        if not child:
            _run(*json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
