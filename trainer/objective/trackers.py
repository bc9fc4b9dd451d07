"""Trackers: metrics that a model or a layer keeps, and updates in call() or compute_loss(), such as a VAE's terms."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops
from keras.src.trainers.compile_utils import CompileMetrics

from trainer.errors import UserError
from trainer.monitoring.readable import NOT_METRICS
from trainer.sums import Tensor


def trackers(model: keras.Model) -> Iterator[tuple[str, keras.metrics.Metric]]:
    """(name of the layer, tracker), and those by which Keras tells the losses of several outputs apart.

    Those that update themselves by code of their own are left out: nobody knows whether what they keep is a sum.
    """
    compiled = getattr(model, "_compile_loss", None)
    kept = [(layer.name, metric) for layer in model._flatten_layers() for metric in layer._metrics]
    kept += [(model.name, metric) for metric in (compiled.metrics if compiled else ())]
    return (each for each in kept if type(each[1]).update_state.__module__.startswith("keras."))


def check_names(flag: str, names: Iterable[str], taken: Iterable[str]) -> None:
    """Raises UserError where a metric's name is that of another, or of something else in a line of the log."""
    for name in names:
        if name in taken or name in NOT_METRICS or name.startswith("val_"):
            raise UserError(
                "model",
                flag,
                f"has a metric or a loss called {name!r}, as lines of the log call something else",
                "give the metric, or the output whose it is, another name",
            )


class Metrics:
    """A run's metrics: those of compile(), by whose sums each example counts, and trackers.

    Args:
      model: a compiled model.
      compiled: its metrics by compile(), built.

    Attributes:
      metrics: all of them.
      variables: those of compile()'s, and then the trackers'.
      start: their values after a reset, which need not be zero.
    """

    def __init__(self, model: keras.Model, compiled: CompileMetrics) -> None:
        self.compiled, self._trackers = compiled, dict[str, keras.metrics.Metric]()
        known = set(map(id, compiled.metrics))
        taken = {"loss", *NOT_METRICS, *(metric.name for metric in compiled.metrics)}
        for layer, tracker in trackers(model):
            if id(tracker) in known:
                continue
            known.add(id(tracker))
            name = tracker.name
            while name in taken:
                name = f"{layer}_{name}"
            taken.add(name)
            tracker.reset_state()
            self._trackers[name] = tracker
        self.metrics = [*compiled.metrics, *self._trackers.values()]
        self.variables = [*compiled.variables, *(v for each in self._trackers.values() for v in each.variables)]
        self.start = [ops.convert_to_numpy(v) for v in self.variables]

    def values(self, assigned: Mapping[int, Tensor]) -> list[tuple[keras.Variable, Tensor]]:
        """The variables, with what was assigned to them, by id, or their start."""
        pairs = zip(self.variables, self.start, strict=True)
        return [(v, assigned.get(id(v), ops.convert_to_tensor(start))) for v, start in pairs]

    def changes(self, scope: keras.StatelessScope, counted: Tensor | None) -> list[Tensor]:
        """What was added to each variable, float32.

        Args:
          scope: in which they were updated.
          counted: (), the share of a replica's examples that are no padding, of which trackers are told, too; or None.
        """
        pairs = [(scope.get_current_value(v), start) for v, start in zip(self.variables, self.start, strict=True)]
        changes = [ops.cast(value, "float32") - ops.cast(start, "float32") for value, start in pairs]
        if counted is not None:
            of_compiled = len(self.compiled.variables)
            changes[of_compiled:] = [counted * change for change in changes[of_compiled:]]
        return changes

    def stateless_result(self, values: Sequence[Any]) -> dict[str, Any]:
        """Name -> result, of the variables' values; of a metric that has several, as in fit(), by their own names."""
        compiled, by_tracker = self._apart(values)
        results = self.compiled.stateless_result(compiled) if compiled else {}
        results |= {name: self._trackers[name].stateless_result(own) for name, own in by_tracker.items()}
        named = (result if isinstance(result, dict) else {name: result} for name, result in results.items())
        return {name: result for each in named for name, result in each.items()}

    def idle(self, sums: Sequence[Any]) -> list[str]:
        """Names of the trackers that no step has told anything, by the sums of the variables' changes."""
        return [name for name, own in self._apart(sums)[1].items() if not any(map(np.any, own))]

    def _apart(self, values: Sequence[Any]) -> tuple[list[Any], dict[str, list[Any]]]:
        """Those of compile()'s variables, and of each tracker's."""
        remaining = iter(values)
        compiled = list(itertools.islice(remaining, len(self.compiled.variables)))
        parts = {name: list(itertools.islice(remaining, len(each.variables))) for name, each in self._trackers.items()}
        return compiled, parts
