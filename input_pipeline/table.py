"""table: rows of CSV or Parquet files; numbers as they are, words as the place of each among all."""

import collections
import glob
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from input_pipeline import order
from input_pipeline.dataset import Dataset
from input_pipeline.source import Arrays, DataError

_SUFFIXES = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet")
_PARTS = ("train", "test", "val")  # with which the names of files begin, where all do
_ROW_NUMBERS = re.compile(r"|Unnamed: \d+|__index_level_\d+__")  # columns as R and pandas call those of rows' names
_AROUND_NUMBERS = re.compile(r"^[$€£¥]\s*|(?<=\d)[,_' ](?=\d{3}(?!\d))|\s*[%$€£¥]$")  # as in $1,234, or 12 %


def load(
    data_dir: str,
    label: str,
    files: str = "*",
    columns: tuple[str, ...] = (),
    held_out: float = 0.1,
    words: tuple[str, ...] = (),
    delimiter: str = "",
    decimal: str = ".",
    encoding: str = "utf-8",
    names: tuple[str, ...] = (),
    regression: bool = False,
) -> Dataset:
    """Needs pyarrow: pip install 'onecurve[table]'.

    Args:
      data_dir: directory of the files, .csv, .csv.gz, .tsv, .tsv.gz or .parquet, or one of them.
      label: the column that is y: integers or words are classes; floats a number to predict.
      files: a glob in data_dir. Where all are called train, test, val or validation, and so on, each is what its name
        says; without test, what is to validate on is to evaluate on.
      columns: those that are x; all others by default.
      held_out: share of the rows to evaluate on, chosen by their place alone, where no file is.
      words: columns whose numbers are names, such as those of houses: each is its place among all.
      delimiter: between the values of a row, where it is neither a comma in .csv nor a tab in .tsv.
      decimal: the point of their numbers.
      encoding: of the files, such as latin-1.
      names: of all columns, where the files' first rows are no names.
      regression: whether the label is a number to predict, although it is an integer.

    Returns:
      x float32 (columns,), y int32 () or float32 (1,).

    Raises:
      DataError: no files, no rows, no such column, a missing value, a word among numbers, more classes than rows,
        pyarrow is not installed.
    """
    try:
        from pyarrow import concat_tables
    except ImportError:
        raise DataError("it needs pyarrow: pip install 'onecurve[table]'") from None
    root = pathlib.Path(data_dir).expanduser()
    found = [root] if root.is_file() else [root / p for p in sorted(glob.glob(files, root_dir=root))]
    paths = [path for path in found if path.name.endswith(_SUFFIXES)]
    if not paths:
        raise DataError(f"no files ({', '.join(_SUFFIXES)}) match {files!r} in {root}")
    if len(paths) > 1 and all(path.name.startswith(_PARTS) for path in paths):
        paths.sort(key=lambda path: next(i for i, part in enumerate(_PARTS) if path.name.startswith(part)))
        parts = [sum(path.name.startswith(part) for path in paths) for part in _PARTS]  # files of each
    else:
        parts = [len(paths), 0, 0]
    try:
        tables = [_read(path, delimiter, decimal, encoding, names) for path in paths]
        rows = concat_tables(tables, promote_options="permissive")  # one file's integers are another's floats
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{paths[0]} and so on can't be read: {error}{_way_out(str(error))}") from None
    if len(rows.column_names) == 1 and any(sign in rows.column_names[0] for sign in ",;|\t"):
        raise DataError(f"{paths[0]} has one column, {rows.column_names[0]!r}: say delimiter=';', or what it is")
    known = rows.column_names
    features = columns or [name for name in known if name != label and not _ROW_NUMBERS.fullmatch(name)]
    for name in (label, *features):
        if name not in known:
            headless = any(map(_is_number, known))
            way_out = ": if that is a row of values, say what they are, names=('width', ...)" if headless else ""
            raise DataError(f"there is no column {name!r}; there are {', '.join(known)}{way_out}")
    for name in known:
        if not columns and name != label and _ROW_NUMBERS.fullmatch(name):
            print(f"column {name!r}, the rows' names or numbers, is left out: columns=(...) says otherwise", flush=True)
    if label in features:
        raise DataError(f"column {label!r} is the label, and among those that are x: {', '.join(features)}")
    if not features or not len(rows):
        raise DataError(f"{paths[0]} and so on have {len(rows)} rows, and {len(features)} columns beside {label!r}")
    y, classes, names_of_classes = _column(rows, label, words)
    if regression and names_of_classes:
        raise DataError(f"column {label!r} has words, which are no numbers to predict: leave regression=True out")
    if regression:
        classes = None
    elif classes is not None and classes > len(rows):
        raise DataError(
            f"column {label!r} has integers up to {classes - 1} in {len(rows)} rows: say regression=True if they are "
            f"numbers to predict, or words=({label!r},) if they are names of classes"
        )
    x = _features(rows, features, words, len(paths))
    y = y.astype(np.float32)[:, None] if classes is None else y.astype(np.int32)
    if not parts[0] or not any(parts[1:]):
        kept, held = order.split(len(y), held_out)
        evaluation = Arrays(x[held], y[held]) if len(held) else None
        return Dataset(Arrays(x[kept], y[kept]), evaluation, classes, class_names=names_of_classes)
    ends = np.cumsum([0, *map(len, tables)])[np.cumsum(parts)]
    train, test, validation = (
        Arrays(*some) if count else None
        for some, count in zip(zip(np.split(x, ends[:-1]), np.split(y, ends[:-1]), strict=True), parts, strict=True)
    )
    assert train is not None
    return Dataset(train, validation if test is None else test, classes, validation, class_names=names_of_classes)


