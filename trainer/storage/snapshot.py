"""What a save writes: the variables on the host, in copies that later steps leave as they are."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from trainer.storage.shards import Piece

Pieces = dict[str, list[Piece]]  # by path of the variable
# Returns what copies them, in any thread; the copies may be arrays of the backend's.
Copying = Callable[[Mapping[str, list[Piece]]], Callable[[], Pieces]]


class KeptCopies:
    """Copies by numpy, into memory that is used again: to be given memory takes longer than to fill it.

    On CPUs, what comes to the host may be the very memory that the next step writes to.
    """

    def __init__(self) -> None:
        self._kept: Pieces = {}

    def __call__(self, pieces: Mapping[str, list[Piece]]) -> Callable[[], Pieces]:
        """Waits for the devices; the copies are the arrays of the call before, with these values."""
        held = _each(pieces, np.asarray)

        def copy() -> Pieces:
            if not self._kept:
                self._kept = _each(held, np.empty_like)
            for path, of_variable in held.items():
                for kept, piece in zip(self._kept[path], of_variable, strict=True):
                    np.copyto(kept.values, piece.values)
            return self._kept

        return copy


def on_host(pieces: Mapping[str, list[Piece]]) -> Pieces:
    """The same as arrays of numpy."""
    return _each(pieces, np.asarray)


def _each(pieces: Mapping[str, list[Piece]], function: Callable[[Any], Any]) -> Pieces:
    return {
        path: [Piece(start, function(values)) for start, values in of_variable] for path, of_variable in pieces.items()
    }
