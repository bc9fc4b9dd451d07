"""The verb probe: what in a model or dataset could break the one curve, found by asking each part alone.

The promise rests on this: examples don't mix, so that they may be shared out; randomness comes from
Keras's seed generators, which we key by step and replica; and loss and metrics are sums over examples. Each
is put to the test on a few real examples. That a source is a function of the id is asked before every run.

What is asked is how a model is made, not how it rounds: it computes in float32, whatever --precision says.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from input_pipeline import order
from input_pipeline.source import read
from input_pipeline.structure import map_structure
from trainer.assembly import Assembly, assemble
from trainer.config import Config
from trainer.errors import OK
from trainer.objective import computed_loss, logits, trial
from trainer.objective.calling import stateless_call
from trainer.objective.inputs import taken
from trainer.objective.purity import numbers
from trainer.objective.randomness import is_seed
from trainer.peers import Peers
from trainer.sums import is_overwritten

EXAMPLES = 4
Close = Callable[[Any, Any], bool]
_TOLERANCE = 1e-5  # relative; other batch sizes take other kernels, which round otherwise


@dataclasses.dataclass(frozen=True)
class Finding:
    """What was found of one part.

    Attributes:
      part: what it is about, by name.
      problem: what is wrong, or just worth knowing.
      breaks: whether it breaks the promise.
    """

    part: str
    problem: str
    breaks: bool = True


def run(config: Config) -> int:
    """Prints findings, the last line being JSON. Returns 0 if none breaks the promise, else 1."""
    config = dataclasses.replace(config, replicas=1, devices=0, global_batch=EXAMPLES, precision="float32")
    parts = assemble(config, Peers())
    findings = probe(parts)
    for finding in findings:
        print(f"{'BREAKS' if finding.breaks else 'note':>6}  {finding.part}: {finding.problem}")
    if not findings:
        print("nothing found that could break the one curve")
    print(json.dumps({"random": _draws(parts), "findings": [dataclasses.asdict(f) for f in findings]}))
    return 1 if any(f.breaks for f in findings) else OK


def probe(parts: Assembly) -> list[Finding]:
    """All findings, of the model from its input on, then of loss and metrics."""
    found = _model(parts)
    return found if any(f.breaks for f in found) else found + _sums(parts)


def _examples(parts: Assembly, start: int) -> Any:
    """x and y of EXAMPLES training examples, from a place in the run's order on."""
    n = len(parts.dataset.train)
    x, y = read(parts.dataset.train, order.order(parts.config.seed, start + np.arange(EXAMPLES), n))[:2]
    return map_structure(ops.convert_to_tensor, x), map_structure(ops.convert_to_tensor, y)


def _model(parts: Assembly) -> list[Finding]:
    model = parts.program.model
    x, other = _examples(parts, 0)[0], _examples(parts, EXAMPLES)[0]
    mixed = keras.tree.map_structure(lambda a, b: ops.concatenate([a[:1], b[1:]]), x, other)
    names, outputs = _layers(model)
    close, found = _closeness(model), []
    for training in (False, True):
        call = _caller(outputs, training)
        when = "in training" if training else "in evaluation, too"
        once, before = call(x), _numbers(model)
        twice, after = call(x), _numbers(model)
        if counting := _counting(before, after, f"by each call() {when}"):
            return counting
        among_others = call(mixed)
        differing = _first_difference(close, names, once, twice)
        if differing:
            problem = (
                f"gives another result for the same input {when}. Draw random numbers from a "
                "keras.random.SeedGenerator, which a run keys by step and replica"
            )
            return [Finding(differing, problem)]
        first_rows = [[a[:1] for a in outputs] for outputs in (once, among_others)]
        differing = _first_difference(close, names, *first_rows)
        if differing and training and _normalizes_batches(model, differing):
            problem = (
                "takes statistics over the examples of a logical replica: the curve depends on --replicas, "
                "not on devices"
            )
            found.append(Finding(differing, problem, breaks=False))
        elif differing:
            problem = (
                f"mixes examples {when}: what it gives for one depends on the others of its batch, so "
                "sharing a batch out changes the training"
            )
            return [*found, Finding(differing, problem)]
    if overwritten := [variable.path for variable in model.trainable_variables if is_overwritten(variable)]:
        problem = (
            "is overwritten at each step, as the scales of float8 are, with what the examples of a logical replica "
            "come to: the curve depends on --replicas, not on devices"
        )
        found.append(Finding(f"variable {overwritten[0]}", problem, breaks=False))
    return found


def _layers(model: keras.Model) -> tuple[list[str], Any]:
    """Names of the layers from the input on, and a model with all their outputs; or the model alone."""
    functional = getattr(model, "_functional", None) or model  # Sequential has one inside
    if not hasattr(functional, "operations"):
        return [f"model {model.name!r}"], model  # subclassed: it can't be looked into
    operations = [op for op in functional.operations if not isinstance(op, keras.layers.InputLayer)]
    names, outputs = [], []
    for operation in operations:
        for tensor in keras.tree.flatten(operation.output):
            names.append(f"layer {operation.name!r} ({type(operation).__name__})")
            outputs.append(tensor)
    return names, keras.Model(functional.input, outputs)


def _caller(model: keras.Model, training: bool) -> Callable[[Any], list[Any]]:
    """x -> the outputs as numpy arrays, always from the same state, seeds included."""

    def call(x: Any) -> list[Any]:
        trainable, state = (
            [v.value for v in some] for some in (model.trainable_variables, model.non_trainable_variables)
        )
        outputs, _ = stateless_call(model, trainable, state, x, training)
        return [ops.convert_to_numpy(ops.cast(o, "float32")) for o in keras.tree.flatten(outputs)]

    return call


