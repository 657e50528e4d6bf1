"""What a verb of a study is: its validated options, and the context it runs in."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from torch import Tensor, nn

from intertwine.errors import InputError, did_you_mean
from intertwine.lab.study.records import ResultRow
from intertwine.lab.study.zoos import NetworkCache
from intertwine.lab.zoo.augment import TrainingBatches, shuffled
from intertwine.lab.zoo.datasets.dataset import Dataset

# ----------------------------------------------------------------------------------------------------
# What an option of a verb may be, so that a plan is refused before anything runs and not task by task afterwards.


#: Says what is wrong with a value, as the end of a sentence about it; None where nothing is.
Fault = Callable[[Any], str | None]


@dataclass(frozen=True)
class Option:
    """Its value where the plan says nothing, and what a value must be."""

    default: Any
    fault: Fault


def whole(default: int | None, least: int = 1) -> Option:
    """A whole number; where the default is None it may be left out.

    >>> whole(3).fault(0), whole(3).fault(4)
    ('must be a whole number, 1 or more', None)
    """
    wanted = f"must be a whole number, {least} or more"

    def fault(value: Any) -> str | None:
        right = isinstance(value, int) and not isinstance(value, bool) and value >= least
        return None if right or (value is None and default is None) else wanted

    return Option(default, fault)


def number(default: float, least: float = -inf, most: float = inf) -> Option:
    """Any number between these."""
    return Option(default, lambda value: None if _between(value, least, most) else f"must be {_words(least, most)}")


def numbers(default: tuple[float, ...], least: float = -inf, most: float = inf) -> Option:
    """A list of such numbers.

    >>> numbers((0.5,), 0.0, 1.0).fault([0.5, 2])
    'must be a list of numbers from 0 to 1'
    """

    def fault(value: Any) -> str | None:
        right = isinstance(value, list | tuple) and value and all(_between(one, least, most) for one in value)
        return None if right else f"must be a list of numbers{_words(least, most).removeprefix('a number')}"

    return Option(default, fault)


def share(default: float) -> Option:
    """A part of a whole, not all of it and not nothing.

    >>> share(0.1).fault(1.0), share(0.1).fault(0.5)
    ('must be a share, above 0 and below 1', None)
    """
    wanted = "must be a share, above 0 and below 1"
    return Option(default, lambda value: None if _between(value, 0.0, 1.0) and 0 < value < 1 else wanted)


def positives(default: tuple[float, ...]) -> Option:
    """A list of numbers above 0.

    >>> positives((0.5,)).fault([0.5, 0])
    'must be a list of numbers above 0'
    """

    def fault(value: Any) -> str | None:
        right = isinstance(value, list | tuple) and value and all(_between(one, 0.0, inf) and one > 0 for one in value)
        return None if right else "must be a list of numbers above 0"

    return Option(default, fault)


def flag(default: bool) -> Option:
    """Yes or no."""
    return Option(default, lambda value: None if isinstance(value, bool) else "must be true or false")


def one_of(default: str, known: Callable[[], Collection[str]]) -> Option:
    """One of some names, which are asked for when a plan is read: users may add to them.

    >>> one_of("weights", lambda: ["none", "weights"]).fault("weight")
    "is not known. Did you mean 'weights'? It may be none, weights"
    """
    return Option(default, lambda value: _unknown(value, known()))


def some_of(default: str, known: Callable[[], Collection[str]]) -> Option:
    """A name, or a list of names."""

    def fault(value: Any) -> str | None:
        names = value if isinstance(value, list | tuple) and value else [value]
        return next(filter(None, (_unknown(name, known()) for name in names)), None)

    return Option(default, fault)


def read_by(default: str, read: Callable[[str], object]) -> Option:
    """A text that a function of the library understands; what the function says of others is told."""

    def fault(value: Any) -> str | None:
        if not isinstance(value, str):
            return "must be a name"
        try:
            read(value)
        except InputError as error:
            return f"is not known: {str(error).rstrip('.')}"
        return None

    return Option(default, fault)


def anything(default: Any) -> Option:
    """What is checked elsewhere."""
    return Option(default, lambda value: None)


def defaults(options: Mapping[str, Option]) -> dict[str, Any]:
    """The values of options of which nothing is said."""
    return {name: option.default for name, option in options.items()}


def _between(value: Any, least: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def _words(least: float, most: float) -> str:
    if least > -inf and most < inf:
        return f"a number from {least:g} to {most:g}"
    return f"a number, {least:g} or more" if least > -inf else "a number"


def _unknown(value: Any, known: Collection[str]) -> str | None:
    if isinstance(value, str) and value in known:
        return None
    return f"is not known. {did_you_mean(str(value), known)}It may be {', '.join(known)}"


# ----------------------------------------------------------------------------------------------------
# Verb and Ask: what a study knows of a verb, and what the verb is asked.


BATCH = 250


@dataclass(frozen=True)
class VerbContext:
    """What a verb is asked: the networks, a layer, options with defaults filled in, and a seed for what is random."""

    bench: NetworkCache
    zoo: str
    a: nn.Module
    b: nn.Module | None
    layer: str | None
    options: Mapping[str, Any]
    seed: int

    @property
    def other(self) -> nn.Module:
        assert self.b is not None  # verbs of two networks are only asked with two
        return self.b

    @property
    def at(self) -> str:
        assert self.layer is not None  # layered verbs are only asked with a layer
        return self.layer

    @property
    def x(self) -> Tensor:
        return self.bench.example(self.zoo, self.a)

    @property
    def images(self) -> Dataset:
        return self.bench.images(self.zoo, self.options.get("images"))

    def test(self) -> list[tuple[Tensor, Tensor]]:
        return list(self.images.batches("test", BATCH))

    def train(self) -> list[tuple[Tensor, Tensor]]:
        return list(self.images.batches("train", BATCH))

    def shuffled(self) -> TrainingBatches:
        """The training images, in another order in every epoch."""
        return shuffled(self.images, BATCH)


@dataclass(frozen=True)
class Verb:
    """`networks`: one or two. `layered`: one task per layer. `takes_layers`: it may be told which to look at."""

    networks: int
    options: Mapping[str, Option]
    run: Callable[[VerbContext], Iterable[ResultRow]]
    layered: bool = False
    takes_layers: bool = False
