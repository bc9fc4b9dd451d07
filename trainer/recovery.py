"""When to save, what to restore, what to keep. Keras's ModelCheckpoint decides, checkpoint.py writes."""

import pathlib
import shutil
import signal
from types import FrameType
from typing import Any, NamedTuple

import keras
import numpy as np

from input_pipeline import order
from trainer import checkpoint
from trainer.config import Config
from trainer.errors import UserError
from trainer.program import Program
from trainer.run_directory import RunDirectory
from trainer.step import NEVER, Totals
from trainer.writer import Writer


class Restored(NamedTuple):
    """Where a run starts.

    Attributes:
      step: steps done.
      totals: sums since the last line of the log.
      ids: checksum of the examples since then.
      callbacks: what `Recovery.save` was given as the callbacks' state, or None.
      stopped: whether a callback had ended the run.
      origin: where the variables come from, in words.
    """

    step: int
    totals: Totals
    ids: int
    callbacks: list[dict[str, Any]] | None
    stopped: bool
    origin: str


class Recovery:
    """Saves and restores a run.

    Args:
      config: gives keep and initialize_from.
      directory: the run directory.
      program: what is saved.
      examples: in a pass over the training data.
      writes: whether this process does; the others of a cluster decide the same, and leave it to it.
    """

    def __init__(
        self, config: Config, directory: RunDirectory, program: Program, examples: int, writes: bool = True
    ) -> None:
        self._examples = examples
        self._writes = writes
        self._config, self._directory, self._program = config, directory, program
        self._best: dict[str, Any] = {}
        self._damaged: list[str] = []
        self._when_due = self._when_best = keras.callbacks.ModelCheckpoint("unset.keras")  # until `restore`
        self._writer = Writer(directory.path)
        self.signal = 0  # the first SIGTERM or SIGINT, to be obeyed at the end of a chunk of steps
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal:  # the second one leaves at once; the checkpoint's rename makes that harmless
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.signal = number

    def tidy(self) -> None:
        """Removes what killed writes left, and sets damaged checkpoints aside: the chief, before all restore."""
        for leftover in self._directory.checkpoints.glob(".*"):
            shutil.rmtree(leftover, ignore_errors=True)
        for path, manifest in checkpoint.newest(self._directory.checkpoints):
            if isinstance(manifest, dict):
                break
            self._set_aside(path, manifest)

    def _set_aside(self, path: pathlib.Path, error: checkpoint.Damaged) -> None:
        self._damaged.append(str(error))
        if self._writes:
            path.rename(path.with_name(f"damaged-{path.name}"))

    def restore(self) -> Restored:
        """Loads the newest checkpoint that can be trusted, or the initial state; all processes together."""
        damaged = self._damaged
        for path, manifest in checkpoint.newest(self._directory.checkpoints):
            try:
                if isinstance(manifest, checkpoint.Damaged):
                    raise manifest
                checkpoint.read(path, self._program, manifest)
            except checkpoint.Damaged as error:
                self._set_aside(path, error)
                continue
            self._watch(manifest["best"])
            aside = "".join(f"\n  set aside as damaged: {error}" for error in damaged)
            return Restored(
                manifest["step"],
                _unpack(manifest["totals"]),
                int(manifest["ids"]),
                manifest["callbacks"],
                manifest["stopped"],
                f"restored from {path}{aside}",
            )
        if damaged:
            raise UserError(
                "run_dir",
                self._directory.path,
                "holds no checkpoint that can be trusted:" + "".join(f"\n    {e}" for e in damaged),
                "restore the run directory from a copy, or start anew in another --run_dir",
            )
        self._watch({})
        origin = f"initial weights from --seed={self._config.seed}"
        if self._config.initialize_from:
            path, manifest = checkpoint.find(self._config.initialize_from)
            checkpoint.read_model_variables(path, self._program, manifest)
            origin = f"initial weights from {path}"
        return Restored(0, self._program.objective.no_totals(), 0, None, False, origin)

    def save(
        self,
        totals: Totals,
        ids: int,
        callbacks: list[dict[str, Any]],
        metrics: dict[str, float],
        due: bool = True,
        stopped: bool = False,
    ) -> None:
        """Copies the run's state if it is due or the best; a thread writes it, and removes what is no longer kept.

        Args:
          totals: sums since the last line of the log.
          ids: checksum of the examples since then.
          callbacks: state of each callback.
          metrics: this step's evaluation, if there was one.
          due: whether to save even if it is not the best.
          stopped: a callback ended the run here.
        """
        self._state: dict[str, Any] = {
            "totals": _pack(totals),
            "ids": ids,
            "callbacks": callbacks,
            "metrics": metrics,
            "stopped": stopped,
        }
        self._committed = False
        self.check_loss(totals)
        if metrics:
            self._when_best.on_epoch_end(self._program.step, metrics)
        if due and not self._committed:
            self._when_due.on_epoch_end(self._program.step, metrics)

    def save_weights(self, filepath: str, overwrite: bool = True) -> None:
        """What the two ModelCheckpoints call in a model's place: commits the whole run, never in place."""
        if self._when_best.best != self._best.get("val_loss"):
            self._best = self._state["metrics"] | {"step": self._program.step}
        step, values = self._program.step, self._program.values()
        state = {**self._state, "step": step, "best": self._best}

        def write() -> None:
            self._check(step, values)
            if self._writes:
                checkpoint.write(self._directory.checkpoints, self._program, values, state)
                self._prune(state["best"].get("step"))

        self._writer.submit(write)
        self._committed = True

    def settle(self, last: bool = False) -> None:
        """Tells what went wrong in the last write; with `last`, waits for it first."""
        if last:
            self._writer.wait(last)
        self._writer.check()

    @property
    def best(self) -> dict[str, Any]:
        """'step' and metrics of the best evaluation; {} before the first."""
        return self._best

    def check_loss(self, totals: Totals) -> None:
        """Raises UserError if a loss was not finite, naming the step."""
        step = int(keras.ops.convert_to_numpy(totals.nonfinite))
        if step != NEVER:
            self._writer.wait()  # what was good is whole before it is told of
            ids = order.of_step(self._config.seed, step, self._config.global_batch, self._examples)
            first = ", ".join(map(str, ids[:8])) + ", ..." * (len(ids) > 8)
            raise self._not_finite(f"the loss was not finite at step {step + 1} (examples {first})")

    def _check(self, step: int, values: dict[str, np.ndarray]) -> None:
        """Raises UserError if a variable is not finite: such a state is never saved."""
        for path, value in values.items():
            if not np.issubdtype(value.dtype, np.integer) and not np.isfinite(value.astype(np.float32)).all():
                raise self._not_finite(f"{path} was not finite after step {step}")

    def _not_finite(self, reason: str) -> UserError:
        saved = checkpoint.steps(self._directory.checkpoints)
        last = f"the last good checkpoint, of step {saved[-1]}, is kept" if saved else "nothing was saved yet"
        return UserError(
            "learning_rate",
            self._config.learning_rate,
            f"{reason}; {last}",
            "lower --learning_rate, clip with --optimizer='adam(global_clipnorm=1.0)', or look at the data; "
            "--initialize_from takes the kept checkpoint into a new run",
        )

    def _prune(self, best: int | None) -> None:
        saved = checkpoint.steps(self._directory.checkpoints)
        for step in saved[: -self._config.keep]:
            if step != best:
                shutil.rmtree(self._directory.checkpoints / f"{step:08d}", ignore_errors=True)

    def _watch(self, best: dict[str, Any]) -> None:
        """Makes the two Keras callbacks that decide when a checkpoint is written."""
        self._best = best
        path = str(pathlib.Path(self._directory.checkpoints, checkpoint.WEIGHTS))
        self._when_due = keras.callbacks.ModelCheckpoint(path, save_weights_only=True)
        self._when_best = keras.callbacks.ModelCheckpoint(
            path,
            monitor="val_loss",
            mode="min",
            save_best_only=True,
            save_weights_only=True,
            initial_value_threshold=best.get("val_loss"),
        )
        for callback in (self._when_due, self._when_best):
            callback.set_model(self)


def _pack(totals: Totals) -> list[Any]:
    return [np.asarray(keras.ops.convert_to_numpy(leaf)).tolist() for leaf in keras.tree.flatten(totals)]


def _unpack(packed: list[Any]) -> Totals:
    objective, weight, *metrics, nonfinite = packed
    return Totals(
        np.float32(objective),
        np.float32(weight),
        [np.asarray(m, np.float32) for m in metrics],
        np.int32(nonfinite),
    )
