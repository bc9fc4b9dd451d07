"""Files of text as one sequence of tokens: bytes, or those of a tokenizer that lies on this machine."""

import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from input_pipeline.source import DataError

_EXTRA = "pip install 'onecurve[text]'"


class Tokens(NamedTuple):
    """How text becomes tokens, and comes back.

    Attributes:
      encode: files -> uint8 or int32 (tokens,), with a zero byte or an end token between two of them.
      classes: number of tokens that there are.
      decode: tokens -> text.
    """

    encode: Callable[[Sequence[pathlib.Path]], npt.NDArray[np.integer]]
    classes: int
    decode: Callable[[npt.NDArray[np.integer]], str]


@functools.cache  # so that a mixture sees whether its parts have the same
def made_by(tokenizer: str) -> Tokens:
    """Tokens by a tokenizer.

    Args:
      tokenizer: the file of a SentencePiece model, the directory of a preset that KerasHub has saved, or '' for bytes.

    Raises:
      DataError: it is neither, or what reads it is not installed.
    """
    if not tokenizer:
        return Tokens(_bytes, 256, _text)
    path = pathlib.Path(tokenizer).expanduser()
    return _keras_hub(path) if path.is_dir() else _sentence_piece(path)


def _bytes(paths: Sequence[pathlib.Path]) -> npt.NDArray[np.integer]:
    return np.frombuffer(b"\0".join(p.read_bytes() for p in paths), np.uint8)


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
    return _by(
        lambda text: model.encode(text, add_eos=True), model.vocab_size(), lambda tokens: model.decode(tokens.tolist())
    )


def _keras_hub(path: pathlib.Path) -> Tokens:
    try:
        import keras_hub
    except ImportError:
        raise DataError(f"to read a preset's tokens, KerasHub is needed: {_EXTRA}") from None
    try:
        model = keras_hub.tokenizers.Tokenizer.from_preset(str(path))
    except (OSError, ValueError) as error:
        raise DataError(f"tokenizer '{path}' is no preset of KerasHub: {error}") from None
    end = [] if getattr(model, "end_token_id", None) is None else [model.end_token_id]
    return _by(lambda text: [*np.asarray(model.tokenize(text)), *end], model.vocabulary_size(), model.detokenize)


def _by(encode: Callable[[str], Sequence[int]], classes: int, decode: Callable[[Any], Any]) -> Tokens:
    def of_files(paths: Sequence[pathlib.Path]) -> npt.NDArray[np.integer]:
        texts = (path.read_text("utf-8", errors="replace") for path in paths)
        return np.concatenate([np.asarray(encode(text), np.int32) for text in texts])

    return Tokens(of_files, classes, lambda tokens: str(decode(tokens)))
