"""A dataset as the run uses it: training, validation and evaluation sources, and the classes."""

import dataclasses
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from input_pipeline import order
from input_pipeline.blocks import pace
from input_pipeline.domains import Categories
from input_pipeline.given import adapted, is_whole
from input_pipeline.rereading import check_same
from input_pipeline.source import Arrays, DataError, Example, Source, Subset, example_spec, fingerprint, is_streamed
from input_pipeline.structure import flatten, map_structure, words

_MANY = 1000  # classes; if integers show more, and more than there are examples, they are numbers to predict
_PARTS = {2: ("train", "evaluation"), 3: ("train", "validation", "evaluation")}  # of a tuple, in the usual order


@dataclasses.dataclass(frozen=True)
class Dataset:
    """What a dataset's `load` returns; any object with `train` and perhaps some of the others serves.

    Attributes:
      train: the training examples.
      evaluation: the test examples; None where a dataset has none.
      classes: number of classes where labels are integers; None otherwise.
      validation: what evaluations during the run use; if None, `prepare` sets it.
      augment: (examples, keys uint64 (batch,)) -> examples, in training only: a pure function, whose randomness is all
        in the keys; an example has another key in each pass.
      decode: the text of tokens (n,), where examples are sequences of them.
      class_names: what people call the classes, in the order of their numbers.
    """

    train: Source
    evaluation: Source | None = None
    classes: int | None = None
    validation: Source | None = None
    augment: Callable[[Example, Any], Example] | None = None
    decode: Callable[[Any], str] | None = None
    class_names: Sequence[str] | None = None

    @property
    def spec(self) -> Example:
        """Structure of one example, with a Spec (shape, dtype) for each array."""
        return example_spec(self.train)

    @property
    def labels(self) -> list[Categories | None]:
        """What is known of each label of an example: integers are classes, if there are classes."""
        specs = flatten(self.spec[1])
        integers = [np.issubdtype(spec.dtype, np.integer) for spec in specs]
        return [Categories(self.classes) if self.classes and integer else None for integer in integers]

    def facts(self) -> dict[str, Any]:
        """What identifies the data: lengths and digests."""
        return {k: f"{len(s)} examples, digest {self._digests[id(s)]}" for k, s in self._sources.items()}

    @functools.cached_property
    def _digests(self) -> dict[int, str]:
        return {id(source): fingerprint(source) for source in self._different}

    def pace(self) -> float:
        """Seconds that an example takes to be read, of the slowest source."""
        return max(pace(source, self.augment if source is self.train else None) for source in self._different)

    @property
    def _different(self) -> list[Source]:
        return list({id(source): source for source in self._sources.values()}.values())  # validation may be evaluation

    @property
    def _sources(self) -> dict[str, Source]:
        sources = {"train": self.train, "validation": self.validation, "evaluation": self.evaluation}
        return {name: source for name, source in sources.items() if source is not None}


def prepare(loaded: Any, validation_fraction: float) -> Dataset:
    """Checks what a dataset's loader returned and splits off the validation examples.

    Args:
      loaded: an object, module or dict with `train` and perhaps other attributes of Dataset; or, as keras.datasets
        return them, ((x_train, y_train), (x_test, y_test)), or as many sources, or three, of which the second is to
        validate on; or the training examples alone.
      validation_fraction: share of the training examples held out; 0 validates on `validation`, or else on
        `evaluation`.

    Raises:
      DataError: no or empty training examples, or data under a name that is not looked at.
    """
    loaded = _named(loaded)
    augment, decode = (getattr(loaded, name, None) for name in ("augment", "decode"))
    for name, function in (("augment", augment), ("decode", decode)):
        if function is not None and not callable(function):
            raise DataError(f"its {name!r} is {function!r}, which is no function")
    sources = {name: adapted(getattr(loaded, name, None)) for name in ("train", "validation", "evaluation")}
    for name, source in sources.items():
        if source is None and name != "train":
            continue
        if not isinstance(source, Source):
            reason = f"its {name!r} is {source!r}, which has no length and neither read(ids) nor [id]"
            if hasattr(source, "__iter__"):
                reason += (
                    ", and so no place to go on from: give what it reads from, such as a DataLoader's dataset, or "
                    "grain's MapDataset before .to_iter_dataset()"
                )
            raise DataError(reason)
        try:
            if not len(source):
                raise DataError(f"its {name!r} is empty (0 examples)")
        except TypeError as error:  # scipy's sparse arrays
            raise DataError(f"its {name!r} is a {type(source).__name__}, which has no length: {error}") from None
        check_same(source, augment if name == "train" else None)
    train, validation, evaluation = sources.values()
    _check_alike(sources)
    classes: Any = getattr(loaded, "classes", None)
    names = getattr(loaded, "class_names", None)
    if classes is not None and not (isinstance(classes, int | np.integer) and classes > 0):
        raise DataError(f"its `classes` is {classes!r}, and it is how many there are; what they are is `class_names`")
    if names is not None:
        names = [str(name) for name in names]
        classes = len(names) if classes is None else classes
        if len(names) != classes:
            raise DataError(f"it has {classes} classes, and {len(names)} class_names")
    if classes is None and isinstance(train, Arrays):
        known = [s.arrays[1] for s in sources.values() if isinstance(s, Arrays) and len(s.arrays) > 1]
        classes = _classes([label for label in known if isinstance(label, np.ndarray)])
    if validation_fraction and validation is not None:
        raise DataError("it has a `validation` of its own: leave --validation_fraction out")
    if validation is None:
        validation = evaluation
    if validation_fraction and is_streamed(train):
        raise DataError("streamed examples can't be held out: give the dataset an `evaluation` of its own")
    if validation_fraction:
        train, validation = divided(train, validation_fraction)
    return Dataset(train, evaluation, classes, validation, augment, decode, names)


