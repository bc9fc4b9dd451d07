"""Tokens of texts, made once by one process of a host, and kept in a file for the others and for later starts."""

import contextlib
import hashlib
import itertools
import json
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from input_pipeline import checksums, documents, host_cache, lengthy
from input_pipeline.ahead import in_order
from input_pipeline.checksums import Checked
from input_pipeline.documents import Part
from input_pipeline.source import DataError

_SAVE_EVERY = 10.0  # seconds after which a kill need not begin anew
_FOOTER = 2**10  # bytes that are enough for the last line


class Encoder(NamedTuple):
    """A tokenizer.

    Attributes:
      encode: text -> tokens.
      classes: number of tokens that there are.
      end: the token after each document, if there is one.
      version: which it is.
    """

    encode: Callable[[str], Any]
    classes: int
    end: int | None
    version: Any

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest that holds its tokens."""
        return np.dtype(np.uint16 if self.classes <= 2**16 else np.int32)


def encoded(encoder: Encoder, paths: Sequence[pathlib.Path], field: str = "") -> Checked:
    """The tokens of documents, one after another.

    They are kept in this host's cache, in the order of the files, and made anew where a file or the tokenizer is
    another than it was. A file is encoded in parts of a megabyte, each of which ends with a line. Of several processes
    one makes them; one that is killed meanwhile is gone on with.

    Args:
      encoder: the tokenizer.
      paths, field: of the documents, see documents.parts().

    Raises:
      DataError: a file can't be read, or there is no place for their tokens.
    """
    names = json.dumps([encoder.version, [str(path.absolute()) for path in paths], *filter(None, [field])])
    whole = host_cache.directory() / f"{hashlib.sha256(names.encode()).hexdigest()[:16]}.tokens"
    part = whole.with_suffix(".part")
    texts = hashlib.sha256(json.dumps([names, [host_cache.state(path) for path in paths]]).encode()).hexdigest()

    def made() -> str:
        with contextlib.suppress(OSError):  # it has just got its name
            return f"making tokens of text: {part.stat().st_size >> 20:,} MiB are made"
        return "making tokens of text"

    found = _kept(whole, texts, encoder)
    if found is None:
        with lengthy.alone(whole.with_suffix(".lock"), made):
            found = _kept(whole, texts, encoder)  # another process may have made them meanwhile
            if found is None:
                try:
                    _make(part, texts, encoder, paths, field)
                    os.replace(part, whole)
                except OSError as error:
                    raise DataError(
                        f"tokens can't be kept in {part} ({error}): set XDG_CACHE_HOME to a place with room for them"
                    ) from None
                found = _kept(whole, texts, encoder)
    assert found is not None
    return found


def _kept(path: pathlib.Path, texts: str, encoder: Encoder) -> Checked | None:
    """The tokens in a file, if it is there, and they are of these texts."""
    try:
        with open(path, "rb") as file:
            file.seek(-min(_FOOTER, path.stat().st_size), os.SEEK_END)
            last = json.loads(file.read().splitlines()[-1])
        if last["texts"] != texts:
            return None
    except (OSError, ValueError, LookupError, TypeError):
        return None
    length, size = last["tokens"], encoder.dtype.itemsize
    sums = np.fromfile(path, np.uint32, checksums.count(length, size), offset=length * size)
    return Checked(path, _mapped(path, encoder, length), sums, "tokens")


def _mapped(path: pathlib.Path, encoder: Encoder, length: int) -> npt.NDArray[np.integer]:
    return np.memmap(path, encoder.dtype, "r", shape=(length,)) if length else np.zeros(0, encoder.dtype)


def _make(path: pathlib.Path, texts: str, encoder: Encoder, paths: Sequence[pathlib.Path], field: str) -> None:
    """Writes the tokens, their checksums, and a line of JSON: of which texts they are, and how many."""
    notes = path.with_suffix(".json")

    def encode(part: Part) -> tuple[int, npt.NDArray[np.integer]]:
        return sum(len(text.encode()) for text in part.texts), _tokens(encoder, part)

    since, of_all = time.monotonic(), ""
    if documents.are_plain(paths, field):  # else nobody knows how much text it is
        of_all = f" of {sum(p.stat().st_size for p in paths) >> 20:,}"
    done, length, read = _noted(notes, texts) if path.exists() else (0, 0, 0)
    with open(path, "r+b" if done else "wb") as file:
        file.truncate(length * encoder.dtype.itemsize)  # what was written after the last note
        file.seek(0, os.SEEK_END)
        left = itertools.islice(documents.parts(paths, field), done, None)
        for size, tokens in in_order(encode, left, 0):
            read += size
            lengthy.tell(f"making tokens of text: {read >> 20:,}{of_all} MiB")
            file.write(tokens.tobytes())
            done, length = done + 1, length + len(tokens)
            if time.monotonic() - since > _SAVE_EVERY:
                _flush(file)
                _note(notes, [texts, done, length, read])
                since = time.monotonic()
        file.flush()
        file.write(checksums.sums(_mapped(path, encoder, length), "tokens").tobytes())
        file.write(b"\n" + json.dumps({"texts": texts, "tokens": length}).encode() + b"\n")
        _flush(file)
    notes.unlink(missing_ok=True)


def _tokens(encoder: Encoder, part: Part) -> npt.NDArray[np.integer]:
    """Those of a part, and after each document the one that ends it."""
    end = [] if encoder.end is None else [encoder.end]
    found: list[Any] = [np.zeros(0, np.int64)]
    for number, text in enumerate(part.texts, 1):
        found += [encoder.encode(text), end if part.ends or number < len(part.texts) else []]
    tokens = np.concatenate([np.asarray(each, np.int64) for each in found])
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < encoder.classes:
        raise DataError(
            f"the tokenizer made tokens from {tokens.min()} to {tokens.max()}, and says that it has {encoder.classes}"
        )
    return tokens.astype(encoder.dtype)


def _flush(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _note(notes: pathlib.Path, done: list[Any]) -> None:
    beside = notes.with_suffix(".note")
    beside.write_text(json.dumps(done))
    os.replace(beside, notes)


def _noted(notes: pathlib.Path, texts: str) -> tuple[int, int, int]:
    """Of how many parts the tokens are written, how many these are, and of how many bytes of text."""
    try:
        of, parts, tokens, read = json.loads(notes.read_text())
    except (OSError, ValueError):
        return 0, 0, 0
    return (parts, tokens, read) if of == texts else (0, 0, 0)
