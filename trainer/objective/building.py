"""The user's model: built from the dataset's facts, and refused where a run would not be what it says."""

import contextlib
import functools
import inspect
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import keras
import keras.src.backend as keras_backend
from keras.src.layers.preprocessing.index_lookup import IndexLookup
from keras.src.models.functional import Functional
from keras.src.trainers.trainer import Trainer

from input_pipeline.dataset import Dataset
from input_pipeline.structure import flatten, words
from trainer import plugins
from trainer.config import Config
from trainer.errors import UserError, said_by_keras
from trainer.objective import inputs
from trainer.objective.calling import stateless_call

_OF_FIT = ("train_step", "test_step", "compute_metrics")  # a run does not call them
_OF_TABLES = (IndexLookup, keras.layers.Hashing, keras.layers.HashedCrossing, keras.layers.TextVectorization)


def build(config: Config, dataset: Dataset) -> tuple[keras.Model, Any, Any]:
    """Calls the model's build() with what it names of the dataset's facts.

    Returns:
      (the built model, symbolic labels, symbolic outputs), of a batch of one example.

    Raises:
      UserError: it needs something else, returns no model, or one that does not take the examples.
    """
    x, y = dataset.spec[:2]
    offered = {"input_shape": getattr(x, "shape", None), "classes": dataset.classes}
    make, arguments = plugins.resolve(config.model, "model", "trainer.models", "build")
    if not callable(make):
        raise UserError("model", config.model, "is a module without build()", "define build(...) -> keras.Model")
    if isinstance(make, keras.Model):
        reason = "is a model, made when its module was imported: before --seed, and wherever that was"
        raise UserError("model", config.model, reason, "name a function that returns one: def build(): ...")
    needed = [name for name in plugins.needed(make) if name not in arguments]
    if offered["input_shape"] is None and "input_shape" in needed:
        labels = "" if flatten(y) else ", and no labels"
        raise UserError(
            "dataset",
            config.dataset,
            f"gives several arrays for an example's x, {words(x)}{labels}: there is no one `input_shape`, which "
            f"--model={config.model} needs",
            "let the source return (x, y), x being one array; or give a model that takes several, by their names",
        )
    for fact in (name for name, value in offered.items() if value is None and name in needed):
        raise UserError(
            "dataset",
            config.dataset,
            f"does not tell `{fact}`, which --model={config.model} needs",
            f"give what it loads that attribute, or say --model='{config.model.partition('(')[0]}({fact}=...)'; to "
            "predict numbers, give a model of your own that is compiled with its loss",
        )
    offered = {k: v for k, v in offered.items() if v is not None}
    if config.remat:
        if keras.config.backend() == "tensorflow":
            raise UserError(
                "remat",
                True,
                "does not work on TensorFlow: keras.remat there loses the gradients of the variables that it reads",
                "use --strategy=device_mesh, or --backend=jax",
            )
        if "remat" not in inspect.signature(make).parameters:
            raise UserError("remat", True, f"--model={config.model} does not support it", "let its build take remat")
        offered["remat"] = True
    with _noting_optimizers(), _noting_integers() as brightened:
        model = plugins.call(make, arguments, offered, flag="model", spec=config.model)
    if not isinstance(model, keras.Model):
        raise UserError("model", config.model, f"build() returned a {type(model).__name__}", "return a keras.Model")
    _check(config, model)

    try:
        with _noting_integers() as more:
            y_pred = inputs.outputs(model, x)
    except (ValueError, TypeError, RuntimeError) as error:
        if not flatten(y):
            fix = "let the source return (x, y): what it gives has no labels, so all of it goes to the model"
        elif len(flatten(x)) > 1:
            fix = "name the model's inputs as the arrays of x, a dict, are; or give as many, in the order of its inputs"
        else:
            fix = "give the model the dataset's shape: name input_shape in build's signature"
        reason = f"does not take the examples of --dataset={config.dataset} ({words(x)}): {said_by_keras(error)}"
        raise UserError("model", config.model, reason, fix) from error
    for spec, of in zip(flatten(x), inputs.inputs_of(model, x), strict=True):
        if of is not None and "complex" in spec.dtype.name and "complex" not in of.dtype:
            raise UserError(
                "dataset",
                config.dataset,
                f"gives complex numbers ({words(x)}), and the model's input is real: Keras would leave out the "
                "imaginary parts",
                "let the source give real and imaginary parts, or give that input dtype='complex64'",
            )
    if brightened := brightened + more:
        raise UserError(
            "model",
            config.model,
            f"layer {brightened[0].path} (RandomBrightness) is given integers, to which Keras adds integers, and "
            "200 + 100 is 44 there",
            "put a layer before it that gives floats, such as Rescaling(1.0)",
        )
    if not model.trainable_variables:  # of whose steps Keras's optimizers count none
        raise UserError(
            "model",
            config.model,
            f"has no trainable variables, of {len(model.variables)}: there is nothing to train",
            "set trainable=True on the layers that are to learn",
        )
    if inputs.mode(model, training=True) and type(model).call not in (Functional.call, keras.Sequential.call):
        # By call(): of a subclass of these two, Keras's symbolic outputs are those of the layers.
        outputs = (
            keras_backend.compute_output_spec(functools.partial(model.call, training=value), inputs.symbols(x))
            for value in (True, False)
        )
        shapes = [keras.tree.map_structure(lambda output: output.shape, each) for each in outputs]
        if shapes[0] != shapes[1]:
            raise UserError(
                "model",
                config.model,
                f"gives other outputs in training than in evaluation, of shapes {shapes[0]} and {shapes[1]}",
                "give the same in both, and add by add_loss() what is a loss in training alone",
            )
    return model, inputs.symbols(y), y_pred


