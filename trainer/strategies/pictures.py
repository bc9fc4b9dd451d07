"""Which devices hold which part of a tensor, drawn in characters."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from trainer.program import Program


def draw(program: Program, sharding: Callable[[keras.Variable], NamedSharding], mesh: jax.sharding.Mesh) -> list[str]:
    """One for each way in which a variable is sharded, of its largest variable, and one of a batch."""
    if mesh.size == 1:
        return []
    largest: dict[Any, Any] = {}
    for variable in [*program.model.trainable_variables, *program.optimizer.variables]:
        spec = sharding(variable).spec
        if any(spec) and math.prod(variable.shape) > math.prod(largest.get(spec, np.zeros(0)).shape):
            largest[spec] = variable
    found = [picture(v.path, v.shape, sharding(v)) for v in largest.values()]
    batch = NamedSharding(mesh, PartitionSpec("data"))
    return [*found, picture("logical replicas of a batch", (program.replicas,), batch)]


def picture(name: str, shape: tuple[int, ...], sharding: NamedSharding, most: int = 8) -> str:
    """Which devices hold which part of a tensor: rows and columns are its sharded dims, `most` parts each."""
    owners: dict[tuple[Any, ...], list[int]] = {}
    for i, index in enumerate(sharding.devices_indices_map(shape).values()):
        owners.setdefault(tuple(s.start or 0 for s in index), []).append(i)
    starts = [sorted({key[d] for key in owners}) for d in range(len(shape))]
    dims = ([d for d in range(len(shape)) if len(starts[d]) > 1] + [None, None])[:2]
    rows, columns = (starts[d] if d is not None else [0] for d in dims)

    def cell(row: int, column: int) -> str:
        place = {dims[0]: row, dims[1]: column}
        return _ranges(owners[tuple(place.get(d, 0) for d in range(len(shape)))])

    grid = [[cell(r, c) for c in columns[:most]] + ["..."] * (len(columns) > most) for r in rows[:most]]
    width = max(len(text) for line in grid for text in line)
    border = "+" + ("-" * (width + 2) + "+") * len(grid[0])
    lines = [border, *(x for line in grid for x in ("| " + " | ".join(t.center(width) for t in line) + " |", border))]
    down, right = (f"dim {d} {word}" if d is not None else "" for d, word in zip(dims, ("down", "right"), strict=True))
    header = f"{name} {tuple(shape)}: devices by {', '.join(filter(None, (down, right))) or 'nothing: all have all'}"
    return "\n".join([header, *lines, *["..."] * (len(rows) > most)])


def _ranges(ids: list[int]) -> str:
    """[0, 1, 2, 5] -> '0-2,5'; an even stride is told as such."""
    if len(ids) > 2 and len({b - a for a, b in itertools.pairwise(ids)}) == 1 and ids[1] - ids[0] > 1:
        return f"{ids[0]},{ids[1]},..{ids[-1]}"
    groups: list[list[int]] = []
    for i in ids:
        if groups and i == groups[-1][-1] + 1:
            groups[-1].append(i)
        else:
            groups.append([i])
    return ",".join(str(g[0]) if len(g) == 1 else f"{g[0]}-{g[-1]}" for g in groups)
