"""The verb train: the whole run on one screen."""

import json
from typing import Any

import keras

from trainer import callbacks as keras_callbacks
from trainer import printout
from trainer.assembly import Assembly, assemble
from trainer.clock import Clock, Interval
from trainer.config import Config
from trainer.errors import OK, PREEMPTED, UserError
from trainer.ledger import Ledger
from trainer.peers import Peers
from trainer.recovery import Recovery, Restored
from trainer.reporting import Nothing, Reporting
from trainer.run_directory import RunDirectory, replace


def run(config: Config, peers: Peers) -> int:
    """Trains from wherever the run stands to its last step. Returns the exit code."""
    ledger = Ledger(peers.doing)
    with RunDirectory(config, peers.cluster.is_chief) as directory:
        with ledger("start"):
            parts = assemble(config, peers, directory.check_flags())  # where, what
            directory.record(parts.program.replicas, printout.facts(parts))
            training = Training(parts, directory, ledger)  # since when, how it is going
        pipeline = training.pipeline
        blocks = parts.blocks(pipeline, training.step // pipeline.block)
        for first in range(training.step // pipeline.block * pipeline.block, parts.steps, pipeline.block):
            if training.ended:
                break
            with ledger("data"):
                block = next(blocks)
            for end in training.clock.chunks(training.step, first + pipeline.block):
                training.advance(block, training.step - first, end)
                training.do_what_is_due()
                if training.ended:
                    break
        code = training.finish()
        parts.strategy.close()
        return code


class Training:
    """One start of a run: its step, its totals, and what is done at which step, in which order.

    Args:
      parts: strategy, program and data.
      directory: the run directory.
      ledger: books this start's time.
    """

    def __init__(self, parts: Assembly, directory: RunDirectory, ledger: Ledger) -> None:
        self._parts, self._directory, self._ledger = parts, directory, ledger
        config = parts.config
        self._recovery = Recovery(
            config, directory, parts.program, len(parts.dataset.train), parts.peers.cluster.is_chief
        )
        restored = self._restore()
        self.step, self._totals, self._stopped = restored.step, restored.totals, restored.stopped
        self.pipeline = parts.pipeline(parts.dataset.train, shuffled=True)
        self._ids, self._ids_before = 0, restored.ids  # checksums of the examples since the last line of the log
        self._compiled, self._signal = False, 0  # the signal that all processes have agreed to obey
        intervals = {"log": config.log_every, "evaluate": config.evaluate_every, "save": config.save_every}
        if config.callbacks:
            intervals["epoch"] = "1epoch"
        self.clock = Clock(
            parts.steps,
            len(parts.dataset.train),
            config.global_batch,
            {name: Interval.parse(text) for name, text in intervals.items()},
            config.profile_range() or (),
        )
        self._reporting: Reporting | Nothing = Nothing()
        if parts.peers.cluster.is_chief:
            self._reporting = Reporting(config, directory, parts.steps, self.step, ledger)
        self._reporting.say(printout.opening(parts, directory.path, restored.origin, self.step))
        self._reporting.define(printout.texts(parts), parts.program.model, config.definition())
        self._callbacks = keras_callbacks.create(config.callbacks, parts.program.model)
        self._callbacks.on_train_begin()
        if not keras_callbacks.restore(self._callbacks, restored.callbacks):
            self._reporting.say("the callbacks are not those of the checkpoint: they start with no memory of the run")
        self._callbacks.on_epoch_begin(self.clock.epochs_ended(self.step))
        self._validation: dict[str, float] = {}
        self._tracing = False
        self._profile()
        if not self.step:
            self._save({}, due=True)  # from here on there is always a good checkpoint

    def _restore(self) -> Restored:
        """The chief sets damaged checkpoints aside; then all read the same."""
        if self._parts.peers.cluster.is_chief:
            self._recovery.tidy()
        self._parts.peers.gather(0)
        restored = self._recovery.restore()
        steps = self._parts.peers.gather(restored.step)
        if len(set(steps)) > 1:
            raise UserError(
                "run_dir",
                self._directory.path,
                f"gives the processes different steps to continue from: {steps}",
                "put it on a file system that all of them share",
            )
        return restored

    @property
    def ended(self) -> bool:
        """Whether there is nothing left to do, or somebody asked to stop."""
        return self.step >= self._parts.steps or self._stopped or bool(self._signal)

    def advance(self, block: Any, first: int, end: int) -> None:
        """Runs the steps up to `end` on a block, the first of them being the block's `first`."""
        before = self._totals
        with self._ledger("step" if self._compiled else "compile"):
            self._totals = self._parts.strategy.train(block, first, end - self.step, self.step, before)
            # At most one chunk is in flight: the host runs ahead by no more, the device never waits.
            keras.ops.convert_to_numpy((before if self._compiled else self._totals).objective)
        self._ids += self.pipeline.fed(self.step, end)
        self.step = self._parts.peers.step = end
        if not self._compiled:
            self._compiled = True
            self._reporting.compiled(end, self._ledger.seconds["compile"])

    def do_what_is_due(self) -> None:
        """Everything that happens between steps, in one place and one order."""
        due, last = self._agreed(self.clock.due(self.step)), self.step >= self._parts.steps
        metrics: dict[str, float] = {}
        evaluation: dict[str, float] = {}
        self._profile()
        if due & {"log", "evaluate", "epoch"} or last:
            with self._ledger("step"):
                metrics = self._parts.program.objective.results(self._totals)
                self._recovery.check_loss(self._totals)
        if "evaluate" in due or last:
            evaluation = self._evaluate()
        if metrics:
            self._log(metrics | evaluation)
        if "epoch" in due:
            epoch = self.clock.epochs_ended(self.step)
            with self._ledger("callbacks"):
                self._callbacks.on_epoch_end(epoch - 1, metrics | self._validation)
                self._callbacks.on_epoch_begin(epoch)
            self._stopped = bool(self._parts.program.model.stop_training)
        save = "save" in due or last or self._stopped or bool(self._signal)
        if save or evaluation:
            self._save(evaluation, save)
        self._recovery.settle(last=self.ended)

    def _agreed(self, due: set[str]) -> set[str]:
        """What the chief finds due, for clocks differ; and a signal that any process was sent reaches all."""
        names = sorted(self.clock.intervals)
        bits = sum(1 << i for i, name in enumerate(names) if name in due)
        gathered = self._parts.peers.gather(bits | self._recovery.signal << len(names))
        self._signal = max(value >> len(names) for value in gathered)
        return {name for i, name in enumerate(names) if gathered[0] >> i & 1}

    def _evaluate(self) -> dict[str, float]:
        source = self._parts.dataset.validation
        if source is None:
            return {}
        with self._ledger("evaluate"):
            self._validation = self._parts.evaluate(source, "val_")
        return self._validation

    def _log(self, metrics: dict[str, float]) -> None:
        seconds = self._ledger.seconds
        pause = sum(v for k, v in seconds.items() if k not in ("data", "step", "compile"))
        learning_rate = self._parts.program.learning_rate
        ids = self._fed()
        self._ids = self._ids_before = 0
        self._reporting.log(self.step, metrics, learning_rate, ids, seconds.get("data", 0.0), pause)
        with self._ledger("callbacks"):
            self._callbacks.on_train_batch_end(self.step - 1, metrics)
        self._totals = self._parts.program.objective.no_totals()

    def _fed(self) -> int:
        """Checksum of the ids that all processes were fed since the last line; a share may be fed to several."""
        gathered = self._parts.peers.gather([self.pipeline.shares[0].start, self._ids])
        return (self._ids_before + sum({first: ids for first, ids in gathered}.values())) % 2**64

    def _save(self, evaluation: dict[str, float], due: bool) -> None:
        remembered = keras_callbacks.state(self._callbacks)
        with self._ledger("save"):
            self._recovery.save(self._totals, self._fed(), remembered, evaluation, due, self._stopped)

    def _profile(self) -> None:
        first, last = self._parts.config.profile_range() or (-1, -1)
        if (self.step == first) or (self._tracing and (self.step >= last or self.ended)):
            self._tracing = not self._tracing
            self._parts.strategy.trace(str(self._directory.tensorboard), self._tracing)

    def finish(self) -> int:
        """Ends the run or, when it was told to stop, this start of it. Returns the exit code."""
        parts, reporting = self._parts, self._reporting
        if self.step < parts.steps and not self._stopped:
            parts.peers.gather(0)  # the chief has saved
            reporting.say(printout.preempted(parts, self._signal, self.step))
            reporting.close()
            return PREEMPTED
        self._callbacks.on_train_end()
        final = reporting.last | (self._validation or self._evaluate())
        if parts.dataset.evaluation is parts.dataset.validation:
            final |= {f"test_{k.removeprefix('val_')}": v for k, v in self._validation.items()}
        elif parts.dataset.evaluation is not None:
            with self._ledger("evaluate"):
                final |= parts.evaluate(parts.dataset.evaluation, "test_")
        seconds = self._ledger.table()
        summary = {
            "status": "stopped by a callback" if self._stopped else "done",
            "step": self.step,
            "final": final,
            "best": self._recovery.best,
            "weights_sha256": parts.program.weights_sha256(),
            "seconds": seconds,
            "goodput": seconds.get("step", 0.0) / max(1e-9, sum(seconds.values())),
        }
        parts.peers.gather(0)  # nobody leaves while another still computes
        if not parts.peers.cluster.is_chief:
            return OK
        replace(self._directory.summary, json.dumps(summary, indent=1))
        reporting.finish(summary)
        reporting.say(printout.ending(parts, self._directory.path, summary))
        return OK
