"""Philox 4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), the same bits on each backend.

TensorFlow's own kernels draw by it, with XLA or without. For JAX it is written out, and takes less time than JAX's own
generator. Number i of an array is word i % 4 of what the key makes of counter i // 4.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainer.objective.randomness import Generator


def _by_tensorflow(shape: Sequence[Any], key: Any) -> Any:
    """uint32 numbers of a shape, whose sizes may be tensors; key uint32 (2,)."""
    import tensorflow as tf

    return tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=tf.convert_to_tensor(shape, tf.int32),
        key=tf.reshape(tf.bitcast(key, tf.uint64), (1,)),
        counter=tf.zeros((2,), tf.uint64),
        alg=tf.random.Algorithm.PHILOX.value,
        dtype=tf.uint32,
    )


def _by_jax(shape: Sequence[int], key: Any) -> Any:
    """uint32 numbers of a shape; key uint32 (2,)."""
    import jax
    import jax.numpy as jnp

    *leading, last = shape or (1,)
    if last % 4:  # words of one counter fall into several rows
        size = math.prod(shape)
        return _by_jax((-(-size // 4) * 4,), key)[:size].reshape(shape)
    blocks = (*leading, last // 4)
    counter = jnp.arange(math.prod(blocks), dtype=jnp.uint32).reshape(blocks)
    weyl = np.array([0x9E3779B9, 0xBB67AE85], np.uint32)

    def product(x: Any, multiplier: int) -> tuple[Any, Any]:
        """Its high and low words."""
        with jax.enable_x64(True):  # lax.mulhi is not to be had in a program of several devices, in JAX 0.10
            wide = x.astype(jnp.uint64) * np.uint64(multiplier)
            return (wide >> np.uint64(32)).astype(jnp.uint32), wide.astype(jnp.uint32)

    def five_rounds(_: Any, state: tuple[list[Any], Any]) -> tuple[list[Any], Any]:
        (a, b, c, d), key = state
        for _ in range(5):
            (high_a, low_a), (high_c, low_c) = product(a, 0xD2511F53), product(c, 0xCD9E8D57)
            a, b, c, d = high_c ^ b ^ key[0], low_c, high_a ^ d ^ key[1], low_a
            key = key + weyl
        return [a, b, c, d], key

    # A loop, or XLA would compute all four words anew for each that is used.
    zeros = jnp.zeros_like(counter)
    words, _ = jax.lax.fori_loop(0, 2, five_rounds, ([counter, zeros, zeros, zeros], key))
    return jnp.stack(words, axis=-1).reshape(shape)


def _tensorflow_s_derivative(alpha: Any, samples: Any) -> Any:
    import tensorflow as tf

    return tf.raw_ops.RandomGammaGrad(alpha=alpha, sample=samples)


def _jax_s_derivative(alpha: Any, samples: Any) -> Any:
    import jax

    return jax.lax.random_gamma_grad(alpha, samples)


GENERATORS = {
    "tensorflow": Generator(_by_tensorflow, _tensorflow_s_derivative),
    "jax": Generator(_by_jax, _jax_s_derivative),
}
