"""What runs where is said by a run's flags alone."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import keras
from keras.src.distribution import distribution_lib

from trainer.errors import UserError


@contextlib.contextmanager
def by_flags(model: str) -> Iterator[None]:
    """Refuses, within it, that a model says where its variables are: by keras.distribution or a tf.distribute scope."""
    refusal = UserError(
        "model",
        model,
        "says by keras.distribution or tf.distribute what runs where, and a run's flags do",
        "leave that out, and give --strategy, --devices and --layout (docs/strategies.md, docs/layouts.md)",
    )

    def refuse(value: Any) -> None:
        raise refusal

    modules, ours = (keras.distribution, distribution_lib), keras.distribution.distribution()
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.object(module, "set_distribution", refuse))
        try:
            yield
        except RuntimeError as error:
            if "Mixing different tf.distribute.Strategy objects" not in str(error):
                raise
            raise refusal from error
    if keras.distribution.distribution() is not ours:  # by a name that was imported before
        raise refusal
