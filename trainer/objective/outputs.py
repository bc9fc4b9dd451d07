"""Which loss, weight and label is of which output of a model."""

from collections.abc import Sequence
from typing import Any

import keras

from trainer.config import Config
from trainer.errors import UserError


def places_of_labels(model: keras.Model, losses: Sequence[Any], y: Any, y_pred: Any) -> dict[str, int] | None:
    """Where the outputs that have labels are among all, by name; None where all have, or an output has a loss alone."""
    names = names_of_outputs(model, y_pred)
    if not isinstance(y, dict) or not y.keys() < set(names):
        return None
    if any(loss is not None for name, loss in zip(names, losses, strict=True) if name not in y):
        return None
    return {name: names.index(name) for name in sorted(y)}


def names_of_outputs(model: keras.Model, y_pred: Any) -> list[str]:
    """In the order in which the outputs are flattened; [] where they have no names."""
    if isinstance(y_pred, dict):
        return sorted(y_pred)
    names = getattr(getattr(model, "_functional", model), "output_names", [])  # Sequential has a functional one inside
    return list(names) if len(names) == len(keras.tree.flatten(y_pred)) else []


def names_of_labels(config: Config, model: keras.Model, y: Any, y_pred: Any) -> list[str] | None:
    """Names of the labels in the order of the outputs; None where labels and outputs come in one order."""
    if len(keras.tree.flatten(y)) < 2 or not (isinstance(y, dict) or isinstance(y_pred, dict)):
        return None
    names = names_of_outputs(model, y_pred)
    if isinstance(y, dict) and sorted(y) == sorted(names):
        return names
    labels = f"labels {', '.join(sorted(y))}" if isinstance(y, dict) else "labels without names"
    raise UserError(
        "model",
        config.model,
        f"has the outputs {', '.join(names) or 'without names'}, and an example has {labels}",
        "name both alike: return y as a dict by output, and a dict of outputs from the model",
    )


def per_output(config: Config, model: keras.Model, argument: str, given: Any, y_pred: Any) -> list[Any]:
    """One entry per output from what compile() takes as an argument: a single one, a list, or a dict by output name."""
    outputs = keras.tree.flatten(y_pred)
    if isinstance(given, dict):
        names = names_of_outputs(model, y_pred)
        if unknown := sorted(given.keys() - set(names)):
            raise UserError(
                "model",
                config.model,
                f"is compiled with {argument} of {', '.join(map(str, unknown))}, and its outputs are "
                f"{', '.join(names) or 'without names'}",
                "name the outputs as the model does: by the keys of the dict that it returns, or by its last layers",
            )
        return [given.get(name) for name in names]
    if isinstance(given, list | tuple):
        if len(given) != len(outputs):
            raise UserError(
                "model",
                config.model,
                f"is compiled with {len(given)} {argument} for {len(outputs)} outputs",
                "give one per output",
            )
        return list(given)
    return [given] * len(outputs)


def both(metrics: Any, weighted_metrics: Any) -> Any:
    """Unweighted and weighted metrics as one argument of compile()."""
    if not metrics or not weighted_metrics:
        return metrics or weighted_metrics or None
    if isinstance(metrics, dict) and isinstance(weighted_metrics, dict):
        names = metrics.keys() | weighted_metrics.keys()
        return {k: [*_listed(metrics.get(k)), *_listed(weighted_metrics.get(k))] for k in sorted(names)}
    return [*metrics, *weighted_metrics]


def _listed(metrics: Any) -> list[Any]:
    return [] if metrics is None else list(metrics) if isinstance(metrics, list | tuple) else [metrics]
