"""The verb doctor: what this process takes itself and its surroundings for, and whether they are in order.

Start it the way the run is started (under launch.local, srun or mpirun, in the pod): it reads the same
environment. With several processes it meets the others as a run would, each saying what it found.
"""

import importlib.metadata
import os
import platform
import shutil
import socket
import time

from input_pipeline.cores import cores
from trainer import backend, verify_rows
from trainer.cluster import Cluster, outside_interfaces, resolve
from trainer.config import Config
from trainer.errors import OK, PEER_LOST, UserError
from trainer.monitoring.readable import size
from trainer.peers import Peers
from trainer.processes import discovery, gpus
from trainer.processes.addresses import UNKNOWN
from trainer.processes.connection import listen, resolved

_PATIENCE = 20.0  # seconds for the others to come


def run(config: Config) -> int:
    """Prints a line for each thing looked at. Returns the exit code: OK if none is wrong."""
    cluster, patience = resolve(config.cluster), min(_PATIENCE, config.patience)
    meeting: Findings = []
    try:
        cluster = discovery.discover(cluster, patience)
    except UserError as error:
        meeting = [("WRONG", "meeting", str(error))]
    found = [*_cluster(config, cluster), *_names(cluster), *_ports(cluster), *_directory(config), *_machine()]
    found += [*_gpus(config, cluster), *meeting]
    if cluster.size > 1 and not meeting:
        found += _meeting(cluster, patience)
    for verdict, name, text in found:
        print(f"{verdict:>5}  {name}: {text}")
    wrong = [name for verdict, name, _ in found if verdict == "WRONG"]
    print(f"\n{'wrong: ' + ', '.join(wrong) if wrong else 'nothing is wrong'}")
    return PEER_LOST if wrong else OK


Findings = list[tuple[str, str, str]]  # verdict, what was looked at, what was found


def _cluster(config: Config, cluster: Cluster) -> Findings:
    found = [("ok", "cluster", f"{cluster.source}; this is process {cluster.index} of {cluster.size}")]
    if cluster.size > 1:
        roles = cluster.roles or ("",) * cluster.size
        for index, (address, role) in enumerate(zip(cluster.addresses, roles, strict=True)):
            found.append(("ok", f"process {index}", f"{address} {role}".rstrip()))
        found.append(("ok", "meeting", "{}:{}".format(*cluster.meeting)))
    try:
        backend.check_cluster(config, cluster)
        found.append(("ok", "strategy", f"{config.strategy} on Keras's {backend.choose(config)}"))
    except UserError as error:
        found.append(("WRONG", "strategy", str(error)))
    return found


def _names(cluster: Cluster) -> Findings:
    found: Findings = []
    hosts = dict.fromkeys(address.rpartition(":")[0] for address in cluster.addresses if cluster.size > 1)
    for host in filter(UNKNOWN.__ne__, hosts):
        try:
            found.append(("ok", "name", f"{host} is {resolved(host)[1]}"))
        except OSError as error:
            found.append(("WRONG", "name", f"{host} can't be resolved here: {error}"))
    return found


def _ports(cluster: Cluster) -> Findings:
    """Whether this process can listen where it will have to."""
    wanted = {int(cluster.addresses[cluster.index].rpartition(":")[2])} if cluster.size > 1 else set()
    if cluster.size > 1 and cluster.is_chief:
        wanted.add(cluster.meeting[1])
    found: Findings = []
    for port in sorted(wanted):
        try:
            listen("", port, cluster.source).close()
            found.append(("ok", "port", f"{port} is free"))
        except UserError as error:
            found.append(("WRONG", "port", str(error)))
    return found


def _meeting(cluster: Cluster, patience: float) -> Findings:
    """Whether the processes find each other, and how long a word to all takes."""
    try:
        with Peers(cluster, patience) as met:
            start = time.monotonic()
            hosts = met.gather(socket.gethostname())
            seconds = time.monotonic() - start
    except UserError as error:
        return [("WRONG", "meeting", str(error))]
    return [
        ("ok", "meeting", f"all {cluster.size} came, from {', '.join(hosts)}; an exchange took {seconds * 1e3:.1f} ms")
    ]


def _directory(config: Config) -> Findings:
    path = config.directory()
    there = next(p for p in (path, *path.resolve().parents) if p.exists())
    free = shutil.disk_usage(there).free
    if not os.access(there, os.W_OK):
        return [("WRONG", "run directory", f"{there} can't be written by user {os.getuid()}")]
    return [("ok", "run directory", f"{path}, {size(free)} free")]


def _machine() -> Findings:
    versions = ", ".join(f"{n} {importlib.metadata.version(n)}" for n in ("keras", "jax", "numpy") if _installed(n))
    outside = outside_interfaces()
    return [
        ("ok", "packages", f"Python {platform.python_version()}, {versions}"),
        ("ok", "machine", f"{cores()} cores, network {', '.join(outside) or 'loopback only'}"),
    ]


def _gpus(config: Config, cluster: Cluster) -> Findings:
    """Whether the backend finds the GPUs that this process takes."""
    if cluster.is_complete:  # or nobody knows with whom it shares them
        os.environ |= gpus.own(cluster, os.environ)
    seen = gpus.visible(os.environ)
    found: Findings = [("ok", "NVIDIA GPUs", f"this process takes {', '.join(seen) or 'none'}")]
    if seen:
        try:
            name = backend.choose(config)
            count = verify_rows.ask(name)
            found.append(("ok" if count == len(seen) else "WRONG", name, f"finds {count} of {len(seen)} GPUs"))
        except UserError as error:
            found.append(("WRONG", "backend", str(error)))
    return found


def _installed(name: str) -> bool:
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False
