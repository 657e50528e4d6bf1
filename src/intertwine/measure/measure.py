"""What a similarity measure is: a checked representation in, a result out, a registry of all measures, and the verbs
`measure` and `measures`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from inspect import signature
from math import nan
from typing import Any

import torch
from torch import Tensor

from intertwine.argument_types import Float, Int
from intertwine.errors import InputError, MismatchError, did_you_mean

# ----------------------------------------------------------------------------------------------------
# A representation as a measure reads it: samples × features, checked once, centred with care.


#: A feature whose spread is below this fraction of its size does not vary: what is left is rounding of the input.
CONSTANT_TOLERANCE = 8.0


@dataclass(frozen=True, eq=False)
class Representation:
    """Values (samples, features), or (samples, channels, positions) for measures that tell channels from places.

    `values` is float64 where that was given, else float32: large products are taken in it, after centring; whatever is
    small enough is done in float64. `eps` is the precision of what was given.
    """

    values: Float[Tensor, "samples ..."]
    eps: float

    @property
    def samples(self) -> int:
        return self.values.shape[0]

    @cached_property
    def flat(self) -> Float[Tensor, "samples features"]:
        """All channels and positions as features."""
        return self.values.flatten(1)

    @cached_property
    def centred(self) -> Float[Tensor, "samples features"]:
        """Features minus their means over the samples; a feature that does not vary is exactly zero."""
        rest = self.flat - self.flat.mean(0)
        rest -= rest.mean(0)  # what the rounding of the mean left: small numbers now, so that nothing is lost
        still = _peaks(rest) <= CONSTANT_TOLERANCE * self.eps * _peaks(self.flat)
        return torch.where(still, 0.0, rest) if still.any() else rest

    @cached_property
    def size(self) -> float:
        """The largest centred entry; 0 where nothing varies."""
        return float(_peaks(self.centred).amax())

    @cached_property
    def varying(self) -> int:
        """How many features vary over the samples."""
        return int((self.centred != 0).any(0).sum())


def _peaks(x: Float[Tensor, "samples features"]) -> Float[Tensor, " features"]:
    """The largest size of every feature, without a copy of all sizes."""
    return torch.maximum(x.amax(0), -x.amin(0))


def represent(x: Tensor, name: str = "x") -> Representation:
    """Check a tensor and read it.

    Raises:
        InputError: it is no tensor of numbers (samples, features) or (samples, channels, positions), or not finite.
    """
    if not isinstance(x, Tensor) or x.dim() not in (2, 3) or x.is_complex():
        found = f"{x.dtype} {tuple(x.shape)}".removeprefix("torch.") if isinstance(x, Tensor) else type(x).__name__
        raise InputError(
            f"{name} must be a tensor (samples, features), or (samples, channels, positions); found {found}. "
            f"{_advice(x, name)}"
        )
    if not x.numel():
        raise InputError(f"{name} has no entries: its shape is {tuple(x.shape)}. Give at least one sample and feature.")
    values = x.detach().to(torch.float64 if x.dtype == torch.float64 or not x.is_floating_point() else torch.float32)
    if not values.sum().isfinite() and not values.isfinite().all():  # the sum alone is quick, and may overflow
        bad = int((~values.isfinite()).sum())
        raise InputError(
            f"{name} holds {bad} entries that are not finite (NaN or infinity). Find the layer that made them; no "
            "measure has a meaning there."
        )
    eps = torch.finfo(x.dtype).eps if x.is_floating_point() else torch.finfo(torch.float64).eps
    return Representation(values, float(eps))


def _advice(x: object, name: str) -> str:
    """What to do with what is no representation."""
    if not isinstance(x, Tensor):
        return f"Make it one: torch.as_tensor({name})."
    if x.dim() < 2:
        return f"For one feature per sample write {name}[:, None]."
    if x.is_complex():
        return f"Take its real and imaginary parts as features: torch.view_as_real({name}).flatten(1)."
    return "Flatten or pool other axes first; `intertwine.compare` does it for a model's layers."


def check_pair(a: Representation, b: Representation) -> None:
    """Two representations are compared sample by sample."""
    if a.samples != b.samples:
        raise MismatchError(
            f"A measure compares two representations of the same samples, but x has {a.samples} and y {b.samples}. "
            "Give the features of the same inputs in the same order."
        )


# ----------------------------------------------------------------------------------------------------
# What a measure returns: a value or the reason why there is none, and the alignment behind it.


@dataclass(frozen=True, eq=False)
class FeatureAlignment:
    """The map that takes the second representation onto the first, in the parts that the measure has; None elsewhere.

    Attributes:
        permutation: feature i of the first meets feature permutation[i] of the second.
        scales: positive factors of the second's features, in the second's order.
        plan: a transport plan between features, first × second.
        write_matrix: makes `matrix`.
    """

    permutation: Int[Tensor, " n"] | None = None
    scales: Float[Tensor, " n"] | None = None
    plan: Float[Tensor, "first second"] | None = None
    write_matrix: Callable[[], Float[Tensor, "second first"]] | None = field(default=None, repr=False)

    @cached_property
    def matrix(self) -> Float[Tensor, "second first"] | None:
        """y @ matrix lies on x (both centred where the measure centres).

        Made when it is first asked for: with more features than samples it is far larger than what was compared.
        """
        return None if self.write_matrix is None else self.write_matrix()


@dataclass(frozen=True, eq=False)
class Result:
    """One comparison.

    Attributes:
        measure: its name. value: not a number exactly where `degenerate` gives the reason in words.
        notes: what a reader should know of this value, such as dead features that were left out.
        baseline: the value of the same features with the samples of y in another order, which makes them unrelated;
            for measures that give unrelated features a value far from the end of their range.
    """

    measure: str
    value: float
    degenerate: str | None = None
    alignment: FeatureAlignment | None = None
    notes: tuple[str, ...] = ()
    baseline: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """As plain data, without the alignment."""
        plain = {"measure": self.measure, "value": self.value, "degenerate": self.degenerate}
        return plain | {"notes": list(self.notes), "baseline": self.baseline}

    def __float__(self) -> float:
        return self.value

    def __repr__(self) -> str:
        tail = f", {'; '.join(self.notes)}" if self.notes else ""
        if self.degenerate:
            return f"Result({self.measure}: degenerate, {self.degenerate}{tail})"
        beside = "" if self.baseline is None else f", unrelated {self.baseline:.4f}"
        return f"Result({self.measure}: {self.value:.6f}{beside}{tail})"


# ----------------------------------------------------------------------------------------------------
# Measure: what every similarity measure declares and does, and the registry of all of them.
#
# A measure works once per representation (`prepare`) and once per pair (`compare`), so that comparing all layers with all
# layers costs as little as it can. What it declares is checked by `intertwine.testing.check_measure`.


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

    def prepare(self, x: Tensor) -> PreparedRepresentation:
        """The work that is done once per representation."""
        return self._prepared(represent(x))

    def _prepared(self, x: Representation) -> PreparedRepresentation:
        return PreparedRepresentation(
            self.name, x.samples, x, self.prepare_with(x) if x.samples >= self.needs else None
        )

    def compare(self, a: PreparedRepresentation, b: PreparedRepresentation) -> Result:
        """The work that is done once per pair."""
        check_pair(a.representation, b.representation)
        if a.samples < self.needs:
            return degenerate(self.name, f"it needs at least {self.needs} samples, and there are {a.samples}")
        result = self.compare_with(a.state, b.state)
        if not self.baseline or result.degenerate:
            return result
        return replace(
            result, baseline=self.compare_with(a.state, self.permuted(b, derangement(b.samples)).state).value
        )

    def permuted(self, a: PreparedRepresentation, order: Tensor) -> PreparedRepresentation:
        """What is prepared, with its samples in another order."""
        moved = Representation(a.representation.values[order], a.representation.eps)
        if self.permute_with is None or a.state is None:
            return self._prepared(moved)
        return PreparedRepresentation(self.name, a.samples, moved, self.permute_with(a.state, order))

    def __call__(self, x: Tensor, y: Tensor) -> Result:
        """Prepare both and compare."""
        first, second = represent(x, "x"), represent(y, "y")
        check_pair(first, second)
        return self.compare(self._prepared(first), self._prepared(second))


@dataclass(frozen=True, eq=False)
class PreparedRepresentation:
    """A representation and what one measure has made of it."""

    measure: str
    samples: int
    representation: Representation = field(repr=False)
    state: Any = field(repr=False)


def derangement(samples: int) -> Int[Tensor, " samples"]:
    """One fixed random order in which no sample keeps its place: a single cycle through all of them.

    >>> derangement(2).tolist()
    [1, 0]
    """
    cycle = torch.randperm(samples, generator=torch.Generator().manual_seed(0))
    return torch.empty_like(cycle).scatter_(0, cycle, cycle.roll(1))


def degenerate(name: str, reason: str, notes: tuple[str, ...] = ()) -> Result:
    """The result of a comparison that has no value."""
    return Result(name, nan, reason, notes=notes)


# -- the registry ------------------------------------------------------------------------------------------------------

MeasureFactory = Callable[..., Measure]
_MAKERS: dict[str, MeasureFactory] = {}


def register(make: MeasureFactory) -> MeasureFactory:
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
        intertwine.errors.InputError: A measure was to be registered as 'rsa', but intertwine.measure.distances.rsa holds...
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


def _origin(make: MeasureFactory) -> tuple[str, str]:
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


# ----------------------------------------------------------------------------------------------------
# `measure` and `measures`: compare two representations by name, and list what can be asked for.


def measure(x: Tensor, y: Tensor, name: str = "linear_cka", **options: Any) -> Result:
    """How similar two representations of the same samples are.

    Args:
        x, y: features (samples, features) of the same samples in the same order; widths may differ. Measures that tell
            channels from positions also take (samples, channels, positions).
        name: one of `measures()`. options: of that measure.

    Returns:
        A `Result`: `.value`, or `.degenerate` with the reason why there is none; `.alignment` where the measure finds
        one.

    Raises:
        InputError: no such measure or option, or what is not a tensor of finite numbers. MismatchError: the numbers of
            samples differ.

    Example:
        >>> import torch, intertwine
        >>> x = torch.randn(100, 8, generator=torch.Generator().manual_seed(0))
        >>> rotation = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(1)))[0]
        >>> round(intertwine.measure(x, 3 * x @ rotation + 5, "linear_cka").value, 4)
        1.0
        >>> intertwine.measure(x, torch.ones(100, 3))
        Result(linear_cka: degenerate, y is constant: no feature varies over the samples)
    """
    return find(name, **options)(x, y)


def measures() -> tuple[Measure, ...]:
    """Every measure with its kind, range, value at identity, invariances and reference.

    Example:
        >>> import intertwine
        >>> {m.name: m.range for m in intertwine.measures()}["linear_cka"]
        (-1.0, 1.0)
    """
    return tuple(every())
