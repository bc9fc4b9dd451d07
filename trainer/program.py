"""What is trained: the model, its objective and its optimizer, built in the strategy's scope."""

import contextlib
import hashlib
import inspect
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras.src.trainers.compile_utils import CompileMetrics, get_loss

from input_pipeline.dataset import Dataset
from input_pipeline.source import map_structure
from trainer import optimizers, plugins
from trainer.config import Config
from trainer.errors import UserError
from trainer.step import Objective


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
        # A variable's whole value; a strategy of which no process holds it puts its own way here.
        self.to_host: Callable[[keras.Variable], np.ndarray] = lambda v: keras.ops.convert_to_numpy(v.value)
        # Not keras.utils.set_random_seed: on JAX it imports TensorFlow. These two are what Keras's
        # initializers draw their seeds from; everything later is keyed by step and replica.
        random.seed(config.seed)
        np.random.seed(config.seed % 2**32)
        keras.config.set_dtype_policy(config.precision)
        with scope:
            self.model, y, y_pred = _build_model(config, dataset)
            self.optimizer = optimizers.create(config, steps)
            self.optimizer.build(self.model.trainable_variables)
        losses, loss_weights, metrics = _compile(config, self.model, self.optimizer, y, y_pred)
        self.objective = Objective(self.model, losses, loss_weights, metrics, config.global_batch)

    @property
    def step(self) -> int:
        """Steps done, as the optimizer counts them."""
        return int(keras.ops.convert_to_numpy(self.optimizer.iterations))

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return float(keras.ops.convert_to_numpy(self.optimizer.learning_rate))

    @property
    def variables(self) -> dict[str, keras.Variable]:
        """All variables of the run by path: the model's and the optimizer's, without seed generators."""
        own = [*self.model.trainable_variables, *self.objective.state_variables]
        variables = {v.path: v for v in own}
        optimizer = {f"optimizer/{v.path}": v for v in self.optimizer.variables}
        if len(variables) != len(own) or len(optimizer) != len(self.optimizer.variables):
            paths = [v.path for v in own]
            twice = sorted({path for path in paths if paths.count(path) > 1})
            raise UserError(
                "model",
                self.model.name,
                f"has several variables of one path: {', '.join(twice)}",
                "give each layer a name of its own",
            )
        return variables | optimizer

    def architecture(self) -> str:
        """Digest of the model's configuration; the name of its class if it can't be serialized."""
        try:
            config = keras.saving.serialize_keras_object(self.model)["config"]
            text = json.dumps(config, sort_keys=True)
        except (NotImplementedError, TypeError, ValueError):
            return type(self.model).__name__
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def signature(self) -> dict[str, list[Any]]:
        """Path -> [shape, dtype] of each variable of the run."""
        return {path: [list(v.shape), kind(v)] for path, v in self.variables.items()}

    def values(self) -> dict[str, np.ndarray]:
        """Path -> whole value of each variable of the run, on the host; all processes call it together."""
        # Copies: on CPUs, what comes to the host may be the very memory that the next step writes to.
        return {path: np.array(self.to_host(v)) for path, v in self.variables.items()}

    def weights_sha256(self) -> str:
        """Digest of all model variables, sorted by path, as float32 little-endian; all processes call it together."""
        digest, variables = hashlib.sha256(), [*self.model.trainable_variables, *self.objective.state_variables]
        for variable in sorted(variables, key=lambda v: v.path):
            digest.update(self.to_host(variable).astype(np.float32).tobytes())
        return digest.hexdigest()


def kind(variable: keras.Variable) -> str:
    """The dtype of a variable, but 'int' for every integer: backends differ in the size of theirs."""
    dtype = keras.backend.standardize_dtype(variable.dtype)
    return "int" if "int" in dtype else dtype


def _build_model(config: Config, dataset: Dataset) -> tuple[keras.Model, Any, Any]:
    """(the built model, symbolic labels, symbolic outputs)."""
    x, y = dataset.spec[:2]
    offered = {"input_shape": getattr(x, "shape", None), "classes": dataset.classes}
    build, arguments = plugins.resolve(config.model, "model", "trainer.models", "build")
    if not callable(build):
        raise UserError("model", config.model, "is a module without build()", "define build(...) -> keras.Model")
    offered = {k: v for k, v in offered.items() if v is not None}
    if config.remat:
        if keras.config.backend() == "tensorflow":
            raise UserError(
                "remat",
                True,
                "does not work on TensorFlow: keras.remat there loses the gradients of the variables that it reads",
                "use --strategy=device_mesh, or --backend=jax",
            )
        if "remat" not in inspect.signature(build).parameters:
            raise UserError("remat", True, f"--model={config.model} does not support it", "let its build take remat")
        offered["remat"] = True
    model = plugins.call(build, arguments, offered, flag="model", spec=config.model)
    if not isinstance(model, keras.Model):
        raise UserError("model", config.model, f"build() returned a {type(model).__name__}", "return a keras.Model")

    def symbol(spec: Any) -> keras.KerasTensor:
        return keras.KerasTensor((1, *spec.shape), str(spec.dtype))

    try:
        y_pred = model(map_structure(symbol, x))  # builds a subclassed model, too
    except (ValueError, TypeError, RuntimeError) as error:
        raise UserError(
            "model",
            config.model,
            f"does not take the examples of --dataset={config.dataset} ({x}): {error}",
            "give the model the dataset's shape: name input_shape in build's signature",
        ) from error
    return model, map_structure(symbol, y), y_pred


