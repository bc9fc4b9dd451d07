"""Named sharding layouts as data: rules (regex of a variable's path -> mesh axes), and what they come to.

An axis is a mesh axis; a dim is a tensor's. Rules have the meaning of keras.distribution.LayoutMap: a
regex matches a path whole, and what none matches is replicated. But a rule that matches nothing is an
error here, not silence.
"""

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainer import plugins
from trainer.errors import UserError

Axes = tuple[str | None, ...]  # a mesh axis per dim; None: the dim stays whole
Rule = tuple[str, Axes]

_BUILT_IN = ("replicated", "zero1", "fsdp")
# Elements of a variable that is left whole, since gathering it costs more than keeping it: under fsdp, where each is
# gathered for each use, and under zero1, where the small ones' gradients are added up in one message.
SMALL, SMALL_SLOTS = 2**8, 2**16


@dataclasses.dataclass(frozen=True)
class Placement:
    """How a tensor lies on the mesh, and why.

    Attributes:
      axes: one per dim.
      rule: what it came from, for people.
    """

    axes: Axes
    rule: str


def parse_mesh(text: str) -> dict[str, int]:
    """'data=2,model=4' -> sizes of the axes, data first (1 if it is not named)."""
    sizes = {"data": 1}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not name.isidentifier() or not size.isdigit() or int(size) < 1:
            raise UserError("mesh", text, f"{part!r} is not axis=size", "for example --mesh=data=2,model=4")
        sizes[name] = int(size)
    return sizes


class Layout:
    """Places tensors on a mesh by rules.

    Args:
      name: --layout, for errors.
      rules: regex -> axes. A path ending in '/output' is a layer's output, others are variables.
      mesh: sizes of the axes.
      shard_rest: whether a large variable's largest dim that can be is sharded over the data axis (fsdp).
      shard_slots: whether the optimizer's slots of a large variable are, by the first dim that can be (zero1).
    """

    def __init__(
        self,
        name: str,
        rules: Sequence[Rule],
        mesh: Mapping[str, int],
        shard_rest: bool = False,
        shard_slots: bool = False,
    ) -> None:
        self.name, self.rules, self._mesh = name, list(rules), dict(mesh)
        self._shard_rest, self._shard_slots = shard_rest, shard_slots
        for pattern, axes in self.rules:
            unknown = [axis for axis in axes if axis is not None and axis not in mesh]
            if unknown:
                raise UserError(
                    "layout",
                    name,
                    f"its rule {pattern!r} shards over {unknown[0]!r}, which is no axis of the mesh {dict(mesh)}",
                    f"name the axis in --mesh, for example --mesh=data={mesh['data']},{unknown[0]}=2",
                )

    @property
    def shards_variables(self) -> bool:
        """Whether the model's own variables may be sharded."""
        return bool(self.rules) or self._shard_rest

    @property
    def shards(self) -> bool:
        """Whether anything may be sharded at all."""
        return self.shards_variables or self._shard_slots

    def place(self, path: str, shape: Sequence[int]) -> Placement:
        """Where a variable goes.

        Raises:
          UserError: two rules match, or the one that does doesn't fit the shape.
        """
        matching = [rule for rule in self.rules if re.fullmatch(rule[0], path)]
        if len(matching) > 1:
            both = " and ".join(repr(pattern) for pattern, _ in matching)
            raise UserError("layout", self.name, f"{both} match {path}", "let one rule match each variable")
        axes: Axes = (None,) * len(shape)
        why = "no rule: replicated"
        if matching:
            pattern, given = matching[0]
            self._check(path, shape, pattern, given)
            axes, why = given, repr(pattern)
        free = self._free(shape, axes) if self._shard_rest and math.prod(shape) >= SMALL else []
        if free:
            dim = max(free, key=lambda d: shape[d])
            axes = _with_data(axes, dim)
            why = f"{repr(matching[0][0]) + ' and ' if matching else ''}fsdp: dim {dim} over data"
        return Placement(axes, why)

    def place_slots(self, shape: Sequence[int], axes: Axes) -> Axes:
        """Where what an optimizer keeps of a variable goes, which itself lies along the axes."""
        large = self._shard_slots and math.prod(shape) >= SMALL_SLOTS
        free = self._free(shape, axes) if large else []  # the first: a share is then one piece of memory
        return _with_data(axes, free[0]) if free else axes

    def _free(self, shape: Sequence[int], axes: Axes) -> list[int]:
        """Dims that can be sharded over the data axis; none where one is."""
        n = self._mesh["data"]
        return [d for d, axis in enumerate(axes) if axis is None and shape[d] % n == 0 and "data" not in axes]

    def place_output(self, path: str) -> Axes | None:
        """Axes of a layer's output, '.../output', or None where no rule speaks of it."""
        for pattern, axes in self.rules:
            if re.fullmatch(pattern, path):
                return axes
        return None

    def check_all_used(self, paths: Iterable[str]) -> None:
        """Raises UserError if a rule matches none of the paths of variables and outputs."""
        paths = list(paths)
        for pattern, _ in self.rules:
            if not any(re.fullmatch(pattern, path) for path in paths):
                raise UserError(
                    "layout",
                    self.name,
                    f"its rule {pattern!r} matches no variable, so nothing would be sharded by it",
                    f"a rule is a regex of a whole path; there are {', '.join(paths[:6])}{', ...' * (len(paths) > 6)}",
                )

    def _check(self, path: str, shape: Sequence[int], pattern: str, axes: Axes) -> None:
        reason = ""
        if len(axes) != len(shape):
            reason = f"has {len(axes)} axes, but {path} has shape {tuple(shape)}"
        for dim, axis in enumerate(axes):
            size = self._mesh.get(axis or "", 1)
            if not reason and shape[dim] % size:
                reason = f"shards dim {dim} of {path}, shape {tuple(shape)}, over {size} devices: not divisible"
        if reason:
            raise UserError("layout", self.name, f"its rule {pattern!r} {reason}", "give axes that fit the shape")


