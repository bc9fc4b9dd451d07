"""The verb export: a SavedModel and a .keras file, loaded again and compared before they are called done."""

import errno
import pathlib
import shutil
import textwrap
from typing import Any

import keras
import numpy as np

from input_pipeline.source import read
from input_pipeline.structure import map_structure
from trainer.assembly import Assembly
from trainer.config import Config
from trainer.errors import OK
from trainer.evaluate import restore
from trainer.objective import trial
from trainer.objective.inputs import inputs_of, taken
from trainer.objective.randomness import is_seed
from trainer.peers import Peers
from trainer.run_directory import RunDirectory

_EXAMPLES = 8
_WRITTEN = ("classes.txt", "model.keras", "saved_model")


def run(config: Config) -> int:
    """Writes export/model.keras, export/saved_model and the names of the classes. Returns the exit code."""
    parts, path = restore(config, Peers())
    source = parts.dataset.evaluation or parts.dataset.train
    x = _needed(parts.program.model, read(source, np.arange(min(_EXAMPLES, len(source))))[0])
    directory = RunDirectory(config)
    target = directory.exports
    temporary = target.with_name(f".{target.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with directory.writing(), parts.program.averaged():
            temporary.mkdir(parents=True)
            wrong = _write(parts, x, temporary)
            target.mkdir(exist_ok=True)
            for name in _WRITTEN:  # one by one: what somebody has made of an earlier export stays
                before = target / name
                shutil.rmtree(before) if before.is_dir() else before.unlink(missing_ok=True)
            print(f"exported {path} to")
            for written in sorted(temporary.iterdir()):
                print(f"  {written.rename(target / written.name)}")
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(f"loaded again, and agrees with the model on {min(_EXAMPLES, len(source))} examples")
    if wrong:
        print(f"no model.keras: {wrong}")
    return OK


def _write(parts: Assembly, x: Any, directory: pathlib.Path) -> str:
    """Writes the program's model as it is. Returns why there is no .keras file of it, or ''."""
    model, names = parts.program.model, parts.dataset.class_names
    seeds = [keras.ops.convert_to_numpy(variable) for variable in _seeds(model)]
    expected = _outputs(model, x, seeds)
    if names:
        (directory / "classes.txt").write_text("".join(f"{name}\n" for name in names), "utf-8")  # line i: class i
    _write_saved_model(model, x, expected, directory / "saved_model")
    return _write_keras(model, x, expected, seeds, directory / "model.keras")


def _needed(model: keras.Model, x: Any) -> Any:
    """Of a dict of arrays, those that go to an input of the model, if that is known."""
    found = inputs_of(model, x)
    if not isinstance(x, dict) or len(x) < len(found) or all(each is None for each in found):
        return x
    return {name: x[name] for name, each in zip(sorted(x), found, strict=True) if each is not None}


def _write_saved_model(model: keras.Model, x: Any, expected: Any, path: pathlib.Path) -> None:
    """Writes a SavedModel, and compares what it makes of some examples with what is expected.

    Raises:
      OSError: there is no room for it.
      RuntimeError: it computes something else than the model.
    """
    import tensorflow as tf  # the SavedModel is TensorFlow's; __main__ has chosen that backend

    signature = map_structure(lambda a: keras.InputSpec(shape=(None, *a.shape[1:]), dtype=str(a.dtype)), x)
    archive = keras.export.ExportArchive()  # not by model.export(), where layers that augment images do so
    archive.track(model)
    archive.add_endpoint("serve", lambda x: model(taken(model, x), training=False), input_signature=[signature])
    try:
        archive.write_out(str(path), verbose=False)
    except (tf.errors.ResourceExhaustedError, tf.errors.PermissionDeniedError) as error:  # of a disk, or a quota
        full = isinstance(error, tf.errors.ResourceExhaustedError)
        raise OSError(errno.ENOSPC if full else errno.EACCES, error.message, str(path)) from None
    served = tf.saved_model.load(str(path))  # kept: its variables end with it
    if apart := _apart(model, expected, served.serve(x)):
        raise RuntimeError(f"export: {path.name} computes something else than the model: they differ by {apart:g}")


def _write_keras(model: keras.Model, x: Any, expected: Any, seeds: list[Any], path: pathlib.Path) -> str:
    """Writes a .keras file likewise. Returns why there is none, where Keras does not make the same model from it."""
    import tensorflow as tf

    try:
        model.save(path)
        loaded = keras.models.load_model(path, compile=False)
    except (TypeError, ValueError, NotImplementedError, tf.errors.OpError) as error:
        path.unlink(missing_ok=True)
        own = sorted({type(v).__name__ for v in model._flatten_layers() if not type(v).__module__.startswith("keras.")})
        named = f" ({', '.join(own)})" if own else ""
        reason = textwrap.shorten(str(error).strip().split("\n\n")[0].partition(" Full object")[0], 400)
        if isinstance(error, tf.errors.OpError):  # as it makes the variables, which have no initial values yet
            return f"Keras can't load it again on TensorFlow: {reason}\n  Fix: train with --precision=mixed_bfloat16"
        return (
            f"Keras can't save it and load it again: {reason}\n  Fix: classes of your own{named} need "
            "@keras.saving.register_keras_serializable(), and a get_config() of all arguments; write one in a Lambda's "
            "place"
        )
    if apart := _apart(model, expected, _outputs(loaded, x, seeds)):
        path.unlink()
        return (
            f"loaded again, it computes something else than the model, by {apart:g}\n  Fix: a layer's get_config() "
            "leaves something out; or it is of integers, and rounds where Keras merges its LoRA into it"
        )
    return ""


def _outputs(model: keras.Model, x: Any, seeds: list[Any]) -> Any:
    """What a model makes of examples; layers that draw random numbers in evaluation, too, begin and end at seeds."""

    def begin() -> None:
        # A model that was loaded with other seeds than the one that was saved is found by what it computes.
        for variable, value in zip(_seeds(model), seeds, strict=False):
            variable.assign(value)

    begin()
    outputs = model(taken(model, x), training=False)
    begin()
    return outputs


def _seeds(model: keras.Model) -> list[keras.Variable]:
    return [variable for variable in model.non_trainable_variables if is_seed(variable)]


def _apart(model: keras.Model, expected: object, found: object) -> float:
    """By how much outputs differ at most; 0 where that is rounding, of the coarsest type that a layer computes in."""
    coarse = trial.COARSE if trial.is_coarse(model) else 0.0
    leaves = zip(keras.tree.flatten(expected), keras.tree.flatten(found), strict=True)
    pairs = [[keras.ops.convert_to_numpy(keras.ops.cast(value, "float32")) for value in pair] for pair in leaves]

    def close(a: np.ndarray, b: np.ndarray) -> bool:
        # A graph rounds where the model, called, does not, at each layer.
        return np.allclose(a, b, rtol=1e-4, atol=1e-5 + coarse * float(np.abs(a).max(initial=0.0)))

    return 0.0 if all(close(a, b) for a, b in pairs) else max(float(np.abs(a - b).max()) for a, b in pairs)
