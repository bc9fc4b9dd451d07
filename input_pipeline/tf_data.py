"""The tf.data graph of a pipeline: reads of blocks, in parallel and ahead, in order."""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from input_pipeline.source import map_structure

if TYPE_CHECKING:
    from input_pipeline.pipeline import Pipeline


def dataset(pipeline: "Pipeline", first_block: int) -> "tf.data.Dataset":
    """Elements from a block on, the shares of a block one after the other."""
    indices = pipeline.indices(first_block)
    index = tf.data.Dataset.range(indices.start, indices.stop)
    specs = map_structure(lambda spec: tf.TensorSpec(spec.shape, spec.dtype), pipeline.spec)

    def flat(index: npt.NDArray[np.int64]) -> list[npt.NDArray[Any]]:
        return list(tf.nest.flatten(pipeline.element(int(index))))

    def element(index: Any) -> Any:
        leaves = tf.nest.flatten(specs)
        tensors = tf.numpy_function(flat, [index], [spec.dtype for spec in leaves])
        for tensor, spec in zip(tensors, leaves, strict=True):
            tensor.set_shape(spec.shape)
        return tf.nest.pack_sequence_as(specs, tensors)

    # One read per block and share: the source sees few large batches. Order is kept, whatever the
    # number of parallel calls.
    elements = index.map(element, num_parallel_calls=pipeline.threads, deterministic=True)
    options = tf.data.Options()
    options.threading.private_threadpool_size = pipeline.threads
    return elements.prefetch(pipeline.prefetch * len(pipeline.shares)).with_options(options)
