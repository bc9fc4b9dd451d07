"""The parts of a run, put together the same way for every verb."""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator

import keras
import numpy as np

from input_pipeline import cores, lengthy
from input_pipeline.blocks import block_steps
from input_pipeline.dataset import Dataset
from input_pipeline.domains import Categories, Domain, check
from input_pipeline.pipeline import Pipeline
from input_pipeline.source import DataError, Source, arrays_of, example_spec
from input_pipeline.structure import words
from trainer import backend, optimizers, policy, strategies
from trainer.clock import Interval
from trainer.config import Config
from trainer.errors import UserError, said_by_keras
from trainer.loading import data_error, load_dataset
from trainer.monitoring.ledger import Ledger
from trainer.peers import Peers
from trainer.preemption import take_back, until_told
from trainer.program import Program, set_defaults
from trainer.strategies import Strategy, philox
from trainer.strategies.base import Block

_SAY_EVERY = 10.0  # seconds
_KEPT = 2**25  # bytes of examples to be evaluated again and again


@dataclasses.dataclass(frozen=True)
class Assembly:
    """What a verb works with.

    Attributes:
      config: the flags.
      dataset: what is read.
      steps: length of the run.
      strategy: where it computes.
      program: what is trained.
      peers: the processes.
      pace: seconds that an example takes to be read, of the slowest process.
    """

    config: Config
    dataset: Dataset
    steps: int
    strategy: Strategy
    program: Program
    peers: Peers
    pace: float

    def pipeline(self, source: Source, shuffled: bool) -> Pipeline:
        """Batches of a source for this strategy's devices."""
        replicas, cadence = self.program.replicas, Interval.parse(self.config.log_every)
        logged = int(cadence.amount) if shuffled and cadence.unit == "step" else 0
        return Pipeline(
            source,
            self.config.seed,
            self.config.global_batch,
            replicas,
            self.strategy.shares(replicas),
            block_steps(source, self.config.global_batch, self.pace, 1024 if shuffled else 32, logged),
            self._labels,
            self.program.inputs,
            shuffled,
            self.config.prefetch,
            self.dataset.augment,
            pace=self.pace,
        )

    @functools.cached_property
    def _labels(self) -> list[Domain | None]:
        """What each label may be: as the model's outputs have it, or else the dataset."""
        pairs = zip(self.program.labels or self.dataset.labels, self.dataset.labels, strict=True)
        return [ours or theirs for ours, theirs in pairs]

    def check_arrays(self) -> None:
        """Raises UserError where the model has too few classes, or examples in memory have numbers that can't be.

        Other examples are checked as they are read.
        """
        for model, data in zip(self.program.labels, self.dataset.labels, strict=False):
            if isinstance(model, Categories) and data and model.size < data.size:
                raise UserError(
                    "model",
                    self.config.model,
                    f"has outputs for {model.size} classes, and --dataset={self.config.dataset} has {data.size}",
                    "name `classes` in build's signature, and give the last layer as many units; or compile the model "
                    "with a loss for what it has, such as binary_crossentropy, or mse for numbers to predict",
                )
        named = {arrays_of(getattr(self.dataset, name)): name for name in ("evaluation", "validation", "train")}
        try:
            for source, name in named.items():  # once, where two are parts of the same
                if source is not None:
                    inputs = () if source.is_mapped else self.program.inputs
                    check(inputs, self._labels, source.arrays, f"{name!r}", np.arange(len(source)))
        except DataError as error:
            raise data_error(self.config, error) from error

    def check_evaluations(self) -> None:
        """Raises UserError where what is evaluated is of other shapes than training, which the model does not take."""
        known = [self.dataset.spec]
        for source in filter(None, (self.dataset.validation, self.dataset.evaluation)):
            spec = example_spec(source)
            if spec not in known:
                known.append(spec)
                try:
                    self.program.check_takes(spec)
                except (ValueError, TypeError, RuntimeError) as error:
                    raise UserError(
                        "dataset",
                        self.config.dataset,
                        f"has examples to train on of {words(known[0][:2])}, and to evaluate on of {words(spec[:2])}, "
                        f"which --model={self.config.model} does not take: {said_by_keras(error)}",
                        "give all the same shapes, as by resizing or padding",
                    ) from error

    def blocks(self, pipeline: Pipeline, first_block: int = 0) -> Iterator[Block]:
        """The pipeline's blocks on the devices; what its source raised is raised here."""
        try:
            yield from self.strategy.feed(pipeline, first_block)
        except Exception:
            if isinstance(pipeline.error, DataError):
                raise data_error(self.config, pipeline.error) from pipeline.error
            if pipeline.error is not None:
                raise pipeline.error from None
            raise

    def evaluated(self, source: Source) -> Iterator[Block]:
        """The blocks of a pass over a source, once each example; those of a small one stay on the devices."""
        if known := self._kept.get(id(source)):
            yield from known
            return
        pipeline, passed = self.pipeline(source, shuffled=False), list[Block]()
        small = pipeline.blocks_from(0) * len(pipeline.shares) * pipeline.size <= _KEPT
        for block in self.blocks(pipeline):
            passed += [block] * small
            yield block
        self._kept[id(source)] = passed

    @functools.cached_property
    def _kept(self) -> dict[int | None, list[Block]]:
        """Of each source that is small, by its id(), and of None: what was probed."""
        return {}

    def probe(self, ledger: Ledger | None = None, told: Callable[[], object] = lambda: False) -> float | None:
        """Mean loss of the first batch to be evaluated on, or of the first in the training data.

        Its program is no other evaluation's: a ledger books the first call as compiling, and blames no save for it.

        Args:
          ledger: of the run.
          told: whether a process is told to stop. If so while they wait for the batch, there is no loss.
        """
        with contextlib.nullcontext() if self.has_probed or not ledger else ledger("compile"):
            if not self.has_probed:
                pipeline = self.pipeline(self.dataset.validation or self.dataset.train, shuffled=False)
                blocks = self.blocks(dataclasses.replace(pipeline, most=1))
                if (first := next(until_told(blocks, self.peers, told), None)) is None:
                    return None
                self._kept[None] = [first]
            totals = self.strategy.evaluate(self._kept[None][0], 0, 1, self.program.objective.no_totals())
            return self.program.objective.loss(totals)

    @property
    def has_probed(self) -> bool:
        """Whether there was a `probe` before, so that what it computes is compiled."""
        return None in self._kept


