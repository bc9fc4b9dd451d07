"""A round of training steps, as a side of a comparison."""

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from trainer.config import Config
from trainer.preemption import until_told
from trainer.run_directory import RunDirectory

if TYPE_CHECKING:
    from trainer.assembly import Assembly


def training(
    parts: "Assembly", exact: bool = False, kept: bool = False, most: int | None = None
) -> Callable[[], float]:
    """As many steps as the run has, with sums in the tree's order or by the backend's all-reduce.

    Args:
      parts: the sides made of them train the same variables.
      exact: which of the two, whatever the flags say.
      kept: whether it trains on the first round's blocks again and again, which stay on the devices.
      most: steps in a call; None: those of a block.

    Returns:
      what does a round and returns its loss; the data go on from pass to pass, as in a run.
    """
    strategy: Any = copy.copy(parts.strategy)
    strategy.compile(parts.program)
    setattr(strategy, "_in_tree_order" if hasattr(strategy, "_in_tree_order") else "_exact", exact)
    pipeline, steps = parts.pipeline(parts.dataset.train, shuffled=True), parts.config.steps
    fed = until_told(strategy.feed(pipeline), parts.peers, lambda: False)  # as in a run, one is taken ahead
    if kept:
        fed = itertools.cycle(list(itertools.islice(fed, -(-steps // pipeline.block))))
    block, used = None, pipeline.block  # a round may end within a block, with which the next one goes on

    def once() -> float:
        nonlocal block, used
        totals, done = parts.program.objective.no_totals(), 0
        while done < steps:
            if used == pipeline.block:
                block, used = next(fed), 0
            count = min(most or steps, pipeline.block - used, steps - done)
            before = totals
            totals = strategy.train(block, used, count, done, before)
            before.wait()  # as in a run, the host runs ahead by no more than one call
            used, done = used + count, done + count
        return float(parts.program.objective.results(totals)["loss"])

    return once


@contextlib.contextmanager
def run(config: Config, steps: int) -> "Iterator[tuple[Assembly, Callable[[], float]]]":
    """A run, and what does so many of its steps more, and all that it does between them, as `trainer.train.run`."""
    from trainer.assembly import assemble
    from trainer.monitoring.ledger import Ledger
    from trainer.peers import Peers
    from trainer.training import Training

    peers = Peers()
    ledger = Ledger(peers.doing)
    with RunDirectory(config, True) as directory, open(directory.path / "log", "w") as log:
        with contextlib.redirect_stdout(log):
            parts = assemble(config, peers)
            training = Training(parts, directory, ledger)
        length = training.pipeline.block
        blocks = until_told(parts.blocks(training.pipeline), peers, training.is_told)
        block = None

        def once() -> float:
            nonlocal block
            for _ in range(-(-steps // length)):
                first = training.step
                with ledger("data"):
                    block = next(blocks)
                for end in training.clock.chunks(first, first + length):
                    training.advance(block, training.step - first, end)
                    training.do_what_is_due()
            assert training.in_flight
            training.in_flight.wait()  # what is in flight is this side's, too
            return float(training.step)

        yield parts, once
