"""Files of text as one sequence of tokens: bytes, or those of a tokenizer that lies on this machine."""

import functools
import hashlib
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from input_pipeline import documents, host_cache, lengthy, token_file
from input_pipeline.checksums import Checked
from input_pipeline.source import DataError
from input_pipeline.token_file import Encoder

_EXTRA = "pip install 'onecurve[text]'"
_READ = 2**26  # bytes of a file that are read at once


class Tokens(NamedTuple):
    """How text becomes tokens, and comes back.

    Attributes:
      encode: files, and which field of theirs is the text (see documents.parts()) -> uint8, uint16 or int32 (tokens,),
        with a zero byte or an end token between two documents.
      classes: number of tokens that there are.
      decode: tokens -> text.
    """

    encode: Callable[[Sequence[pathlib.Path], str], npt.NDArray[np.integer] | Checked]
    classes: int
    decode: Callable[[npt.NDArray[np.integer]], str]


@functools.cache  # so that a mixture sees whether its parts have the same
def made_by(tokenizer: str) -> Tokens:
    """Tokens by a tokenizer, which are made once, and kept; see token_file.

    Args:
      tokenizer: the file of a SentencePiece model, the directory of a preset that KerasHub has saved, or '' for bytes.

    Raises:
      DataError: it is neither, or what reads it is not installed.
    """
    if not tokenizer:
        return Tokens(_bytes, 256, _text)
    path = pathlib.Path(tokenizer).expanduser()
    return _keras_hub(path) if path.is_dir() else _sentence_piece(path)


def _bytes(paths: Sequence[pathlib.Path], field: str) -> npt.NDArray[np.integer] | Checked:
    if not documents.are_plain(paths, field):
        encoder = Encoder(lambda text: np.frombuffer(text.encode(), np.uint8), 256, 0, "bytes")
        return token_file.encoded(encoder, paths, field)
    sizes = [path.stat().st_size for path in paths]
    ends = np.cumsum([size + 1 for size in sizes])
    joined = np.zeros(ends[-1] - 1, np.uint8)
    view = memoryview(joined.data)
    for path, end, size in zip(paths, ends.tolist(), sizes, strict=True):
        with open(path, "rb") as file:
            for begin in range(end - 1 - size, end - 1, _READ):
                lengthy.tell(f"reading text: {begin >> 20:,} of {len(joined) >> 20:,} MiB")
                part = view[begin : min(begin + _READ, end - 1)]
                if file.readinto(part) != len(part):
                    raise DataError(f"{path} has become shorter while it was read")
    return joined


def _text(tokens: npt.NDArray[np.integer]) -> str:
    return tokens.astype(np.uint8).tobytes().decode(errors="replace")


def _sentence_piece(path: pathlib.Path) -> Tokens:
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError:
        raise DataError(f"to read tokens, SentencePiece is needed: {_EXTRA}") from None
    try:
        model = SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError) as error:
        raise DataError(f"tokenizer '{path}' is no model of SentencePiece: {error}") from None
    end = model.eos_id() if model.eos_id() >= 0 else None
    version = hashlib.sha256(path.read_bytes()).hexdigest()
    encoder = Encoder(model.encode, model.vocab_size(), end, version)
    return _by(encoder, lambda tokens: model.decode(tokens.tolist()))


def _keras_hub(path: pathlib.Path) -> Tokens:
    try:
        import keras_hub
    except ImportError:
        raise DataError(f"to read a preset's tokens, KerasHub is needed: {_EXTRA}") from None
    try:
        model = keras_hub.tokenizers.Tokenizer.from_preset(str(path))
    except (OSError, ValueError) as error:
        raise DataError(f"tokenizer '{path}' is no preset of KerasHub: {error}") from None
    version = [[str(p.relative_to(path)), *host_cache.state(p)] for p in sorted(path.rglob("*")) if p.is_file()]
    encoder = Encoder(model.tokenize, model.vocabulary_size(), getattr(model, "end_token_id", None), version)
    return _by(encoder, model.detokenize)


def _by(encoder: Encoder, decode: Callable[[Any], Any]) -> Tokens:
    encode = functools.partial(token_file.encoded, encoder)
    return Tokens(encode, encoder.classes, lambda tokens: str(decode(tokens)))
