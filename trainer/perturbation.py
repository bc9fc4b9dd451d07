"""Weights perturbed in their last bits: what rounding alone comes to in the curve of a model."""

from typing import Any

import keras
import ml_dtypes
import numpy as np

_ULPS = 8  # by which a weight is moved at most: sums of 64 numbers, of other orders, are as far apart


class Perturbed(keras.callbacks.Callback):
    """Multiplies each weight by nearly 1, as a fixed seed draws, before the first step.

    Args:
      bits: how many significant bits of a weight stay, where an accelerator multiplies no more; 0: all but the last.
    """

    def __init__(self, bits: int = 0) -> None:
        super().__init__()
        self._rounded = 0.5**bits if bits else 0.0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Perturbs them."""
        generator = np.random.default_rng(0)
        for variable in self.model.trainable_variables:
            weights = keras.ops.convert_to_numpy(variable)
            most = self._rounded or _ULPS * float(ml_dtypes.finfo(weights.dtype).eps)
            factors = 1 + most * generator.uniform(-1, 1, weights.shape)
            variable.assign((weights.astype(np.float64) * factors).astype(weights.dtype))
