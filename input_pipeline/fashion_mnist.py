"""fashion_mnist, by keras.datasets."""

from input_pipeline.keras_datasets import loader

load = loader("fashion_mnist")
