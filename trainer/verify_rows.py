"""The runs that verify compares: a run on one device, and what must give the same bits, or nearly the same curve."""

import concurrent.futures
import dataclasses
import glob
import importlib.util
import itertools
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from trainer.errors import UserError, last_words

_WITHIN = {"sgd": 1e-5}  # relative, between backends, which round every sum otherwise; else:
_WITHIN_ADAPTIVE = 1e-4
# Of float32 an accelerator multiplies so many bits, but not in every shape, nor does every backend: it parts the
# dense model's losses by 3e-5 in eight steps of Adam (an H200 and a CPU).
_BITS = 11
_WITHIN_COARSE = 1e-3
# How much further than weights perturbed once may sums part curves, which each layer and step rounds
# otherwise? EfficientNet's and MobileNet's went less far on the two backends; a single loss may be close by accident.
_AS_ROUNDING = 10
_SEVERAL = (2, 4)  # devices, and processes
# Where a driver shows accelerators: NVIDIA's, Google's, AMD's, Windows's. Without them nobody asks the frameworks.
_NODES = ("/dev/nvidia[0-9]*", "/dev/accel*", "/dev/vfio/[0-9]*", "/dev/kfd", "/dev/dxg")
BACKENDS = ("tensorflow", "jax")
_ASK = {
    "tensorflow": "import tensorflow as tf; print(len(tf.config.list_physical_devices('GPU')))",
    "jax": "import jax; print(sum(device.platform != 'cpu' for device in jax.devices()))",
}


@dataclasses.dataclass
class Row:
    """One run of the table.

    Attributes:
      name, backend, devices, replicas, processes: what is run.
      on_cpu: whether virtual CPUs stand in for accelerators.
      against: name of the row that it is compared with; '' for the reference itself.
      bits: whether it must equal that to the bit; else within `within`, relative.
      perturbation: the callback that perturbs its weights, if any.
      losses: of each step, once run.
      apart: from those of the other row, relative, once compared.
      verdict: for people; it starts with 'ok' or 'FAIL'.
    """

    name: str
    backend: str
    devices: int
    replicas: int
    against: str = ""
    bits: bool = True
    within: float = 0.0
    losses: Sequence[float] = ()
    sha256: str = ""
    apart: Sequence[float] = ()
    verdict: str = ""
    processes: int = 1
    on_cpu: bool = False
    perturbation: str = ""

    @property
    def deviation(self) -> float:
        """The largest."""
        return max(self.apart, default=0.0)

    def flags(self) -> list[str]:
        """Where it runs."""
        if self.devices == 1:
            perturbed = [f"--callbacks={self.perturbation}"] if self.perturbation else []
            return ["--strategy=one_device", f"--backend={self.backend}", *perturbed]
        several = "mirrored" if self.processes == 1 else "multi_worker_mirrored"
        strategy = several if self.backend == "tensorflow" else "device_mesh"
        return [f"--strategy={strategy}", f"--devices={self.devices}"]


def accelerators() -> dict[str, int]:
    """How many each backend finds on this machine; backends that are not installed are left out."""
    installed = [backend for backend in BACKENDS if importlib.util.find_spec(backend)]
    if not any(map(glob.glob, _NODES)):
        return dict.fromkeys(installed, 0)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return dict(zip(installed, pool.map(ask, installed), strict=True))


def ask(backend: str) -> int:
    """How many accelerators a backend finds, in a process of its own.

    Raises:
      UserError: that process ended with an error.
    """
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # a run may hold its memory
    found = subprocess.run([sys.executable, "-c", _ASK[backend]], capture_output=True, text=True, env=environment)
    if found.returncode:
        reason = f"can't be asked for its devices: {last_words(found.stderr)}"
        raise UserError("backend", backend, reason, f"mend what this says: {sys.executable} -c {_ASK[backend]!r}")
    return int(found.stdout.split()[-1])


