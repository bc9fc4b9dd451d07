"""The devices of a JAX run: accelerators, or virtual CPUs where those are too few; of one process or of many."""

import math
import os
from collections.abc import Callable
from typing import Any

import jax
import keras.src.backend.jax.distribution_lib as keras_distribution
from jax._src import distributed as jax_distributed
from jax._src import xla_bridge
from jax._src.lib import _jax
from jax.sharding import NamedSharding

from trainer.cluster import Cluster
from trainer.config import Config
from trainer.errors import UserError
from trainer.processes import gpus
from trainer.strategies import jax_compiled
from trainer.strategies.base import Result, threads_of_cpu
from trainer.strategies.jax_arrays import placed


def take(config: Config, cluster: Cluster) -> tuple[list[jax.Device], str]:
    """The devices that the flags ask for, those of process 0 first, and what they are in words."""
    jax_compiled.mend()
    sizes = config.mesh_sizes()
    wanted = 1 if config.strategy == "one_device" else math.prod(sizes.values()) if sizes else config.devices
    if cluster.size > 1:
        _join(cluster)
    # Takes effect because no JAX device has been asked for yet; costs nothing if accelerators are used. As
    # many as there are replicas, though some stay idle: XLA's thread pool has one for each, or for each core.
    replicas = max(config.replicas, wanted) or cluster.size
    jax.config.update("jax_num_cpu_devices", replicas)
    if threads_of_cpu(config, replicas) and not gpus.visible(os.environ):  # whose client would have one thread, too
        os.environ["PJRT_NPROC"] = "1"  # cores, for XLA: it has no flag for them
    real = [d for d in _found() if d.platform != "cpu"]
    if not real:
        gpus.tell_if_idle("jax")
    wanted = wanted or len(real) or cluster.size
    if wanted % cluster.size:
        raise UserError(
            "devices", wanted, f"can't be shared out evenly by {cluster.size} processes", "give a multiple of them"
        )
    pool = real if len(real) >= wanted else _found("cpu")
    by_process = [[d for d in pool if d.process_index == p] for p in range(cluster.size)]
    devices = [d for of_process in by_process for d in of_process[: wanted // cluster.size]]
    if pool is real:
        description = f"{wanted} of {len(real)} {real[0].device_kind}"
    else:
        description = (
            "1 CPU" if wanted == 1 else f"{wanted} virtual CPU devices (this machine has {len(real)} accelerators)"
        )
        jax.config.update("jax_default_device", by_process[cluster.index][0])
    if len(devices) < wanted:
        raise UserError(
            "devices",
            wanted,
            f"each process has its share of them to give, and only {len(devices)} were found",
            "set XLA_FLAGS=--xla_force_host_platform_device_count before the start, or unset it",
        )
    return devices, description


def by_host(compute: Callable[[], Result]) -> Result:
    """Computes with this host's CPU; the same by the accelerator, but later, where JAX_PLATFORMS leaves CPUs out."""
    try:
        cpu = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        cpu = None
    with jax.default_device(cpu):
        return compute()


def _found(kind: str | None = None) -> list[jax.Device]:
    """The devices of a kind, or of the best there is.

    Raises:
      UserError: there are none, or the environment keeps JAX from them.
    """
    try:
        return jax.devices(kind)
    except (RuntimeError, AssertionError) as error:
        asked, why = f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}", str(error) or "it has no such parts"
        raise UserError(
            "backend",
            "jax",
            f"JAX finds no {f'{kind} ' if kind else ''}device with {asked}: {why}",
            "unset JAX_PLATFORMS, add cpu to it, or install JAX for this machine's accelerators",
        ) from error


def _join(cluster: Cluster) -> None:
    """Joins the processes' JAX runtimes; the coordinator listens on the chief's address and no other."""
    port = cluster.addresses[0].rpartition(":")[2]
    own_host = cluster.addresses[cluster.index].rpartition(":")[0].strip("[]")
    listens = cluster.bind_host or "0.0.0.0"
    jax.distributed.initialize(
        cluster.addresses[0],
        cluster.size,
        cluster.index,
        coordinator_bind_address=f"[{listens}]:{port}" if ":" in listens else f"{listens}:{port}",
        # It would keep to the GPU of Slurm's or Open MPI's local rank: trainer/processes/gpus.py knows better.
        cluster_detection_method="deactivate",
        heartbeat_timeout_seconds=30,  # trainer/peers.py notices sooner, and says why
        initialization_timeout=60,
    )

    def cpu_client() -> Any:
        # JAX's own listens where this machine's name leads, which on many is loopback.
        client = jax_distributed.global_state.client
        return xla_bridge.make_cpu_client(_jax.make_gloo_tcp_collectives(client, hostname=own_host))

    xla_bridge.register_backend_factory("cpu", cpu_client, priority=0, fail_quietly=False)

    def distribute(value: Any, layout: NamedSharding) -> Any:
        traced = isinstance(value, jax.core.Tracer)
        return jax.lax.with_sharding_constraint(value, layout) if traced else placed(value, layout)

    keras_distribution.distribute_tensor = distribute  # Keras's own uses jax.device_put; see `placed`
