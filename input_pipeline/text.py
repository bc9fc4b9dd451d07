"""text: files as sequences of bytes or of tokens; without any named, the Python standard library's own sources."""

import glob
import pathlib
import sysconfig

import numpy as np
import numpy.typing as npt

from input_pipeline import tokens
from input_pipeline.checksums import Checked
from input_pipeline.dataset import Dataset
from input_pipeline.memory import gather
from input_pipeline.source import DataError, Example, Source, Subset


class Windows:
    """Windows of a text: x is `context` tokens, y the token after each of them.

    Args:
      text: integers (tokens,).
      context: tokens of a window; neighbouring windows do not overlap.
      begin, end: the tokens of the text that they are of; by default all.
    """

    def __init__(
        self, text: npt.NDArray[np.integer] | Checked, context: int, begin: int = 0, end: int | None = None
    ) -> None:
        self._checked = text if isinstance(text, Checked) else None
        tokens = text.array if isinstance(text, Checked) else text
        self._context, self._begin = context, begin
        self._length = max(0, (len(tokens) if end is None else end) - begin - 1) // context
        end = begin + self._length * context
        self._windows = tokens[begin:end].reshape(self._length, context)
        self._next = tokens[begin + context : end + 1 : context]  # the token after each

    def __len__(self) -> int:
        return self._length

    def read(self, ids: npt.NDArray[np.int64]) -> Example:
        x, after = gather(self._windows, ids).astype(np.int32), self._next[ids]
        if self._checked is not None:
            first = self._begin + ids * self._context
            self._checked.check(first, first + self._context)
        return x, np.column_stack([x[:, 1:], after])


def load(
    data_dir: str = "",
    files: str = "**/*.py",
    context: int = 128,
    held_out: int = 20,
    evaluation_examples: int = 512,
    tokenizer: str = "",
    field: str = "",
    evaluation: str = "",
    validation: str = "",
) -> Dataset:
    """Every `held_out`-th file is for evaluation, of a single file so small a part of its tokens, the last.

    Documents are joined, with a zero byte or an end token between: files, perhaps compressed (.gz, .bz2, .xz, .zst); or
    of files of JSON's lines and of .csv, .tsv and .parquet, each line or row, where `field` is named.

    Args:
      data_dir: directory that `files` are looked for in, or a file; the standard library's if it is empty.
      files: a glob; ** takes directories of any depth.
      context: tokens of an example.
      held_out: one file in so many is held out, or one token of a single file.
      evaluation_examples: number of windows taken from what is evaluated, spread over it.
      tokenizer: file of a SentencePiece model, or directory of a KerasHub preset; without one, tokens are bytes.
      field: which field of a line or row is the document.
      evaluation, validation: globs of other files, to evaluate and to validate on; where the first is given, none of
        `files` is held out.

    Returns:
      x and y int32 (context,); 256 classes, or as many as the tokenizer has.

    Raises:
      DataError: no files, or too short ones.
    """
    root = pathlib.Path(data_dir or sysconfig.get_path("stdlib")).expanduser()
    made, every = tokens.made_by(tokenizer), max(2, held_out)

    def paths_of(files: str) -> list[pathlib.Path]:
        paths = [root] if root.is_file() else [root / p for p in _matching(files, root) if (root / p).is_file()]
        if not paths:
            raise DataError(f"no files match {files!r} in {root}: name yours, such as text(files='**/*.txt')")
        return paths

    def windows(text: npt.NDArray[np.integer] | Checked, what: str, begin: int = 0, end: int | None = None) -> Windows:
        found = Windows(text, context, begin, end)
        if not len(found):
            raise DataError(f"what is {what} of {paths[0]} and so on has fewer tokens than context={context}")
        return found

    def spread(found: Source) -> Source:
        return Subset(found, np.unique(np.linspace(0, len(found) - 1, evaluation_examples).astype(np.int64)))

    def held(files: str) -> Source:
        return spread(windows(made.encode(paths_of(files), field), "held out"))

    paths = paths_of(files)
    if evaluation:
        train, test = windows(made.encode(paths, field), "trained on"), held(evaluation)
    elif len(paths) == 1:
        whole = made.encode(paths, field)
        end = max(0, len(whole) - max(context + 1, len(whole) // every))
        train, test = windows(whole, "trained on", 0, end), spread(windows(whole, "held out", end))
    else:
        train = windows(made.encode([p for i, p in enumerate(paths) if i % every], field), "trained on")
        test = spread(windows(made.encode(paths[::every], field), "held out"))
    return Dataset(train, test, made.classes, held(validation) if validation else None, decode=made.decode)


def _matching(files: str, root: pathlib.Path) -> list[str]:
    """Paths below root that a glob matches, but those of packages installed there: these are not even looked at."""
    found = glob.glob(files.removeprefix("**/"), root_dir=root, recursive=True)
    if files.startswith("**/"):
        for directory in root.iterdir() if root.is_dir() else ():
            if directory.is_dir() and directory.name != "site-packages" and not directory.name.startswith("."):
                below = glob.glob(files, root_dir=directory, recursive=True)
                found += [f"{directory.name}/{path}" for path in below]
    return sorted({path for path in found if "site-packages" not in path})
