"""The tf.data graph of a pipeline: reads of blocks, in parallel and ahead, in order."""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from input_pipeline.structure import map_structure

if TYPE_CHECKING:
    from input_pipeline.pipeline import Pipeline


def dataset(pipeline: "Pipeline", first_block: int) -> "tf.data.Dataset":
    """Elements from a block on, the shares of a block one after the other; endless, as far as TensorFlow knows.

    Of what may end, the workers of tf.distribute ask each other at each element whether it has, by a collective that
    none of them can leave while another waits for its data.
    """
    indices = pipeline.indices(first_block)
    index = tf.data.Dataset.range(indices.start, indices.stop)
    specs = map_structure(lambda spec: tf.TensorSpec(spec.shape, spec.dtype), pipeline.spec)

    def flat(index: npt.NDArray[np.int64]) -> list[npt.NDArray[Any]]:
        return list(tf.nest.flatten(pipeline.element(int(index))))

    @tf.autograph.experimental.do_not_convert  # there is nothing to convert, and it would go through a file
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
    elements = elements.prefetch(pipeline.prefetch * len(pipeline.shares)).with_options(options)
    return elements.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