def _with_data(axes: Axes, dim: int) -> Axes:
    return (*axes[:dim], "data", *axes[dim + 1 :])


def create(name: str, beside_the_model: Mapping[str, Any], mesh: Mapping[str, int]) -> Layout:
    """The layout that --layout names.

    Args:
      name: 'replicated'; 'zero1'; 'fsdp'; a name of the model's own layouts, as 'megatron'; several joined by +;
        a JSON list of rules; or the dotted path of a list of rules, or of a function that returns one.
      beside_the_model: LAYOUTS of the model's module: name -> rules.
      mesh: sizes of the axes.

    Raises:
      UserError: there is no such layout, or it isn't one.
    """
    if name.startswith("["):
        try:
            return Layout(name, _rules(name, json.loads(name)), mesh)
        except json.JSONDecodeError as error:
            raise UserError(
                "layout", name, f"is no JSON: {error}", """for example '[["d1/kernel", [null, "model"]]]'"""
            ) from None
    rules: list[Rule] = []
    parts = name.split("+")
    for part in parts:
        if part in beside_the_model:
            rules += _rules(name, beside_the_model[part])
        elif "." in part or ":" in part:
            found, arguments = plugins.resolve(part, "layout", "trainer.models", "LAYOUTS")
            rules += _rules(name, found(**arguments) if callable(found) else found)
        elif part not in _BUILT_IN:
            known = ", ".join([*_BUILT_IN, *beside_the_model])
            raise UserError(
                "layout",
                name,
                f"there is no layout {part!r} for this model",
                f"one of {known}, several joined by +, a JSON list of rules, or a path such as my_pkg.my_module:rules; "
                "LAYOUTS = {name: rules} in the model's module gives it more of them (docs/layouts.md)",
            )
    return Layout(name, rules, mesh, shard_rest="fsdp" in parts, shard_slots="zero1" in parts)


def _rules(name: str, given: Any) -> list[Rule]:
    try:
        rules = [(str(pattern), tuple(axes)) for pattern, axes in given]
        for pattern, axes in rules:
            re.compile(pattern)
            if not all(axis is None or isinstance(axis, str) for axis in axes):
                raise ValueError(f"axes {axes}")
    except (TypeError, ValueError, re.error) as error:
        raise UserError(
            "layout",
            name,
            f"is not a list of [regex, [axis or null, ...]] ({error})",
            """for example '[["d1/kernel", [null, "model"]]]'""",
        ) from None
    return rules
