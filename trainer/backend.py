"""Chooses the Keras backend and quiets the frameworks. Runs before anything imports keras."""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import os
import pathlib
import platform
import sys
import warnings
from collections.abc import Iterator

from absl import logging

from trainer import later
from trainer.cluster import ALONE, Cluster
from trainer.config import Config
from trainer.errors import UserError
from trainer.monitoring import host_memory
from trainer.processes import gpus, holding_back

_OF_MANY_PROCESSES = ("multi_worker_mirrored", "parameter_server", "device_mesh")
_BACKENDS = {
    "one_device": ("tensorflow", "jax"),
    "mirrored": ("tensorflow",),
    "multi_worker_mirrored": ("tensorflow",),
    "parameter_server": ("tensorflow",),
    "tpu": ("tensorflow",),
    "device_mesh": ("jax",),
}


def choose(config: Config) -> str:
    """Name of the backend that the strategy implies.

    Raises:
      UserError: --backend or KERAS_BACKEND contradicts --strategy.
    """
    possible = _BACKENDS.get(config.strategy, ("tensorflow", "jax"))  # a strategy of the user's own: either
    if config.backend and config.backend not in possible:
        raise UserError(
            "backend",
            config.backend,
            f"contradicts --strategy={config.strategy}, which runs on {possible[0]}",
            f"drop --backend, or use --strategy={_strategies(config.backend)}",
        )
    environment = os.environ.get("KERAS_BACKEND", "")
    if not config.backend and environment and environment not in possible:
        raise UserError(
            "strategy",
            config.strategy,
            f"runs on {' or '.join(possible)}, but KERAS_BACKEND={environment} is set",
            f"unset KERAS_BACKEND, or use --strategy={_strategies(environment)}",
        )
    return config.backend or environment or possible[0]


def check_cluster(config: Config, cluster: Cluster) -> None:
    """Raises UserError if the strategy does not run in the processes that there are."""

    def wrong(reason: str, fix: str) -> UserError:
        return UserError("strategy", config.strategy, reason, fix)

    start = "start it by python -m launch.local --processes={} -- ..., or set TF_CONFIG"
    if config.strategy == "multi_worker_mirrored" and cluster is ALONE:
        raise wrong("needs several processes, and nothing in the environment names them", start.format("2"))
    roles = " and ".join(sorted(set(cluster.roles))) or "no roles"
    if config.strategy == "parameter_server" and set(cluster.roles) != {"chief", "worker", "ps"}:
        raise wrong(
            f"needs a chief, workers and servers (ps); {cluster.source} names {roles}", start.format("3 --servers=1")
        )
    if config.strategy != "parameter_server" and "ps" in cluster.roles:
        raise wrong(f"has no use for servers; {cluster.source} names {roles}", "use --strategy=parameter_server")
    if cluster.size > 1 and config.strategy not in _OF_MANY_PROCESSES and not config.has_own_strategy:
        raise wrong(
            f"runs in one process, but {cluster.source} names {cluster.size}",
            f"use --strategy={' or --strategy='.join(_OF_MANY_PROCESSES)}, or unset {cluster.source}",
        )


