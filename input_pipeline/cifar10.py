"""cifar10, by keras.datasets."""

from input_pipeline.keras_datasets import loader

load = loader("cifar10", ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"])
