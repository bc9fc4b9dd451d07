"""mixture: several datasets as one, each with its share of the examples."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from input_pipeline.dataset import Dataset, divided, prepare
from input_pipeline.source import DataError, Example, Source, example_spec, is_streamed, read
from input_pipeline.structure import map_structure


class Mixture:
    """Examples of several sources. A pass has as many as the largest source for its share needs; smaller ones repeat.

    Args:
      sources: of one structure of examples.
      shares: one positive number for each, in any unit.
    """

    def __init__(self, sources: Sequence[Source], shares: Sequence[float]) -> None:
        self._sources, self._shares = sources, shares
        whole = max(len(source) / share for source, share in zip(sources, shares, strict=True))
        self._ends = np.cumsum([max(1, round(share * whole)) for share in shares])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def divided(self, fraction: float) -> tuple["Mixture", "Mixture"]:
        """As `dataset.divided`: each source's examples are, for those that repeat would be on both sides."""
        kept, held_out = zip(*(divided(source, fraction) for source in self._sources), strict=True)
        return Mixture(kept, self._shares), Mixture(held_out, self._shares)

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


def load(parts: Mapping[str, float], load_dataset: Callable[[str], Any]) -> Dataset:
    """Mixes datasets by share.

    Args:
      parts: dataset -> its share, such as {'digits': 3, "my_pkg.my_data:load(data_dir='more')": 1}.
      load_dataset: loads one by its name and arguments.

    Raises:
      DataError: a share is not positive, or examples are not of one structure, of the same classes or tokens, or
        changed alike.
    """
    if not parts or min(parts.values()) <= 0:
        raise DataError(f"shares must be positive: {dict(parts)}")
    loaded = {spec: prepare(load_dataset(spec), 0) for spec in parts}
    if streamed := [spec for spec, data in loaded.items() if is_streamed(data.train)]:
        raise DataError(f"{streamed[0]} is streamed, in an order of its own: it can't be mixed")
    structures = {spec: example_spec(data.train) for spec, data in loaded.items()}
    first = next(iter(structures))
    for spec, structure in structures.items():
        if structure != structures[first]:
            raise DataError(f"examples of {spec} are {structure}, of {first} {structures[first]}: they can't be mixed")
    classes = [data.classes for data in loaded.values() if data.classes]

    def mixed(attribute: str) -> Mixture | None:
        found = [(source, parts[k]) for k, data in loaded.items() if (source := getattr(data, attribute)) is not None]
        return Mixture(*map(list, zip(*found, strict=True))) if found else None

    def different(attribute: str) -> list[Any]:
        found: list[Any] = []
        for data in loaded.values():
            value = getattr(data, attribute)
            found += [value] * (value not in found)
        return found

    if len(augments := different("augment")) > 1:
        raise DataError(
            "its parts change examples in training (augment) in different ways, or some do not: give all the same "
            "arguments, such as images(shift=2), or write a dataset that changes what it mixes"
        )
    names = [each for each in different("class_names") if each is not None]
    if len(names) > 1:
        raise DataError(f"a label is not of one class in all its parts: they are {names[0]} here and {names[1]} there")
    decodes = [each for each in different("decode") if each is not None]
    tokens = np.arange(min(classes, default=0), dtype=np.int32)
    if len(decodes) > 1 and (not len(tokens) or len({each(tokens) for each in decodes}) > 1):
        raise DataError(
            "a token is not of one text in all its parts, or none says how many tokens there are (classes): give all "
            "the same tokenizer"
        )
    own = any(data.validation is not data.evaluation for data in loaded.values())
    return Dataset(
        Mixture([data.train for data in loaded.values()], list(parts.values())),
        mixed("evaluation"),
        max(classes, default=None),
        mixed("validation") if own else None,
        augments[0],
        decodes[0] if decodes else None,
        names[0] if names and len(names[0]) == max(classes) else None,
    )