def divided(source: Source, fraction: float) -> tuple[Source, Source]:
    """Most of a source's examples, and a fraction that is held out; a source of others' examples has its own way.

    Raises:
      DataError: one of them would be empty.
    """
    if hasattr(source, "divided"):
        kept, held_out = source.divided(fraction)
        return kept, held_out
    kept, held_out = (Subset(source, ids) for ids in order.split(len(source), fraction))
    if not len(kept) or not len(held_out):
        raise DataError(f"{fraction} of {len(source)} examples leaves nothing on one side")
    return kept, held_out


def _check_alike(sources: dict[str, Source | None]) -> None:
    """Raises DataError where a part's examples are of another structure than those to train on, or else scaled."""
    train = sources["train"]
    assert train is not None
    for name, source in sources.items():
        if source is None:
            continue
        (x, y, *_), (x_train, y_train, *_) = example_spec(source), example_spec(train)
        if map_structure(_is_integer, x) != map_structure(_is_integer, x_train):
            raise DataError(
                f"its {name!r} has x {words(x)}, and its 'train' {words(x_train)}: give all the same structure, and "
                "integers or floats; were only some of them scaled?"
            )
        if map_structure(type, y) != map_structure(type, y_train):
            found, wanted = (words(each) if flatten(each) else "none" for each in (y, y_train))
            raise DataError(
                f"its {name!r} has labels {found}, and its 'train' {wanted}: give all the same structure; what has no "
                "labels can't be evaluated"
            )


def _is_integer(spec: Any) -> bool:
    return spec.dtype.kind in "biu"


def _classes(labels: list[Any]) -> int | None:
    """How many classes labels in memory show: None if they are no classes, as prices are not, or there are none."""
    if not labels or not all(np.issubdtype(each.dtype, np.integer) and each.min() >= 0 for each in labels):
        return None
    classes = 1 + max(int(each.max()) for each in labels)
    return None if labels[0][0].size == 1 and classes > max(_MANY, *map(len, labels)) else classes


def _named(loaded: Any) -> Any:
    """What was loaded, as an object with `train`."""
    if isinstance(loaded, tuple) and len(loaded) in _PARTS and all(part is None or is_whole(part) for part in loaded):
        loaded = dict(zip(_PARTS[len(loaded)], loaded, strict=True))
    elif not (isinstance(loaded, dict) or hasattr(loaded, "train")) and isinstance(source := adapted(loaded), Source):
        loaded = {"train": source}
    known = [field.name for field in dataclasses.fields(Dataset)]
    unknown = sorted(loaded.keys() - set(known)) if isinstance(loaded, dict) else _mistaken(loaded)
    if unknown:
        names = ", ".join(map(repr, unknown))
        raise DataError(f"it has {names}, which is not looked at: known are {', '.join(known)}")
    if isinstance(loaded, dict):
        loaded = types.SimpleNamespace(**loaded)
    if not hasattr(loaded, "train"):
        raise DataError(
            f"it is a {type(loaded).__name__}, which has no `train`; return an object that has one, a source with a "
            "length and read(ids), or arrays: ((x_train, y_train), (x_test, y_test))"
        )
    return loaded


def _mistaken(loaded: Any) -> list[str]:
    """Attributes that hold data under names that others use."""
    found = {name: getattr(loaded, name, None) for name in ("test", "val", "valid", "dev", "eval")}
    return [name for name, value in found.items() if hasattr(value, "__len__") and not isinstance(value, str | bytes)]
