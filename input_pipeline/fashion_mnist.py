"""fashion_mnist, by keras.datasets."""

from input_pipeline.keras_datasets import loader

load = loader(
    "fashion_mnist",
    ["T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"],
)