def prepare(backend: str, exact: bool = False) -> None:
    """Sets the environment that the frameworks read at import, and puts off what few runs use of them.

    What the user has set stays.

    Args:
      backend: of Keras.
      exact: whether a GPU may only use algorithms that give the same bits each time.

    Raises:
      UserError: the backend is not installed, or a run would compute with other types of numbers than it says.
    """
    if not importlib.util.find_spec(backend):
        other = "jax" if backend == "tensorflow" else "tensorflow"
        raise UserError(
            "backend",
            backend,
            f"is not installed for {sys.executable}",
            f"pip install {backend}, or use --backend={other}, with a strategy that runs on it",
        )
    wide = os.environ.get("JAX_ENABLE_X64", "")
    if backend == "jax" and wide.lower() in ("1", "true", "yes", "y", "t", "on"):
        raise UserError(
            "backend",
            backend,
            f"computes in 32 bits, but JAX_ENABLE_X64={wide} is set: Keras's losses would have 64, its variables not",
            "unset JAX_ENABLE_X64",
        )
    os.environ |= {"KERAS_BACKEND": backend, "KERAS_NNX_ENABLED": "false"}  # or its variables would be Flax's
    host_memory.keep_freed()
    if memory := host_memory.read():  # of which XLA gives copies of a GPU's variables no more than 64 GB by itself
        os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(memory.whole // 2**30 + 1))
    if not gpus.visible(os.environ):  # else, of an installed CUDA, JAX shows why it finds no driver: a traceback
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    later.put_off()
    if backend == "jax":  # a dataset's TensorFlow would take what memory of the GPUs JAX has left
        later.when_imported("tensorflow", lambda tensorflow: tensorflow.config.set_visible_devices([], "GPU"))
    if exact:
        os.environ |= deterministic()
    if not _verbose():
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
        logging.set_verbosity(logging.WARNING)  # JAX and TensorFlow log through absl
        # Keras asks for them where it counts classes.
        warnings.filterwarnings("ignore", "Explicitly requested dtype int64", module=r"keras\.")


def deterministic() -> dict[str, str]:
    """The environment in which GPUs only use algorithms that give the same bits each time."""
    xla = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_deterministic_ops=true"
    return {"XLA_FLAGS": xla.strip(), "TF_DETERMINISTIC_OPS": "1"}


def in_full() -> dict[str, str]:
    """The environment in which accelerators multiply float32 as it is.

    By themselves they round it to 11 bits (TF32) or 8 (TPUs), but not in every shape: to compare what is computed of
    more examples, or by another graph, is to compare that.
    """
    return {"JAX_DEFAULT_MATMUL_PRECISION": "highest", "NVIDIA_TF32_OVERRIDE": "0"}


def go_past_proxies(cluster: Cluster) -> None:
    """Has gRPC, by which the frameworks' processes talk, ask no HTTP proxy for their hosts: it would for loopback."""
    excepted = next((os.environ[name] for name in ("no_grpc_proxy", "no_proxy", "NO_PROXY") if name in os.environ), "")
    hosts = {address.rpartition(":")[0].strip("[]") for address in cluster.addresses}
    os.environ |= {"no_grpc_proxy": ",".join(filter(None, [excepted, *sorted(hosts)]))}


@functools.cache
def machine() -> str:
    """A digest of what a program compiled for this host's CPU depends on: what its kind can do, and how many cores."""
    try:
        cpu = [s for s in pathlib.Path("/proc/cpuinfo").read_text().splitlines() if s.startswith(("flags", "Features"))]
    except OSError:
        cpu = []
    found = repr((platform.machine(), platform.processor(), cpu[:1], os.cpu_count()))
    return hashlib.sha256(found.encode()).hexdigest()[:8]


def keep_compiled(run: pathlib.Path) -> None:
    """Has JAX keep what it compiles in the run directory, so that the next start need not compile again.

    A folder for each kind of machine: XLA does not ask whether a processor has all that a kept program uses, and
    splits work by the number of cores.
    """
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str((run / "compiled" / machine()).resolve()))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    # XLA's own, of how GPUs do best: its path is in the key of every program, so that a moved run would compile anew.
    os.environ.setdefault("JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES", "none")


def without_accelerators(config: Config) -> Config:
    """The same run on as many virtual CPU devices of JAX, which can compile without computing."""
    os.environ |= gpus.NONE
    os.environ.pop("KERAS_BACKEND", None)
    devices = 0 if config.mesh else max(1, config.devices)
    return dataclasses.replace(config, strategy="device_mesh", backend="jax", devices=devices)


def without_others(config: Config) -> Config:
    """What a process can do by itself with a run whose strategy needs several, on the same backend."""
    if config.strategy not in ("multi_worker_mirrored", "parameter_server"):
        return config
    return dataclasses.replace(config, strategy="one_device", backend=choose(config), devices=0)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Keeps JAX from being imported beside TensorFlow: Keras does so for Orbax's sake, a tenth of a start's time."""
    if os.environ.get("KERAS_BACKEND") != "tensorflow" or "jax" in sys.modules:
        yield
        return
    sys.modules["jax"] = None  # type: ignore[assignment]  # to import it raises ImportError, as where it is not installed
    try:
        yield
    finally:
        del sys.modules["jax"]


def quiet() -> contextlib.AbstractContextManager[None]:
    """Drops what TensorFlow's C++ says while it is imported, which no setting of its own does.

    Only lines in the form of its log are dropped, and only when the import ends well; everything
    else is handed on, also of a process that dies meanwhile. ONECURVE_VERBOSE=1 leaves all of it.
    """
    return contextlib.nullcontext() if _verbose() else holding_back.stderr_held_back()


def _verbose() -> bool:
    return os.environ.get("ONECURVE_VERBOSE") == "1"


def _strategies(backend: str) -> str:
    return " or ".join(s for s, backends in _BACKENDS.items() if backend in backends) or "one_device"