def _read(path: pathlib.Path, delimiter: str, decimal: str, encoding: str, names: tuple[str, ...]) -> Any:
    """A file's rows, under names without the spaces around them."""
    from pyarrow import csv, parquet

    if path.suffix == ".parquet":
        found = parquet.read_table(path)
    else:
        found = csv.read_csv(
            path,
            csv.ReadOptions(encoding=encoding, column_names=list(names) or None),
            csv.ParseOptions(delimiter=delimiter or ("\t" if ".tsv" in path.suffixes else ",")),
            csv.ConvertOptions(decimal_point=decimal),
        )
    stripped = [name.strip() for name in found.column_names]
    if twice := [name for name, times in collections.Counter(stripped).items() if times > 1]:
        raise ValueError(f"{path.name} has several columns {twice[0]!r}")
    return found.rename_columns(stripped)


def _features(rows: Any, names: Sequence[str], words: tuple[str, ...], files: int) -> npt.NDArray[np.float32]:
    """float32 (rows, names); what is doubtful of a column is said."""
    x = np.empty((len(rows), len(names)), np.float32)
    for i, name in enumerate(names):
        values = _column(rows, name, words)[0]
        x[:, i] = values
        if values.dtype.kind in "iu" and _counts(values, files):
            print(f"column {name!r} counts the rows: leave it out of columns=(...) if it is no measure", flush=True)
        if values.dtype.kind in "iu" and (values != x[:, i]).any():
            row = int(np.argmax(values != x[:, i]))
            print(
                f"column {name!r} has integers that float32, which x is, does not hold, such as {values[row]} in row "
                f"{row}, which is {x[row, i]:.0f}: of measures that may do, but several names become one",
                flush=True,
            )
    return x


def _way_out(words: str) -> str:
    """What may help where pyarrow can't read a file."""
    if "Expected 1 columns" in words:
        return "; say delimiter=';', or what it is; or is the first line no row?"
    return "; say encoding='latin-1', or what it is" if "codec can't decode" in words else ""


def _counts(values: npt.NDArray[Any], files: int) -> bool:
    """Whether each is one more than the one before, but where a file begins."""
    return len(values) > files + 1 and int(np.count_nonzero(np.diff(values) == 1)) >= len(values) - files


def _column(rows: Any, name: str, names: tuple[str, ...]) -> tuple[npt.NDArray[Any], int | None, list[str] | None]:
    """Values of a column, the number of classes if it has some, and their names if it has words."""
    column = rows[name]
    if column.null_count:
        missing = int(np.argmax(column.is_null().to_numpy()))
        raise DataError(f"column {name!r} has no value in row {missing}, and {column.null_count - 1} more")
    kind = str(column.type)
    if kind.removeprefix("large_") in ("string", "bool") or kind.startswith("dictionary"):
        column = column.cast(column.type.value_type) if kind.startswith("dictionary") else column
        chunks = column.dictionary_encode().chunks  # of one dictionary
        words, ranks = np.unique(chunks[0].dictionary.to_numpy(False).astype(str), return_inverse=True)
        places = ranks[np.concatenate([chunk.indices.to_numpy() for chunk in chunks])]
        numbers = np.array([_is_number(word) for word in words])
        if numbers.any() and name not in names:  # one '?' makes a column of numbers one of words
            row, other = int(np.argmax(~numbers[places])), words[~numbers]
            raise DataError(
                f"column {name!r} has numbers that are written as words"
                + (f", and {str(other[0])!r} among them, as in row {row}" if len(other) else "")
                + f": mend the file, or say words=({name!r},) if they are names"
            )
        return places, len(words), words.tolist()
    values = (column.cast("float64") if kind.startswith("decimal") else column).to_numpy()
    if name in names and values.dtype.kind in "iuf":
        numbers, places = np.unique(values, return_inverse=True)
        return places, len(numbers), [str(number) for number in numbers]
    if values.dtype.kind in "iu":
        return values, int(values.max()) + 1, None
    if values.dtype.kind != "f":
        raise DataError(f"column {name!r} is of {kind}, no number and no word: name those that are x (columns=...)")
    return values, None, None


def _is_number(word: str) -> bool:
    """Whether a word is written as a number, though as none that pyarrow reads: 1,234.5, $1000, 12 %."""
    try:
        return bool(np.isfinite(float(_AROUND_NUMBERS.sub("", word.strip()))))
    except ValueError:
        return False
