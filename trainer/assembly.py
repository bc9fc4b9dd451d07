"""The parts of a run, put together the same way for every verb."""

import dataclasses
import hashlib
import importlib.metadata
import math
import pathlib
import platform
from collections.abc import Iterator

import keras

from input_pipeline import cache, dataset
from input_pipeline.dataset import Dataset
from input_pipeline.pipeline import Pipeline, block_steps
from input_pipeline.source import DataError, Source
from trainer import backend, plugins, strategies
from trainer.cluster import ALONE, Cluster
from trainer.config import Config
from trainer.errors import UserError
from trainer.program import Program
from trainer.strategies import Strategy
from trainer.strategies.base import Block


@dataclasses.dataclass(frozen=True)
class Assembly:
    """What a verb works with.

    Attributes:
      config: the flags.
      dataset: what is read.
      steps: length of the run.
      strategy: where it computes.
      program: what is trained.
      cluster: the processes.
    """

    config: Config
    dataset: Dataset
    steps: int
    strategy: Strategy
    program: Program
    cluster: Cluster = ALONE

    def pipeline(self, source: Source, shuffled: bool) -> Pipeline:
        """Batches of a source for this strategy's devices."""
        replicas = self.program.replicas
        return Pipeline(
            source,
            self.config.seed,
            self.config.global_batch,
            replicas,
            self.strategy.shares(replicas),
            block_steps(source, self.config.global_batch),
            self.dataset.classes,
            shuffled,
            self.config.prefetch,
        )

    def blocks(self, pipeline: Pipeline, first_block: int = 0) -> Iterator[Block]:
        """The pipeline's blocks on the devices; what its source raised is raised here."""
        try:
            yield from self.strategy.feed(pipeline, first_block)
        except Exception:
            if isinstance(pipeline.error, DataError):
                raise _data_error(self.config, pipeline.error) from pipeline.error
            if pipeline.error is not None:
                raise pipeline.error from None
            raise

    def evaluate(self, source: Source, prefix: str) -> dict[str, float]:
        """Loss and metrics over a source, each example counted once, under names with a prefix."""
        pipeline = self.pipeline(source, shuffled=False)
        totals, left = self.program.objective.no_totals(), pipeline.steps
        for block in self.blocks(pipeline):
            totals = self.strategy.evaluate(block, min(left, pipeline.block), totals)
            left -= pipeline.block
        return {f"{prefix}{k}": v for k, v in self.program.objective.results(totals).items()}


def assemble(config: Config, recorded_replicas: int = 0, training: bool = True, cluster: Cluster = ALONE) -> Assembly:
    """Reads the dataset, takes the devices and builds the program.

    Args:
      config: the flags.
      recorded_replicas: logical replicas of the run, where it was started before; else 0.
      cluster: the processes.
      training: whether the run will be trained. If not, any number of devices will do: in evaluation
        the logical replicas only share the examples out.

    Raises:
      UserError: something in the flags can't be had or doesn't fit.
    """
    config = dataclasses.replace(config, replicas=recorded_replicas or config.replicas)
    data = load_dataset(config)
    with backend.quiet():  # TensorFlow looks for GPUs, and complains of each way in which there are none
        strategy = strategies.create(config, keras.config.backend(), cluster)
    if cluster.size > 1:
        _agree(config, data, strategy)
    replicas = config.replicas or strategy.devices
    if not training and replicas % strategy.devices:
        replicas = strategy.devices
        config = dataclasses.replace(config, global_batch=-(-config.global_batch // replicas) * replicas)
    config.check_batch(strategy.devices, replicas)
    steps = config.steps
    if steps < 0:
        steps = math.ceil((config.epochs or 15) * len(data.train) / config.global_batch)
    program = Program(config, data, steps, replicas, strategy.scope())
    strategy.compile(program)
    return Assembly(config, data, steps, strategy, program, cluster)


def _agree(config: Config, data: Dataset, strategy: Strategy) -> None:
    """Raises UserError if the processes of the cluster differ in what they are about to do."""
    packages = ("absl-py", "jax", "keras", "numpy", "tensorflow")
    facts = {f"--{k}": v for k, v in (config.definition() | {"steps": config.steps, "epochs": config.epochs}).items()}
    facts |= {f"version of {name}": importlib.metadata.version(name) for name in packages}
    facts |= {f"data, {name}": text for name, text in data.facts().items()}
    facts |= {"version of Python": platform.python_version(), "run directory": config.directory().resolve()}
    facts["code of the trainer"] = _code_digest()
    for name, value in facts.items():
        digests = strategy.gather(int(hashlib.sha256(repr(value).encode()).hexdigest()[:7], 16))
        others = [p for p, digest in enumerate(digests) if digest != digests[0]]
        if others:
            raise UserError(
                "strategy",
                config.strategy,
                f"process {', '.join(map(str, others))} differs from process 0 in {name}; "
                f"here, in process {strategy.cluster.index}, it is {value}",
                "start all processes with the same flags, code, data and packages",
            )


def _code_digest() -> str:
    """Of the Python files of this package and of the input pipeline."""
    digest = hashlib.sha256()
    for package in (pathlib.Path(__file__).parent, pathlib.Path(cache.__file__).parent):
        for path in sorted(package.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def load_dataset(config: Config) -> Dataset:
    """The dataset that the flags name, checked, split and cached."""
    load, arguments = plugins.resolve(config.dataset, "dataset", "input_pipeline", "load")
    try:
        if callable(load):
            offered = {"data_dir": config.data_dir} if config.data_dir else {}
            load = plugins.call(load, arguments, offered, flag="dataset", spec=config.dataset)
        prepared = dataset.prepare(load, config.validation_fraction)
        return dataclasses.replace(prepared, train=cache.cached(prepared.train, config.cache))
    except DataError as error:
        raise _data_error(config, error) from error


def _data_error(config: Config, error: DataError) -> UserError:
    return UserError("dataset", config.dataset, str(error), "mend the data or its module, or give another --dataset")
