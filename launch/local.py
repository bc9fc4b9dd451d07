"""Starts one run as several processes on this machine, and ends them all when one fails.

python -m launch.local --processes=2 [--restarts=3] -- --strategy=multi_worker_mirrored ...

What follows `--` are the flags of `python -m trainer`. Each process is told the others by TF_CONFIG; all
listen on loopback. A line of output begins with the number of its process. Exit codes are the trainer's: of the
process that failed first.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO

RESTARTABLE = (69, 70, 75)  # a peer was lost, a watchdog fired, preempted: the run itself is well
USER_ERROR = 2
GRACE = 12.0  # seconds that the others have to end by themselves once one has failed


def main(argv: Sequence[str]) -> int:
    """Runs the group, again as often as allowed. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m launch.local", description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, required=True, help="number of processes")
    parser.add_argument("--restarts", type=int, default=0, help="how often the group is started again after a failure")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="-- and the flags of python -m trainer")
    arguments = parser.parse_args(argv)
    flags = arguments.flags[1:] if arguments.flags[:1] == ["--"] else arguments.flags
    for attempt in range(arguments.restarts + 1):
        group = Group(arguments.processes, flags)
        code = group.wait()
        restartable = code in RESTARTABLE or code < 0
        if not restartable or group.told_to_stop or attempt == arguments.restarts:
            break
        pause = min(30.0, 0.5 * 2**attempt)
        print(f"launch: exit code {code}; start {attempt + 2} in {pause:g}s", flush=True)
        time.sleep(pause)
    return code if code >= 0 else 128 - code


class Group:
    """The processes of one start.

    Args:
      count: how many.
      flags: of python -m trainer.
    """

    def __init__(self, count: int, flags: Sequence[str]) -> None:
        self.told_to_stop = False
        addresses = [f"127.0.0.1:{port}" for port in free_ports(count)]
        self._processes = [_start(addresses, index, flags) for index in range(count)]
        self._readers = [
            threading.Thread(target=_copy, args=(process.stdout, index), daemon=True)
            for index, process in enumerate(self._processes)
        ]
        for reader in self._readers:
            reader.start()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._pass_on)

    def wait(self) -> int:
        """Waits for all to end; ends the others when one has failed. Returns the first failure's code, or 0."""
        failed: int | None = None
        deadline = float("inf")
        while any(process.poll() is None for process in self._processes):
            codes = [process.poll() for process in self._processes]
            bad = [(index, code) for index, code in enumerate(codes) if code]
            if bad and failed is None:
                # Of several at once: a user's mistake explains the others, and who was killed followed nobody.
                index, failed = min(bad, key=lambda one: (one[1] != USER_ERROR, one[1] > 0))
                deadline = time.monotonic() + GRACE
                print(f"launch: process {index} ended first, with exit code {failed}", flush=True)
            if time.monotonic() > deadline:
                for process in self._processes:
                    process.kill()
            time.sleep(0.05)
        for reader in self._readers:
            reader.join(timeout=5)
        return failed if failed is not None else next((c for p in self._processes if (c := p.returncode)), 0)

    def _pass_on(self, number: int, frame: object) -> None:
        self.told_to_stop = True
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)


def _start(addresses: Sequence[str], index: int, flags: Sequence[str]) -> "subprocess.Popen[bytes]":
    config = {"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": index}}
    return subprocess.Popen(
        [sys.executable, "-m", "trainer", *flags],
        env=os.environ | {"TF_CONFIG": json.dumps(config)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C reaches them through us alone, once
    )


def _copy(stream: IO[bytes], index: int) -> None:
    for line in stream:
        sys.stdout.write(f"[{index}] {line.decode(errors='replace')}")
        sys.stdout.flush()


def free_ports(count: int) -> list[int]:
    """Ports that are free now, held together while they are chosen so that they differ."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
