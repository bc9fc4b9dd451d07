"""text: files as sequences of bytes or of tokens; without any named, the Python standard library's own sources."""

import glob
import pathlib
import sysconfig
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from input_pipeline.dataset import Dataset
from input_pipeline.source import DataError, Example, Source, Subset


class Windows:
    """Windows of a text: x is `context` tokens, y the token after each of them.

    Args:
      text: uint8 or int32 (tokens,).
      context: tokens of a window; neighbouring windows do not overlap.
    """

    def __init__(self, text: npt.NDArray[np.integer], context: int) -> None:
        self.text, self.context = text, context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def read(self, ids: npt.NDArray[np.int64]) -> Example:
        windows = self.text[ids[:, None] * self.context + np.arange(self.context + 1)].astype(np.int32)
        return windows[:, :-1], windows[:, 1:]


def load(
    data_dir: str = "",
    files: str = "**/*.py",
    context: int = 128,
    held_out: int = 20,
    evaluation_examples: int = 512,
    tokenizer: str = "",
) -> Dataset:
    """Every `held_out`-th file is for evaluation; files are joined, with a zero byte or an end token between.

    Args:
      data_dir: directory that `files` are looked for in; the standard library's if it is empty.
      files: a glob; ** takes directories of any depth.
      context: tokens of an example.
      held_out: one file in so many is held out.
      evaluation_examples: number of windows taken from the held-out files, spread over them.
      tokenizer: path of a SentencePiece model; without one, tokens are bytes.

    Returns:
      x and y int32 (context,); 256 classes, or as many as the tokenizer has.

    Raises:
      DataError: no files, or too short ones.
    """
    root = pathlib.Path(data_dir or sysconfig.get_path("stdlib"))
    paths = [root / p for p in _matching(files, root) if (root / p).is_file()]
    if len(paths) < 2:
        raise DataError(f"{len(paths)} files match {files!r} in {root}; one is to train on, one to evaluate on")
    evaluation = paths[:: max(2, held_out)]
    train = [p for i, p in enumerate(paths) if i % max(2, held_out)]
    joined, classes, decode = _sentence_piece(tokenizer) if tokenizer else (_joined, 256, _decode)
    windows = Windows(joined(evaluation), context)
    if not len(windows):
        raise DataError(f"the held-out files, {evaluation[0]} and so on, have fewer tokens than context={context}")
    ids = np.unique(np.linspace(0, len(windows) - 1, evaluation_examples).astype(np.int64))
    held: Source = Subset(windows, ids)
    return Dataset(Windows(joined(train), context), held, classes, decode=decode)


def _matching(files: str, root: pathlib.Path) -> list[str]:
    """Paths below root that a glob matches, but those of packages installed there: these are not even looked at."""
    found = glob.glob(files.removeprefix("**/"), root_dir=root, recursive=True)
    if files.startswith("**/"):
        for directory in root.iterdir() if root.is_dir() else ():
            if directory.is_dir() and directory.name != "site-packages" and not directory.name.startswith("."):
                below = glob.glob(files, root_dir=directory, recursive=True)
                found += [f"{directory.name}/{path}" for path in below]
    return sorted({path for path in found if "site-packages" not in path})


def _joined(paths: list[pathlib.Path]) -> npt.NDArray[np.integer]:
    return np.frombuffer(b"\0".join(p.read_bytes() for p in paths), np.uint8)


def _decode(tokens: npt.NDArray[np.integer]) -> str:
    return tokens.astype(np.uint8).tobytes().decode(errors="replace")


def _sentence_piece(path: str) -> tuple[Callable[[list[pathlib.Path]], Any], int, Callable[[Any], str]]:
    """(what joins files as tokens, number of tokens, the text of tokens) of a SentencePiece model."""
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError:
        raise DataError("to read tokens, SentencePiece is needed: pip install 'onecurve[text]'") from None
    try:
        model = SentencePieceProcessor(model_file=str(pathlib.Path(path).expanduser()))
    except (OSError, RuntimeError) as error:
        raise DataError(f"tokenizer {path!r} is no model of SentencePiece: {error}") from None

    def joined(paths: list[pathlib.Path]) -> npt.NDArray[np.integer]:
        texts = [p.read_text(errors="replace") for p in paths]
        return np.array([token for text in model.encode(texts, add_eos=True) for token in text], np.int32)

    return joined, model.vocab_size(), lambda tokens: str(model.decode(tokens.tolist()))
