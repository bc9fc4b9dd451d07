"""Starts one run as several processes on this machine, and ends or restarts them together.

python -m launch.local --processes=2 [--restarts=3] -- --strategy=multi_worker_mirrored ...
python -m launch.local --processes=3 --servers=2 -- --strategy=parameter_server ...

What follows `--` are the flags of `python -m trainer`. Each process is told the others by TF_CONFIG; all
meet on loopback. A line of output begins with the number of its process, and is kept in a log of each. Exit
codes are the trainer's: of the process that failed first.

When one fails, the others end by themselves, and the group starts again from the last checkpoint. With --elastic
it goes on with fewer processes (the next number that divides --replicas, which has to be given); SIGUSR1 says
that what was lost is back. Of a parameter_server run, a lost worker alone is started again.
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO

from launch import flags_of, told
from launch.autopsy import Standstill, kills_for_memory, lack_of_memory
from trainer import console
from trainer.cluster import Cluster
from trainer.command_line import config_of
from trainer.errors import BUSY, OK, PREEMPTED, USER_ERROR, UserError
from trainer.monitoring import host_memory
from trainer.processes import addresses, forks, gpus
from trainer.processes.claims import claim
from trainer.run_directory import split

FINAL = (OK, USER_ERROR, BUSY)  # done; or what another start would meet again
MOST_STARVED = 2  # times that a group is killed for lack of memory before it is given up
GRACE = 4.0  # seconds that the others have to end by themselves once one has failed
PARTING = 30.0  # seconds that they have once the chief, who leaves last, is done
# As `make train`; what the environment says goes before.
MALLOC = {"GLIBC_TUNABLES": host_memory.TUNABLES}


def main(argv: Sequence[str]) -> int:
    """Runs the group, again as often as allowed. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.local", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, required=True, help="number of processes, servers not counted")
    parser.add_argument("--servers", type=int, default=0, help="parameter servers; process 0 is then the chief")
    parser.add_argument("--restarts", type=int, default=0, help="how often something is started again after a failure")
    parser.add_argument("--elastic", action="store_true", help="after a loss go on with fewer processes")
    parser.add_argument("--logs", default="", help="directory of a log per process; default: the run's logs")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="-- and the flags of python -m trainer")
    arguments = parser.parse_args(argv)
    flags = flags_of(arguments.flags)
    config = config_of(flags)  # a mistake in them is told once, before each process would
    sizes = _sizes(parser, arguments, config.replicas)
    run, _ = split(config.directory())  # evaluate takes a checkpoint
    logs = pathlib.Path(arguments.logs or run / "logs")
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError("logs", logs, f"can't be made: {error}", "give it, or --run_dir, another place") from None
    signals = _Signals()
    size, restarts = 0, 0  # size: place in `sizes`
    standstill, starved = Standstill(run / "checkpoints"), 0
    while True:
        before = kills_for_memory()
        group = Group(sizes[size], arguments.servers, flags, logs, arguments.restarts - restarts)
        code = group.wait(signals)
        restarts += group.replaced
        if code == -signal.SIGKILL and kills_for_memory() > before:
            starved += 1
            print(f"launch: {lack_of_memory()}", flush=True)
        if starved == MOST_STARVED or (
            code not in (OK, PREEMPTED) and standstill.ended() and restarts < arguments.restarts
        ):
            why = "as it is, it will not fit" if starved == MOST_STARVED else "several starts saved no further step"
            print(f"launch: exit code {code}; not started again: {why}", flush=True)
            return code if code >= 0 else 128 - code
        if signals.grow:
            signals.grow, size, pause = False, 0, 0.0
        elif signals.stop or restarts == arguments.restarts or code in FINAL:
            return code if code >= 0 else 128 - code
        else:
            size = min(size + (code != PREEMPTED), len(sizes) - 1)
            pause = min(30.0, 0.5 * 2**restarts)
            restarts += 1
        print(f"launch: exit code {code}; {sizes[size]} processes start in {pause:g}s", flush=True)
        if signals.stops_within(pause):
            return PREEMPTED


def _sizes(parser: argparse.ArgumentParser, arguments: argparse.Namespace, replicas: int) -> list[int]:
    """The numbers of processes that may be, the first one first."""
    if not arguments.elastic:
        return [arguments.processes]
    if not replicas:
        parser.error("--elastic needs --replicas among the run's flags: they keep the curve as processes go and come")
    return [n for n in range(arguments.processes, 0, -1) if replicas % n == 0]


class _Signals:
    """What the launcher was told: to stop (SIGINT, SIGTERM, SIGHUP) or to go on with all processes (SIGUSR1)."""

    def __init__(self) -> None:
        self.stop, self.grow, self.pending = False, False, list[int]()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        self.stop |= number != signal.SIGUSR1
        self.grow |= number == signal.SIGUSR1
        self.pending.append(signal.SIGTERM if number == signal.SIGUSR1 else number)

    def stops_within(self, seconds: float) -> bool:
        """Waits for so long, or until it is told to stop; whether it was."""
        end = time.monotonic() + seconds
        while not self.stop and time.monotonic() < end:
            time.sleep(0.05)
        return self.stop


