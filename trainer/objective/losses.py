"""What a model is trained on: the losses and metrics that it is compiled with, or those that its labels mean."""

import math
import numbers
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras.src.backend import compute_output_spec
from keras.src.losses.loss import squeeze_or_expand_to_same_rank
from keras.src.trainers.compile_utils import CompileMetrics, get_loss

from input_pipeline.dataset import Dataset
from input_pipeline.domains import Categories, Domain, Shares
from input_pipeline.source import named_weights, read
from trainer.config import Config
from trainer.errors import UserError
from trainer.objective import building, computed_loss, inputs
from trainer.objective.logits import gives_logits, takes_logits
from trainer.objective.metrics import build_metrics, in_floats, is_keras_own, of_probabilities
from trainer.objective.outputs import both, names_of_labels, names_of_outputs, per_output, places_of_labels
from trainer.objective.purity import pure
from trainer.objective.trackers import Metrics
from trainer.objective.trial import EXAMPLES, TOLERANCE, drawn, over_batches, several
from trainer.objective.weighing import Losses, labelled, shapes

# Functions of Keras's losses that compare numbers one by one, and broadcast what is of other shapes.
_OF_NUMBERS = (
    keras.losses.binary_crossentropy,
    keras.losses.binary_focal_crossentropy,
    keras.losses.cosine_similarity,
    keras.losses.hinge,
    keras.losses.huber,
    keras.losses.kl_divergence,
    keras.losses.log_cosh,
    keras.losses.mean_absolute_error,
    keras.losses.mean_absolute_percentage_error,
    keras.losses.mean_squared_error,
    keras.losses.mean_squared_logarithmic_error,
    keras.losses.poisson,
    keras.losses.squared_hinge,
)
_OF_PROBABILITIES = (
    keras.losses.binary_crossentropy,
    keras.losses.binary_focal_crossentropy,
    keras.losses.categorical_crossentropy,
    keras.losses.categorical_focal_crossentropy,
    keras.losses.kl_divergence,
)
_MANY = 2**26  # numbers; with more outputs, a loss is not tried on any


