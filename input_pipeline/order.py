"""order(seed, position) -> example id, and the keys of a step's randomness: pure functions of integers.

Pass p over n examples is a permutation of 0..n-1 keyed by (seed, p), evaluated per position, so there
is no shuffle buffer, no iterator state, and looking up position 10**12 costs what position 0 costs.
"""

import functools

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

_ROUNDS = 7
_MOST_BITS = 24  # of numbers whose rounds are looked up, in 230 kB at most
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(z: Words) -> Words:
    """The finalizer of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    z = z ^ (z >> np.uint64(30))
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def fold(*words: npt.ArrayLike) -> Words:
    """One 64-bit hash of several integers, or of several integer arrays elementwise.

    Args:
      words: non-negative integers or arrays of them, which broadcast against each other.

    Returns:
      uint64, of the broadcast shape. Integers are taken modulo 2**64.
    """
    h = np.zeros((), np.uint64)
    with np.errstate(over="ignore"):
        for word in words:
            h = _mix((h ^ np.asarray(word).astype(np.uint64)) + _GOLDEN)
    return h


def permute(index: npt.ArrayLike, n: int, key: Words) -> npt.NDArray[np.int64]:
    """Evaluates the permutation of 0..n-1 that `key` names, at `index`.

    An unbalanced Feistel network over the smallest power of two >= n, walked along its cycle until the
    value lies below n (Black, Rogaway: Ciphers with arbitrary finite domains, 2002). Every round is
    invertible, so every key gives a bijection.

    Args:
      index: integers in [0, n), any shape.
      n: size of the domain.
      key: uint64, broadcastable to index: elements may belong to different permutations.

    Returns:
      int64, the shape of index.
    """
    x = np.asarray(index).astype(np.uint64).ravel()
    keys = np.broadcast_to(key, np.shape(index)).ravel() if np.ndim(key) else key
    bits = max(int(n - 1).bit_length(), 2)
    x = _feistel(x, bits, keys)
    while (walking := np.flatnonzero(x >= np.uint64(n))).size:
        x[walking] = _feistel(x[walking], bits, keys[walking] if np.ndim(keys) else keys)
    return x.astype(np.int64).reshape(np.shape(index))


def _feistel(x: Words, bits: int, key: Words) -> Words:
    low_bits = np.uint64(bits // 2)
    low, high = x & _mask(bits // 2), x >> low_bits
    looked_up = not np.ndim(key) and bits <= _MOST_BITS
    for r in range(_ROUNDS):
        half = low if r % 2 else high
        change = _rounds(int(key), bits)[r].take(half.view(np.int64)) if looked_up else _round(r, half, bits, key)
        if r % 2:
            high ^= change
        else:
            low ^= change
    return (high << low_bits) | low


def _round(r: int, half: Words, bits: int, key: Words) -> Words:
    """What round r adds to one half of a value for the other; even rounds change the low one."""
    with np.errstate(over="ignore"):
        changed = bits - bits // 2 if r % 2 else bits // 2
        return _mix((key + np.uint64(r + 1) * _GOLDEN) ^ half) & _mask(changed)


@functools.lru_cache(4)
def _rounds(key: int, bits: int) -> list[Words]:
    """For each round, `_round` of each half that there is: half of the time where many values have one key."""
    sizes = [2 ** (bits // 2 if r % 2 else bits - bits // 2) for r in range(_ROUNDS)]
    return [_round(r, np.arange(size, dtype=np.uint64), bits, np.array(key, np.uint64)) for r, size in enumerate(sizes)]


def _mask(bits: int) -> np.uint64:
    return np.uint64(2**bits - 1)


def order(seed: int, positions: npt.ArrayLike, n: int) -> npt.NDArray[np.int64]:
    """The example at each position of the endless order of a run.

    Args:
      seed: the run's seed.
      positions: non-negative integers, any shape; position = step * global_batch + index in the batch.
      n: examples in a pass; positions [p * n, (p + 1) * n) are pass p, which holds each id once.

    Returns:
      int64 ids in [0, n), the shape of positions.
    """
    positions = np.asarray(positions, np.int64)
    passes, index = np.divmod(positions, n)
    if passes.size and passes.min() == passes.max():  # as a rule: one key for all
        passes = passes.flat[0]
    return permute(index, n, fold(0, seed, passes))


def keys(seed: int, steps: npt.ArrayLike, replicas: npt.ArrayLike) -> npt.NDArray[np.uint32]:
    """The random key of a logical replica at a step: fold(seed, step, replica).

    Args:
      seed: the run's seed.
      steps: steps.
      replicas: logical replicas, broadcastable against steps.

    Returns:
      uint32 (..., 2), of the broadcast shape of steps and replicas.
    """
    words = fold(1, seed, steps, replicas)
    return np.stack([words >> np.uint64(32), words & np.uint64(0xFFFFFFFF)], -1).astype(np.uint32)


def checksums(ids: npt.ArrayLike) -> Words:
    """64-bit sums over example ids (sums, ids of each): the same in any order, added up over steps and processes."""
    return np.asarray(fold(2, ids).sum(axis=1, dtype=np.uint64))  # modulo 2**64


def split(n: int, fraction: float) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Splits 0..n-1 into (kept, held out) at random, but the same for every seed of a run.

    Args:
      n: number of examples.
      fraction: share held out, rounded to the nearest example.

    Returns:
      Two sorted int64 arrays.
    """
    shuffled = permute(np.arange(n), n, fold(2, n))
    held_out = round(n * fraction)
    return np.sort(shuffled[held_out:]), np.sort(shuffled[:held_out])