class Group:
    """The processes of one start.

    Args:
      count: how many, servers not counted.
      servers: parameter servers.
      flags: of python -m trainer.
      logs: directory of a log per process.
      replacements: how many lost workers of a parameter_server run may be started again.
    """

    def __init__(self, count: int, servers: int, flags: Sequence[str], logs: pathlib.Path, replacements: int) -> None:
        self.replaced, self._replacements, self._flags, self._logs = 0, replacements, flags, logs
        self._roles = ["worker"] * count
        if servers:
            self._roles = ["chief", *["worker"] * (count - 1), *["ps"] * servers]
        self._addresses = [f"127.0.0.1:{port}" for port in free_ports(len(self._roles))]
        self._gpus = gpus.visible(os.environ)
        computing = len(gpus.computing(self._cluster(0)))
        if 0 < len(self._gpus) < computing:
            few = f"{computing} processes are more than the GPUs here, {', '.join(self._gpus)}"
            print(f"launch: {few}: they compute on CPUs", flush=True)
        self._readers, self._started = list[threading.Thread](), list[subprocess.Popen[bytes]]()
        self._processes = [self._start(index) for index in range(len(self._roles))]

    def wait(self, signals: _Signals) -> int:
        """Waits for all to end; ends the others when one has failed. Returns the first failure's code, or 0."""
        failed, deadline, running = 0, float("inf"), True
        while running:
            running = any(process.poll() is None for process in self._processes)
            while signals.pending:
                self._send(signals.pending.pop(0))
            bad = [(index, code) for index, process in enumerate(self._processes) if (code := process.poll())]
            if self._processes[0].poll() == 0:
                # The chief is done: nobody stays behind. A worker that came back too late would wait for another chief.
                deadline = min(deadline, time.monotonic() + (GRACE if "ps" in self._roles else PARTING))
            elif len(bad) == 1 and not failed and not signals.stop and self._may_replace(*bad[0]):
                index, code = bad[0]
                print(f"launch: worker {index} ended with exit code {code}; it is started again", flush=True)
                self.replaced += 1
                self._processes[index] = self._start(index)
                running = True
            elif bad and not failed:
                # Of several at once: a user's mistake explains the others, and who was killed followed nobody.
                index, failed = min(bad, key=lambda one: (one[1] != USER_ERROR, one[1] > 0))
                deadline = time.monotonic() + GRACE
                print(f"launch: process {index} ended with exit code {failed}", flush=True)
            if time.monotonic() > deadline:
                self._send(signal.SIGKILL)
            time.sleep(0.05)
        for process in self._started:
            if process.returncode < 0:  # killed, so that what it has started was not ended
                with contextlib.suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)
        for reader in self._readers:
            reader.join(timeout=5)
        return PREEMPTED if self._processes[0].returncode == PREEMPTED else failed  # one may have died of the signal

    def _may_replace(self, index: int, code: int) -> bool:
        """Whether a process that ended is a worker that others can do without for a while."""
        asynchronous = "ps" in self._roles and self._roles[index] == "worker"
        return asynchronous and code not in (*FINAL, PREEMPTED) and self.replaced < self._replacements

    def _send(self, number: int) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def _cluster(self, index: int) -> Cluster:
        return Cluster(tuple(self._addresses), index, "TF_CONFIG", tuple(self._roles))

    def _start(self, index: int) -> "subprocess.Popen[bytes]":
        role, cluster = self._roles[index], dict[str, list[str]]()
        for name, address in zip(self._roles, self._addresses, strict=True):
            cluster.setdefault(name, []).append(address)
        config = {"cluster": cluster, "task": {"type": role, "index": index - self._roles.index(role)}}
        process = subprocess.Popen(
            [sys.executable, "-m", "trainer", *self._flags],
            env=MALLOC | os.environ | {"TF_CONFIG": json.dumps(config)} | gpus.share(self._cluster(index), self._gpus),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches them through us alone, once
            preexec_fn=forks.end_with_parent,
        )
        self._started.append(process)  # of a worker that is replaced, each
        assert process.stdout
        log = console.Lossy(self._logs / f"process-{index}.log", "a")
        self._readers.append(threading.Thread(target=_copy, args=(process.stdout, log, index), daemon=True))
        self._readers[-1].start()
        return process


def _copy(stream: IO[bytes], log: console.Lossy, index: int) -> None:
    """Reads on whatever becomes of the copies: a process whose output nobody takes stands still."""
    with log:
        for line in stream:
            log.write(line)
            sys.stdout.write(f"[{index}] {line.decode(errors='replace')}")
            sys.stdout.flush()


def free_ports(count: int) -> list[int]:
    """Ports that are free now, and so is the one above the first, at which the processes meet.

    Above those that Linux gives away by itself: a connection that goes out might have one by the time that the process
    that is to listen there has started. Of processes that ask, until they end, none is given another's.

    Raises:
      OSError: there are not so many.
    """
    found = list[int]()
    with contextlib.ExitStack() as held:  # together while they are chosen, so that they differ

        def take(port: int) -> bool:
            if not claim(f"port {port}"):
                return False
            one = held.enter_context(contextlib.closing(socket.socket()))
            with contextlib.suppress(OSError):
                one.bind(("127.0.0.1", port))
                return True
            return False

        every = range(addresses.FIRST, 2**16 - 1)
        for port in random.SystemRandom().sample(every, len(every)):
            if take(port) and (found or take(port + 1)):
                found.append(port)
            if len(found) == count:
                return found
    raise OSError(f"{count} ports from {every.start} to {every.stop} are not free")


if __name__ == "__main__":
    console.make_lossy()
    sys.exit(told(main, sys.argv[1:]))
