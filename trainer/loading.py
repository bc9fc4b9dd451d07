"""The dataset that the flags name."""

import dataclasses
import inspect
from typing import Any

from input_pipeline import cache, dataset, remote
from input_pipeline.dataset import Dataset
from input_pipeline.source import DataError
from trainer import plugins
from trainer.config import Config
from trainer.errors import UserError


def load_dataset(config: Config) -> Dataset:
    """The dataset that the flags name, checked, split and cached."""
    try:
        prepared = dataset.prepare(loaded(config.dataset, config.data_dir), config.validation_fraction)
        return dataclasses.replace(prepared, train=cache.cached(prepared.train, config.cache))
    except DataError as error:
        raise data_error(config, error) from error


def loaded(spec: str, data_dir: str = "") -> Any:
    """What a dataset's loader returns; one that is made of others asks for this function, as `load_dataset`.

    Args:
      spec: name(arg=value) or my_pkg.my_module:load(arg=value).
      data_dir: for a loader that takes it; it may be a URL, as one among the arguments may.
    """
    load, arguments = plugins.resolve(spec, "dataset", "input_pipeline", "load")
    takes = inspect.signature(load).parameters if callable(load) else {}
    if data_dir and ("data_dir" not in takes or "data_dir" in arguments):
        said = "names another" if "data_dir" in takes else "does not take it"
        fix = "give --dataset=images or another that reads what is there, or drop --data_dir"
        raise UserError("data_dir", data_dir, f"--dataset={spec} {said}", fix)
    if not callable(load):
        return load
    if "data_dir" in plugins.needed(load) and not data_dir and "data_dir" not in arguments:
        fix = f"say where its files are, or --dataset='{spec.partition('(')[0]}(data_dir=...)'"
        raise UserError("data_dir", "", f"--dataset={spec} needs it", fix)
    offered = remote.localized({"data_dir": data_dir} if data_dir else {}) | {"load_dataset": loaded}
    return plugins.call(load, remote.localized(arguments), offered, flag="dataset", spec=spec)


def data_error(config: Config, error: DataError) -> UserError:
    """What is wrong with the data, as a mistake in --dataset."""
    return UserError("dataset", config.dataset, str(error), "mend the data or its module, or give another --dataset")
