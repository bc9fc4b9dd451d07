"""A run's metrics: each weighs examples, and what it keeps is a sum over them, however they are shared out."""

import contextlib
import operator
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import keras
import numpy as np
from keras import ops
from keras.src import backend
from keras.src.metrics import confusion_metrics
from keras.src.trainers.compile_utils import CompileMetrics

from input_pipeline.dataset import Dataset
from input_pipeline.pipeline import Batch
from input_pipeline.source import named_weights, read
from input_pipeline.structure import map_structure
from trainer.config import Config
from trainer.errors import UserError
from trainer.objective.purity import pure
from trainer.objective.randomness import keyed
from trainer.objective.trial import EXAMPLES, TOLERANCE, drawn, over_batches, several
from trainer.objective.weighing import expand, shapes

# Metrics that take weights of examples only where an example is one element.
_OF_ELEMENTS = (
    keras.metrics.AUC,
    keras.metrics.IoU,
    keras.metrics.Precision,
    keras.metrics.Recall,
    confusion_metrics.SensitivitySpecificityBase,
    confusion_metrics._ConfusionMatrixConditionCount,
)
_OF_PROBABILITIES = (
    keras.metrics.AUC,
    keras.metrics.BinaryAccuracy,
    keras.metrics.BinaryIoU,
    keras.metrics.FBetaScore,
    keras.metrics.Precision,
    keras.metrics.Recall,
    confusion_metrics.SensitivitySpecificityBase,
    confusion_metrics._ConfusionMatrixConditionCount,
)
# Functions of Keras's metrics that broadcast labels (batch,) against outputs (batch, 1).
_OF_ONE_RANK = (keras.losses.hinge, keras.losses.kl_divergence, keras.losses.poisson, keras.losses.squared_hinge)
_KEY = np.zeros(2, np.uint32)  # by which those are tried that draw, as metrics of rankings do for their ties
_NO_SUMS = ("ConcordanceCorrelation", "PearsonCorrelation")  # Keras's own, but the mean over batches


def in_floats(metrics: Any) -> Any:
    """Lets Keras's metrics of pixels count in float32, as all sums here are.

    Theirs are integers, in which weights between 0 and 1 are 0, and which end at 2**31 on JAX.

    Args:
      metrics: a nested structure of what compile() takes.
    """

    def convert(metric: Any) -> Any:
        if isinstance(metric, keras.metrics.IoU) and type(metric).__module__.startswith("keras."):
            return type(metric).from_config(metric.get_config() | {"dtype": "float32"})
        return metric

    return keras.tree.map_structure(convert, metrics)


def build_metrics(
    config: Config,
    model: keras.Model,
    metrics: CompileMetrics,
    dataset: Dataset,
    y: Any,
    y_pred: Any,
    weights_of: Callable[[Batch, Any], Any],
) -> CompileMetrics:
    """Makes the metrics' variables, which some create in their first update only, and resets them.

    Traced, as Keras's own trainer does it: computed, it would compile each of its operations alone.

    Args:
      config: the flags, for errors.
      model, metrics: the model, and the metrics of all its outputs.
      dataset: whose labels metrics that are not Keras's are tried on.
      y, y_pred: symbolic labels and outputs, of a batch of one example.
      weights_of: (a batch, outputs) -> weights as metrics take them.

    Raises:
      UserError: a metric is none, takes no weights, or keeps what is no sum over examples.
    """
    one = y, y_pred, keras.KerasTensor((1,))
    _update(config, model, metrics, one)
    metrics.reset_state()
    for metric in metrics.metrics:
        if isinstance(metric, _OF_ELEMENTS):
            _weigh_elements(metric, each=isinstance(metric, keras.metrics.IoU))
    if own := [metric for metric in metrics.metrics if not _is_known(metric)]:
        names = " or ".join(repr(metric.name) for metric in own)
        _, y, *given = read(dataset.train, np.arange(EXAMPLES) % len(dataset.train))
        weights = [np.ones(EXAMPLES)]  # of examples where an evaluation is padded, whatever the dataset weighs
        if given:
            as_given = weights_of({"weight": weights[0]} | named_weights(given), y_pred)
            weights.append(map_structure(lambda weight: np.ones(weight.shape), as_given))
        wrong = _tried(metrics, names, y, y_pred, weights)
        if wrong:  # such as a perplexity: its elements are to be weighed
            for metric in own:
                _weigh_elements(metric, each=True)
        if wrong and _tried(metrics, names, y, y_pred, weights):
            raise UserError(
                "model",
                config.model,
                f"its metric {wrong} (labels {shapes(y)}, outputs {shapes(y_pred)})",
                "add to its variables what each example gives, times its weight; a function gives one value per "
                "example, such as ops.mean(..., axis=-1)",
            )
    _update(config, model, metrics, several(one))
    return metrics