def adds_losses(model: keras.Model, x: Any) -> bool:
    """Whether a model's layers add losses in training, by add_loss(); traced.

    Args:
      model: a built model.
      x: Specs of an example.
    """
    found: list[Any] = []

    def call(trainable: list[Any], state: list[Any], x: Any) -> Any:
        outputs, _, losses = stateless_call(model, trainable, state, x, training=True, return_losses=True)
        found.extend(losses)
        return outputs

    variables = model.trainable_variables, model.non_trainable_variables
    values = [[keras.KerasTensor(v.shape, v.dtype) for v in some] for some in variables]
    keras_backend.compute_output_spec(call, *values, inputs.symbols(x))
    return len(found) > sum(v.regularizer is not None for v in model.trainable_variables)


@contextlib.contextmanager
def _noting_optimizers() -> Iterator[None]:
    """Marks models whose compile() was given an optimizer: afterwards its default looks like one that was."""
    compile_ = Trainer.compile

    @functools.wraps(compile_)
    def noting(model: keras.Model, *args: Any, **kwargs: Any) -> None:
        compile_(model, *args, **kwargs)
        model.optimizer_is_given = bool(args) or "optimizer" in kwargs

    with mock.patch.object(Trainer, "compile", noting):
        yield


@contextlib.contextmanager
def _noting_integers() -> Iterator[list[keras.Layer]]:
    """Gives the layers that are asked to brighten integers, of which Keras 3.15 makes noise, and says nothing."""
    found, call = list[keras.Layer](), keras.layers.RandomBrightness.__call__

    def noting(layer: keras.Layer, data: Any, *args: Any, **kwargs: Any) -> Any:
        images = data["images"] if isinstance(data, dict) else data
        if "int" in keras.backend.standardize_dtype(images.dtype):
            found.append(layer)
        return call(layer, data, *args, **kwargs)

    with mock.patch.object(keras.layers.RandomBrightness, "__call__", noting):
        yield found


def _check(config: Config, model: keras.Model) -> None:
    """Refuses what would be left out in silence, or would change with the devices."""
    for method in _OF_FIT:
        if getattr(type(model), method) is not getattr(keras.Model, method):
            raise UserError(
                "model",
                config.model,
                f"has a {method}() of its own ({type(model).__name__}), which only fit() calls: here a step is a "
                "function of variables and examples",
                "give losses and metrics to compile(), what needs no labels to add_loss() in call(), or let "
                "compute_loss() return the loss, and delete it",
            )
    if keras.config.floatx() != "float32":
        raise UserError(
            "model",
            config.model,
            f"sets Keras's floatx to {keras.config.floatx()}, or --dataset's module does: losses are float32",
            "delete it, and say by --precision what layers are to compute in",
        )
    if model.compiled and model.run_eagerly:
        raise UserError(
            "model",
            config.model,
            "is compiled with run_eagerly=True, and a run's steps are compiled",
            "leave it out, and look into the model by calling it on a batch",
        )
    of_tensorflow = getattr(sys.modules.get("tensorflow"), "Variable", ())
    for layer in model._flatten_layers():
        for name in (name for name, value in vars(layer).items() if isinstance(value, of_tensorflow)):
            raise UserError(
                "model",
                config.model,
                f"layer {layer.path} keeps {name!r} in a tf.Variable, which Keras 3 neither trains nor saves",
                "make it by self.add_weight(...), or as a keras.Variable",
            )
        if getattr(layer, "synchronized", False):
            raise UserError(
                "model",
                config.model,
                f"layer {layer.path} has synchronized=True: its statistics would be those of a step's examples on all "
                "devices, and here they are a logical replica's, whatever the devices",
                "delete it; with --replicas=1 they are those of the whole batch",
            )
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            raise UserError(
                "model",
                config.model,
                f"layer {layer.path} has stateful=True: it would carry what it saw in one batch into the next, and "
                "examples come in random order",
                "delete it, and give each sequence whole",
            )
        is_input = isinstance(layer, keras.layers.InputLayer)
        wide = "float64" in (layer.compute_dtype, layer.variable_dtype) and not is_input
        if keras.config.backend() == "jax" and wide:
            raise UserError(
                "model",
                config.model,
                f"layer {layer.path} computes in float64, and JAX in 32 bits",
                "leave its dtype out, or use --backend=tensorflow",
            )
        if keras.config.backend() == "jax" and isinstance(layer, _OF_TABLES):
            raise UserError(
                "model",
                config.model,
                f"layer {layer.path} ({type(layer).__name__}) is computed by TensorFlow, which JAX can't compile",
                "give the source what it returns, by calling it there on each batch, or use --backend=tensorflow",
            )
