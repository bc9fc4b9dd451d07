"""The verb diff: the first step at which two runs part, and what differed first.

python -m trainer diff RUN_A RUN_B
"""

import itertools
import json
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from trainer import checkpoint
from trainer.errors import OK, UserError
from trainer.storage.append import records

PARTED = 1


def run(a: str, b: str) -> int:
    """Prints how two run directories differ. Returns the exit code: OK if they are one run, to the bit."""
    runs = [_Run(pathlib.Path(a)), _Run(pathlib.Path(b))]
    found = [*_definitions(*runs), *_lines(*runs), *_weights(*runs)]
    for line in found:
        print(line)
    print("they part" if found else "one run: the same definition, log and weights, as far as both have them")
    return PARTED if found else OK


class _Run:
    """What a run directory says of a run."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        try:
            self.definition = json.loads((path / "definition.json").read_text())
            lines = records(path / "metrics.jsonl")
        except (OSError, ValueError) as error:
            raise UserError("run_dir", path, f"holds no run ({error})", "give two run directories") from None
        # By the last step that they tell of; a run that was ended and then made longer has one more.
        self.lines: dict[int, dict[str, Any]] = {line["step"]: line for line in lines}
        ends = sorted(self.lines)
        self.since = dict(zip(ends, [0, *ends], strict=False))  # the end of the line before each
        sums = itertools.accumulate(int(self.lines[end].get("ids", "0"), 16) for end in ends)
        # Checksums of all examples up to there.
        self.fed = {end: ids % 2**64 for end, ids in zip(ends, sums, strict=True)}


def _definitions(a: _Run, b: _Run) -> Iterator[str]:
    for part in ("flags", "variables", "data"):
        x, y = a.definition[part], b.definition[part]
        for key in sorted(x.keys() | y.keys()):
            if x.get(key) != y.get(key):
                yield f"definition: {'--' * (part == 'flags')}{key}: {x.get(key, 'absent')}, {y.get(key, 'absent')}"
    if a.definition["architecture"] != b.definition["architecture"]:
        yield "definition: the models differ in what their layers do"


def _lines(a: _Run, b: _Run) -> Iterator[str]:
    """The first logged step at which they differ, causes before effects."""
    ends = sorted(a.lines.keys() & b.lines.keys())
    of_same_steps = {end for end in ends if a.since[end] == b.since[end]}
    for last, end in zip([0, *ends], ends, strict=False):
        x, y = a.lines[end], b.lines[end]
        where = f"step {end}" if end == last + 1 else f"between steps {last + 1} and {end} (--log_every=1 tells)"
        if others := a.fed[end] != b.fed[end]:
            yield f"{where}: other examples were fed: {x.get('ids')}, {y.get('ids')}"
        if x.get("learning_rate") != y.get("learning_rate"):
            yield f"{where}: another learning rate: {x.get('learning_rate')}, {y.get('learning_rate')}"
        differing = []
        if end in of_same_steps:
            differing = [key for key in x if key in y and key.startswith(("loss", "val_")) and relative(x[key], y[key])]
            for key in differing[:1]:
                yield f"{where}: {key} {x[key]!r}, {y[key]!r}: {relative(x[key], y[key]):.1e} apart"
            norms = list(_norms(x.get("gradient_norms", {}), y.get("gradient_norms", {})))
            yield from (f"{where}: {text}" for text in norms)
            differing += norms
        if differing or others:
            yield from _worst(a, b, of_same_steps)
            return
    if not ends:
        yield "no step is in both logs"


def relative(x: float, y: float) -> float:
    """How far apart two numbers are; two losses over examples of no weight are NaN, and not apart."""
    if math.isnan(x) or math.isnan(y):
        return 0.0 if math.isnan(x) and math.isnan(y) else math.inf
    return abs(x - y) / max(abs(x), 1e-30)


def _norms(x: dict[str, float], y: dict[str, float]) -> Iterator[str]:
    """The layers whose gradients differ in length: the first, and the furthest apart."""
    apart = {layer: relative(x[layer], y[layer]) for layer in x if layer in y and x[layer] != y[layer]}
    if apart:
        worst = max(apart, key=lambda layer: apart[layer])
        yield (
            f"gradients of {len(apart)} of {len(x)} layers differ in length, {next(iter(apart))} first; "
            f"furthest apart {worst}: {x[worst]!r}, {y[worst]!r}: {apart[worst]:.1e}"
        )


def _worst(a: _Run, b: _Run, ends: set[int]) -> Iterator[str]:
    logged = [end for end in sorted(ends) if "loss" in a.lines[end] and "loss" in b.lines[end]]
    if logged:
        apart = {end: relative(a.lines[end]["loss"], b.lines[end]["loss"]) for end in logged}
        end = max(logged, key=lambda end: apart[end])
        yield f"furthest apart in loss at step {end}: {apart[end]:.1e}"


def _weights(a: _Run, b: _Run) -> Iterator[str]:
    """The variables that differ in the first checkpoint that both have, the furthest apart first."""
    for step in checkpoint.steps(a.path / "checkpoints"):
        if step not in checkpoint.steps(b.path / "checkpoints"):
            continue
        paths = [run.path / "checkpoints" / f"{step:08d}" for run in (a, b)]
        try:
            manifests = [checkpoint.verify(path) for path in paths]
        except checkpoint.Damaged as error:
            yield f"weights of step {step}: not compared, for one is damaged: {error}"
            continue
        x, y = (manifest["variables"] for manifest in manifests)
        differing = [
            name for name in x if _digests(x[name]) != _digests(y.get(name, {})) and not name.endswith("/learning_rate")
        ]
        if differing and manifests[0]["files"].keys() != manifests[1]["files"].keys():
            yield f"weights of step {step}: not compared, for other processes have written them in other pieces"
            return
        if differing:
            there, here = map(checkpoint.arrays, paths, manifests)
            comparable = [k for k in there if k in here and there[k].shape == here[k].shape]
            worst = {k: apart for k in comparable if (apart := _apart(there[k], here[k]))}
            furthest = max(worst, key=lambda k: worst[k], default="")
            yield (
                f"weights of step {step}: {len(differing)} of {len(x)} variables differ, {differing[0]} first; "
                + (f"furthest apart {furthest}: {worst[furthest]:.1e}" if furthest else "those of one shape are equal")
            )
            return


def _digests(facts: dict[str, Any]) -> Any:
    """What a variable's values are known by: one digest, or those of its pieces."""
    return facts.get("blake3") or [(piece["start"], piece["blake3"]) for piece in facts.get("pieces", [])]


def _apart(x: np.ndarray, y: np.ndarray) -> float:
    x, y = x.astype(np.float64), y.astype(np.float64)
    return float(np.max(np.abs(x - y), initial=0.0) / max(np.max(np.abs(x), initial=0.0), 1e-30))
