"""What a person sees: print-outs, the progress line, metrics.jsonl, and TensorBoard's files. One writer."""

import math
import pathlib
import shutil
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

import keras
import numpy as np
import numpy.typing as npt

from trainer.config import Config
from trainer.monitoring.board import Board
from trainer.monitoring.ledger import OTHERS_DATA, Ledger
from trainer.monitoring.readable import NOT_METRICS, duration, words
from trainer.monitoring.verdict import Verdict
from trainer.run_directory import RunDirectory
from trainer.storage.append import Appender, encoded, record_of

_DATA = ("data", OTHERS_DATA)
_BEFORE_VERDICT = 30.0  # seconds of training, before which a start is not typical


class Nothing:
    """Reports nothing: for the processes of a cluster that are not the chief."""

    def __init__(self) -> None:
        self.last: dict[str, float] = {}

    def _ignore(self, *arguments: Any) -> None:
        pass

    say = started = define = text = picture = weights = compare = loses = log = note = write = finish = close = _ignore


class Reporting:
    """Reports a training run.

    Args:
      config: the flags.
      directory: where the files go.
      steps: the run's last step.
      step: steps done at the start.
      told: steps of which the log has told; what a start before has told of later ones will be told again.
      ledger: this start's time.
      stream: where people look.
    """

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        steps: int,
        step: int,
        told: int,
        ledger: Ledger,
        stream: TextIO | None = None,
    ) -> None:
        self._config, self._directory, self._steps = config, directory, steps
        self._ledger = ledger
        self._stream = stream or sys.stdout
        self._live = self._stream.isatty()
        self._metrics, self.last = _continued(directory.metrics, told)
        self._board = Board(directory.tensorboard, told)
        self._since = {"step": step, **_booked(ledger.table())}
        self._first_step, self._started = step, time.monotonic()
        self._flops = self._peak = 0.0
        self._told = set[str]()  # causes of lost time

    def say(self, text: str) -> None:
        """Prints lines for the user."""
        if self._live:
            self._stream.write("\r\033[K")
        print(text, file=self._stream, flush=True)

    def started(self, step: int) -> None:
        """Says what the time until the first chunk of steps was done went to; the time left is told without it."""
        seconds = self._ledger.table()
        parts = ", ".join(f"{purpose} {value:.1f}s" for purpose, value in seconds.items() if value >= 0.05)
        self.say(f"first steps done after {duration(sum(seconds.values()))}: {parts}")
        self._first_step, self._started = step, time.monotonic()

    def define(self, facts: Mapping[str, str], model: keras.Model, hyperparameters: Mapping[str, Any]) -> None:
        """Writes what the run is to TensorBoard: text, graph, hparams."""
        for tag, text in facts.items():
            self._board.text(0, tag, text)
        self._board.graph(model)
        self._board.hyperparameters(hyperparameters, str(self._directory.path))

    def loses(self, step: int, found: Verdict) -> None:
        """Says what the run loses time by, once for each cause."""
        if found.cause and found.cause not in self._told and time.monotonic() - self._started > _BEFORE_VERDICT:
            self._told.add(found.cause)
            self.say(f"so far, time is lost by {found.words}")
            self.text(step, "lost by", found.words)

    def note(self, step: int, facts: Mapping[str, Any]) -> None:
        """Writes a line of metrics.jsonl that is not of the usual kind."""
        self._metrics.write(encoded({"step": step, **facts}).encode() + b"\n")

    def text(self, step: int, tag: str, text: str) -> None:
        """Shows a text, in Markdown, in TensorBoard."""
        self._board.text(step, tag, text)

    def picture(self, step: int, tag: str, pixels: npt.NDArray[np.uint8]) -> None:
        """Shows a picture, uint8 (height, width, 3), in TensorBoard."""
        self._board.image(step, tag, pixels)

    def weights(self, step: int, layer: str, values: npt.NDArray[np.floating]) -> None:
        """Shows the norm of a variable in TensorBoard, and how its values are spread."""
        self._board.scalars(step, {f"weight_norm/{layer}": float(np.linalg.norm(values.astype(np.float64)))})
        self._board.histogram(step, f"weights/{layer}", values.ravel()[:: max(1, values.size // 100_000)])

    def compare(self, flops: float, peak: float) -> None:
        """From now on the log tells FLOP/s, and their share of the peak: FLOPs of a step; FLOP/s of all devices."""
        self._flops, self._peak = flops, peak

    def log(self, step: int, metrics: dict[str, float], facts: Mapping[str, Any], table: Mapping[str, float]) -> None:
        """Reports the steps since the last call.

        Args:
          step: steps done.
          metrics: 'loss' and metrics of those steps, and 'val_' ones if there was an evaluation.
          facts: 'learning_rate' of the next step; 'ids', checksum of the examples of those steps, by which `audit`
            proves the data order; 'gradient_norms' by layer; perhaps 'save_stall', the longest that a save held the
            training up, in seconds.
          table: seconds of this start when the steps were done, by purpose.
        """
        since, booked = self._since, _booked(table)
        steps, seconds = step - since["step"], booked["training"] - since["training"]
        waited = (booked["data"] - since["data"]) / seconds if seconds > 0 else 0.0
        speed = {
            "examples_per_second": steps * self._config.global_batch / seconds if seconds > 0 else 0.0,
            "data_wait": min(1.0, max(0.0, waited)),
        }
        if self._flops and seconds > 0:
            speed["flops_per_second"] = self._flops * steps / seconds
            speed["mfu"] = speed["flops_per_second"] / self._peak
        if math.isnan(metrics["loss"]):  # of no weight; one that is not finite ends the run before
            self.say(f"nothing was trained up to step {step}: all its examples weigh 0, or their steps were skipped")
        self._since = {"step": step, **booked}
        self.note(step, {**metrics, **facts, **speed})
        sides = {name: "validation" if name.startswith("val_") else "train" for name in metrics}
        norms = facts["gradient_norms"]
        self._board.scalars(
            step,
            {f"{name.removeprefix('val_')}/{side}": metrics[name] for name, side in sides.items()}
            | {f"gradient_norm/{layer}": norm for layer, norm in norms.items()}
            | {f"performance/{name}": value for name, value in speed.items()}
            | {f"performance/{name}": facts[name] for name in ("save_stall",) if name in facts}
            | {
                "learning_rate": facts["learning_rate"],
                "gradient_norm": math.sqrt(sum(norm**2 for norm in norms.values())),
                "performance/step_seconds": seconds / max(1, steps),
            },
        )
        self.last = metrics
        self._progress(step, metrics, speed)

    def _progress(self, step: int, metrics: dict[str, float], speed: dict[str, float]) -> None:
        done = step - self._first_step
        left = (time.monotonic() - self._started) / max(1, done) * (self._steps - step)
        eta = f"eta {duration(left)}  " if done else ""
        text = (
            f"{step / max(1, self._steps):4.0%}  step {step}/{self._steps}  {eta}"
            f"{words(metrics)}  {speed['examples_per_second']:,.0f} examples/s  data wait {speed['data_wait']:.0%}"
        )
        if self._live and not any(name.startswith("val_") for name in metrics):
            width = shutil.get_terminal_size().columns
            self._stream.write("\r\033[K" + text[: width - 1])
            self._stream.flush()
        else:
            self.say(text)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Closes the files; `summary` has become summary.json."""
        self._board.scalars(summary["step"], {"performance/goodput": summary["goodput"]})
        self.close()

    def close(self) -> None:
        """Closes the files."""
        self._metrics.close()
        self._board.close()


def _booked(table: Mapping[str, float]) -> dict[str, float]:
    """Of the seconds of a start by purpose, those that were spent on training, and of these on waiting for data."""
    data = sum(table.get(purpose, 0.0) for purpose in _DATA)
    return {"data": data, "training": data + sum(table.get(purpose, 0.0) for purpose in ("step", "compile"))}


def _continued(path: pathlib.Path, told: int) -> tuple[Appender, dict[str, float]]:
    """metrics.jsonl, opened to append after its lines up to step `told`, and the metrics of the last of them.

    Later ones will be written again.
    """
    end, last = 0, dict[str, float]()
    if path.exists():
        with open(path, "r+b") as file:
            for line in file:
                record = record_of(line) if line.endswith(b"\n") else None
                if record is None or record.get("step", math.inf) > told:
                    break
                end, last = end + len(line), record if "loss" in record else last
            file.truncate(end)
    return Appender(path), {name: value for name, value in last.items() if name not in NOT_METRICS}
