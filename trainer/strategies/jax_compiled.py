"""How programs are lowered and compiled by JAX, kept from start to start, and found again: cut, or another device's."""

import collections
import contextlib
import pathlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import keras
from jax._src import cache_key, compilation_cache, config
from jax.stages import Lowered

from trainer import backend
from trainer.errors import UserError
from trainer.objective.trackers import Metrics
from trainer.program import Program

_read: Any = compilation_cache.get_executable_and_time
_hash_options = cache_key._hash_serialized_compile_options
_hash_topology = cache_key._hash_accelerator_config


def mend() -> None:
    """From here on, what can't be read is removed, and a program for one device is found for any of its kind.

    JAX writes them in place, so that a kill leaves a part of one. It would warn of that, compile the program and leave
    the file as it is, at each start again. And on CPUs it would compile a program anew for each virtual device, and
    in each process at each start, for what only process 0 keeps is found by no other: a key has its own devices' ids.
    """
    reading: Any = compilation_cache
    reading.get_executable_and_time = _read_or_remove
    cache_key._hash_serialized_compile_options = _hash_for_any_device
    cache_key._hash_accelerator_config = _hash_for_any_process


@contextlib.contextmanager
def explained(program: Program) -> Iterator[None]:
    """Within it steps are lowered, and called.

    Raises:
      UserError: these devices can't compute one in the types of numbers that the run is to have, or what is traced
        leaves values behind.
    """
    try:
        yield
    except jax.errors.UnexpectedTracerError as error:
        words = str(error)
        where = re.search(r"when the value leaked was (.*?)\.?$", words, re.MULTILINE)
        raise UserError(
            "model",
            program.config.model,
            f"keeps a value of JAX's from one trace for another ({where[1] if where else words.splitlines()[0]})",
            "compute what it keeps by numpy, or anew in each call(); take jax.jit off call(), and what it calls: a "
            "step is compiled as a whole; let a branch or a loop return what it computes, and draw random numbers "
            "before it",
        ) from error
    except ValueError as error:
        if "not supported by dot_general" not in str(error):
            raise
        raise UserError(
            "precision",
            keras.config.dtype_policy().name,
            f"JAX has no such product of matrices for these devices, as attention asks for: {error}",
            "use --precision=mixed_bfloat16 or float32",
        ) from error


def results_of(metrics: Metrics) -> Callable[[list[Any]], dict[str, Any]]:
    """(values of the metrics' variables) -> {name: result}, compiled: operation by operation it takes 0.2 ms more.

    As it is, where a metric looks at values, as R2Score of several regressors does at how many examples there were.
    """

    def compute(values: list[Any]) -> dict[str, Any]:
        return collections.OrderedDict(metrics.stateless_result(values))  # JAX would sort the names of a dict

    compiled, looks = jax.jit(compute), False

    def results(values: list[Any]) -> dict[str, Any]:
        nonlocal looks
        if not looks:
            try:
                return compiled(values)
            except jax.errors.ConcretizationTypeError:
                looks = True
        return compute(values)

    return results


def compile_all(programs: Sequence[Sequence[Lowered]]) -> None:
    """Compiles programs: those of one device together, for XLA takes a core for each; the next find them."""
    with ThreadPoolExecutor() as threads:
        for of_device in programs:
            list(threads.map(Lowered.compile, of_device))


def _read_or_remove(cache_key: str, *how: Any) -> tuple[Any | None, int | None]:
    try:  # three arguments say how it is to be loaded, and four since JAX 0.11
        return _read(cache_key, *how)
    except Exception as error:  # of whatever library has compressed it
        kept = pathlib.Path(config.compilation_cache_dir.value, f"{cache_key}-cache")
        with contextlib.suppress(OSError):
            kept.unlink()
        print(f"{kept} can't be read, and is compiled anew: {error}", file=sys.stderr, flush=True)
        return None, None


def _hash_for_any_device(hashed: Any, options: Any, strip_device_assignment: bool = False) -> Any:
    """As JAX's, which leaves out on GPUs which one a program is for: it is loaded for the one that asks."""
    devices = options.device_assignment
    alone = bool(devices) and devices.replica_count() * devices.computation_count() == 1
    return _hash_options(hashed, options, strip_device_assignment=strip_device_assignment or alone)


def _hash_for_any_process(hash_obj: Any, accelerators: Any) -> None:
    """As JAX's, which names the devices that a process has, but of CPUs what a program depends on."""
    if all(device.platform == "cpu" for device in accelerators.flat):
        # XLA's pool has a thread for each device, if they are more than the cores, and splits work by their number.
        hash_obj.update(f"{backend.machine()} {accelerators.flat[0].client.local_device_count()}".encode())
    else:
        _hash_topology(hash_obj, accelerators)
