"""A strategy for tests: virtual devices that add as accelerators do, by the backend's all-reduce."""

from trainer.config import Config
from trainer.program import Program
from trainer.strategies import device_mesh
from trainer.strategies.base import Strategy


def create(config: Config) -> Strategy:
    """The device mesh of the flags, whose sums do not follow the tree."""
    strategy = device_mesh.create(config)
    compile_for_cpus = strategy.compile

    def compile_for_accelerators(program: Program) -> None:
        compile_for_cpus(program)
        strategy._exact = False

    strategy.compile = compile_for_accelerators  # type: ignore[method-assign]
    return strategy