def _update(config: Config, model: keras.Model, metrics: CompileMetrics, symbols: Any) -> None:
    """Traces an update with symbolic labels, outputs and weights; the first one makes the metrics' variables."""
    try:
        with pure(config.model, model, metrics) as noted, keyed(_KEY), contextlib.ExitStack() as stack:
            for metric in metrics.metrics:
                if function := getattr(metric, "_fn", None):
                    stack.enter_context(mock.patch.object(metric, "_fn", _of_examples(function)))
            backend.compute_output_spec(lambda *args: metrics.update_state(*args) or args, *symbols)
            noted.used.clear()
    except (TypeError, ValueError) as error:
        if not metrics.built:
            reason = f"is compiled with metrics that are none, or not for its outputs: {error}"
            fix = "give compile() names that keras.metrics knows, or metrics; for several outputs a dict by their names"
        elif "sample_weight" in str(error):
            reason = f"has a metric that takes no sample_weight ({error})"
            fix = "give its update_state(y_true, y_pred, sample_weight=None) that argument: padding has weight 0"
        else:
            y, y_pred, _ = symbols
            reason = f"has outputs {shapes(y_pred)} for labels {shapes(y)}, which a metric does not take: {error}"
            fix = "let the last layers give what is compared with a label (is a Flatten missing?), or reshape labels"
            if any(len(output.shape) == 1 for output in keras.tree.flatten(y_pred)):
                fix = "let the model give outputs (batch, 1): Keras's metrics take the mean over the last axis"
            if any("float16" in output.dtype for output in keras.tree.flatten(y_pred)):  # bfloat16, too
                fix = f"give them dtype='float32', should a metric want that; or {fix}"
        raise UserError("model", config.model, reason, fix) from error


def _of_examples(function: Callable[..., Any]) -> Callable[..., Any]:
    """Of a metric; raises ValueError where it would compare all labels with all outputs, or give one value for all."""

    def checked(y_true: Any, y_pred: Any, **arguments: Any) -> Any:
        if function in _OF_ONE_RANK and len(y_true.shape) != len(y_pred.shape):
            raise ValueError(f"{function.__name__} would compare each label with each output")
        values = function(y_true, y_pred, **arguments)
        if not values.shape:
            raise ValueError("it takes a mean over the last axis, which is that of the examples")
        return values

    return checked


def of_probabilities(metrics: CompileMetrics) -> str:
    """In words, which metrics of Keras's take outputs for probabilities; '' if none does."""

    def cut(metric: keras.metrics.Metric) -> Any:
        """Where it takes an output for a positive, for the first time."""
        if isinstance(metric, keras.metrics.AUC):
            return not metric._from_logits
        return getattr(metric, "threshold", None) or min(getattr(metric, "thresholds", [0]))

    found = [repr(m.name) for m in metrics.metrics if isinstance(m, _OF_PROBABILITIES) and cut(m)]
    if not found:
        return ""
    return (
        f"{', '.join(found)} would be right for probabilities, and the loss takes the outputs for logits: give "
        "BinaryAccuracy, say, threshold=0, or AUC from_logits=True"
    )


