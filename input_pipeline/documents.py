"""Files of text as documents: a plain file is one; of lines of JSON and of the rows of CSV and Parquet, each is."""

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import pathlib
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TextIO

from input_pipeline.source import DataError

_PART = 2**20  # characters that a tokenizer is given at once, and the rest of their line: it takes 30 times the memory
_COLUMNS = ".parquet"
_SEPARATED = {".csv": ",", ".tsv": "\t"}
_COMPRESSED: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_MARK = "\ufeff"  # of the order of bytes, which some programs write first
_NEEDED = "it needs pyarrow: pip install 'onecurve[table]'"


class Part(NamedTuple):
    """Some text of a file.

    Attributes:
      texts: of one document each; all but the last go to its end.
      ends: whether the last does, too.
    """

    texts: list[str]
    ends: bool


def are_plain(paths: Sequence[pathlib.Path], field: str) -> bool:
    """Whether files are documents just as they are: neither compressed, nor lines or rows of some."""
    return not field and not any(path.suffix in (*_COMPRESSED, ".zst", _COLUMNS) for path in paths)


def parts(paths: Sequence[pathlib.Path], field: str) -> Iterator[Part]:
    """The texts of files, about a megabyte at a time.

    Args:
      paths: files, perhaps compressed (.gz, .bz2, .xz, .zst).
      field: where documents are lines of JSON, or rows of .csv, .tsv or .parquet: which of their fields is the text.

    Raises:
      DataError: a file can't be read, or has no such field.
    """
    for path in paths:
        try:
            yield from _of_documents(_documents(path, field)) if field else _of_file(path)
        except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
            raise DataError(f"{path} can't be read: {error}") from None


def _of_file(path: pathlib.Path) -> Iterator[Part]:
    """Parts that end with a line."""
    if path.suffix == _COLUMNS:
        raise DataError(f"{path} has columns: say which is the text, as in text(field='text')")
    with _opened(path) as file:
        text, ends = _read(file), False
        while not ends:
            following = _read(file)
            ends = not following
            yield Part([text], ends)
            text = following


def _read(file: TextIO) -> str:
    return file.read(_PART) + file.readline(_PART)


def _of_documents(documents: Iterator[str]) -> Iterator[Part]:
    texts, size = list[str](), 0
    for text in documents:
        texts.append(text.encode(errors="replace").decode())  # JSON may have halves of characters
        size += len(text)
        if size >= _PART:
            yield Part(texts, ends=True)
            texts, size = [], 0
    yield Part(texts, ends=True)


def _documents(path: pathlib.Path, field: str) -> Iterator[str]:
    kind = pathlib.Path(path.stem).suffix if path.suffix in (*_COMPRESSED, ".zst") else path.suffix
    if kind in _SEPARATED:
        found = _separated(path, field, _SEPARATED[kind])
    else:
        found = _rows(path, field) if kind == _COLUMNS else _lines(path, field)
    for place, text in found:
        if not isinstance(text, str):
            raise DataError(f"{path}, {place}: there is no text {field!r}, but {str(text)[:40]!r}")
        yield text


def _lines(path: pathlib.Path, field: str) -> Iterator[tuple[str, Any]]:
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            if (line := line.removeprefix(_MARK)).strip():
                place = f"line {number}"
                try:
                    yield place, json.loads(line)[field]
                except (ValueError, LookupError, TypeError):
                    raise DataError(f"{path}, {place} is no JSON object that has {field!r}: {line[:40]!r}") from None


def _separated(path: pathlib.Path, field: str, separator: str) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(2**31 - 1)  # of characters: a document may be longer than 131,072
    with _opened(path, newline="") as file:
        rows = csv.reader(file, delimiter=separator)
        try:
            names = [name.removeprefix(_MARK).strip() for name in next(rows, [])]
            if field not in names:
                raise DataError(f"{path}: there is no column {field!r}, but {', '.join(names)}")
            column = names.index(field)
            for number, row in enumerate(filter(None, rows), 1):
                if len(row) != len(names):
                    raise DataError(f"{path}, row {number} has {len(row)} columns, and the first {len(names)} names")
                yield f"row {number}", row[column]
        except csv.Error as error:
            raise DataError(f"{path} can't be read: {error}") from None


def _rows(path: pathlib.Path, field: str) -> Iterator[tuple[str, Any]]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise DataError(f"to read {path}, {_NEEDED}") from None
    try:
        file, first = parquet.ParquetFile(path), 0
        if field not in (names := file.schema_arrow.names):
            raise LookupError(f"there is no column {field!r}, but {', '.join(names)}")
        for batch in file.iter_batches(1024, columns=[field]):
            for number, text in enumerate(batch.column(0).to_pylist(), first):
                yield f"row {number}", text
            first += len(batch)
    except (ValueError, LookupError) as error:  # pyarrow's own are some
        raise DataError(f"{path} can't be read: {error}") from None


def _opened(path: pathlib.Path, newline: str | None = None) -> TextIO:
    file = _decompressed(path)
    if file.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        raise DataError(f"{path} is text in UTF-16, of which nothing would be left: write it in UTF-8")
    return io.TextIOWrapper(file, encoding="utf-8", errors="replace", newline=newline)


def _decompressed(path: pathlib.Path) -> Any:
    """A file's bytes, of which one may peek at the first."""
    if path.suffix != ".zst":
        return _COMPRESSED.get(path.suffix, open)(path, "rb")
    try:
        import pyarrow
    except ImportError:
        raise DataError(f"to read {path}, {_NEEDED}") from None
    return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))
