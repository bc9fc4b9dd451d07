"""One start of a run: its state between steps, and all that happens there."""

import contextlib
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from trainer import best, copies
from trainer import callbacks as keras_callbacks
from trainer.assembly import Assembly
from trainer.clock import Clock
from trainer.errors import UserError
from trainer.evaluation import BrokenOff
from trainer.guard import Guard
from trainer.monitoring import printout
from trainer.monitoring.health import Health
from trainer.monitoring.history import History
from trainer.monitoring.ledger import Ledger
from trainer.monitoring.log import Line, Log
from trainer.monitoring.tracing import Tracing
from trainer.monitoring.utilization import Utilization
from trainer.preemption import Preemption
from trainer.recovery import Progress, Recovery, Restored
from trainer.reporting import Nothing, Reporting
from trainer.run_directory import RunDirectory
from trainer.sums import Totals
from trainer.validation import Validation


class Training:
    """One start of a run: its step, its totals, and what is done at which step, in which order.

    Args:
      parts: strategy, program and data.
      directory: the run directory.
      ledger: books this start's time.
    """

    def __init__(self, parts: Assembly, directory: RunDirectory, ledger: Ledger) -> None:
        self.parts, self._directory, self._ledger = parts, directory, ledger
        config, chief = parts.config, parts.peers.cluster.is_chief
        self.clock = Clock.of(config, parts.steps, len(parts.dataset.train))
        kept = functools.partial(self.clock.falls_on, "keep")
        self._probe = functools.partial(parts.probe, ledger, self.is_told)
        judged_by = best.judged_by(config, parts.program, parts.dataset)
        self.recovery = Recovery(config, directory, parts.program, parts.peers, self._probe, kept, judged_by)
        self._preemption = Preemption(directory.deadline, chief)
        with ledger("restore"):
            restored = self._restore()
        self.step, progress = restored.step, restored.progress
        self.stopped = progress.stopped
        program = parts.program
        self.pipeline = dataclasses.replace(parts.pipeline(parts.dataset.train, shuffled=True), most=parts.steps)
        self._guard = Guard(config, program.as_compiled, self.pipeline, program.out_of_range, progress.guard)
        patient = not (config.callbacks or self._guard.steers or parts.program.scales_loss)
        self._log = Log(parts, self.pipeline, ledger, progress, patient)
        self.in_flight: Totals | None = None  # of the last chunk
        self.told, self._pace = 0, 1  # told: what all have agreed to obey; pace: see the clock
        self.owed = set(progress.owed)  # what was due when the start before was told to stop
        self.health, self.utilization = Health(parts, ledger, self.step), Utilization(parts, self.step)
        self._validation = Validation(parts, ledger, self.is_told)
        self.reporting: Reporting | Nothing = Nothing()
        self.history: History | Nothing = Nothing()
        if chief:
            facts = {"devices": parts.strategy.device_count, "strategy": parts.strategy.description}
            self.history = History(directory.starts, ledger, facts, self.step)
            self.reporting = Reporting(config, directory, parts.steps, self.step, restored.told, ledger)
            if not self.ended:
                directory.summary.unlink(missing_ok=True)  # of an end that is none any more
        self.reporting.say(printout.opening(parts, directory.path, restored.origin, self.step))
        self.reporting.define(
            printout.texts(parts), parts.program.model, config.definition() | parts.program.hyperparameters
        )
        self._callbacks = keras_callbacks.create(config.callbacks, parts.program, parts.dataset, self.clock, chief)
        if not self._callbacks.begin(self.clock.epochs_ended(self.step) - ("epoch" in self.owed), progress.callbacks):
            self.stopped = False
            self.reporting.say("callbacks have changed: those of other names than before have no memory of the run")
        self._tracing = Tracing(config, parts.strategy, directory.tensorboard, parts.peers.cluster.index)
        self._tracing.at(self.step, self.ended)
        directory.record(parts.program.replicas, parts.dataset.class_names)  # what was refused so far is no run
        if not self.step:
            self.save({})  # from here on there is always a good checkpoint

    def _restore(self) -> Restored:
        """The chief sets damaged checkpoints aside; then all read the same."""
        if self.parts.peers.cluster.is_chief:
            self.recovery.tidy()
        self.parts.peers.gather(0)
        restored = self.recovery.restore()
        if len(set(steps := self.parts.peers.gather(restored.step))) > 1:
            raise UserError(
                "run_dir",
                self._directory.path,
                f"gives the processes different steps to continue from: {steps}",
                "put it on a file system that all of them share",
            )
        return restored

    @property
    def ended(self) -> bool:
        """Whether there are no steps left to do, or somebody asked to stop."""
        return self.step >= self.parts.steps or self.stopped or bool(self.told)

    def advance(self, block: Any, first: int, end: int) -> None:
        """Runs the steps up to `end` on a block, the first of them being the block's `first`."""
        begin, steps = self.clock.now(), end - self.step
        with self._ledger("step" if self.in_flight else "compile"):
            totals = self.parts.strategy.train(block, first, steps, self.step, self._log.totals)
            # At most one chunk is in flight: the host runs ahead by no more, the device never waits.
            (self.in_flight or totals).wait()
        self._pace = self.clock.pace(steps, begin)
        self._log.add(totals, self.step, end)
        self.step = self.parts.peers.step = end
        if not self.in_flight:
            self.reporting.started(end)
        self.in_flight = totals

    def do_what_is_due(self) -> None:
        """Everything that happens between steps, in one place and one order; what is broken off is owed."""
        due, trouble = self._agreed(self.clock.due(self.step) | self.owed)
        last = self.step >= self.parts.steps
        logs = last or bool(due & {"log", "evaluate", "epoch"})
        self._tracing.at(self.step, self.ended)
        line = self._log.line(self.step)
        if not (logs or self._log.waits):
            due.discard("tell")
        if not (due - {"log", "tell"} or trouble or self.ended) and (not logs or self._log.keeps(line)):
            if "tell" in due and (trouble := self._tell_what_waits(newest=not logs)):  # the steps in flight go on
                raise self._guard.error(trouble, self.recovery.last_good)
            return
        trouble = trouble or self._tell_what_waits()
        with self._ledger("step"):  # whose end may have to be waited for
            line = self._log.fetched(line)
        if trouble := trouble or self._trouble(line, logs):
            self._go_back(trouble, line)
            line = line._replace(metrics={})
        evaluation = dict[str, float]()
        self.owed = due - {"tell"} | {"evaluate"}
        with contextlib.suppress(BrokenOff):
            if "evaluate" in due or last:
                evaluation = self._validation.run(self.step, self.reporting, last)
            if line.metrics and logs:
                self._tell(line, evaluation)
                self._log.begin()
            if "epoch" in due:
                self._end_epoch()
            self.stopped |= any(self.parts.peers.gather(bool(self.parts.program.model.stop_training)))
            self.owed = {"evaluate"}
            if self.stopped and not evaluation:  # it may have ended within an epoch
                evaluation = self._validation.run(self.step, self.reporting, is_last=True)
            self.owed = set()
        self.save(evaluation, due=bool(due & {"save", "keep"}) or self.ended)

    def _trouble(self, line: Line, logged: bool = True) -> str:
        """What is wrong with the steps of a line of the log, or of its first part, in words; '' if nothing is."""
        unhealthy = self._guard.unhealthy(line.totals)
        if self.parts.program.objective.skips:
            if unhealthy and logged:
                self.reporting.say(f"skipped: {unhealthy}")
            unhealthy = ""
        return unhealthy or (self._guard.leaps(line.step, line.metrics["loss"]) if line.metrics and logged else "")

    def _go_back(self, trouble: str, line: Line) -> None:
        """Goes on with the variables of the last good checkpoint; the steps since then count as done."""
        nth = self._guard.go_back()
        with self._ledger("roll back"), self._callbacks.constants.numbers_left():
            step = self.recovery.roll_back(nth) if nth else None
            if step is None:
                raise self._guard.error(trouble, self.recovery.last_good)
            self.parts.program.count_steps(self.step - step)
        self._log.begin()
        self.reporting.say(f"rolled back: {trouble}; steps {step + 1} to {self.step} are left out")
        self.reporting.note(self.step, {"rolled_back_to": step, "why": trouble, "ids": self._log.ids(line)})

    def _agreed(self, due: set[str]) -> tuple[set[str], str]:
        """What the chief finds due, for clocks differ; and the first variable that was not finite in any process.

        A signal that any process was sent reaches all.
        """
        names = sorted(self.clock.intervals)
        bits = sum(1 << i for i, name in enumerate(names) if name in due)
        gathered = self.parts.peers.gather([bits, self._pace, self._preemption.told, self.recovery.settle()])
        bits, self.clock.most, _, _ = gathered[0]
        self.told = max(told for *_, told, _ in gathered)
        trouble = next((unsound for *_, unsound in gathered if unsound), "")
        return {name for i, name in enumerate(names) if bits >> i & 1}, trouble

    def is_told(self) -> bool:
        """Whether any process was told to stop."""
        self.told = max(self.parts.peers.gather(self._preemption.told))
        return bool(self.told)

    def _tell_what_waits(self, newest: bool = True) -> str:
        """Tells the lines of the log that wait, up to the first with trouble, which it returns in words."""
        with self._ledger("step"):
            lines = self._log.waited(newest)
        for line in lines:
            if trouble := self._trouble(line):
                return trouble
            self._tell(line)
        return ""

    def _tell(self, line: Line, evaluation: Mapping[str, float] | None = None) -> None:
        metrics = {**line.metrics, **(evaluation or {})}
        with self._ledger("log"):
            self._log.tell(line)
            self.reporting.log(line.step, metrics, self._log.facts(line), line.seconds)
        with self._ledger("callbacks"):
            self._callbacks.on_train_batch_end(line.step - 1, metrics)
        self.health.look()
        self.utilization.measure(self.reporting, self._ledger)
        with self._ledger("log"):
            self.reporting.loses(self.step, self.health.verdict(self._ledger.table()))
            self.history.write(self.step)

    def _end_epoch(self) -> None:
        epoch = self.clock.epochs_ended(self.step)
        with self._ledger("callbacks"):
            self._callbacks.on_epoch_end(epoch - 1, self._log.end_epoch() | self._validation.metrics)
            self._callbacks.on_epoch_begin(epoch)

    def save(self, evaluation: dict[str, float], due: bool = True) -> None:
        """Saves where the run stands, unless that is in doubt; at a start's end, waits until it is written."""
        if trouble := self._tell_what_waits():  # where it was told to stop while it waited for data
            raise self._guard.error(trouble, self.recovery.last_good)
        if (due or evaluation) and (self.step >= self.parts.steps or not self._guard.in_doubt):
            if due:
                copies.compare(self.parts, self.step, self.recovery)
            if self.step and not self.parts.has_probed:  # or the save would wait for its compiling
                self._probe()
            memories = self._callbacks.memory(), self._guard.memory
            line = self._log.line(self.step)
            ids, owed = self._log.checksum(line), sorted(self.owed)
            progress = Progress(line.totals, ids, *memories, self.stopped, owed, self._log.epoch)
            began = self.clock.now()
            with self._ledger("last save" if self.ended else "save"):  # the last one holds no steps up
                self.recovery.save(self.step, progress, evaluation, due, self.ended)
            self._log.stalled(self.clock.now() - began)
        if self.ended and (trouble := self.recovery.settle(last=True)):
            raise self._guard.error(trouble, self.recovery.last_good)

    def final_metrics(self) -> dict[str, float] | None:
        """The last line's metrics, and those of the last evaluations; None where steps or evaluations are left."""
        with contextlib.suppress(BrokenOff):
            if (self.step >= self.parts.steps or self.stopped) and not self.owed:
                self._callbacks.on_train_end()
                return self.reporting.last | self._validation.final(self.step, self.reporting)
        return None
