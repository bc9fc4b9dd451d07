"""Random numbers in a step that no backend has a part in: Keras's random functions, over the bits of one generator.

JAX and TensorFlow draw other numbers from one seed, and so does TensorFlow's XLA: masks of dropout, and with them the
curve, would be another on each. The bits are Philox's on both (see strategies/philox.py); what is made of them is here.
"""

import contextlib
import functools
import itertools
import math
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import keras.src.random.seed_generator as keras_seeds
import numpy as np
from keras import ops
from keras.src.backend import random as of_backend
from keras.src.random.seed_generator import draw_seed

from trainer.objective.patched import patched

Tensor = Any  # of the backend
GOLDEN = 0x9E3779B9  # of 2**32: its multiples lie far from one another
_TRIES = 8  # of a rejection sampler: less than one number in 10**10 needs more, and is then the first
_DIGITS = {"bfloat16": 7, "float16": 10}  # binary ones of a fraction, so that none is rounded up to 1


class Generator(NamedTuple):
    """What a backend computes for it.

    Attributes:
      bits: (shape, key uint32 (2,)) -> uint32 numbers of that shape; on TensorFlow, sizes may be tensors.
      gamma_derivative: (alpha, samples), both float32 of one shape -> that of gamma variates by alpha
        (Figurnov et al. 2018, "Implicit reparameterization gradients").
    """

    bits: Callable[[Sequence[Any], Tensor], Tensor]
    gamma_derivative: Callable[[Tensor, Tensor], Tensor]


def is_seed(variable: keras.Variable) -> bool:
    """Whether it is the state of a layer's seed generator."""
    return str(variable.name) == "seed_generator_state"


@contextlib.contextmanager
def drawn_from(generator: Generator) -> Iterator[None]:
    """Within it, what layers draw by keras.random follows from their seeds and from `generator` alone."""
    ours = Random(generator)
    with contextlib.ExitStack() as stack:
        for name in vars(Random):
            if not name.startswith("_"):
                stack.enter_context(patched(of_backend, name, getattr(ours, name)))
        yield


@contextlib.contextmanager
def keyed(key: Tensor, first: int = 0) -> Iterator[None]:
    """Within it all draws follow from a key: of metrics that do, as those of rankings do for their ties.

    Args:
      key: uint32 (2,).
      first: the number of the first draw, which makes another key of it for each.
    """
    numbers = itertools.count(first)

    def following(of: Any, ordered: bool = True) -> Tensor:
        return ops.cast(key, "uint32") + ops.convert_to_tensor([next(numbers) * GOLDEN % 2**32, 0], "uint32")

    without = types.SimpleNamespace(next=functools.partial(following, None))
    with patched(keras_seeds, "global_seed_generator", lambda: without):
        with patched(keras.random.SeedGenerator, "next", following):
            yield


