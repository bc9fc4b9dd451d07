"""Initial weights that no backend and no device has a part in: Keras's initializers, drawing on the host by numpy.

JAX and TensorFlow draw other numbers from one seed. And JAX compiles a program for each shape, which takes longer than
to draw: a third of a second a layer on a CPU, and a thirtieth for zeros.
"""

import concurrent.futures
import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import keras
import keras.src.initializers.random_initializers as keras_initializers
import numpy as np
import numpy.typing as npt
from keras.src.backend import random as of_backend
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from keras.src.random.seed_generator import draw_seed

from trainer.storage.shards import dtype as dtype_of

_BLOCK = 2**20  # numbers from a generator of their own, so that all cores can share in a variable
Numbers = npt.NDArray[np.floating[Any]]


@contextlib.contextmanager
def on_host() -> Iterator[None]:
    """Within it, Keras's initializers return numpy arrays: zeros, ones, and numbers that follow from seeds alone.

    So do the numbers that a user's own draw by keras.random, in tensors.
    """
    with contextlib.ExitStack() as stack:
        for owner, name, stand_in in (
            (keras_initializers, "random", _Host()),
            (keras_initializers.Orthogonal, "__call__", _orthogonal),
            (keras.initializers.Zeros, "__call__", functools.partialmethod(_constant, 0)),
            (keras.initializers.Ones, "__call__", functools.partialmethod(_constant, 1)),
            *((of_backend, name, _in_tensors(name)) for name in ("normal", "truncated_normal", "uniform", "randint")),
        ):
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        yield


def _in_tensors(name: str) -> Callable[..., Any]:
    """What stands for one of keras.random's functions, but where a layer's call() is traced."""
    of_trace, host = getattr(of_backend, name), getattr(_Host(), name)

    def draw(*args: Any, **kwargs: Any) -> Any:
        traced = in_stateless_scope() or in_symbolic_scope()
        return of_trace(*args, **kwargs) if traced else keras.ops.convert_to_tensor(host(*args, **kwargs))

    return draw


class _Host:
    """Stands where Keras's initializers look for the random numbers of a backend; arguments as of keras.random."""

    def __getattr__(self, name: str) -> Any:
        return getattr(of_backend, name)

    def normal(
        self, shape: Sequence[int], mean: float = 0.0, stddev: float = 1.0, dtype: Any = None, seed: Any = None
    ) -> Numbers:
        return _drawn(shape, dtype, seed, _normal, stddev, mean)

    def truncated_normal(
        self, shape: Sequence[int], mean: float = 0.0, stddev: float = 1.0, dtype: Any = None, seed: Any = None
    ) -> Numbers:
        return _drawn(shape, dtype, seed, _truncated_normal, stddev, mean)

    def uniform(
        self, shape: Sequence[int], minval: float = 0.0, maxval: float = 1.0, dtype: Any = None, seed: Any = None
    ) -> Numbers:
        return _drawn(shape, dtype, seed, _uniform, maxval - minval, minval)

    def randint(
        self, shape: Sequence[int], minval: int, maxval: int, dtype: Any = "int32", seed: Any = None
    ) -> npt.NDArray[np.integer[Any]]:
        return _generator(_words(seed)).integers(minval, maxval, shape).astype(_dtype(dtype))


def _orthogonal(initializer: Any, shape: Sequence[int], dtype: Any = None) -> Numbers:
    """Stands where Keras's Orthogonal is called (Saxe et al. 2014, arXiv:1312.6120).

    In float64, whose rounding is the same whichever library has factorized the matrix; and not every backend can in
    16 bits.
    """
    if len(shape) < 2:
        raise ValueError(f"Orthogonal is for variables of two dimensions and more; it was given the shape {shape}")
    rows, columns = math.prod(shape[:-1]), shape[-1]
    numbers = _Host().normal((max(rows, columns), min(rows, columns)), dtype="float32", seed=initializer.seed)
    q, r = np.linalg.qr(numbers.astype(np.float64))
    q *= np.sign(np.diag(r))  # or not all rotations would be equally likely
    found = initializer.gain * (q.T if rows < columns else q).reshape(shape)
    return found.astype(_dtype(dtype))


def _constant(initializer: Any, value: int, shape: Sequence[int], dtype: Any = None) -> npt.NDArray[Any]:
    """Stands where Keras's Zeros and Ones are called."""
    return np.full(shape, value, _dtype(dtype))


def _normal(generator: np.random.Generator, numbers: Numbers) -> None:
    generator.standard_normal(out=numbers, dtype=numbers.dtype)


def _truncated_normal(generator: np.random.Generator, numbers: Numbers) -> None:
    """Drawn again where beyond two standard deviations."""
    _normal(generator, numbers)
    while (beyond := np.flatnonzero(np.abs(numbers) > 2)).size:
        numbers[beyond] = generator.standard_normal(beyond.size, numbers.dtype)


def _uniform(generator: np.random.Generator, numbers: Numbers) -> None:
    generator.random(out=numbers, dtype=numbers.dtype)


def _dtype(name: Any) -> np.dtype[Any]:
    return dtype_of(keras.backend.standardize_dtype(name or keras.config.floatx()))


def _drawn(
    shape: Sequence[int],
    dtype: Any,
    seed: Any,
    draw: Callable[[np.random.Generator, Numbers], None],
    scale: float,
    offset: float,
) -> Numbers:
    """Numbers drawn into an array, times `scale`, plus `offset`.

    Args:
      shape, dtype: of the result.
      seed: an int, or a keras.random.SeedGenerator, which goes on.
      draw: fills a part.
    """
    wanted, words = _dtype(dtype), _words(seed)
    numbers: Numbers = np.empty(math.prod(shape), np.float64 if wanted == np.float64 else np.float32)

    def fill(start: int) -> None:
        part = numbers[start : start + _BLOCK]
        draw(_generator([*words, start]), part)
        part *= scale
        part += offset

    with concurrent.futures.ThreadPoolExecutor() as threads:
        list(threads.map(fill, range(0, numbers.size, _BLOCK)))
    return numbers.reshape(shape).astype(wanted, copy=False)


def _words(seed: Any) -> list[int]:
    words = [seed, 0] if isinstance(seed, int) else keras.ops.convert_to_numpy(draw_seed(seed))
    return [int(word) % 2**32 for word in words]


def _generator(words: Sequence[int]) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(words)))
