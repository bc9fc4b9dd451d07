"""A round of training steps, as a side of a comparison."""

import copy
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.assembly import Assembly


def training(
    parts: "Assembly", exact: bool = False, fed_once: bool = False, most: int | None = None
) -> Callable[[], float]:
    """As many steps as the run has, with sums in the tree's order or by the backend's all-reduce.

    Args:
      parts: the sides made of them train the same variables.
      exact: which of the two, whatever the flags say.
      fed_once: whether it trains on the first block again and again, with nothing to read.
      most: steps in a call; None: those of a block.

    Returns:
      what does a round and returns its loss; the data go on from pass to pass, as in a run.
    """
    strategy: Any = copy.copy(parts.strategy)
    strategy.compile(parts.program)
    setattr(strategy, "_in_tree_order" if hasattr(strategy, "_in_tree_order") else "_exact", exact)
    pipeline, steps = parts.pipeline(parts.dataset.train, shuffled=True), parts.config.steps
    fed = strategy.feed(pipeline)
    if fed_once:
        fed = itertools.repeat(next(fed))

    def once() -> float:
        totals, done = parts.program.objective.no_totals(), 0
        while done < steps:
            block, end = next(fed), min(pipeline.block, steps - done)
            for first in range(0, end, most or end):
                totals = strategy.train(block, first, min(most or end, end - first), done + first, totals)
            done += end
        return float(parts.program.objective.results(totals)["loss"])

    return once
