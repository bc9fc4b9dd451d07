"""The verb audit: whether a run used each example exactly once in each pass, over all its starts and topologies.

The order of examples is a function of (seed, position), so two things have to be shown: that the function is a
permutation in each pass, and that the steps done were fed what it says. Each line of metrics.jsonl holds a checksum of
the ids that the pipelines of all processes handed out for the steps since the line before.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from input_pipeline import order
from input_pipeline.source import Source, ids_at
from trainer.config import Config
from trainer.errors import OK, UserError
from trainer.loading import load_dataset
from trainer.run_directory import RunDirectory
from trainer.storage.append import records

BROKEN = 1
_SHOWN = 20  # ids that are printed
_AT_ONCE = 2**20  # ids that are in memory


def run(config: Config) -> int:
    """Prints what was proved, or which ids were lost or repeated. Returns the exit code."""
    directory = RunDirectory(config)
    if not directory.metrics.exists():
        raise UserError("run_dir", directory.path, "has no metrics.jsonl", "give the directory of a run")
    lines = records(directory.metrics)
    plan = Plan(config, load_dataset(dataclasses.replace(config, cache="none")).train)
    problems = list(plan.problems(lines))
    for problem in problems:
        print(problem)
    steps = lines[-1]["step"] if lines else 0
    passes, rest = divmod(steps * config.global_batch, plan.examples)
    if not problems:
        print(
            f"steps 1 to {steps}, {len(lines)} lines of the log: each was fed the examples of the run's order.\n"
            f"{passes} passes of {plan.examples:,} examples: each example exactly once in each; "
            f"{rest:,} of the next, none twice."
        )
        for line in lines:
            if "rolled_back_to" in line:
                print(f"steps {line['rolled_back_to'] + 1} to {line['step']} changed nothing: {line['why']}")
            if line.get("skipped"):
                print(f"{line['skipped']} steps up to step {line['step']} were skipped as not finite")
    return BROKEN if problems else OK


class Plan:
    """What the steps of a run should be fed.

    Args:
      config: gives seed and global batch.
      source: what was trained on.
    """

    def __init__(self, config: Config, source: Source) -> None:
        self._seed, self._batch, self._source, self.examples = config.seed, config.global_batch, source, len(source)

    def ids(self, first: int, end: int) -> npt.NDArray[np.int64]:
        """(end - first, global batch): the examples of steps, counted from 0."""
        positions = np.arange(first * self._batch, end * self._batch)
        return ids_at(self._source, self._seed, positions).reshape(-1, self._batch)

    def _checksums(self, steps: int) -> npt.NDArray[np.uint64]:
        """(steps,): of the ids of each of the first steps."""
        many = max(1, _AT_ONCE // self._batch)
        ends = [*range(0, steps, many), steps]
        sums = [order.checksums(self.ids(first, end)) for first, end in itertools.pairwise(ends)]
        return np.concatenate([np.zeros(0, np.uint64), *sums])

    def problems(self, lines: list[dict[str, Any]]) -> Iterator[str]:
        """Whatever contradicts the promise, in words."""
        before, sums = 0, self._checksums(max((line["step"] for line in lines), default=0))
        for line in lines:
            steps = range(before, line["step"])
            if not steps:
                yield f"step {line['step']} is logged twice, or after a later one"
                continue
            yield from self._compared(steps, int(line["ids"], 16), sums)
            before = line["step"]
        end = before * self._batch
        for first in range(0, end, self.examples):
            positions = range(first, min(first + self.examples, end))
            if self._distinct(positions) < len(positions):
                yield f"pass {first // self.examples} is no permutation of the examples: some come twice"

    def _distinct(self, positions: range) -> int:
        """How many examples lie at positions of one pass."""
        seen = np.zeros(self.examples, bool)
        for first in range(positions.start, positions.stop, _AT_ONCE):
            some = np.arange(first, min(first + _AT_ONCE, positions.stop))
            seen[ids_at(self._source, self._seed, some)] = True
        return int(np.count_nonzero(seen))

    def _compared(self, steps: range, fed: int, sums: npt.NDArray[np.uint64]) -> Iterator[str]:
        """Nothing, if the steps were fed their ids; else which were lost or repeated, where that explains it."""
        missing = (int(sums[steps.start : steps.stop].sum(dtype=np.uint64)) - fed) % 2**64
        if not missing:
            return
        where = f"steps {steps.start + 1} to {steps.stop}"
        lost, again = np.uint64(missing), np.uint64(-missing % 2**64)
        for first in range(max(0, steps.start - len(steps)), steps.stop):
            totals = np.cumsum(sums[first : steps.stop], dtype=np.uint64)
            if (found := np.flatnonzero((totals == lost) | (totals == again))).size:
                end, word = first + int(found[0]) + 1, "lost" if totals[found[0]] == lost else "fed again"
                ids = self._named(first, end)
                yield f"{where}: of steps {first + 1} to {end}, these examples were {word}: {ids}"
                return
        yield f"{where}: were fed other examples than the run's order gives"

    def _named(self, first: int, end: int) -> str:
        ids = self.ids(first, end).ravel()
        more = f" and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else ""
        return ", ".join(map(str, ids[:_SHOWN])) + more
