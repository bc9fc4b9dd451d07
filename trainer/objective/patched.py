"""What Keras does otherwise while a step is traced, and only there: other threads read examples, perhaps by Keras."""

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock


def patched(owner: Any, name: str, stand_in: Callable[..., Any]) -> contextlib.AbstractContextManager[Any]:
    """Within it, what calls a function or a method of `owner` in this thread calls `stand_in`."""
    plain, thread = getattr(owner, name), threading.get_ident()

    @functools.wraps(plain)
    def either(*args: Any, **kwargs: Any) -> Any:
        return (stand_in if threading.get_ident() == thread else plain)(*args, **kwargs)

    return mock.patch.object(owner, name, either)
