"""What is trained: the model, its objective and its optimizer, built in the strategy's scope."""

import contextlib
import functools
import hashlib
import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import keras
import numpy as np
from keras.src.backend import compute_output_spec
from keras.src.backend.common import global_state
from keras.src.utils import naming

from input_pipeline.dataset import Dataset
from input_pipeline.source import Example, named_weights
from trainer import optimizers, policy
from trainer.config import Config
from trainer.objective import building, draws, inputs, placed, updates
from trainer.objective.lookups import looked_up, out_of_range
from trainer.objective.losses import compile_model
from trainer.objective.randomness import GOLDEN, Generator
from trainer.serialized import serialized, without_tensorflow
from trainer.step import Objective
from trainer.storage.shards import Index, Piece, everything
from trainer.storage.snapshot import Copying, KeptCopies, Pieces

_MUCH = 2**18  # numbers: to trace takes as long as some hundred sums of so many


def set_defaults(precision: str) -> None:
    """Sets those of a run, whatever this host's keras.json says; a user's modules, imported later, may change them."""
    for module in (global_state, keras.backend, keras.utils):
        # Keras's clear_session() would forget the precision, and on which devices variables are made.
        vars(module)["clear_session"] = lambda free_memory=True: naming.reset_uids()
    keras.config.set_floatx("float32")
    keras.config.set_epsilon(1e-7)
    keras.config.set_image_data_format("channels_last")
    keras.config.set_dtype_policy(precision)


