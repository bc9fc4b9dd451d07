"""Runs of the program for the price of one import of the frameworks: forks of a process that has imported them.

For tests of what a run makes of a model, of data and of flags, not of how a process starts, ends or is watched.
"""

import functools
import json
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from tests import running
from tests.running import REPOSITORY, TIMEOUT, environment


def trainer(
    *arguments: str, code: int = 0, cwd: pathlib.Path = REPOSITORY, timeout: float = TIMEOUT, **env: str
) -> "subprocess.CompletedProcess[str]":
    """As tests.running.trainer; a process of its own for most verbs, and where `env` says something."""
    given = [*map(str, arguments)]
    if env or not given[0].startswith(("--", "explain")):
        return running.trainer(*given, code=code, cwd=cwd, timeout=timeout, **env)
    on_jax = "--backend=jax" in given or "--strategy=device_mesh" in given
    ready = _ready("jax" if on_jax else "tensorflow")
    assert ready.stdin and ready.stdout
    with tempfile.TemporaryDirectory() as scratch:
        out, err = pathlib.Path(scratch, "out"), pathlib.Path(scratch, "err")
        print(json.dumps([given, str(cwd), str(out), str(err), timeout]), file=ready.stdin, flush=True)
        found = int(ready.stdout.readline())
        said = out.read_text(), err.read_text()
    assert found == code, f"exit code {found}, not {code}\n{said[0]}\n{said[1]}"
    return subprocess.CompletedProcess(given, found, *said)


@functools.cache
def _ready(backend: str) -> "subprocess.Popen[str]":
    """A process that is ready to be `python -m trainer` on a backend; it ends with this one, for its stdin does."""
    command = [sys.executable, "-m", "tests.forks", backend]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=REPOSITORY, env=environment(), stdin=pipe, stdout=pipe, text=True)


def _run(arguments: Sequence[str], cwd: str, out: str, err: str, timeout: float) -> None:
    """In a fork: becomes the program."""
    signal.setitimer(signal.ITIMER_REAL, timeout)
    for number, path in ((0, os.devnull), (1, out), (2, err)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    os.chdir(cwd)
    sys.path.insert(0, cwd)
    sys.argv = ["trainer", *arguments]
    runpy.run_module("trainer", run_name="__main__", alter_sys=True)  # leaves by os._exit


def main(backend_name: str) -> None:
    """Forks for each line of stdin: what to run, where, and where to leave what it prints; prints its exit code."""
    from trainer import backend

    backend.prepare(backend_name)
    with backend.quiet():
        import trainer.train  # noqa: F401
    for line in sys.stdin:
        child = os.fork()
        if not child:
            _run(*json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
