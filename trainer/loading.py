"""The dataset that the flags name."""

import dataclasses

from input_pipeline import cache, dataset, remote
from input_pipeline.dataset import Dataset
from input_pipeline.source import DataError
from trainer import plugins
from trainer.config import Config
from trainer.errors import UserError


def load_dataset(config: Config) -> Dataset:
    """The dataset that the flags name, checked, split and cached."""
    load, arguments = plugins.resolve(config.dataset, "dataset", "input_pipeline", "load")
    try:
        if callable(load):
            offered = {"data_dir": remote.local(config.data_dir)} if config.data_dir else {}
            if isinstance(arguments.get("data_dir"), str):
                arguments = {**arguments, "data_dir": remote.local(arguments["data_dir"])}
            load = plugins.call(load, arguments, offered, flag="dataset", spec=config.dataset)
        prepared = dataset.prepare(load, config.validation_fraction)
        return dataclasses.replace(prepared, train=cache.cached(prepared.train, config.cache))
    except DataError as error:
        raise data_error(config, error) from error


def data_error(config: Config, error: DataError) -> UserError:
    """What is wrong with the data, as a mistake in --dataset."""
    return UserError("dataset", config.dataset, str(error), "mend the data or its module, or give another --dataset")
