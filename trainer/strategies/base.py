"""The contract of a strategy: where a run's logical replicas run. Write your own against this."""

import abc
import contextlib
import math
import timeit
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from unittest import mock

import keras
from keras.src.backend import core

from input_pipeline.pipeline import Batch, Pipeline
from trainer.cluster import ALONE, Cluster
from trainer.config import Config
from trainer.program import Program
from trainer.sums import Totals

Block = Any  # a pipeline's Batch, on the strategy's devices
Result = TypeVar("Result")


@contextlib.contextmanager
def _alone(_: bool) -> Iterator[Callable[[], None]]:
    yield lambda: None


class Strategy(abc.ABC):
    """Runs steps of a Program on its devices and leaves the result in the program's Keras variables.

    A strategy owns R devices (R shares of the data axis, where a mesh has other axes too); each computes
    V / R logical replicas one after another. It adds their
    Sums (trainer/step.py) over all replicas and updates the variables once per step. Between two
    calls of `train`, the program's variables hold the run's state: whoever saves, evaluates, exports
    or looks, looks there.

    Attributes:
      devices: R, over all processes.
      description: the devices in words, for people.
      cluster: the processes; this one owns R / cluster.size devices.
      on_cpu: whether the devices are CPUs, which share their host's cores.
      compiling: where a program is compiled that runs over processes: a run's `Peers.compiling`.
      can_skip: whether its `train` undoes an unhealthy step where `program.objective.skips` (--on_nan=skip).
    """

    devices: int
    description: str
    cluster: Cluster = ALONE
    on_cpu = False
    compiling: Callable[[bool], contextlib.AbstractContextManager[Callable[[], None]]] = staticmethod(_alone)
    can_skip = False

    @property
    def device_count(self) -> int:
        """All devices of all processes: more than R where a share of the data axis is several."""
        return self.devices

    @abc.abstractmethod
    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which the program's variables are created."""

    @abc.abstractmethod
    def compile(self, program: Program) -> None:
        """Takes the program whose steps it will run. Called once, after its variables exist."""

    def shares(self, replicas: int) -> list[range]:
        """The logical replicas that are fed apart: one range per local device."""
        n, local = replicas // self.devices, self.devices // self.cluster.size
        first = self.cluster.index * local
        return [range(d * n, (d + 1) * n) for d in range(first, first + local)]

    def elements_on_device(self, variable: keras.Variable) -> int:
        """How many elements of a variable of the program one device holds: all, where nothing is sharded."""
        return math.prod(variable.shape)

    def pictures(self) -> list[str]:
        """For people: which devices hold which part of the variables and of a batch, where not all hold all."""
        return []

    @abc.abstractmethod
    def feed(self, pipeline: Pipeline, first_block: int = 0) -> Iterator[Block]:
        """The pipeline's blocks from `first_block` on, on the devices."""

    @abc.abstractmethod
    def train(self, block: Block, first: int, count: int, step: int, totals: Totals) -> Totals:
        """Runs `count` steps on a block, from its `first`, and updates the program's variables.

        Args:
          block: from `feed`; arrays (steps of a block, replicas, examples of a replica, ...).
          first: index in the block of the first step.
          count: number of steps.
          step: steps done before.
          totals: what the steps are added to.

        Returns:
          The new totals; perhaps still being computed.
        """

    @abc.abstractmethod
    def evaluate(self, block: Block, first: int, count: int, totals: Totals) -> Totals:
        """Adds `count` evaluation steps of a block, from its `first`, to the totals.

        Changes no variable, and leaves the block as it is: a small one comes again at the next evaluation.
        """

    def predict(self, x: Any) -> Any:
        """The model's outputs for a few examples, on the host; None where no process alone can compute them.

        Args:
          x: as the model takes it, (examples, ...); the same shape at each call.
        """
        return None

    def aside(self, compute: Callable[[], Result]) -> Result:
        """Computes something small with the backend, such as a line's metrics, while steps are in flight."""
        return compute()

    def flops(self, spec: Any) -> float:
        """Floating-point operations of one training step over all devices, as written down; 0: not known.

        Args:
          spec: structure, with shape and dtype, of a block (steps, replicas, examples of a replica, ...).
        """
        return 0.0

    def exchange(self, floats: int) -> float:
        """Seconds in which the devices add up a vector each, as they do in a training step; 0: not known.

        All processes call it together, between steps.

        Args:
          floats: length of the vectors.
        """
        return 0.0

    def checksums(self) -> list[int]:
        """A number for each local device's copy of all variables, equal if the copies are; [] where each has one.

        Where a device has a part of them, before the first step, one for what this process took the parts of.
        """
        return []

    def close(self, code: int) -> None:  # noqa: B027
        """Leaves the cluster, in step with its other processes, with this exit code. Nothing is computed afterwards."""

    @abc.abstractmethod
    def trace(self, directory: str, start: bool) -> None:
        """Starts or ends a profiler trace that TensorBoard can show."""


def threads_of_cpu(config: Config, replicas: int) -> int:
    """By how many threads a CPU is to compute; 0: by one for each core, as the backend does.

    A long product's sum is split by their number, which shows in its bits. With --exact it follows from the run, for
    another host may have other cores, or a scheduler give each process one.
    """
    return replicas if config.exact and replicas > 1 else 0


def nothing_again() -> contextlib.AbstractContextManager[Any]:
    """Within it, what is traced computes nothing again in its backward pass, whatever the model asks for."""
    return mock.patch.object(core, "remat", lambda function: function)


def quickest(call: Callable[[], Any]) -> float:
    """Seconds of the quickest of a few calls, but the first, which compiles and waits for what was begun before."""
    call()
    return min(timeit.repeat(call, number=1, repeat=4))


__all__ = ["Batch", "Block", "Strategy", "quickest", "threads_of_cpu"]