def _numbers(model: keras.Model) -> dict[str, int | float]:
    """The numbers that layers and losses have as attributes, by name."""
    things = {f"layer {layer.path!r}": layer for layer in model._flatten_layers()}
    things |= {f"loss {each.name!r}": each for each in keras.tree.flatten(model.loss) if hasattr(each, "call")}
    return {f"{name!r} of {of}": value for of, each in things.items() for name, value in numbers(each).items()}


def _counting(before: dict[str, int | float], after: dict[str, int | float], when: str) -> list[Finding]:
    problem = (
        f"is changed in Python {when}: a compiled step does so once, when it is traced. Keep it by the model's "
        "or a layer's add_weight(trainable=False), and assign to that"
    )
    return [Finding(name, problem) for name, number in after.items() if before.get(name) != number][:1]


def _first_difference(close: Close, names: Sequence[str], a: Sequence[Any], b: Sequence[Any]) -> str:
    """The first name whose output differs; a single one stands for all that a model gives."""
    names = names if len(names) > 1 else [*names] * len(a)
    for name, x, y in zip(names, a, b, strict=True):
        if not close(x, y):
            return name
    return ""


def _closeness(model: keras.Model) -> Close:
    """Whether two results are one but for rounding, of the coarsest type that a layer computes in."""
    tolerance = trial.COARSE if trial.is_coarse(model) else _TOLERANCE

    def close(a: Any, b: Any) -> bool:
        scale = max(1e-6, float(np.max(np.abs(a), initial=0.0)))
        return bool(np.max(np.abs(a - b), initial=0.0) <= tolerance * scale)

    return close


def _normalizes_batches(model: keras.Model, name: str) -> bool:
    """Whether what a name of `_layers` stands for is batch normalization, or has some inside."""
    named = (layer for layer in model._flatten_layers() if repr(layer.name) in name)
    return any(isinstance(v, keras.layers.BatchNormalization) for layer in named for v in layer._flatten_layers())


def _summing(parts: Assembly) -> Callable[..., Any]:
    """(chosen, replica, training) -> the Sums of some of a few examples, by the key of a logical replica."""
    objective, model = parts.program.objective, parts.program.model
    trainable = [v.value for v in model.trainable_variables]
    state = [v.value for v in objective.state_variables]
    x, y = _examples(parts, 0)
    keys = [ops.convert_to_tensor(key) for key in order.keys(0, np.zeros(1, np.int64), np.arange(2))]

    def sums(chosen: slice = slice(None), replica: int = 0, training: bool = False) -> Any:
        batch = map_structure(lambda a: a[chosen], {"x": x, "y": y}) | {"key": keys[replica]}
        return keras.tree.map_structure(ops.convert_to_numpy, objective(trainable, state, batch, training=training)[1])

    return sums


def _draws(parts: Assembly) -> bool:
    """Whether training draws random numbers: with other logical replicas they would be others."""
    if not any(map(is_seed, parts.program.model.non_trainable_variables)):
        return False
    sums = _summing(parts)
    return bool(sums(training=True).objective != sums(replica=1, training=True).objective)


def _sums(parts: Assembly) -> list[Finding]:
    """Loss and metrics of a batch are the sums of its examples', and the loss is Keras's own."""
    objective, model = parts.program.objective, parts.program.model
    x, y = _examples(parts, 0)
    sums, close = _summing(parts), _closeness(model)
    single, whole, before = [sums(slice(i, i + 1)) for i in range(EXAMPLES)], sums(), _numbers(model)
    again = sums(replica=1)
    if counting := _counting(before, _numbers(model), "by each step"):
        return counting
    if not close(whole.objective, again.objective):
        problem = "draws random numbers in evaluation, too: what evaluations give depends on --replicas"
        return [Finding("the loss", problem, breaks=False)]
    found, computes = list[Finding](), computed_loss.is_own(model)
    if not close(whole.objective, sum(s.objective for s in single)):
        problem = (
            f"of {EXAMPLES} examples is {whole.objective / whole.weight:.6g}, but the mean of what it gives for "
            f"each alone is {sum(s.objective for s in single) / sum(s.weight for s in single):.6g}: it mixes "
            "examples or scales by the batch, so it would change with how a batch is shared out"
        )
        if computes:  # which is made for batches
            problem = (
                "mixes the examples of a logical replica in compute_loss(): the curve depends on --replicas, not on "
                "devices"
            )
        found.append(Finding("the loss", problem, breaks=not computes))
    if not (found or computes):
        with logits.remembered():
            y_pred = model(taken(model, x), training=False)
            keras_loss = float(ops.convert_to_numpy(model.compute_loss(x=x, y=y, y_pred=y_pred, training=False)))
        if not close(whole.objective / whole.weight, keras_loss):
            problem = f"is {whole.objective / whole.weight:.6g} in the run's step, but {keras_loss:.6g} in Keras's"
            found.append(Finding("the loss", problem))
    for i, variable in enumerate(objective.metrics.compiled.variables):
        if not close(whole.metrics[i], sum(s.metrics[i] for s in single)):
            problem = "is no sum over examples, so it depends on how a batch is shared out"
            found.append(Finding(f"metric variable {variable.path}", problem))
    return found
