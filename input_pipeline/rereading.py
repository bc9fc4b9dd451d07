"""Whether examples that are read again are the same, and read by several threads at once."""

import itertools
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from input_pipeline import order
from input_pipeline.given import Batches, Items
from input_pipeline.source import DataError, Example, Source, checked, is_streamed, read
from input_pipeline.structure import flatten

_THREADS = 4
# For which threads read beside each other: of those that share an open file, some then read astray.
_SECONDS, _OF_A_CORE = 0.1, 0.02  # at least, and by each thread
_AT_MOST = 0.3  # where others keep the cores busy, or reads wait for a disk
Changed = Callable[[npt.NDArray[np.int64]], list[Any]]


def check_same(source: Source, augment: Callable[[Example, Any], Example] | None = None) -> None:
    """Reads some examples again, in another order and company, and by several threads; changes them by the same keys.

    Raises:
      DataError: they are others then. A run could not go on with them after a start, and readers beside each other
        would change them.
    """

    def changed(ids: npt.NDArray[np.int64]) -> list[Any]:
        example = read(source, ids)
        if augment:
            example = checked(augment(example, order.fold(0, ids)), ids, "augment(example, keys)")
        return flatten(example)

    few = np.arange(min(len(source), 4))
    first = changed(few)
    for ids in [few] if is_streamed(source) else [few[::-1], few[-1:]]:
        again = changed(ids)
        if all(_close(a[ids], b) for a, b in zip(first, again, strict=True)):
            continue
        if all(map(_close, first, again)):
            raise DataError(
                f"read({ids.tolist()}) gives examples in another order: row i is to be the example of ids[i]. Where a "
                "file wants them sorted: needed, where = np.unique(ids, return_inverse=True), and file[needed][where]"
            )
        raise DataError(
            f"examples {ids.tolist()} are others when they are read again. A source is a function of the id: draw "
            "what changes from pass to pass in the dataset's `augment`, by its keys; shuffle a tf.data.Dataset "
            "once, by .shuffle(n, seed=0, reshuffle_each_iteration=False) (of folders by Keras: shuffle=False); "
            "return a new array each time, not one that is filled anew"
        )
    theirs = [each for each in (source, augment) if each is not None and not _is_ours(each)]
    if theirs and not is_streamed(source):
        _check_beside(changed, np.unique(np.linspace(0, len(source) - 1, _THREADS).astype(np.int64)))


def _is_ours(thing: Any) -> bool:
    return not isinstance(thing, Batches | Items) and thing.__module__.startswith(f"{__package__}.")


def _check_beside(changed: Changed, ids: npt.NDArray[np.int64]) -> None:
    """Reads examples, far from each other, by threads that take turns as often as they can.

    Raises:
      DataError: some are others then, or can't be read.
    """
    known = [changed(ids[[i]]) for i in range(len(ids))]
    begun, interval = time.monotonic(), sys.getswitchinterval()

    def reads_astray(thread: int) -> bool:
        busy = time.thread_time()
        for i in itertools.cycle(np.roll(range(len(ids)), thread)):
            for a, b in zip(known[i], changed(ids[[i]]), strict=True):
                if not (np.array_equal(a, b) or _close(a, b)):
                    return True
            passed = time.monotonic() - begun
            if passed > (_SECONDS if time.thread_time() - busy > _OF_A_CORE else _AT_MOST):
                return False
        return False

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(_THREADS) as threads:
            reason = "are others" if any(threads.map(reads_astray, range(_THREADS))) else ""
    except Exception as error:  # whatever a read() may raise
        reason = f"can't be read ({type(error).__name__}: {error})"
    finally:
        sys.setswitchinterval(interval)
    if reason:
        raise DataError(
            f"examples {reason} when several threads read at once, as a run's do: one moves what another reads from. "
            "Open files in read(), or one for each thread (threading.local()); or hold a threading.Lock() in read(); "
            "or let input_pipeline.processes.Processes read it"
        )


def _close(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    """Equal, but for the rounding of floats: a product of matrices rounds by how many rows it has."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    if a.dtype.kind not in "fcV":  # V: bfloat16
        return np.array_equal(a, b)
    a, b = a.astype(np.complex128), b.astype(np.complex128)  # which holds any of these numbers
    scale = np.max(np.abs(a), initial=0.0, where=np.isfinite(a))
    return np.allclose(a, b, 1e-4, 1e-4 * float(scale), equal_nan=True)
