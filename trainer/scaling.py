"""What a step, and a run that fails now and then, would take on other numbers of devices.

The all-reduce is modelled by a latency alpha and a bandwidth beta for each message (Thakur, Rabenseifner & Gropp 2005,
"Optimization of Collective Communication Operations in MPICH", section 4), in three algorithms:

    ring   2 (N - 1) alpha + 2 (N - 1) / N * S / beta      what NCCL and XLA do for large sums
    tree   2 log2(N) alpha + 2 S / beta                    for small ones
    exact  log2(N) (alpha + S / beta)                      --exact: partners at distance 1, 2, 4 ... exchange all

N devices, S bytes of sums. What all devices read from one store comes no sooner for more devices (Amdahl 1967).
Failures come at random, N times as often as to one device; what they and saving cost is by Daly 2006, "A higher order
estimate of the optimum checkpoint interval for restart dumps". docs/scaling.md compares it with what is measured.
"""

import math
import re
from typing import NamedTuple

from trainer.errors import UserError

_UNITS = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "": 1.0}
_DEVICES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_EXAMPLE = "for example 45GB/s,10us,400TFLOP/s"
# Unit of a quantity of --predict: (what it is, factor), the prefix aside.
_QUANTITIES = {
    "B/s": ("bandwidth", 1.0),
    "us": ("latency", 1e-6),
    "ms": ("latency", 1e-3),
    "FLOP/s": ("speed", 1.0),
    "examples/s": ("examples", 1.0),
    "h": ("lifetime", 3600.0),
}
_COPY = 4e9  # bytes a second from a device to its host: benchmarks/save_stall.py, on CPUs
_RESTART = 30.0  # seconds from a failure to the next step: docs/reliability.md


class Hardware(NamedTuple):
    """What the devices and what lies between them can do.

    Attributes:
      bandwidth: bytes a second, of each device.
      latency: seconds, of each message.
      speed: FLOP a second, of each device, as really reached.
      examples: examples a second that the store gives from which all devices read.
      lifetime: mean seconds from one failure of a device to the next.
    """

    bandwidth: float
    latency: float
    speed: float
    examples: float = math.inf
    lifetime: float = math.inf

    @classmethod
    def parse(cls, text: str) -> "Hardware":
        """Reads '45GB/s,10us,400TFLOP/s', and of '2Mexamples/s' and '50000h' what is there.

        Raises:
          UserError: any other text.
        """
        found: dict[str, float] = {}
        for part in text.split(","):
            match = re.fullmatch(rf"\s*(\d+(?:\.\d+)?)([kMGTP]?)({'|'.join(_QUANTITIES)})\s*", part)
            if match:
                name, factor = _QUANTITIES[match[3]]
                found[name] = float(match[1]) * _UNITS[match[2]] * factor
        if not match or not {"bandwidth", "latency", "speed"} <= found.keys() or len(found) < len(text.split(",")):
            raise UserError("predict", text, "is not bandwidth,latency,speed of a device", _EXAMPLE)
        if not all(found.values()):
            raise UserError("predict", text, "has a zero in it", _EXAMPLE)
        return cls(**found)


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


def saving(devices: int, state: float, hardware: Hardware) -> tuple[float, float]:
    """(seconds between saves that lose least, the share of the time that then goes into steps that count).

    Args:
      devices: any one's failure stops all.
      state: bytes that a device copies to its host in a save.
      hardware: its lifetime.
    """
    between, stall = hardware.lifetime / devices, state / _COPY
    interval = max(math.sqrt(2 * stall * between) - stall, stall)  # Young 1974
    # Where failures come so fast, nothing is left of the time, and exp would overflow.
    doing, restarting = (min(seconds / between, 300.0) for seconds in (interval + stall, _RESTART))
    return interval, interval / (between * math.exp(restarting) * math.expm1(doing))


def table(flops: float, sums: float, examples: float, state: float, hardware: Hardware) -> str:
    """Seconds of a step for 1 to 4,096 devices of a data axis, each with the share of a batch that one has now.

    Args:
      flops: of one device and step.
      sums: bytes that the devices add up in a step: gradients, metrics and states.
      examples: of one device and step.
      state: bytes of a device's variables.
      hardware: see there.

    Returns:
      A table: nothing of the all-reduce is taken to be hidden behind the backward pass, so it is the worst case.
    """
    compute = flops / hardware.speed
    names = [
        "devices",
        "compute",
        "input",
        "ring",
        "tree",
        "exact",
        "efficiency",
        "with_exact",
        "save_every",
        "goodput",
    ]
    given = {"input": hardware.examples, "save_every": hardware.lifetime, "goodput": hardware.lifetime}
    told = [given.get(name, 0.0) < math.inf for name in names]
    rows = [names]
    for n in _DEVICES:
        read = n * examples / hardware.examples
        times = [function(n, sums, hardware) for function in (ring, tree, exact)]
        shares = [f"{compute / (max(compute, read) + added):.1%}" for added in (min(times[:2]), times[2])]
        interval, goodput = saving(n, state, hardware) if hardware.lifetime < math.inf else (0.0, 1.0)
        seconds = map(duration, (compute, read, *times))
        rows.append([str(n), *seconds, *shares, duration(interval), f"{goodput:.1%}"])
    return "\n".join(" ".join(f"{cell:>10}" for cell, wanted in zip(row, told, strict=True) if wanted) for row in rows)


def duration(seconds: float) -> str:
    """'12 us', '3.4 ms', '1.2 s', '5 min', '7 h'."""
    for limit, factor, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms"), (120.0, 1.0, "s"), (7200.0, 1 / 60, "min")):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds / 3600:.3g} h"