def compile_model(
    config: Config, dataset: Dataset, model: keras.Model, optimizer: Any, y: Any, y_pred: Any
) -> tuple[Losses, Metrics, list[Domain | None], dict[str, str]]:
    """The losses and metrics of a model, what each label may be, and in words what is doubtful of 'loss' or 'metrics'.

    Compiles it with the run's optimizer, so that callbacks and .keras files find it there.

    Loss and metrics are the model's own if it is compiled; else integer labels mean sparse
    categorical cross-entropy, with accuracy. No labels mean what call() adds by add_loss(), and so
    does, as in fit(), a model that adds some and is compiled without a loss.

    Raises:
      UserError: they are not known, or don't fit the labels.
    """
    given = model._compile_config.config if model.compiled else {}  # what compile() was called with
    labels = keras.tree.flatten(y)
    loss, loss_weights = given.get("loss"), given.get("loss_weights")
    metrics = both(given.get("metrics"), given.get("weighted_metrics"))
    computes, no_loss = computed_loss.is_own(model), model.compiled and loss is None
    adds = computes or (no_loss and bool(labels) and building.adds_losses(model, dataset.spec[0]))
    if adds and not metrics:  # nothing compares labels with outputs, so they need not fit
        y, labels = (), []
    for things, each in (("outputs", y_pred), ("labels", y)):
        nested = isinstance(each, dict) and any(map(keras.tree.is_nested, each.values()))
        if nested and (metrics or not computes):
            raise UserError(
                "model",
                config.model,
                f"has {things} in a dict of which a value is no array: {shapes(each)}",
                "give one dict of arrays for all outputs, and one for all labels",
            )
    if loss is None and labels and not adds:
        if len(labels) != 1 or not np.issubdtype(np.dtype(labels[0].dtype), np.integer):
            raise UserError(
                "model",
                config.model,
                "is not compiled, and the labels are not integers, so its loss is not known",
                "compile it in build(): model.compile(loss=..., metrics=[...])",
            )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=gives_logits(model) != [False])
        metrics = metrics or ["accuracy"]
    # Every metric is a weighted one: the padding of the last evaluation batch has weight 0.
    keras.Model.compile(  # not a class's own, which may take something else
        model,
        optimizer,
        loss,
        loss_weights=loss_weights,
        weighted_metrics=metrics,
        auto_scale_loss=False,
        jit_compile=False,
    )
    if computes:
        computed_loss.build(config.model, model, dataset)
        loss = loss_weights = None
    losses = per_output(config, model, "loss", loss, y_pred)
    pairs = zip(losses, per_output(config, model, "loss_weights", loss_weights or 1.0, y_pred), strict=True)
    weights = [1.0 if loss is None else weight for loss, weight in pairs]
    gives = gives_logits(model)
    places = places_of_labels(model, losses, y, y_pred)
    if places is not None:
        losses, weights = ([each[i] for i in places.values()] for each in (losses, weights))
        gives = [gives[i] for i in places.values()] if gives else []
        if isinstance(metrics, list | tuple) and len(metrics) == len(keras.tree.flatten(y_pred)):
            metrics = {name: metrics[i] for name, i in places.items()}
        y_pred = labelled(y_pred, places)
    outputs = keras.tree.flatten(y_pred)
    if len(labels) != len(outputs) and (labels or loss is not None):
        raise UserError(
            "model",
            config.model,
            f"has {len(outputs)} outputs, but an example has {len(labels)} labels",
            "return one label per output from the source; where an output is to have none, a dict of labels by output, "
            "and compile the model with a dict of losses",
        )
    names = names_of_labels(config, model, y, y_pred)
    if not all(isinstance(weight, numbers.Real) for weight in weights):
        reason = f"is compiled with loss_weights={loss_weights!r}, which are no number for each output"
        raise UserError("model", config.model, reason, "name compile()'s arguments: metrics=[...] is not the third")
    targets = labels if names is None else [y[name] for name in names]
    try:
        found = [get_loss(*given) for given in zip(losses, targets or losses, outputs, strict=True)]
    except ValueError as error:
        reason, fix = f"is compiled with a loss that is none: {error}", "give a name that keras.losses knows, or a loss"
        raise UserError("model", config.model, reason, fix) from error
    if any(getattr(each, "reduction", None) == "sum" for each in found):
        raise UserError(
            "model",
            config.model,
            "has a loss with reduction='sum': a run's loss is the mean over a step's examples, by their weights",
            "leave `reduction` out, and give --learning_rate what the sum would have given",
        )
    if any(type(each).__call__ is not keras.losses.Loss.__call__ for each in found if each is not None):
        raise UserError(
            "model",
            config.model,
            "has a loss with __call__() of its own, which a step does not call: it weighs each example's value itself",
            "name it call(), and let it return one value per example",
        )
    for each, logits in zip(found, gives, strict=False):
        if logits is not None and takes_logits(each) not in (None, logits):
            given, taken = ("logits", "probabilities") if logits else ("probabilities", "logits")
            raise UserError(
                "model",
                config.model,
                f"ends in a layer that gives {given}, and its loss {each.name!r} takes {taken}",
                f"compile it with that loss's class and from_logits={logits}",
            )
    known = [_labels(loss, output) for loss, output in zip(found, outputs, strict=True)] if labels else []
    if names is not None:  # in the order in which a dict's are flattened
        known = [each for _, each in sorted(zip(names, known, strict=True), key=lambda pair: pair[0])]
    combined = Losses(config.model, found, weights, names, config.global_batch, places, names_of_outputs(model, y_pred))
    doubts = {"loss": ""}
    if loss is not None:
        doubts["loss"] = _try(model, combined, found, dataset, y, y_pred) or _broadcast(found, targets, outputs)
    if computes:
        doubts["loss"] = "what the model's compute_loss() returns for a logical replica's examples, as their mean"
    elif adds:
        doubts["loss"] = "what call() adds by add_loss(), for the model is compiled without a loss for its labels"
    summed = CompileMetrics(None, in_floats(metrics), output_names=getattr(model, "output_names", None))
    summed = build_metrics(config, model, summed, dataset, y, y_pred, combined.metric_weights)
    object.__setattr__(model, "_compile_metrics", summed)  # callbacks ask it whether more is better; not a layer's
    if {takes_logits(each) for each in found if each is not None} == {True}:
        doubts["metrics"] = of_probabilities(summed)
    return combined, Metrics(model, summed), known, {of: words for of, words in doubts.items() if words}


