"""mixture: several datasets as one, each with its share of the examples."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from input_pipeline.dataset import Dataset, prepare
from input_pipeline.source import DataError, Example, Source, example_spec, is_streamed, map_structure, read


class Mixture:
    """Examples of several sources. A pass has as many as the largest source for its share needs; smaller ones repeat.

    Args:
      sources: of one structure of examples.
      shares: one positive number for each, in any unit.
    """

    def __init__(self, sources: Sequence[Source], shares: Sequence[float]) -> None:
        self._sources = sources
        whole = max(len(source) / share for source, share in zip(sources, shares, strict=True))
        self._ends = np.cumsum([max(1, round(share * whole)) for share in shares])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, ids: npt.NDArray[np.int64]) -> Example:
        which = np.searchsorted(self._ends, ids, side="right")
        batch: Any = None
        for number, source in enumerate(self._sources):
            rows = np.flatnonzero(which == number)
            if len(rows):
                first = self._ends[number - 1] if number else 0
                part = read(source, (ids[rows] - first) % len(source))
                if batch is None:
                    batch = map_structure(lambda a: np.empty((len(ids), *a.shape[1:]), a.dtype), part)
                _put(batch, rows, part)
        return batch


def _put(batch: Any, rows: npt.NDArray[np.int64], part: Any) -> None:
    if isinstance(batch, dict):
        for name in batch:
            _put(batch[name], rows, part[name])
    elif isinstance(batch, tuple | list):
        for of_batch, of_part in zip(batch, part, strict=True):
            _put(of_batch, rows, of_part)
    else:
        batch[rows] = part


def load(parts: Mapping[str, float], arguments: Mapping[str, Mapping[str, Any]] | None = None) -> Dataset:
    """Mixes datasets by share.

    Args:
      parts: dataset -> its share, such as {'digits': 3, 'my_pkg.my_data:load': 1}.
      arguments: dataset -> the arguments of its load.

    Raises:
      DataError: a share is not positive, or examples are not of one structure.
    """
    if not parts or min(parts.values()) <= 0:
        raise DataError(f"shares must be positive: {dict(parts)}")
    loaded = {name: prepare(_load(name)(**(arguments or {}).get(name, {})), 0) for name in parts}
    if streamed := [name for name, data in loaded.items() if is_streamed(data.train)]:
        raise DataError(f"{streamed[0]} is streamed, in an order of its own: it can't be mixed")
    specs = {name: example_spec(data.train) for name, data in loaded.items()}
    first = next(iter(specs))
    for name, spec in specs.items():
        if spec != specs[first]:
            raise DataError(f"examples of {name} are {spec}, of {first} {specs[first]}: they can't be mixed")
    classes = [data.classes for data in loaded.values() if data.classes]
    train = Mixture([data.train for data in loaded.values()], list(parts.values()))

    def mixed(attribute: str) -> Mixture | None:
        found = [(source, parts[k]) for k, data in loaded.items() if (source := getattr(data, attribute)) is not None]
        return Mixture(*map(list, zip(*found, strict=True))) if found else None

    own = any(data.validation is not data.evaluation for data in loaded.values())
    validation = mixed("validation") if own else None
    return Dataset(train, mixed("evaluation"), max(classes) if classes else None, validation)


def _load(name: str) -> Any:
    module, _, attribute = name.partition(":")
    try:
        found = importlib.import_module(module if "." in module or attribute else f"input_pipeline.{module}")
        return getattr(found, attribute or "load")
    except (ImportError, AttributeError) as error:
        raise DataError(f"there is no dataset {name!r}: {error}") from None
