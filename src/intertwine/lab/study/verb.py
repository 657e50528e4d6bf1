"""The definition of a study verb: its options with their checks, and the context that it runs in."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from torch import Tensor, nn

from intertwine.errors import InputError, unknown_name
from intertwine.lab.study.records import ResultRow
from intertwine.lab.study.zoos import NetworkCache
from intertwine.lab.zoo.augment import TrainingBatches, shuffled
from intertwine.lab.zoo.datasets.dataset import Dataset

BATCH = 250


@dataclass(frozen=True)
class VerbContext:
    """What a verb works on: networks, a layer, options with their defaults, and a random seed."""

    cache: NetworkCache
    zoo: str
    a: nn.Module
    b: nn.Module | None
    layer: str | None
    options: Mapping[str, Any]
    seed: int

    @property
    def other(self) -> nn.Module:
        """The second network, in a verb of two networks."""
        assert self.b is not None
        return self.b

    @property
    def at(self) -> str:
        """The layer, in a verb that runs per layer."""
        assert self.layer is not None
        return self.layer

    @property
    def x(self) -> Tensor:
        """An example input."""
        return self.cache.example(self.zoo, self.a)

    @property
    def images(self) -> Dataset:
        return self.cache.images(self.zoo, self.options.get("images"))

    def test(self) -> list[tuple[Tensor, Tensor]]:
        return list(self.images.batches("test", BATCH))

    def train(self) -> list[tuple[Tensor, Tensor]]:
        return list(self.images.batches("train", BATCH))

    def shuffled(self) -> TrainingBatches:
        """The training images, in a new order every epoch."""
        return shuffled(self.images, BATCH)


@dataclass(frozen=True)
class Option:
    """The default of an option, and `check(name, value)`: the error message for an invalid value, or None."""

    default: Any
    check: Callable[[str, Any], str | None]


@dataclass(frozen=True)
class Verb:
    """A verb of one or two `networks`.

    Attributes:
        layered: one task runs per layer.
        takes_layers: a task covers all layers, and the plan may restrict them.
    """

    networks: int
    options: Mapping[str, Option]
    run: Callable[[VerbContext], Iterable[ResultRow]]
    layered: bool = False
    takes_layers: bool = False


# -- Options -----------------------------------------------------------------------------------------------------------


def whole(default: int | None, least: int = 1) -> Option:
    """An integer; optional if the default is None.

    >>> whole(3).check("trials", 0), whole(3).check("trials", 4)
    ('trials must be an integer, 1 or more, but is 0.', None)
    """
    return _checked(
        default, f"an integer, {least} or more",
        lambda value: (value is None and default is None) or (_is_number(value, int) and value >= least),
    )  # fmt: skip


def number(default: float, low: float = -inf, high: float = inf, exclusive: bool = False) -> Option:
    """A number within a range; `exclusive` forbids the ends of the range.

    >>> number(0.1, 0.0, 1.0, exclusive=True).check("beta", 1.0)
    'beta must be a number above 0 and below 1, but is 1.0.'
    """
    return _checked(
        default, f"a number{_range(low, high, exclusive)}", lambda value: _is_within(value, low, high, exclusive)
    )


def numbers(default: tuple[float, ...], low: float = -inf, high: float = inf, exclusive: bool = False) -> Option:
    """A list of such numbers.

    >>> numbers((0.5,), 0.0, 1.0).check("alphas", [0.5, 2])
    'alphas must be a list of numbers from 0 to 1, but is [0.5, 2].'
    """
    return _checked(
        default, f"a list of numbers{_range(low, high, exclusive)}",
        lambda value: isinstance(value, list | tuple) and len(value) > 0
        and all(_is_within(one, low, high, exclusive) for one in value),
    )  # fmt: skip


def flag(default: bool) -> Option:
    """True or false."""
    return _checked(default, "true or false", lambda value: isinstance(value, bool))


def one_of(default: str, known: Callable[[], Collection[str]]) -> Option:
    """A name; `known` is called for each check, because users may register names.

    >>> one_of("weights", lambda: ["none", "weights"]).check("method", "weight")
    "Unknown method 'weight'. Did you mean 'weights'? Choose one of: none, weights."
    """
    return Option(default, lambda name, value: _check_name(name, value, known()))


def some_of(default: str, known: Callable[[], Collection[str]]) -> Option:
    """A name, or a list of names."""

    def check(name: str, value: Any) -> str | None:
        values = value if isinstance(value, list | tuple) and value else [value]
        return next(filter(None, (_check_name(name, one, known()) for one in values)), None)

    return Option(default, check)


def read_by(default: str, read: Callable[[str], object]) -> Option:
    """A string that a function of the library parses; its error is the message."""

    def check(name: str, value: Any) -> str | None:
        if not isinstance(value, str):
            return f"{name} must be a string, but is {value!r}."
        try:
            read(value)
        except InputError as error:
            return str(error)
        return None

    return Option(default, check)


def _checked(default: Any, required: str, valid: Callable[[Any], bool]) -> Option:
    return Option(default, lambda name, v: None if valid(v) else f"{name} must be {required}, but is {v!r}.")


def _check_name(name: str, value: Any, known: Collection[str]) -> str | None:
    return None if isinstance(value, str) and value in known else unknown_name(name, str(value), known)


def _is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_within(value: Any, low: float, high: float, exclusive: bool) -> bool:
    return _is_number(value, int | float) and (low < value < high if exclusive else low <= value <= high)


def _range(low: float, high: float, exclusive: bool) -> str:
    if exclusive:
        return f" above {low:g}" + (f" and below {high:g}" if high < inf else "")
    return f" from {low:g} to {high:g}" if high < inf else ""
