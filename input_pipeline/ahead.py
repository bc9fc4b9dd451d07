"""Blocks read ahead by threads, in order: what tf.data's map and prefetch are to TensorFlow, for who has none."""

import collections
import itertools
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from input_pipeline.cores import cores

Index = TypeVar("Index")
Read = TypeVar("Read")


def in_order(
    read: Callable[[Index], Read], indices: Iterable[Index], most: int, threads: int = 0
) -> Generator[Read, None, None]:
    """What `read` makes of each index, in their order.

    Args:
      read: is called by several threads at once.
      indices: perhaps endless.
      most: how many are read ahead; as many as there are threads, if those are more.
      threads: that read; 0: as many as this process may use cores.

    Raises:
      Exception: what `read` raised, when its turn comes.
    """
    threads = threads or cores()
    pending: collections.deque[Future[Read]] = collections.deque()
    remaining = iter(indices)
    pool = ThreadPoolExecutor(threads, "read")
    try:
        while True:
            wanted = 1 + max(most, threads) - len(pending)
            pending.extend(pool.submit(read, index) for index in itertools.islice(remaining, wanted))
            if not pending:
                return
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
