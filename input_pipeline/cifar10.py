"""cifar10, by keras.datasets."""

from input_pipeline.keras_datasets import loader

load = loader("cifar10")
