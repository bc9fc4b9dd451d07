"""Hosts of their own network on this machine, whose links can be cut; containers of little memory or time."""

import contextlib
import os
import pathlib
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.conftest import need
from tests.running import REPOSITORY, environment


class Lab:
    """Network namespaces h0, h1, ... at 10.91.0.1, 10.91.0.2, ..."""

    def __init__(self, hosts: int) -> None:
        self._name = f"onecurve{os.getpid()}"
        self.addresses = [f"10.91.0.{i + 1}" for i in range(hosts)]
        self._spaces = [f"{self._name}-h{i}" for i in range(hosts)]
        self._switch = f"{self._name}-switch"
        for space in (self._switch, *self._spaces):
            _ip("netns", "add", space)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        for i, (space, address) in enumerate(zip(self._spaces, self.addresses, strict=True)):
            _ip("-n", self._switch, "link", "add", f"port{i}", "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("-n", self._switch, "link", "set", f"port{i}", "master", "bridge", "up")
            _ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", space, "link", "set", "lo", "up")

    def on(self, host: int, command: Sequence[str]) -> list[str]:
        """The command that runs a command on a host."""
        return ["ip", "netns", "exec", self._spaces[host], *command]

    def start(self, host: int, command: Sequence[str], **env: str) -> "subprocess.Popen[str]":
        """Starts a command on a host; its process id is the command's own."""
        return subprocess.Popen(
            self.on(host, command),
            cwd=REPOSITORY,
            env=environment(**env),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
        )

    def cut(self, host: int, down: bool = True) -> None:
        """Takes a host's cable out, or puts it back."""
        _ip("-n", self._switch, "link", "set", f"port{host}", "down" if down else "up")

    def throttle(self, rate: str) -> None:
        """Lets each host send no more than so much a second: '20mbit'."""
        limit = ["tbf", "rate", rate, "burst", "32kbit", "latency", "1s"]
        for space in self._spaces:
            command = ["ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", "eth0", "root", *limit]
            subprocess.run(command, check=True, capture_output=True)

    def close(self) -> None:
        """Removes the hosts."""
        for space in (*self._spaces, self._switch):
            subprocess.run(["ip", "netns", "delete", space], check=False, capture_output=True)


@contextlib.contextmanager
def lab(hosts: int = 2) -> Iterator[Lab]:
    """A lab for the length of a `with` block; skips the test where there can be none."""
    need(bool(shutil.which("ip")), "no ip command: apt-get install iproute2")
    probe = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    need(os.getuid() == 0 and probe.returncode == 0, "network namespaces need root, and a kernel that has them")
    made = Lab(hosts)
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def container(controller: str, first: Mapping[str, str], second: Mapping[str, str]) -> Iterator[pathlib.Path]:
    """A control group with limits, file -> value, in the names of the first version of cgroups and of the second."""
    root = pathlib.Path("/sys/fs/cgroup")
    parent, limits = (root / controller, first) if (root / controller).exists() else (root, second)
    group = parent / f"onecurve{os.getpid()}"
    try:
        group.mkdir()
        for name, value in limits.items():
            (group / name).write_text(value)
    except OSError as error:
        need(False, f"no container can be made: {error}")
    try:
        yield group
    finally:
        group.rmdir()


def _ip(*arguments: str) -> Any:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True)