class Program:
    """Model, objective and optimizer of a run; their Keras variables hold the run's state between steps.

    Args:
      config: the flags.
      dataset: gives the model the shapes and the classes that it asks for.
      steps: length of the run, for the schedule.
      replicas: V, the run's logical replicas.
      scope: where variables are created: the strategy's.
    """

    def __init__(
        self,
        config: Config,
        dataset: Dataset,
        steps: int,
        replicas: int,
        scope: contextlib.AbstractContextManager[Any],
    ) -> None:
        self.replicas = replicas
        # How values come from and to the devices; a strategy of which no process holds the whole has its own ways.
        self.to_host: Callable[[keras.Variable], np.ndarray] = lambda v: keras.ops.convert_to_numpy(v.value)
        self.assign: Callable[[keras.Variable, Callable[[Index], np.ndarray]], None] = _assign_whole
        # What a process saves of a variable: the whole, or the pieces that only it holds; and how that is copied.
        self.whole = True
        self.held: Callable[[keras.Variable], list[Piece]] = lambda v: [Piece((), self.to_host(v))]
        self.copy: Copying = KeptCopies()
        # Not keras.utils.set_random_seed: on JAX it imports TensorFlow. These two are what Keras's
        # initializers draw their seeds from; everything later is keyed by step and replica.
        random.seed(config.seed)
        np.random.seed(config.seed % 2**32)
        with scope, draws.on_host(), without_tensorflow():
            with placed.by_flags(config.model):
                self.model, y, y_pred = building.build(config, dataset)
            self.optimizer = optimizers.create(config, self.model, steps)
            optimizers.build(self.optimizer, self.model.trainable_variables)
        self.config, self._spec = config, dataset.spec
        self.as_compiled = not config.optimizer and optimizers.compiled_with(self.model) is not None
        self.jit_compile = self.model.compiled and self.model._compile_config.config["jit_compile"] is True  # XLA
        compiled = compile_model(config, dataset, self.model, self.optimizer, y, y_pred)
        losses, metrics, self.labels, self.doubts = compiled  # labels: what an example's may be, where that is known
        self.inputs, self._computed = looked_up(self.model, dataset.spec[0])
        skips, scaled = policy.parse(config.on_nan).name == "skip", hasattr(self.optimizer, "dynamic_scale")
        self.objective = Objective(self.model, losses, metrics, skips, scaled, self._computed)
        self._constant: float | None = None  # the learning rate, where it is

    def draw_from(self, generator: Generator) -> None:
        """Has layers and the optimizer draw their random numbers from it."""
        self.objective.generator, seed = generator, self.config.seed
        for each in optimizers.each_of(self.optimizer):
            updates.key(each, self.optimizer.iterations, seed, generator, optimizers.whose(self.config))
            seed += len(each._trainable_variables) * GOLDEN  # the next one's variables have numbers of their own

    def check_takes(self, spec: Example) -> None:
        """Traces an evaluation of one such example.

        Raises:
          ValueError, TypeError, RuntimeError: what the model, its losses or its metrics say against it.
        """
        self._trace(spec, training=False)

    def leave_what_stays(self) -> None:
        """Traces a step where a model has much that is not trained: what it leaves as it is, is not added up."""
        if sum(math.prod(v.shape) for v in self.objective.state.variables) >= _MUCH:
            self._trace(self._spec, training=True)
            self.objective.state.leave_what_stays()

    def _trace(self, spec: Example, training: bool) -> None:
        x, y, *weight = inputs.symbols(spec)
        batch = {"x": x, "y": y, "key": keras.KerasTensor((2,), "uint32"), **named_weights(weight)}
        variables = (self.model.trainable_variables, self.objective.state_variables)
        values = [[keras.KerasTensor(v.shape, v.dtype) for v in some] for some in variables]
        compute_output_spec(lambda t, s, batch: self.objective(t, s, batch, training)[0], *values, batch)

    def out_of_range(self, x: Any) -> str:
        """What examples look up, and has no row, in words; '' if nothing is found."""
        return out_of_range(self.model, self._computed, x) if self._computed else ""

    def count_steps(self, left_out: int) -> None:
        """Has the optimizer count steps that changed nothing, as if it had done them."""
        for counter in optimizers.counters(self.optimizer):
            counter.assign(int(keras.ops.convert_to_numpy(counter)) + left_out)

    def learning_rate(self, step: int) -> float:
        """Learning rate of the step after so many, of several optimizers the first's."""
        first = optimizers.each_of(self.optimizer)[0]
        schedule = first._learning_rate
        changes = isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule)
        if changes and not self.scales_loss:
            return float(keras.ops.convert_to_numpy(schedule(keras.ops.convert_to_tensor(step))))
        # To look at the variables is to wait for the steps in flight. Of a Keras optimizer without a schedule,
        # callbacks alone change it; with one, where the loss is scaled, it follows the steps that were not left out.
        changes |= bool(self.config.callbacks) or not type(first).__module__.startswith("keras.")
        if self._constant is None or changes:
            self._constant = float(keras.ops.convert_to_numpy(first.learning_rate))
        return self._constant

    @property
    def scales_loss(self) -> bool:
        """Whether the optimizer scales the loss, and skips steps whose gradients overflow by it."""
        return hasattr(self.optimizer, "dynamic_scale")

    @functools.cached_property  # for it takes milliseconds where there are thousands, each of which asks for it
    def variables(self) -> dict[str, keras.Variable]:
        """All variables of the run by path: the model's and the optimizer's, without seed generators.

        Those of one path are numbered: parts of a layer that builds them itself may have the names of another's, and
        Adafactor's factors have those of the layers' variables: kernel, kernel, ...
        """
        variables = dict[str, keras.Variable]()
        own = [*self.model.trainable_variables, *self.objective.state_variables]
        for prefix, some in (("", own), ("optimizer/", self.optimizer.variables)):
            for variable in some:
                path, number = prefix + variable.path, itertools.count(1)
                while path in variables:
                    path = f"{prefix}{variable.path}:{next(number)}"
                variables[path] = variable
        return variables

    def architecture(self) -> str:
        """Digest of the model's configuration; the name of its class if it can't be serialized."""
        text = serialized(self.model)
        return hashlib.sha256(text.encode()).hexdigest()[:16] if text else type(self.model).__name__

    @functools.cached_property
    def hyperparameters(self) -> dict[str, Any]:
        """The optimizer, its first learning rate and the schedule of that: the flags', or the compiled model's."""
        with without_tensorflow():
            return optimizers.describe(self.optimizer) if self.as_compiled else self.config.hyperparameters

    def signature(self) -> dict[str, list[Any]]:
        """Path -> [shape, dtype] of each variable of the run."""
        return {path: [list(v.shape), kind(v)] for path, v in self.variables.items()}

    def values(self) -> dict[str, np.ndarray]:
        """Path -> whole value of each variable of the run, on the host; all processes call it together."""
        return {path: self.to_host(v) for path, v in self.variables.items()}

    def snapshot(self) -> Callable[[], Pieces]:
        """What this process saves of each variable; all processes call it together.

        Returns:
          what copies it, in any thread but before the next step; the copies hold until the next snapshot.
        """
        return self.copy({path: self.held(v) for path, v in self.variables.items()})

    @contextlib.contextmanager
    def remembered(self) -> Iterator[list[tuple[keras.Variable, np.ndarray]]]:
        """Gives the variables of the run that are assigned to within it, with their values before.

        All processes call it together, and assign to the same ones.
        """
        left, before = set(map(id, self.variables.values())), list[tuple[keras.Variable, np.ndarray]]()
        assign = keras.Variable.assign

        def assigning(variable: keras.Variable, value: Any) -> Any:
            if id(variable) in left:
                left.remove(id(variable))
                before.append((variable, np.array(self.to_host(variable))))
            return assign(variable, value)

        with mock.patch.object(keras.Variable, "assign", assigning):
            yield before

    def begin_averages(self) -> None:
        """Has moving averages begin at the variables: Keras's are zeros until a first step, which may be left out."""
        for each in optimizers.each_of(self.optimizer):
            for variable, average in optimizers.averages(each):
                self.assign(average, self.to_host(variable).__getitem__)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Has the moving averages of variables in their place, where the optimizer keeps some: to judge and to export.

        All processes call it together.
        """
        begun = [o for o in optimizers.each_of(self.optimizer) if keras.ops.convert_to_numpy(o.iterations)]
        pairs = [pair for each in begun for pair in optimizers.averages(each)]
        trained = [(variable, np.array(self.to_host(variable))) for variable, _ in pairs]
        for variable, average in pairs:
            self.assign(variable, self.to_host(average).__getitem__)
        try:
            yield
        finally:
            for variable, value in trained:
                self.assign(variable, value.__getitem__)

    def weights_sha256(self) -> str:
        """Digest of all model variables, sorted by path, as float32 little-endian; all processes call it together."""
        digest, variables = hashlib.sha256(), [*self.model.trainable_variables, *self.objective.state_variables]
        for variable in sorted(variables, key=lambda v: v.path):
            digest.update(self.to_host(variable).astype(np.float32).tobytes())
        return digest.hexdigest()


def _assign_whole(variable: keras.Variable, read: Callable[[Index], np.ndarray]) -> None:
    variable.assign(read(everything(variable.shape)))


def kind(variable: keras.Variable) -> str:
    """The dtype of a variable, but 'int' for every integer: backends differ in the size of theirs."""
    dtype = keras.backend.standardize_dtype(variable.dtype)
    return "int" if "int" in dtype else dtype
