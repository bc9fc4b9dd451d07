"""Where logical replicas run. `create` picks the strategy; base.py is the contract."""

import importlib
from typing import cast

from trainer import plugins
from trainer.cluster import Cluster
from trainer.config import Config
from trainer.errors import UserError
from trainer.strategies.base import Strategy

_MODULES = {
    ("one_device", "tensorflow"): "mirrored",
    ("mirrored", "tensorflow"): "mirrored",
    ("multi_worker_mirrored", "tensorflow"): "multi_worker_mirrored",
    ("parameter_server", "tensorflow"): "parameter_server",
    ("tpu", "tensorflow"): "tpu",
    ("one_device", "jax"): "device_mesh",
    ("device_mesh", "jax"): "device_mesh",
}


def create(config: Config, backend: str, cluster: Cluster) -> Strategy:
    """The strategy that the flags name, on the devices of this machine or of the cluster.

    Raises:
      UserError: the user's own strategy is not to be found, or is none.
    """
    if not config.has_own_strategy:
        module = importlib.import_module(f"trainer.strategies.{_MODULES[config.strategy, backend]}")
        return cast(Strategy, module.create(config, cluster))
    factory, arguments = plugins.resolve(config.strategy, "strategy", "trainer.strategies", "create")
    strategy = plugins.call(factory, arguments, {"config": config}, flag="strategy", spec=config.strategy)
    if not isinstance(strategy, Strategy):
        raise UserError(
            "strategy",
            config.strategy,
            f"returned a {type(strategy).__name__}",
            "return a trainer.strategies.base.Strategy; docs/extending.md has a whole one",
        )
    return strategy