def _compile(
    config: Config, model: keras.Model, optimizer: Any, y: Any, y_pred: Any
) -> tuple[list[Any], Sequence[float], keras.metrics.Metric]:
    """Compiles the model with the run's optimizer, so that callbacks and .keras files find it there.

    Loss and metrics are the model's own if it is compiled; else integer labels mean sparse
    categorical cross-entropy on logits, with accuracy.
    """
    given = model._compile_config.config if model.compiled else {}  # what compile() was called with
    if given.get("loss") is not None:
        loss, loss_weights = given["loss"], given["loss_weights"]
        metrics = _both(given["metrics"], given["weighted_metrics"])
    else:
        labels = keras.tree.flatten(y)
        if len(labels) != 1 or not np.issubdtype(np.dtype(labels[0].dtype), np.integer):
            raise UserError(
                "model",
                config.model,
                "is not compiled, and the labels are not integers, so its loss is not known",
                "compile it in build(): model.compile(loss=..., metrics=[...])",
            )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        loss_weights, metrics = None, ["accuracy"]
    # Every metric is a weighted one: the padding of the last evaluation batch has weight 0.
    model.compile(
        optimizer,
        loss,
        loss_weights=loss_weights,
        weighted_metrics=metrics,
        auto_scale_loss=False,
        jit_compile=False,
    )
    outputs = keras.tree.flatten(y_pred)
    losses = _per_output(config, model, loss, y_pred)
    weights = _per_output(config, model, loss_weights or 1.0, y_pred)
    metrics_object = CompileMetrics(None, metrics, output_names=getattr(model, "output_names", None))
    _build_metrics(config, metrics_object, y, y_pred)
    if len(keras.tree.flatten(y)) != len(outputs):
        raise UserError(
            "model",
            config.model,
            f"has {len(outputs)} outputs, but an example has {len(keras.tree.flatten(y))} labels",
            "return one label per output from the source",
        )
    targets = keras.tree.flatten(y)
    return [get_loss(*given) for given in zip(losses, targets, outputs, strict=True)], weights, metrics_object


def _both(metrics: Any, weighted_metrics: Any) -> Any:
    """Unweighted and weighted metrics as one argument of compile()."""
    if not metrics or not weighted_metrics:
        return metrics or weighted_metrics or None
    if isinstance(metrics, dict) and isinstance(weighted_metrics, dict):
        names = metrics.keys() | weighted_metrics.keys()
        return {k: [*_listed(metrics.get(k)), *_listed(weighted_metrics.get(k))] for k in sorted(names)}
    return [*metrics, *weighted_metrics]


def _listed(metrics: Any) -> list[Any]:
    return [] if metrics is None else list(metrics) if isinstance(metrics, list | tuple) else [metrics]


def _per_output(config: Config, model: keras.Model, given: Any, y_pred: Any) -> list[Any]:
    """One entry per output from what compile() takes: a single one, a list, or a dict by output name."""
    outputs = keras.tree.flatten(y_pred)
    if isinstance(given, dict):
        names = sorted(y_pred) if isinstance(y_pred, dict) else getattr(model, "output_names", [])
        return [given.get(name) for name in names]
    if isinstance(given, list | tuple):
        if len(given) != len(outputs):
            raise UserError(
                "model",
                config.model,
                f"is compiled with {len(given)} losses for {len(outputs)} outputs",
                "give one per output",
            )
        return list(given)
    return [given] * len(outputs)


def _build_metrics(config: Config, metrics: CompileMetrics, y: Any, y_pred: Any) -> None:
    """Makes the metrics' variables, which some create in their first update only, and resets them."""

    def zeros(tensor: Any) -> Any:
        return keras.ops.zeros(tensor.shape, tensor.dtype)

    tree = keras.tree.map_structure
    try:
        metrics.update_state(tree(zeros, y), tree(zeros, y_pred), sample_weight=keras.ops.ones((1,)))
    except TypeError as error:
        raise UserError(
            "model",
            config.model,
            f"has a metric that takes no sample_weight ({error})",
            "give its update_state(y_true, y_pred, sample_weight=None) that argument: padding has weight 0",
        ) from error
    metrics.reset_state()