def rows(replicas: int, there: Mapping[str, int], alone: bool, optimizer: str) -> list[Row]:
    """The table's rows, not yet run.

    Where a backend has accelerators, but fewer than the rows ask for, its rows are virtual CPUs', for bits are those of
    one kind of chip; and rows of the accelerators are compared with each other.

    Args:
      replicas: V.
      there: backend -> how many accelerators it finds.
      alone: whether a replica's results do not depend on which and how large it is: then one replica is a row, too.
      optimizer: its name.
    """
    v, found = replicas, list[Row]()
    several = [n for n in _SEVERAL if v % n == 0]
    enough = max(several, default=1)
    within = _WITHIN.get(optimizer, _WITHIN_ADAPTIVE) if max(there.values()) < enough else _WITHIN_COARSE
    for backend, count in there.items():
        few = 0 < count < enough
        first, name = f"one_device {backend}", "mirrored" if backend == "tensorflow" else "device_mesh"
        of_backend = [Row(first, backend, 1, v), Row(f"{first}, again", backend, 1, v, first)]
        of_backend += [Row(f"{name} x{r}", backend, r, v, first) for r in several]
        of_backend += [Row(f"{n} processes {backend}", backend, n, v, first, processes=n) for n in several]
        if alone:
            of_backend.append(Row(f"{first}, 1 replica", backend, 1, 1, first, False, within))
        found += [dataclasses.replace(row, on_cpu=few) for row in of_backend]
        if few:
            first = f"accelerator {backend}"
            found += [Row(first, backend, 1, v), Row(f"{first}, again", backend, 1, v, first)]
            found += [Row(f"accelerators {backend} x{r}", backend, r, v, first) for r in several if r <= count]
    for row in found:
        if row.name == "one_device jax" and "tensorflow" in there:
            row.against, row.bits, row.within = "one_device tensorflow", False, within
    return found


def perturbed(row: Row, within: float) -> Row:
    """A row on one device once more, for what rounding alone comes to where that much may part two curves."""
    perturbation = f"trainer.perturbation:Perturbed(bits={_BITS if within == _WITHIN_COARSE else 0})"
    name = f"{row.name}, perturbed"
    return Row(name, row.backend, 1, row.replicas, row.name, bits=False, on_cpu=row.on_cpu, perturbation=perturbation)


def judge_by(perturbed: Row, far: Sequence[Row]) -> None:
    """Rows that went too far hold if at no step they went much further than one whose weights were perturbed."""
    limits = [_AS_ROUNDING * apart for apart in itertools.accumulate(perturbed.apart, max)]
    for row in far:
        within = [apart <= max(row.within, limit) for apart, limit in zip(row.apart, limits, strict=False)]
        if within and all(within):
            row.verdict = f"ok: within {_AS_ROUNDING} times what rounding comes to"


def table(rows: Sequence[Row]) -> str:
    """The rows in columns, as they are printed."""
    lines = [("strategy", "devices", "processes", "replicas", "loss", "deviation", "at step", "weights", "verdict")]
    for row in rows:
        loss = f"{row.losses[-1]:.7g}" if row.losses else "-"
        deviation = f"{row.deviation:.1e}" if row.losses and row.against else "-"
        at = str(row.apart.index(row.deviation) + 1) if row.deviation else "-"
        counts = (str(row.devices), str(row.processes), str(row.replicas))
        lines.append((row.name, *counts, loss, deviation, at, row.sha256[:12] or "-", row.verdict))
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n" + "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def likely_cause(failed: Sequence[Row]) -> str:
    """In words, what kinds of rows fail."""
    if not all(row.losses for row in failed):
        return "cause: some did not run at all; python -m trainer with their flags says more"
    names = [row.name for row in failed]
    if any(name.endswith("again") for name in names):
        return "cause: the same flags gave other bits twice: an op, a layer or the data is not deterministic"
    if any(name.endswith("1 replica") for name in names):
        return (
            "cause: the number of logical replicas shows, though nothing in the model should let it: is a "
            "loss or a gradient scaled by the size of a replica's share?"
        )
    return "cause: the number of devices shows: is something scaled by it, or added up in another order?"
