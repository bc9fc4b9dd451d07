"""How much of the devices' peak a run uses (model FLOPs utilization, Chowdhery et al. 2022, arXiv:2204.02311)."""

import socket
import sys
import time

import keras
import numpy as np

from trainer.assembly import Assembly
from trainer.errors import out_of_memory
from trainer.monitoring.ledger import Ledger
from trainer.reporting import Nothing, Reporting

_AFTER = 10.0  # seconds of training, before which nobody asks
_LEAST = 0.02  # seconds of products that are long enough to be timed
_MOST = 32  # products in a row: each has memory for its result
_LARGEST = 8192  # rows


class Utilization:
    """Counts a step's floating-point operations, and measures how many the devices could do.

    Args:
      parts: of the run; all processes make one together.
      step: steps done before this start.
    """

    def __init__(self, parts: Assembly, step: int) -> None:
        self._parts, self._step, self._begin = parts, step, time.monotonic()
        hosts = len(set(parts.peers.gather(socket.gethostname())))
        # Virtual CPU devices share what their host can do.
        self._peaks = hosts if parts.strategy.on_cpu else parts.strategy.device_count
        self._measured = not parts.peers.cluster.is_chief
        self.flops = self.peak = 0.0  # of a step; of all devices, a second

    def measure(self, reporting: Reporting | Nothing, ledger: Ledger) -> None:
        """Counts and measures, once, when the run has trained for a while; the log then tells both."""
        if self._measured or time.monotonic() - self._begin < _AFTER:
            return
        self._measured = True
        with ledger("measure"):
            spec = self._parts.pipeline(self._parts.dataset.train, shuffled=True).spec
            self.flops = self._parts.strategy.flops(spec)
            if self.flops:  # a strategy need not count
                dtype = keras.config.dtype_policy().compute_dtype
                try:
                    self.peak = self._peaks * matrix_product(dtype, self._parts.strategy.on_cpu)
                except Exception as error:  # a run that fits must not end by being measured
                    if not (words := out_of_memory(error)):
                        raise
                    print(f"the peak of the devices is not measured, nor MFU: {words}", file=sys.stderr, flush=True)
                    self.flops = 0.0
                    return
                reporting.compare(self.flops, self.peak)

    def of(self, step: int, seconds: float) -> dict[str, float]:
        """'flops_per_second' of this start's steps, and 'mfu', its share of the peak; {} where nothing was measured."""
        if not self.flops or not seconds:
            return {}
        speed = self.flops * (step - self._step) / seconds
        return {"flops_per_second": speed, "mfu": speed / self.peak}


def matrix_product(dtype: str, on_cpu: bool) -> float:
    """FLOP/s of the fastest product of two square matrices that this process's first device was seen to do.

    Of random numbers: those of which most bits are equal take less power, and a GPU is faster with them than a model
    can be. Short products follow one another, so that the time to ask for one is not counted.

    Args:
      dtype: of the matrices.
      on_cpu: whether to begin with small ones: a CPU reaches its peak with them, and would take minutes for large ones.
    """
    best, size, seconds = 0.0, 512 if on_cpu else _LARGEST, 0.0
    while seconds < _LEAST and size <= _LARGEST:
        random = np.random.default_rng(0).random((size, size), np.float32) - 0.5
        a, many = keras.ops.cast(keras.ops.convert_to_tensor(random), dtype), 1
        for _ in range(4):  # the first one compiles
            begin = time.perf_counter()
            for _ in range(many):
                product = keras.ops.matmul(a, a)
            # Of bfloat16, TensorFlow has no number alone.
            keras.ops.convert_to_numpy(keras.ops.cast(product[:1, :1], "float32"))
            seconds = (time.perf_counter() - begin) / many
            many = max(many, min(_MOST, round(_LEAST / seconds)))
            best = max(best, 2 * size**3 / seconds)
        size *= 4
    return best
