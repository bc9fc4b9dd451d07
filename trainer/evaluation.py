"""Loss and metrics over all examples of a source."""

import contextlib
from collections.abc import Callable

from input_pipeline.source import Source
from trainer.assembly import Assembly
from trainer.clock import Clock
from trainer.preemption import until_told

_NOTHING = contextlib.nullcontext()


class BrokenOff(Exception):
    """An evaluation was not finished, for this start of the run was told to stop."""


def evaluate(
    parts: Assembly,
    source: Source,
    prefix: str,
    told: Callable[[], bool] | None = None,
    compiling: contextlib.AbstractContextManager[None] = _NOTHING,
) -> dict[str, float]:
    """Loss and metrics over a source, each example counted once, under names with a prefix.

    Args:
      parts: what is evaluated.
      source: the examples.
      prefix: of the names.
      told: whether to break off; asked every second or so.
      compiling: entered for the first chunk, where that is to be compiled.

    Raises:
      BrokenOff: it was told so.
    """
    pipeline = parts.pipeline(source, shuffled=False)
    clock, step = Clock(pipeline.steps, len(source), pipeline.global_batch, {}), 0
    totals = parts.program.objective.no_totals()
    for block in until_told(parts.evaluated(source), parts.peers, told or (lambda: False)):
        first = step
        for end in clock.chunks(step, first + pipeline.block):
            begin, before = clock.now(), totals
            with _NOTHING if step else compiling:
                totals = parts.strategy.evaluate(block, step - first, end - step, before)
                before.wait()  # at most two chunks, and their blocks, are on the devices
            parts.peers.doing("evaluate")  # each is progress
            clock.most = parts.peers.gather(clock.pace(end - step, begin))[0]
            step = end
            if told and step < pipeline.steps and told():
                raise BrokenOff
    if step < pipeline.steps:  # it was told while it waited for a block
        raise BrokenOff
    return {f"{prefix}{name}": value for name, value in parts.program.objective.results(totals).items()}
