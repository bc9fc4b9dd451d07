"""What a step would take on other numbers of devices: compute, the all-reduce, and what both hide.

The all-reduce is modelled by a latency alpha and a bandwidth beta for each message (Thakur, Rabenseifner & Gropp 2005,
"Optimization of Collective Communication Operations in MPICH", section 4), in three algorithms:

    ring   2 (N - 1) alpha + 2 (N - 1) / N * S / beta      what NCCL and XLA do for large sums
    tree   2 log2(N) alpha + 2 S / beta                    for small ones
    exact  log2(N) (alpha + S / beta)                      --exact: partners at distance 1, 2, 4 ... exchange all

N devices, S bytes of sums. docs/scaling.md compares it with what is measured.
"""

import math
import re
from typing import NamedTuple

from trainer.errors import UserError

_UNITS = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "": 1.0}
_DEVICES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_EXAMPLE = "for example 45GB/s,10us,400TFLOP/s"


class Hardware(NamedTuple):
    """What the devices and the network between them can do.

    Attributes:
      bandwidth: bytes a second, of each device.
      latency: seconds, of each message.
      speed: FLOP a second, of each device, as really reached.
    """

    bandwidth: float
    latency: float
    speed: float

    @classmethod
    def parse(cls, text: str) -> "Hardware":
        """Reads '45GB/s,10us,400TFLOP/s'.

        Raises:
          UserError: any other text.
        """
        match = re.fullmatch(
            r"(\d+(?:\.\d+)?)([kMGT]?)B/s,\s*(\d+(?:\.\d+)?)(us|ms),\s*(\d+(?:\.\d+)?)([kMGTP]?)FLOP/s", text
        )
        if not match:
            raise UserError("predict", text, "is not bandwidth,latency,speed of a device", _EXAMPLE)
        bandwidth, unit, latency, seconds, speed, prefix = match.groups()
        of_second = {"us": 1e-6, "ms": 1e-3}[seconds]
        hardware = cls(float(bandwidth) * _UNITS[unit], float(latency) * of_second, float(speed) * _UNITS[prefix])
        if not all(hardware):
            raise UserError("predict", text, "has a zero in it", _EXAMPLE)
        return hardware


def ring(devices: int, sums: float, hardware: Hardware) -> float:
    """Seconds of an all-reduce of `sums` bytes around a ring."""
    n = devices
    return 2 * (n - 1) * hardware.latency + 2 * (n - 1) / n * sums / hardware.bandwidth


def tree(devices: int, sums: float, hardware: Hardware) -> float:
    """Seconds of an all-reduce up a binary tree and down again."""
    return 2 * math.ceil(math.log2(devices)) * hardware.latency + 2 * (devices > 1) * sums / hardware.bandwidth


def exact(devices: int, sums: float, hardware: Hardware) -> float:
    """Seconds of the exchange that --exact adds by, between a power of two of devices."""
    return math.ceil(math.log2(devices)) * (hardware.latency + sums / hardware.bandwidth)


def table(flops: float, sums: float, hardware: Hardware) -> str:
    """Seconds of a step for 1 to 4,096 devices of a data axis, each with the share of a batch that one has now.

    Args:
      flops: of one device and step.
      sums: bytes that the devices add up in a step: gradients, metrics and states.
      hardware: see there.

    Returns:
      A table: nothing of the all-reduce is taken to be hidden behind the backward pass, so it is the worst case.
    """
    compute = flops / hardware.speed
    lines = [f"{'devices':>8} {'compute':>10} {'ring':>10} {'tree':>10} {'exact':>10} {'efficiency':>11} {'exact':>6}"]
    for n in _DEVICES:
        times = [function(n, sums, hardware) for function in (ring, tree, exact)]
        best = min(times[:2])
        cells = " ".join(f"{duration(t):>10}" for t in (compute, *times))
        lines.append(f"{n:>8} {cells} {compute / (compute + best):>11.1%} {compute / (compute + times[2]):>6.1%}")
    return "\n".join(lines)


def duration(seconds: float) -> str:
    """'12 us', '3.4 ms', '1.2 s'."""
    for limit, factor, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"