def assemble(config: Config, peers: Peers, recorded_replicas: int = 0, training: bool = True) -> Assembly:
    """Reads the dataset, takes the devices and builds the program.

    Args:
      config: the flags.
      peers: the processes.
      recorded_replicas: logical replicas of the run, where it was started before; else 0.
      training: whether the run will be trained. If not, any number of devices will do: in evaluation
        the logical replicas only share the examples out.

    Raises:
      UserError: something in the flags can't be had or doesn't fit.
    """
    config = dataclasses.replace(config, replicas=recorded_replicas or config.replicas)
    set_defaults(config.precision)
    peers.all_started()
    with backend.quiet():  # TensorFlow looks for GPUs, and complains of each way in which there are none
        strategy = strategies.create(config, keras.config.backend(), peers.cluster)
    take_back()
    strategy.compiling = peers.compiling
    peers.agree({"its devices": strategy.description})
    everyones = peers.gather(cores.allowed())
    cores.share(cores.allowed(), [everyones[process] for process in peers.cluster.here])
    lengthy.listener = _teller(peers)
    data = load_dataset(config)  # after the strategy: a dataset that uses TensorFlow fixes TensorFlow's devices
    try:
        facts, pace = data.facts(), data.pace()
    except DataError as error:
        raise data_error(config, error) from error
    peers.agree({f"the data, {name}": fact for name, fact in facts.items()})
    replicas = config.replicas or strategy.devices
    if not training and replicas % strategy.devices:
        replicas = strategy.devices
        config = dataclasses.replace(config, global_batch=-(-config.global_batch // replicas) * replicas)
    config.check_batch(strategy.devices, replicas)
    if policy.parse(config.on_nan).name == "skip" and not strategy.can_skip:
        raise UserError(
            "on_nan", config.on_nan, f"--strategy={config.strategy} can't undo a step", "use --on_nan=rollback or stop"
        )
    steps = config.steps
    if steps < 0:
        steps = math.ceil((config.epochs or 15) * len(data.train) / config.global_batch)
    program = Program(config, data, steps, replicas, strategy.scope())
    # Variables are compared later, where what is computed of them is not seen.
    peers.agree({"the model's layers (does build() go through a set? each has its own order)": program.architecture()})
    program.draw_from(philox.GENERATORS[keras.config.backend()])
    if training:
        optimizers.check_trains(config, program.optimizer)
        program.leave_what_stays()
    strategy.compile(program)
    parts = Assembly(config, data, steps, strategy, program, peers, max(peers.gather(pace)))
    parts.check_arrays()
    parts.check_evaluations()
    return parts


def _teller(peers: Peers) -> Callable[[str], None]:
    """Notes as progress what is told of what takes long, and prints it now and then."""
    said, since = "", time.monotonic()

    def tell(words: str) -> None:
        nonlocal said, since
        if words != said:
            peers.doing(words)
            said = words
        if time.monotonic() - since > _SAY_EVERY:
            print(words, flush=True)
            since = time.monotonic()

    return tell