def _weigh_elements(metric: keras.metrics.Metric, each: bool) -> None:
    """Lets a metric of elements take weights of examples (b,): as (b, 1, ...), or one for `each` element."""
    update = metric.update_state

    def update_state(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        if sample_weight is not None and len(sample_weight.shape) < len(y_true.shape):
            one_hot = isinstance(metric, keras.metrics.IoU) and not metric.sparse_y_true
            elements = y_true[..., 0] if one_hot else y_true
            sample_weight = expand(sample_weight, elements)
            if each:
                sample_weight = ops.broadcast_to(sample_weight, ops.shape(elements))
        return update(y_true, y_pred, sample_weight)

    metric.update_state = update_state


def _is_known(metric: keras.metrics.Metric) -> bool:
    """Whether a metric is one of Keras's, whose state is a sum over examples."""
    function = getattr(metric, "_fn", None) or metric.update_state
    return type(metric).__name__ not in _NO_SUMS and is_keras_own(metric, function)


def is_keras_own(thing: Any, function: Any) -> bool:
    """Whether a loss or a metric is one of Keras's, of a function of Keras's."""
    modules = (type(thing).__module__, getattr(function, "__module__", ""))
    return all(name.startswith(("keras.", __name__)) for name in modules)


def _tried(metrics: CompileMetrics, own: str, y: Any, y_pred: Any, weights: Sequence[Any]) -> str:
    """What is wrong where a few examples don't give what each gives alone, or those of weight 0 count; else ''.

    Args:
      metrics, y_pred: as for build_metrics().
      own: names of those that are not Keras's, in words.
      y: the labels of EXAMPLES examples; what the model would say of them is drawn.
      weights: ones, in each structure of shapes in which the examples' weights may come.
    """
    return next(filter(None, (_tried_with(metrics, own, y, y_pred, each) for each in weights)), "")


def _tried_with(metrics: CompileMetrics, own: str, y: Any, y_pred: Any, weights: Any) -> str:
    start = [ops.convert_to_numpy(v) for v in metrics.variables]  # on no device, nor on all of them
    given = y, drawn(y_pred), map_structure(np.float32, weights)

    def update(batch: Any) -> Any:
        y, y_pred, *weight = batch
        with keyed(_KEY):
            new = metrics.stateless_update_state(
                [ops.convert_to_tensor(s) for s in start], y, y_pred, sample_weight=weight[0] if weight else None
            )
        return [n - s for n, s in zip(new, start, strict=True)]

    try:
        whole, unweighted = (over_batches(update, each, EXAMPLES) for each in (given, given[:2]))
        single = over_batches(update, given, 1)
        one, two = (map_structure(operator.itemgetter(slice(few)), given) for few in (1, 2))
        padding = map_structure(lambda weight: np.stack([weight[0], 0 * weight[0]]), given[2])
        alone, padded = over_batches(update, one, 1), over_batches(update, (*two[:2], padding), 2)
    except Exception as error:  # whatever a metric of the user's may raise
        return f"{own} can't be computed with weights (batch,) of examples: {error}"
    for a, b, reason in (
        (whole, single, "keeps what is no sum over examples: it would depend on how a batch is shared out"),
        (whole, unweighted, "tells something else with weights of 1 than without weights"),
        (padded, alone, "counts examples of weight 0, such as the padding of the last batch of an evaluation"),
    ):
        for variable, one, other in zip(metrics.variables, a, b, strict=True):
            if not np.allclose(one, other, TOLERANCE, TOLERANCE * np.max(np.abs(one), initial=0.0), equal_nan=True):
                name = next(m.name for m in metrics.metrics if any(v is variable for v in m.variables))
                return f"{name!r} {reason}"
    return ""
