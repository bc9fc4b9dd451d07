"""What TensorBoard shows of a model beside curves: confusions, its worst mistakes, a text that it goes on with."""

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from input_pipeline.source import Example, Source, is_streamed, read
from input_pipeline.structure import flatten
from trainer.assembly import Assembly
from trainer.evaluation import BrokenOff
from trainer.monitoring.ledger import Ledger
from trainer.preemption import until_told
from trainer.reporting import Nothing, Reporting

# Seconds between two visits, or times what one takes: a prediction is compiled apart, and costs time.
_EVERY, _TIMES = 30.0, 20
_EXAMPLES, _BATCH = 512, 64
_READING = 5.0  # seconds
_CLASSES = 64  # more don't fit on a picture
_WORST = 16
_TOKENS = 64
_HEAD, _LETTER = 24, 6  # letters of a class's name beside its row; pixels of one
_CAPTION = 36  # pixels of two lines
_TEMPERATURE = 0.8
Pixels = npt.NDArray[np.uint8]  # (height, width, 3)


class Gallery:
    """Shows what a model makes of some validation examples.

    Args:
      parts: of the run.
      ledger: books the first prediction, which compiles.
      told: whether to break off, where the examples are not there yet.
    """

    def __init__(self, parts: Assembly, ledger: Ledger, told: Callable[[], bool]) -> None:
        self._parts, self._ledger, self._told = parts, ledger, told
        self._has_predicted = False
        self._since, self._pause = time.monotonic(), _EVERY
        evaluates = parts.dataset.validation is not None and parts.config.evaluate_every != "never"
        self._open = evaluates and parts.peers.cluster.size == 1

    def show(self, step: int, reporting: Reporting | Nothing, last: bool) -> None:
        """Writes pictures and texts to TensorBoard, if the last time was long ago or there is no next one.

        Raises:
          BrokenOff: this start was told to stop.
        """
        begin = time.monotonic()
        if self._open and (last or begin - self._since > self._pause):
            self._show(step, reporting)
            self._since = time.monotonic()
            self._pause = max(_EVERY, _TIMES * (self._since - begin))

    def _show(self, step: int, reporting: Reporting | Nothing) -> None:
        source = self._parts.dataset.validation
        assert source is not None
        for variable in self._parts.program.model.trainable_variables:
            reporting.weights(step, variable.path, self._parts.program.to_host(variable).astype(np.float32))
        n, classes, decode = len(source), self._parts.dataset.classes, self._parts.dataset.decode
        examples = min(_EXAMPLES, 1 + int(_READING / max(1e-9, self._parts.pace)))
        spread = np.unique(np.linspace(0, n - 1, examples).astype(np.int64))
        x, y, *_ = self._read(source, np.arange(len(spread)) if is_streamed(source) else spread)
        one_label = classes is not None and isinstance(y, np.ndarray) and np.issubdtype(y.dtype, np.integer)
        if one_label and y.ndim == 1:
            self._show_classes(step, reporting, x, y)
        elif one_label and decode is not None and isinstance(x, np.ndarray) and x.ndim == 2:
            text = decode(self._continued(x[0]))
            if text:
                reporting.text(step, "sample", "    " + text.replace("\n", "\n    "))  # Markdown's verbatim

    def _read(self, source: Source, ids: npt.NDArray[np.int64]) -> Example:
        for example in until_told(map(functools.partial(read, source), [ids]), self._parts.peers, self._told):
            return example
        raise BrokenOff

    def _show_classes(self, step: int, reporting: Reporting | Nothing, x: Any, y: npt.NDArray[Any]) -> None:
        logits = self._predictions(x, len(y))
        if logits is None or logits.shape[1:] != (self._parts.dataset.classes,):
            return
        chosen, classes = logits.argmax(1), logits.shape[1]
        known = (y >= 0) & (y < classes)  # others are those that the loss is to ignore
        if not known.any():
            return
        y, logits, chosen = y[known], logits[known], chosen[known]
        names = _names(self._parts.dataset.class_names, classes)
        if classes <= _CLASSES:
            reporting.picture(step, "confusion", _matrix(confusion(y, chosen, classes), names))
        if isinstance(x, np.ndarray) and (x.ndim == 3 or (x.ndim == 4 and x.shape[3] in (1, 3))):
            shifted = logits - logits.max(1, keepdims=True)
            losses = np.log(np.exp(shifted).sum(1)) - shifted[np.arange(len(y)), y]
            worst = np.argsort(-losses, kind="stable")[:_WORST]
            captions = [names[y[i]] + (f",\nnot {names[chosen[i]]}" if y[i] != chosen[i] else "") for i in worst]
            reporting.picture(step, "worst", _sheet(x[known][worst], captions))

    def _predictions(self, x: Any, n: int) -> npt.NDArray[np.float32] | None:
        """The model's only output for all examples, in batches of one shape; None if it can't be had."""
        found, size = [], min(_BATCH, n)
        for first in range(0, n, size):
            ids = np.minimum(np.arange(first, first + size), n - 1)
            batch = keras.tree.map_structure(lambda a, ids=ids: a[ids], x)
            with contextlib.nullcontext() if self._has_predicted else self._ledger("compile"):
                outputs = self._parts.strategy.predict(batch)
            self._has_predicted = True
            if outputs is None or len(flatten(outputs)) != 1:
                return None
            found.append(flatten(outputs)[0].astype(np.float32))
        return np.concatenate(found)[:n]

    def _continued(self, tokens: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The first half of a window, and what the model goes on with."""
        window, begin = np.array(tokens)[None], len(tokens) // 2
        for i in range(begin, min(len(tokens), begin + _TOKENS)):
            logits = self._predictions(window, 1)
            if logits is None or logits.ndim != 3:
                return window[0, :0]
            noise = np.random.default_rng([self._parts.config.seed, i]).gumbel(size=logits.shape[-1])
            window[0, i] = np.argmax(logits[0, i - 1] / _TEMPERATURE + noise)
        return window[0, : begin + _TOKENS]


def _names(given: Sequence[str] | None, classes: int) -> list[str]:
    """What the classes are called in pictures: by their numbers, where one has no name, or letters that we have not."""
    numbers = list(map(str, range(classes)))
    return [name if name.isascii() else number for name, number in zip(given or numbers, numbers, strict=True)]


def confusion(labels: npt.NDArray[Any], chosen: npt.NDArray[Any], classes: int) -> npt.NDArray[np.int64]:
    """(classes, classes): examples by their label and by what was chosen."""
    # int64: labels of few bits would wrap around.
    return np.bincount(labels.astype(np.int64) * classes + chosen, minlength=classes**2).reshape(classes, classes)


def _matrix(counts: npt.NDArray[np.int64], names: list[str]) -> Pixels:
    """Rows are labels, columns what was chosen; darker is more of the row."""
    cell = max(8, min(40, 640 // len(counts)))
    heads = [name if name == str(i) else f"{i} {name}"[:_HEAD] for i, name in enumerate(names)]
    left = max(cell, 6 + _LETTER * max(map(len, heads))) if cell >= 16 else cell
    image = Image.new("RGB", (left + cell * len(counts), cell * (len(counts) + 1)), "white")
    draw = ImageDraw.Draw(image)
    shares = counts / np.maximum(1, counts.sum(1, keepdims=True))
    for i, row in enumerate(shares):
        if cell >= 16:
            draw.text((3, (i + 1) * cell + 3), heads[i], "black")
            draw.text((left + i * cell + 3, 3), str(i), "black")
        for j, share in enumerate(row):
            corner = (left + j * cell, (i + 1) * cell)
            shade = int(255 * (1 - share))
            draw.rectangle((*corner, corner[0] + cell - 2, corner[1] + cell - 2), (shade, shade, 255))
            if counts[i, j] and cell >= 24:
                draw.text((corner[0] + 3, corner[1] + 3), str(counts[i, j]), "white" if share > 0.5 else "black")
    return np.asarray(image)


def _sheet(images: npt.NDArray[Any], captions: list[str], side: int = 96) -> Pixels:
    """Pictures beside each other, four in a row, each with a caption."""
    rows = -(-len(images) // 4)
    sheet = Image.new("RGB", (4 * (side + 8), rows * (side + _CAPTION)), "white")
    draw = ImageDraw.Draw(sheet)
    for i, (pixels, caption) in enumerate(zip(images, captions, strict=True)):
        values = pixels.astype(np.float64).squeeze(-1) if pixels.shape[-1] == 1 else pixels.astype(np.float64)
        values = np.nan_to_num(values)
        values = (values - values.min()) / max(1e-9, float(np.ptp(values)))
        one = Image.fromarray((255 * values).astype(np.uint8)).convert("RGB").resize((side, side))
        corner = (i % 4 * (side + 8), i // 4 * (side + _CAPTION))
        sheet.paste(one, corner)
        draw.text((corner[0], corner[1] + side + 4), caption, "black")
    return np.asarray(sheet)
