"""Random numbers in a step that no backend has a part in: Keras's random functions, over the bits of one generator.

JAX and TensorFlow draw other numbers from one seed, and so does TensorFlow's XLA: masks of dropout, and with them the
curve, would be another on each. The bits are Philox's on both (see philox.py); what is made of them is here.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import keras
import numpy as np
from keras import ops
from keras.src.backend import random as of_backend
from keras.src.random.seed_generator import draw_seed

Tensor = Any  # of the backend
Bits = Callable[[Sequence[Any], Tensor], Tensor]  # (shape, key uint32 (2,)) -> uint32 numbers of that shape

BY_BACKEND = ("gamma", "beta", "binomial")  # sampled by rejection, with gradients of their own: the backend's, still
_DIGITS = {"bfloat16": 7, "float16": 10}  # binary ones of a fraction, so that none is rounded up to 1


@contextlib.contextmanager
def drawn_from(bits: Bits) -> Iterator[None]:
    """Within it, what layers draw by keras.random follows from their seeds and from `bits` alone."""
    ours = Random(bits)
    with contextlib.ExitStack() as stack:
        for name in vars(Random):
            if not name.startswith("_"):
                stack.enter_context(mock.patch.object(of_backend, name, getattr(ours, name)))
        yield


class Random:
    """Keras's random functions.

    Args:
      bits: the generator; on TensorFlow, sizes in the shape may be tensors.
    """

    def __init__(self, bits: Bits) -> None:
        self._generator = bits

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
        return ops.cast(ops.sqrt(-2.0 * ops.log(1.0 - u)) * ops.cos(2.0 * math.pi * v), dtype) * stddev + mean

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

    def shuffle(self, x: Tensor, axis: int = 0, seed: Any = None) -> Tensor:
        """As keras.random.shuffle."""
        return ops.take(x, ops.argsort(self.uniform((ops.shape(x)[axis],), dtype="float32", seed=seed)), axis=axis)

    def _bits(self, shape: Sequence[Any], seed: Any) -> Tensor:
        key = seed if ops.is_tensor(seed) else draw_seed(seed)
        return self._generator(shape, ops.cast(key, "uint32"))