def _try(model: keras.Model, losses: Losses, found: Sequence[Any], dataset: Dataset, y: Any, y_pred: Any) -> str:
    """Tries the losses on a few examples: traced, for what does not fit is to be told before a run begins.

    Returns:
      In words, that a loss mixes examples, as none of Keras's but one does; '' if none does, or it can't be tried.
    """
    symbols = several((y, y_pred, inputs.symbols(named_weights(dataset.spec[2:]))))
    with pure(losses.flag, model):
        compute_output_spec(lambda y, y_pred, weights: losses({"x": y_pred, "y": y} | weights, y_pred, []), *symbols)
    for each in found:
        if isinstance(each, keras.losses.Circle):
            return f"{each.name!r} mixes the examples of a logical replica: it compares them in pairs"
    own = [each for each in found if each is not None and not is_keras_own(each, getattr(each, "fn", each.call))]
    if not own or sum(math.prod(each.shape) for each in keras.tree.flatten(symbols[1])) > _MANY:
        return ""
    given = read(dataset.train, np.arange(EXAMPLES) % len(dataset.train))[1], drawn(y_pred)

    def objective(batch: Any) -> Any:
        labels, outputs = batch
        with keras.StatelessScope():  # what a loss changes of the model's is not to stay
            return losses({"x": outputs, "y": labels}, outputs, [])[0]

    try:
        together, alone = over_batches(objective, given, EXAMPLES), over_batches(objective, given, 1)
    except Exception:  # whatever a loss of the user's may raise of numbers that its model would not give
        return ""
    if np.isclose(together, alone, TOLERANCE, equal_nan=True):
        return ""
    names = " or ".join(repr(each.name) for each in own)
    return (
        f"{names} mixes the examples of a logical replica: if that is not meant, labels {shapes(y)} and outputs "
        f"{shapes(y_pred)} were broadcast"
    )


def _broadcast(losses: Sequence[Any], labels: Sequence[Any], outputs: Sequence[Any]) -> str:
    """In words, that a loss of Keras's compares numbers one by one, and has not one for one; '' if none does."""
    for loss, *compared in zip(losses, labels, outputs, strict=False):
        if getattr(loss, "fn", None) in _OF_NUMBERS:
            dims = [each.shape[1:] for each in squeeze_or_expand_to_same_rank(*compared)]
            if len(dims[0]) != len(dims[1]) or any(a != b and None not in (a, b) for a, b in zip(*dims, strict=True)):
                label, output = map(shapes, compared)
                return (
                    f"{loss.name!r} broadcasts labels {label} and outputs {output}: if that is not meant, reshape one"
                )
    return ""


def _labels(loss: Any, output: Any) -> Domain | None:
    """The labels of a loss that takes probabilities, or the number of a class."""
    function = getattr(loss, "fn", None)
    if function in _OF_PROBABILITIES:
        return Shares(loss.name)
    if function is not keras.losses.sparse_categorical_crossentropy:
        return None
    arguments = getattr(loss, "_fn_kwargs", {})
    classes = output.shape[arguments.get("axis", -1)]
    return Categories(classes, ignored=arguments.get("ignore_class")) if classes else None
