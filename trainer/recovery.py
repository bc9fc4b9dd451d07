"""When to save, what to restore, what to keep. Keras's ModelCheckpoint decides, saving.py writes."""

import pathlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import keras
import numpy as np

from trainer import checkpoint
from trainer.config import Config
from trainer.errors import UserError
from trainer.peers import Peers
from trainer.program import Program
from trainer.run_directory import RunDirectory
from trainer.storage import initial, progress, saving
from trainer.storage.progress import Progress
from trainer.storage.shards import not_finite
from trainer.storage.snapshot import Pieces, on_host
from trainer.storage.writer import Writer


class Restored(NamedTuple):
    """Where a run starts: steps done, what it goes on with, and in words where its variables come from."""

    step: int
    progress: Progress
    origin: str

    @property
    def told(self) -> int:
        """The last step that the log may tell of; what a start that was killed told of later ones is told anew."""
        return self.step - bool(self.progress.totals.counted.steps)


class Recovery:
    """Saves and restores a run; all processes of a cluster call it together, and process 0 decides and commits.

    Args:
      config: gives keep and initialize_from.
      directory: the run directory.
      program: what is saved.
      peers: the processes.
      probe: the loss of a few examples with the variables as they are; None where they don't come before a stop.
      kept: whether the checkpoint of a step is to stay for ever.
      judged_by: the metric that the best checkpoint is best in, and 'min' or 'max'.
    """

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        program: Program,
        peers: Peers,
        probe: Callable[[], float | None],
        kept: Callable[[int], bool],
        judged_by: tuple[str, str],
    ) -> None:
        self._config, self._directory, self._program, self._peers = config, directory, program, peers
        self._probe, self._kept, self._judged_by = probe, kept, judged_by
        self.best: dict[str, Any] = {}  # 'step' and metrics of the best evaluation whose checkpoint is kept
        self._damaged: list[str] = []
        self._unsound = ""  # what was not finite in the last state that was to be written
        self._when_due = self._when_best = keras.callbacks.ModelCheckpoint("unset.keras")  # until `restore`
        self._writer = Writer(directory.path)

    def tidy(self) -> None:
        """Removes what killed writes left, and sets damaged checkpoints aside: process 0, before all restore."""
        checkpoint.tidy(self._directory.checkpoints)
        for path, manifest in checkpoint.newest(self._directory.checkpoints, arrays=False):
            if isinstance(manifest, dict):
                break
            self._set_aside(path, manifest)

    def _set_aside(self, path: pathlib.Path, error: checkpoint.Damaged) -> None:
        self._damaged.append(str(error))
        if self._peers.cluster.is_chief:
            checkpoint.set_aside(path)

    def restore(self) -> Restored:
        """Loads the newest checkpoint that can be trusted, or the initial state.

        Raises:
          UserError: there are checkpoints, and none can be trusted; or there are none, and what a run has left; or the
            model computes something else with the variables than it did when they were saved.
        """
        found = self._load_newest()
        aside = "".join(f"\n  set aside as damaged: {error}" for error in self._damaged)
        if found:
            path, manifest = found
            saving.check_probe(self._program, path, manifest["probe"], self._probe)
            self._watch(manifest["best"])
            nothing = self._program.objective.no_totals()
            going_on, left_out = progress.unpack(manifest["progress"], nothing, self._directory.path)
            words = f"restored from {path}{aside}" + f"\n  {left_out}" * bool(left_out)
            return Restored(manifest["step"], going_on, words)
        earlier = [f"\n  {path}" for path in sorted(self._directory.checkpoints.glob("damaged-*"))]
        if self._damaged or earlier:  # or the next start would begin anew, without a word
            raise UserError(
                "run_dir",
                self._directory.path,
                f"holds no checkpoint that can be trusted:{aside or ''.join(earlier)}",
                "restore the run directory from a copy, or start anew in another --run_dir",
            )
        self._directory.check_is_vacant()
        self._watch({})
        origin = f"initial weights from --seed={self._config.seed}"
        if self._config.initialize_from:
            path, manifest = initial.find(self._config.initialize_from, self._peers)
            but = initial.read_model_variables(path, self._program, manifest)
            origin = f"initial weights from {path}{but}"
        self._program.begin_averages()
        return Restored(0, Progress(self._program.objective.no_totals()), origin)

    def _load_newest(self, nth: int = 1) -> tuple[pathlib.Path, dict[str, Any]] | None:
        """Loads the nth newest checkpoint that can be trusted, or the oldest of fewer."""
        found = None
        for path, manifest in checkpoint.newest(self._directory.checkpoints, arrays=False):
            try:
                if isinstance(manifest, checkpoint.Damaged):
                    raise manifest
                saving.read(path, self._program, manifest)
                found, nth = (path, manifest), nth - 1
                if not nth:
                    break
            except checkpoint.Damaged as error:
                self._set_aside(path, error)
        return found

    def roll_back(self, nth: int) -> int | None:
        """Loads the nth newest good checkpoint. Returns its step; None if there is none."""
        self._writer.wait()
        self._peers.gather(0)
        found = self._load_newest(nth)
        return int(found[1]["step"]) if found else None

    def save(self, step: int, now: Progress, metrics: dict[str, float], due: bool = True, last: bool = False) -> None:
        """Copies the run's state if it is due or the best; a thread writes it, and removes what is no longer kept.

        Args:
          step: steps done. Not as the optimizer counts them, which leaves out those whose scaled loss overflows.
          now: what is saved beside the variables.
          metrics: this step's evaluation, if there was one.
          due: whether to save even if it is not the best.
          last: whether to save even if the write before takes its time.

        Raises:
          FileNotFoundError: the run directory is gone.
        """
        self._directory.checkpoints.stat()  # Keras would make it anew
        self.best = self._peers.gather(self.best)[0]  # the chief's, who knows whether it could be written
        self._best_before = self._when_best.best = self.best.get(self._judged_by[0])
        self._state: dict[str, Any] = {"step": step, "progress": progress.pack(now), "metrics": metrics}
        self._committed = False
        if last:
            self._writer.wait()
        if np.isfinite(metrics.get(self._judged_by[0], np.nan)):  # nothing is better than what is no number
            self._when_best.on_epoch_end(step, metrics)
        if due and not self._committed:
            self._when_due.on_epoch_end(step, metrics)

    def save_weights(self, filepath: str, overwrite: bool = True) -> None:
        """What the two ModelCheckpoints call in a model's place: commits the whole run, never in place."""
        self._committed = True
        if not all(self._peers.gather(self._writer.is_ready())):
            return
        before = self.best
        if self._when_best.best != self._best_before:
            self.best = self._state["metrics"] | {"step": self._state["step"]}
        with ThreadPoolExecutor(1) as beside:  # copies are made while the devices compute
            copying = beside.submit(self._program.snapshot())
            probe = self._probe() if self._state["step"] else None
        copies = copying.result()
        state: dict[str, Any] = {**self._state, "best": self.best, "probe": probe}

        def write() -> None:
            written = False
            try:
                written = self._write(on_host(copies), state)
            finally:
                if not written:
                    self.best = before

        self._writer.submit(write, sum(values.nbytes for of_variable in copies.values() for _, values in of_variable))

    def _write(self, pieces: Pieces, state: dict[str, Any]) -> bool:
        """Commits a state, unless it is not finite; whether it has."""
        program, cluster, parent = self._program, self._peers.cluster, self._directory.checkpoints
        self._unsound = not_finite(pieces)
        if self._unsound:
            return False
        if not program.whole:
            saving.write_shards(parent, program, pieces, state, cluster.index, cluster.size, self._config.patience)
        elif cluster.is_chief:
            saving.write(parent, program, {path: whole.values for path, (whole,) in pieces.items()}, state)
        if cluster.is_chief:
            self._prune(state["best"].get("step"))
        return True

    def settle(self, last: bool = False) -> str:
        """Tells what went wrong in the last write; with `last`, waits for it first.

        Returns:
          Which variable was not finite, in words: such a state is never written. '' if all were.
        """
        if last:
            self._writer.wait(last)
        self._writer.check()
        unsound, self._unsound = self._unsound, ""
        return unsound

    @property
    def last_good(self) -> str:
        """Which checkpoint is kept, in words; what was good is whole before it is told of."""
        self._writer.wait()
        saved = checkpoint.steps(self._directory.checkpoints)
        return f"the last good checkpoint, of step {saved[-1]}, is kept" if saved else "nothing was saved yet"

    def _prune(self, best: int | None) -> None:
        saved = checkpoint.steps(self._directory.checkpoints)
        for step in saved[: -self._config.keep]:
            if step != best and not self._kept(step):
                checkpoint.remove(self._directory.checkpoints / f"{step:08d}")

    def _watch(self, best: dict[str, Any]) -> None:
        """Makes the two Keras callbacks that decide when a checkpoint is written."""
        self.best, (metric, mode) = best, self._judged_by
        path = str(pathlib.Path(self._directory.checkpoints, checkpoint.WEIGHTS))
        self._when_due = keras.callbacks.ModelCheckpoint(path, save_weights_only=True)
        self._when_best = keras.callbacks.ModelCheckpoint(path, metric, 0, True, True, mode)
        for callback in (self._when_due, self._when_best):
            callback.set_model(self)
