"""ids -> slices -> batches: the pipelines that feed the devices, by tf.data or by threads.

One element is one block: the examples of `block` consecutive steps for one share of the logical
replicas, as arrays (block, replicas of the share, examples of a replica, ...). Blocks are cut at
multiples of `block` steps, so an element is a function of its index alone, whatever step a run
resumes at, and a long block makes few large reads where single steps would make many small ones.
"""

import dataclasses
import math
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from input_pipeline import ahead, order
from input_pipeline.cores import cores
from input_pipeline.domains import Domain, check
from input_pipeline.reader import Reader
from input_pipeline.source import DataError, Example, Source, example_spec, ids_at, is_streamed, named_weights
from input_pipeline.structure import Spec, flatten, map_structure

_ENDLESS = 2**40  # blocks
_AHEAD = 2**30  # bytes that are read at once, but for `prefetch`
Batch = dict[str, Any]  # 'x', 'y', 'key'; where examples are weighted or padded, 'weight'; of outputs apart, 'weights'


@dataclasses.dataclass
class Pipeline:
    """Batches of a source for some of the logical replicas of a run.

    Args:
      source: the examples.
      seed: the run's seed.
      global_batch: examples per step over all logical replicas.
      replicas: logical replicas, a divisor of global_batch.
      shares: the logical replicas of each element in turn: one range per device that is fed apart.
      block: steps per element.
      labels, inputs: for each array of an example's y, and of its x, what its numbers may be; None: anything goes.
      shuffled: in the endless random order of training; else each example once, in order of its id,
        the last batch padded with its own examples again, of weight 0.
      prefetch: blocks read ahead, and at least as many threads that read.
      augment: as in Dataset; while shuffled only.
      most: steps that will be asked for, of a pass or, while shuffled, of the run; 0: all.
      pace: seconds that an example takes to be read; 0: not known.
    """

    source: Source
    seed: int
    global_batch: int
    replicas: int
    shares: Sequence[range]
    block: int
    labels: Sequence[Domain | None] = ()
    inputs: Sequence[Domain | None] = ()
    shuffled: bool = True
    prefetch: int = 2
    augment: Callable[[Any, Any], Any] | None = None
    most: int = 0
    pace: float = 0.0

    def __post_init__(self) -> None:
        self.error: BaseException | None = None  # what the source raised
        self._fed: dict[int, npt.NDArray[np.uint64]] = {}  # block: for each of its steps, checksum of our shares' ids
        self._lock = threading.Lock()
        self._whole: tuple[int, Example] = (-1, ())  # of streamed data: the last block that was read
        self._example = example_spec(self.source)
        self._reader = Reader(self.source, self._example, self.augment, self.pace)
        self._padded = not self.shuffled and len(self.source) % self.global_batch != 0

    @property
    def steps(self) -> int:
        """Steps in which a pass sees every example; the last may be padded (or run into the next pass)."""
        whole = -(-len(self.source) // self.global_batch)
        return min(whole, self.most or whole)

    def dataset(self, first_block: int = 0) -> Any:
        """The elements from a block on, the shares of a block one after the other, as a tf.data.Dataset.

        TensorFlow takes them for endless: `blocks_from` tells how many there are.
        """
        from input_pipeline import tf_data  # TensorFlow takes seconds to import, and `explain` needs none of it

        return tf_data.dataset(self, first_block)

    def blocks(self, first_block: int = 0) -> Iterator[Batch]:
        """The elements as numpy arrays, read without TensorFlow, for JAX, whose integers have 32 bits."""
        most = self.prefetch * len(self.shares)
        return ahead.in_order(self.narrow_element, self.indices(first_block), most, self.threads)

    @property
    def threads(self) -> int:
        """How many elements are read at once: `prefetch`, for a source may wait for disks and networks, or more.

        As many as keep the cores busy, unless they are so large that a host of many cores had no room for them.
        """
        if is_streamed(self.source):
            return 1
        examples = self.block * len(self.shares[0]) * (self.global_batch // self.replicas)
        busy = -(-cores() // self._reader.threads(examples))
        return max(self.prefetch, min(busy, _AHEAD // self.size))

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in flatten(self.spec))

    def blocks_from(self, first_block: int) -> int:
        """How many there are from one on: a run or a pass ends with the block of its last step, else none does."""
        steps = self.most if self.shuffled else self.steps
        return (-(-steps // self.block) or _ENDLESS) - first_block

    def indices(self, first_block: int) -> range:
        """Of the elements from a block on."""
        return range(first_block * len(self.shares), (first_block + self.blocks_from(first_block)) * len(self.shares))

    def element(self, index: int) -> Batch:
        """Reads an element, and remembers what the source raised: tf.data hands on only its text."""
        return self._noting(self.read_block, index)

    def narrow_element(self, index: int) -> Batch:
        """An element whose integers fit into 32 bits: JAX would cut them without a word."""

        def read_narrow(index: int) -> Batch:
            batch = self.read_block(index)
            for array in flatten(batch):
                if array.dtype.kind in "iu" and array.dtype.itemsize == 8:
                    limits = np.iinfo(f"{array.dtype.kind}4")
                    if array.min() < limits.min or array.max() > limits.max:
                        raise DataError(
                            f"it holds integers of {array.min()} to {array.max()}, and JAX computes with 32 bits: give "
                            "remainders of them, or two halves, or use --backend=tensorflow"
                        )
            return batch

        return self._noting(read_narrow, index)

    def _noting(self, read: Callable[[int], Batch], index: int) -> Batch:
        try:
            return read(index)
        except BaseException as error:
            self.error = self.error or error
            raise

    def fed(self, first: int, end: int) -> int:
        """Checksum of the ids that were read for steps from `first` to before `end`, each asked for once, in order."""
        total = 0
        for block in range(first // self.block, -(-end // self.block)):
            begin = block * self.block
            total += int(self._fed[block][max(0, first - begin) : end - begin].sum(dtype=np.uint64))
            if end >= begin + self.block:
                del self._fed[block]
        return total

    def ids(self, step: int) -> npt.NDArray[np.int64]:
        """(B,) of the examples of a step of all logical replicas."""
        return self._ids(self._positions(step))

    def examples(self, step: int) -> Example:
        """What a step of all logical replicas is fed (B, ...)."""
        return self._read_once(self._positions(step), self.ids(step))

    def _positions(self, step: int) -> npt.NDArray[np.int64]:
        return step * self.global_batch + np.arange(self.global_batch)

    def read_block(self, index: int) -> Batch:
        """Reads element `index`: block index // shares, share index % shares."""
        block, share = divmod(int(index), len(self.shares))
        per_replica = self.global_batch // self.replicas
        replica = np.asarray(self.shares[share])[:, None]
        steps = min(self.block, self.most - block * self.block) if self.shuffled and self.most else self.block
        step = block * self.block + np.arange(steps)[:, None, None]
        position = step * self.global_batch + replica * per_replica + np.arange(per_replica)
        n = len(self.source)
        ids = self._ids(position)
        if self.shuffled:
            checksums = order.checksums(ids.reshape(steps, -1))
            with self._lock:  # the shares of a block may be read at once
                self._fed[block] = checksums + self._fed.get(block, np.uint64(0))
        x, y, *weight = self._read(block, position, ids)
        check(self.inputs, self.labels, (x, y, *weight), "the source", ids.ravel())
        batch = map_structure(lambda a: a.reshape(ids.shape + a.shape[1:]), {"x": x, "y": y})
        batch["key"] = order.keys(self.seed, step[..., 0], replica[:, 0])
        weights = ({"weight": np.ones(ids.size)} if self._padded else {}) | named_weights(weight)
        batch |= map_structure(lambda a: a.astype(np.float32).reshape(ids.shape + a.shape[1:]), weights)
        if self._padded:
            batch["weight"][position >= n] = 0
        if steps < self.block:  # a program takes arrays of one shape: what nobody will ask for is the last step again
            batch = map_structure(operator.itemgetter(np.minimum(np.arange(self.block), steps - 1)), batch)
        return batch

    def _ids(self, position: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        if self.shuffled:
            return ids_at(self.source, self.seed, position)
        # The padding is a mix of the last batch's examples: what a model adds by add_loss() is a mean over both.
        last, end = (self.steps - 1) * self.global_batch, min(len(self.source), self.steps * self.global_batch)
        return np.where(position < end, position, last + position % (end - last))

    def _read(self, block: int, position: npt.NDArray[np.int64], ids: npt.NDArray[np.int64]) -> Example:
        if not is_streamed(self.source):
            return self._read_once(position.ravel(), ids.ravel())
        first = block * self.block * self.global_batch
        if self._whole[0] != block:  # a stream is read once for all shares of a block, which comes one after another
            everything = first + np.arange(len(position) * self.global_batch)
            self._whole = block, self._read_once(everything, self._ids(everything))
        return map_structure(lambda a: a[(position - first).ravel()], self._whole[1])

    def _read_once(self, position: npt.NDArray[np.int64], ids: npt.NDArray[np.int64]) -> Example:
        """Examples (n, ...) by ids (n,), of which a pass's last block repeats some, perhaps many batches full."""
        if self.shuffled:
            return self._reader(ids, order.fold(3, self.seed, position) if self.augment else None)
        needed, where = np.unique(ids, return_inverse=True)
        examples = self._reader(needed)
        return examples if len(needed) == len(ids) else map_structure(lambda a: a[where], examples)

    @property
    def spec(self) -> Batch:
        """Structure of an element, with a Spec for each array; the shares are of one size."""
        x, y, *weight = self._example
        leading = (self.block, len(self.shares[0]), self.global_batch // self.replicas)
        spec = map_structure(lambda s: Spec(leading + s.shape, s.dtype), {"x": x, "y": y})
        spec["key"] = Spec((*leading[:2], 2), np.dtype(np.uint32))
        weights = ({"weight": Spec((), np.dtype(np.float32))} if self._padded else {}) | named_weights(weight)
        return dict(spec | map_structure(lambda s: Spec(leading + s.shape, np.dtype(np.float32)), weights))


__all__ = ["Batch", "DataError", "Pipeline"]
