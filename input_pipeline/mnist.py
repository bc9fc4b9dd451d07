"""mnist, by keras.datasets."""

from input_pipeline.keras_datasets import loader

load = loader("mnist", "0123456789")