class Random:
    """Keras's random functions."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    def uniform(
        self, shape: Sequence[Any], minval: Any = 0.0, maxval: Any = 1.0, dtype: Any = None, seed: Any = None
    ) -> Tensor:
        """As keras.random.uniform; multiples of 2**-23 of the range, 2**-10 in float16, 2**-7 in bfloat16."""
        dtype = keras.backend.standardize_dtype(dtype or keras.config.floatx())
        digits = _DIGITS.get(dtype, 23)
        fraction = ops.cast(ops.right_shift(self._bits(shape, seed), 32 - digits), dtype) * 2.0**-digits
        low, high = ops.cast(minval, dtype), ops.cast(maxval, dtype)
        return fraction * (high - low) + low

    def normal(
        self, shape: Sequence[Any], mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = None, seed: Any = None
    ) -> Tensor:
        """As keras.random.normal, by Box and Muller (1958), of whose two numbers one is taken: any shape will do."""
        dtype = dtype or keras.config.floatx()
        u, v = ops.unstack(self.uniform((2, *shape), dtype="float32", seed=seed), 2)
        return ops.cast(_normal(1.0 - u, v), dtype) * stddev + mean

    def truncated_normal(
        self, shape: Sequence[Any], mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = None, seed: Any = None
    ) -> Tensor:
        """As keras.random.truncated_normal, within two standard deviations: by the inverse of the distribution."""
        dtype, end = dtype or keras.config.floatx(), math.erf(math.sqrt(2.0))
        return (
            ops.cast(math.sqrt(2.0) * ops.erfinv(self.uniform(shape, -end, end, "float32", seed)), dtype) * stddev
            + mean
        )

    def randint(self, shape: Sequence[Any], minval: Any, maxval: Any, dtype: Any = "int32", seed: Any = None) -> Tensor:
        """As keras.random.randint, of up to 2**32 numbers, of which some come up more often by n / 2**32 of n."""
        return ops.cast(ops.mod(self._bits(shape, seed), ops.cast(maxval - minval, "uint32")), dtype) + ops.cast(
            minval, dtype
        )

    def categorical(self, logits: Tensor, num_samples: int, dtype: Any = "int32", seed: Any = None) -> Tensor:
        """As keras.random.categorical: (batch, classes) -> (batch, num_samples), the largest after Gumbel's noise."""
        batch, classes = ops.shape(logits)
        noise = -ops.log(-ops.log(self.uniform((batch, num_samples, classes), dtype="float32", seed=seed)))
        return ops.cast(ops.argmax(ops.expand_dims(ops.cast(logits, "float32"), 1) + noise, axis=-1), dtype)

    def dropout(
        self, inputs: Tensor, rate: float, noise_shape: Sequence[Any] | None = None, seed: Any = None
    ) -> Tensor:
        """As keras.random.dropout."""
        if rate == 0:
            return inputs
        if rate == 1:
            return ops.zeros_like(inputs)
        shape = ops.shape(inputs)
        if noise_shape is not None:
            shape = [of_input if size is None else size for size, of_input in zip(noise_shape, shape, strict=True)]
        kept = ops.greater_equal(self._bits(shape, seed), np.uint32(rate * 2**32))
        # By a factor, for compilers make one of a divisor, which rounds otherwise.
        return ops.where(kept, inputs * (1 / (1 - rate)), 0.0)

    def gamma(self, shape: Sequence[Any], alpha: Any, dtype: Any = None, seed: Any = None) -> Tensor:
        """As keras.random.gamma, with gradients to a tensor `alpha`."""
        return ops.cast(ops.exp(self._log_gammas(shape, [alpha], seed)[0]), dtype or keras.config.floatx())

    def beta(self, shape: Sequence[Any], alpha: Any, beta: Any, dtype: Any = None, seed: Any = None) -> Tensor:
        """As keras.random.beta, x / (x + y) of two gamma variates, with gradients to tensors `alpha` and `beta`."""
        log_x, log_y = ops.unstack(self._log_gammas(shape, [alpha, beta], seed), 2)
        return ops.cast(ops.sigmoid(log_x - log_y), dtype or keras.config.floatx())

    def binomial(
        self, shape: Sequence[Any], counts: Any, probabilities: Any, dtype: Any = None, seed: Any = None
    ) -> Tensor:
        """As keras.random.binomial, of up to 2**24 trials: by their medians (Devroye 1986, X.4.3).

        Of n uniform numbers, the median is drawn; as it lies beyond the probability or not, one half is known.
        """
        least = 2.0**-24
        rounds = int(np.max(counts)).bit_length() or 1 if _is_constant(counts) else 25
        keys = self._bits((rounds, 2), seed)
        n, p = (ops.zeros(shape, "float32") + ops.cast(x, "float32") for x in (counts, probabilities))

        def halve(step: Tensor, state: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            successes, n, p = state
            rank = ops.floor((n + 1) / 2)
            alphas = [ops.maximum(rank, 1.0), ops.maximum(n + 1 - rank, 1.0)]
            log_x, log_y = ops.unstack(self._log_gammas(shape, alphas, ops.take(keys, step, axis=0), learned=False), 2)
            median = ops.sigmoid(log_x - log_y)
            below = median < p
            return (
                successes + ops.where(below, rank, 0.0),
                ops.where(below, n - rank, ops.maximum(rank - 1, 0.0)),
                ops.where(below, (p - median) / ops.maximum(1 - median, least), p / ops.maximum(median, least)),
            )

        successes, *_ = ops.fori_loop(0, rounds, halve, (ops.zeros_like(n), n, p))
        return ops.cast(ops.where(p < 1, successes, n), dtype or keras.config.floatx())

    def shuffle(self, x: Tensor, axis: int = 0, seed: Any = None) -> Tensor:
        """As keras.random.shuffle."""
        return ops.take(x, ops.argsort(self.uniform((ops.shape(x)[axis],), dtype="float32", seed=seed)), axis=axis)

    def _log_gammas(
        self, shape: Sequence[Any], alphas: Sequence[Any], seed: Any, learned: bool | None = None
    ) -> Tensor:
        """Logarithms of gamma variates (alphas, *shape), by Marsaglia and Tsang (2000).

        That of d times a cubed number, the first that is kept; where alpha < 1, it is alpha + 1, times u**(1 / alpha).
        With gradients if `learned`; None: where one of `alphas` is no constant.
        """
        if learned is None:
            learned = not all(map(_is_constant, alphas))
        given = ops.stack([ops.broadcast_to(ops.cast(alpha, "float32"), shape) for alpha in alphas])
        alpha = ops.stop_gradient(given)
        uniform = 1.0 - self.uniform((3 * _TRIES + 1, len(alphas), *shape), dtype="float32", seed=seed)  # in (0, 1]
        boost, (u, v, w) = uniform[0], ops.split(uniform[1:], 3)
        d = ops.where(alpha < 1, alpha + 1, alpha) - 1 / 3
        x = _normal(u, v)
        cubed = (1 + x / ops.sqrt(9 * d)) ** 3
        log_cubed = ops.log(ops.maximum(cubed, 1e-30))
        kept = (cubed > 0) & (ops.log(w) < x * x / 2 + d * (1 - cubed + log_cubed))
        first = ops.argmax(ops.cast(kept, "int32"), axis=0, keepdims=True)
        log_gamma = ops.take_along_axis(log_cubed, first, axis=0)[0] + ops.log(d)
        log_gamma += ops.where(alpha < 1, ops.log(boost) / alpha, 0.0)
        if learned:
            sample = ops.maximum(ops.exp(log_gamma), 1e-30)
            slope = self._generator.gamma_derivative(alpha, sample) / sample
            log_gamma += ops.where(ops.isfinite(slope), slope, 0.0) * (given - alpha)  # which is 0
        return log_gamma

    def _bits(self, shape: Sequence[Any], seed: Any) -> Tensor:
        key = seed if ops.is_tensor(seed) else draw_seed(seed)
        return self._generator.bits(shape, ops.cast(key, "uint32"))


def _is_constant(value: Any) -> bool:
    return not ops.is_tensor(value) and not isinstance(value, keras.Variable)


def _normal(u: Tensor, v: Tensor) -> Tensor:
    """A normal number from two uniform ones, the first above 0."""
    return ops.sqrt(-2.0 * ops.log(u)) * ops.cos(2.0 * math.pi * v)
