"""Where logical replicas run. `create` picks the strategy; base.py is the contract."""

import importlib

from trainer.config import Config
from trainer.strategies.base import Strategy

_MODULES = {
    ("one_device", "tensorflow"): "tf_distribute",
    ("mirrored", "tensorflow"): "tf_distribute",
    ("one_device", "jax"): "device_mesh",
    ("device_mesh", "jax"): "device_mesh",
}


def create(config: Config, backend: str) -> Strategy:
    """The strategy that the flags name, on this machine's devices."""
    module = importlib.import_module(f"trainer.strategies.{_MODULES[config.strategy, backend]}")
    strategy: Strategy = module.create(config)
    return strategy
