"""Measure: what every similarity measure declares and does, and the registry of all of them.

A measure works once per representation (`prepare`) and once per pair (`compare`), so that comparing all layers with all
layers costs as little as it can. What it declares is checked by `intertwine.testing.check_measure`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from inspect import signature
from math import nan
from typing import Any

import torch
from torch import Tensor

from intertwine.errors import InputError, did_you_mean
from intertwine.measure.representation import Representation, check_pair, represent
from intertwine.measure.result import Result
from intertwine.shapes import Int

#: What a representation can be changed by; a measure declares which of these leave it as it is.
CHANGES = ("permutation", "positive scales", "signs", "orthogonal", "invertible", "isotropic scale", "translation")
#: What a measure holds in memory at once, from little to much.
FEATURES, SAMPLES, PAIRS = "features", "samples", "pairs of samples"


@dataclass(frozen=True)
class Measure:
    """One measure with its options.

    Attributes:
        kind: "similarity" (larger is closer) or "distance". range: smallest and largest value it can take.
        at_identity: its value for a representation and itself. invariances: changes of the second representation, out
            of `CHANGES`, that leave the value as it is.
        prepare_with, compare_with: what it does; options are bound already.
        needs: samples at least. positions: whether it tells channels from positions, (samples, channels, positions).
        meets: with `positions`, whether those of both must be the same.
        permute_with: the state of the same representation with its samples in another order, where that is cheaper
            than to prepare it again.
        memory: what must be held at once: products of "features" (one pass over the samples is enough), all "samples",
            or a number for all "pairs of samples", for measures that compare samples with samples.
        baseline: whether every value comes with that of unrelated features, at the price of a second comparison.
    """

    name: str
    kind: str
    range: tuple[float, float]
    at_identity: float
    invariances: frozenset[str]
    reference: str
    about: str
    prepare_with: Callable[[Representation], Any] = field(repr=False)
    compare_with: Callable[[Any, Any], Result] = field(repr=False)
    needs: int = 2
    positions: bool = False
    meets: bool = False
    permute_with: Callable[[Any, Tensor], Any] | None = field(default=None, repr=False)
    baseline: bool = False
    memory: str = SAMPLES

    def __repr__(self) -> str:
        low, high = self.range
        return f"Measure({self.name}: {self.kind} from {low:g} to {high:g}, {self.about})"

    def prepare(self, x: Tensor) -> Prepared:
        """The work that is done once per representation."""
        return self._prepared(represent(x))

    def _prepared(self, x: Representation) -> Prepared:
        return Prepared(self.name, x.samples, x, self.prepare_with(x) if x.samples >= self.needs else None)

    def compare(self, a: Prepared, b: Prepared) -> Result:
        """The work that is done once per pair."""
        check_pair(a.representation, b.representation)
        if a.samples < self.needs:
            return degenerate(self.name, f"it needs at least {self.needs} samples, and there are {a.samples}")
        result = self.compare_with(a.state, b.state)
        if not self.baseline or result.degenerate:
            return result
        return replace(result, baseline=self.compare_with(a.state, self.permuted(b, unrelated(b.samples)).state).value)

    def permuted(self, a: Prepared, order: Tensor) -> Prepared:
        """What is prepared, with its samples in another order."""
        moved = Representation(a.representation.values[order], a.representation.eps)
        if self.permute_with is None or a.state is None:
            return self._prepared(moved)
        return Prepared(self.name, a.samples, moved, self.permute_with(a.state, order))

    def __call__(self, x: Tensor, y: Tensor) -> Result:
        """Prepare both and compare."""
        first, second = represent(x, "x"), represent(y, "y")
        check_pair(first, second)
        return self.compare(self._prepared(first), self._prepared(second))


@dataclass(frozen=True, eq=False)
class Prepared:
    """A representation and what one measure has made of it."""

    measure: str
    samples: int
    representation: Representation = field(repr=False)
    state: Any = field(repr=False)


def unrelated(samples: int) -> Int[Tensor, " samples"]:
    """One fixed random order in which no sample keeps its place: a single cycle through all of them.

    >>> unrelated(2).tolist()
    [1, 0]
    """
    cycle = torch.randperm(samples, generator=torch.Generator().manual_seed(0))
    return torch.empty_like(cycle).scatter_(0, cycle, cycle.roll(1))


def degenerate(name: str, reason: str, notes: tuple[str, ...] = ()) -> Result:
    """The result of a comparison that has no value."""
    return Result(name, nan, reason, notes=notes)


# -- the registry ------------------------------------------------------------------------------------------------------

Maker = Callable[..., Measure]
_MAKERS: dict[str, Maker] = {}


def register(make: Maker) -> Maker:
    """Make a measure of your own known, under the name that it gives itself, for this process.

    A function of the same name takes the place of the first, as when a notebook's cell runs again or a file is imported
    twice. The names of our own measures are taken.

    Args:
        make: returns the `Measure`; its keyword arguments are the measure's options, all with defaults.

    Returns:
        `make`, so that this can stand above it as a decorator.

    Raises:
        InputError: the name belongs to a measure of intertwine, or to that of a function with another name.

    Example:
        `@register` above the function, as in docs/bring-your-own-measure.md. What is taken is refused:

        >>> from intertwine.measure.measure import find, register
        >>> register(lambda: find("rsa"))
        Traceback (most recent call last):
        intertwine.errors.InputError: A measure was to be registered as 'rsa', but intertwine.measure.rsa.rsa holds...
    """
    home, function = _origin(make)
    if not home.startswith("intertwine."):
        _load()  # our names are taken, whatever was imported before
    name = make().name
    holder, known = _origin(_MAKERS.get(name, make))
    if known != function or (holder.startswith("intertwine.") and holder != home):
        raise InputError(
            f"A measure was to be registered as {name!r}, but {holder}.{known} holds that name already. Give yours "
            f"another name."
        )
    _MAKERS[name] = make
    return make


def _origin(make: Maker) -> tuple[str, str]:
    """The module and the name of a function, or of a partial one."""
    function = getattr(make, "func", make)
    return str(function.__module__), function.__qualname__


def find(name: str, **options: Any) -> Measure:
    """The measure of that name."""
    _load()
    if name not in _MAKERS:
        raise InputError(
            f"The measure {name!r} was asked for, but there is none of that name. {did_you_mean(name, _MAKERS)}The "
            f"names are {', '.join(sorted(_MAKERS))}."
        )
    try:
        return _MAKERS[name](**options)
    except TypeError as error:
        known = list(signature(_MAKERS[name]).parameters)
        offered = f"Its options: {', '.join(known)}." if known else "It has no options: leave them out."
        foreign = [option for option in options if option not in known]
        why = f"it has no option {foreign[0]!r}. {did_you_mean(foreign[0], known)}" if foreign else f"{error}. "
        raise InputError(f"The measure {name} was asked for with {options}: {why}{offered}") from error


def every() -> Iterator[Measure]:
    """All measures with their default options, by name."""
    _load()
    return (_MAKERS[name]() for name in sorted(_MAKERS))


def _load() -> None:
    """Import the modules that register measures."""
    from intertwine.measure import families  # noqa: F401
