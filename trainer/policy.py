"""--on_nan: what becomes of steps whose loss is not finite, or leaps."""

from typing import NamedTuple

from trainer import plugins
from trainer.errors import UserError

_NAMES = ("stop", "skip", "rollback")


class Policy(NamedTuple):
    """A parsed --on_nan.

    Attributes:
      name: stop, skip or rollback.
      spike: a line of the log with so many times the median loss of those before is at fault, too; 0: none is.
    """

    name: str
    spike: float


def parse(text: str) -> Policy:
    """Reads 'stop', 'skip', 'rollback', 'rollback(spike=5)'.

    Raises:
      UserError: any other text.
    """
    name, attribute, arguments = plugins.parse(text, "on_nan")
    spike = arguments.pop("spike", 0.0)
    if name not in _NAMES or attribute or arguments:
        raise UserError("on_nan", text, "is no such policy", "stop, skip, rollback, stop(spike=5), rollback(spike=5)")
    if not isinstance(spike, int | float) or (spike and spike <= 1) or (spike and name == "skip"):
        raise UserError(
            "on_nan",
            text,
            "its spike is told of lines of the log, which can't be skipped"
            if name == "skip"
            else "its spike is not above 1",
            "for example rollback(spike=5)",
        )
    return Policy(name, float(spike))
