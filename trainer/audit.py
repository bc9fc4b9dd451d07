"""The verb audit: whether a run used each example exactly once in each pass, over all its starts and topologies.

The order of examples is a function of (seed, position), so two things have to be shown: that the function is a
permutation in each pass, and that the steps done were fed what it says. Each line of metrics.jsonl holds a checksum of
the ids that the pipelines of all processes handed out for the steps since the line before.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from input_pipeline import order
from input_pipeline.source import Source, ids_at
from trainer.append import records
from trainer.config import Config
from trainer.errors import OK, UserError
from trainer.loading import load_dataset
from trainer.run_directory import RunDirectory

BROKEN = 1
_SHOWN = 20  # ids that are printed


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

    def ids(self, step: int) -> np.ndarray:
        """int64 (global batch,): the examples of a step, counted from 0."""
        return ids_at(self._source, self._seed, step * self._batch + np.arange(self._batch))

    def problems(self, lines: list[dict[str, Any]]) -> Iterator[str]:
        """Whatever contradicts the promise, in words."""
        before = 0
        for line in lines:
            steps = range(before, line["step"])
            if not steps:
                yield f"step {line['step']} is logged twice, or after a later one"
                continue
            yield from self._compared(steps, int(line["ids"], 16))
            before = line["step"]
        for number in range(before * self._batch // self.examples + 1):
            positions = number * self.examples + np.arange(self.examples)
            counts = np.bincount(ids_at(self._source, self._seed, positions), minlength=self.examples)
            if (counts != 1).any():
                yield f"pass {number} is no permutation of the examples"

    def _compared(self, steps: range, fed: int) -> Iterator[str]:
        """Nothing, if the steps were fed their ids; else which were lost or repeated, where that explains it."""
        looked_at = range(max(0, steps.start - len(steps)), steps.stop)
        sums = {step: int(order.checksums([self.ids(step)])[0]) for step in looked_at}
        missing = (sum(sums[step] for step in steps) - fed) % 2**64
        if not missing:
            return
        where = f"steps {steps.start + 1} to {steps.stop}"
        for first in sums:
            total = 0
            for end in range(first + 1, steps.stop + 1):
                total = (total + sums[end - 1]) % 2**64
                for word, value in (("lost", total), ("fed again", -total % 2**64)):
                    if value == missing:
                        ids = self._named(first, end)
                        yield f"{where}: of steps {first + 1} to {end}, these examples were {word}: {ids}"
                        return
        yield f"{where}: were fed other examples than the run's order gives"

    def _named(self, first: int, end: int) -> str:
        ids = np.concatenate([self.ids(step) for step in range(first, end)])
        more = f" and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else ""
        return ", ".join(map(str, ids[:_SHOWN])) + more
