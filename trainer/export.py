"""The verb export: a .keras file and a SavedModel, loaded again and compared before they are called done."""

import pathlib
import shutil
from typing import Any

import keras
import numpy as np

from input_pipeline.source import map_structure, read
from trainer.config import Config
from trainer.errors import OK
from trainer.evaluate import restore
from trainer.peers import Peers
from trainer.run_directory import RunDirectory

_EXAMPLES = 8


def run(config: Config) -> int:
    """Writes export/model.keras and export/saved_model. Returns the exit code."""
    parts, path = restore(config, Peers())
    source = parts.dataset.evaluation or parts.dataset.train
    x = read(source, np.arange(min(_EXAMPLES, len(source))))[0]
    target = RunDirectory(config).exports
    temporary = target.with_name(f".{target.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    with parts.program.averaged():
        _write(parts.program.model, x, temporary)
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)
    print(f"exported {path} to\n  {target / 'model.keras'}\n  {target / 'saved_model'}")
    print(f"both were loaded again and agree with the model on {min(_EXAMPLES, len(source))} examples")
    return OK


def _write(model: keras.Model, x: Any, directory: pathlib.Path) -> None:
    """Both, and compares what they make of some examples.

    Raises:
      RuntimeError: what was written computes something else than the model.
    """
    import tensorflow as tf  # the SavedModel is TensorFlow's; __main__ has chosen that backend

    expected = model(x, training=False)
    model.save(directory / "model.keras")
    loaded = keras.models.load_model(directory / "model.keras", compile=False)
    _compare(expected, loaded(x, training=False), "model.keras")

    signature = map_structure(lambda a: keras.InputSpec(shape=(None, *a.shape[1:]), dtype=str(a.dtype)), x)
    model.export(str(directory / "saved_model"), input_signature=[signature], verbose=False)
    served = tf.saved_model.load(str(directory / "saved_model"))
    _compare(expected, served.serve(x), "saved_model")


def _compare(expected: object, found: object, name: str) -> None:
    leaves = zip(keras.tree.flatten(expected), keras.tree.flatten(found), strict=True)
    for a, b in leaves:
        a, b = keras.ops.convert_to_numpy(a), keras.ops.convert_to_numpy(b)
        if not np.allclose(a, b, rtol=1e-4, atol=1e-5):
            raise RuntimeError(
                f"export: {name} computes something else than the model: they differ by "
                f"{np.abs(a - b).max():g}. A layer's get_config or serialization is at fault."
            )
