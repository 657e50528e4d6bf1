"""What a similarity measure is: a checked representation in, a result out; the registry of all measures; and the verbs
`measure` and `measures`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from inspect import signature
from math import nan
from typing import Any

import torch
from torch import Tensor

from intertwine.argument_types import Float, Int
from intertwine.errors import InputError, MismatchError, did_you_mean, unknown_name

#: Modules of this folder that register measures.
MODULES = ("cca", "cka", "distances", "kernel_cka", "procrustes")
#: Times the precision of the input: a feature whose spread is a smaller fraction of its size is constant.
CONSTANT_TOLERANCE = 8.0
CONSTANT, ZERO = "constant: no feature varies over the samples", "zero everywhere"


@dataclass(frozen=True, eq=False)
class Representation:
    """Values (samples, features), or (samples, channels, positions) for measures that tell channels from positions.

    `values` is float64 if the input is, else float32: large products are computed in it, after centring; small ones in
    float64. `eps` is the precision of the input.
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
        """Features minus their means over the samples; a constant feature is exactly zero."""
        rest = self.flat - self.flat.mean(0)
        rest -= rest.mean(0)  # removes the rounding error of the mean
        constant = _peaks(rest) <= CONSTANT_TOLERANCE * self.eps * _peaks(self.flat)
        return torch.where(constant, 0.0, rest) if constant.any() else rest

    @cached_property
    def size(self) -> float:
        """The largest centred entry; 0 if nothing varies."""
        return float(_peaks(self.centred).amax())


def _peaks(x: Float[Tensor, "samples features"]) -> Float[Tensor, " features"]:
    """The largest absolute value of every feature, without a copy."""
    return torch.maximum(x.amax(0), -x.amin(0))


def represent(x: Tensor, name: str = "x") -> Representation:
    """Check a tensor and read it.

    Raises:
        InputError: not a tensor of numbers (samples, features) or (samples, channels, positions), or not finite.
    """
    if not isinstance(x, Tensor) or x.dim() not in (2, 3) or x.is_complex():
        found = f"{x.dtype} {tuple(x.shape)}".removeprefix("torch.") if isinstance(x, Tensor) else type(x).__name__
        advice = "Flatten or pool other axes first; `intertwine.compare` does it for a model's layers."
        if not isinstance(x, Tensor):
            advice = f"Make it one: torch.as_tensor({name})."
        elif x.dim() < 2:
            advice = f"For one feature per sample write {name}[:, None]."
        elif x.is_complex():
            advice = f"Take its real and imaginary parts as features: torch.view_as_real({name}).flatten(1)."
        raise InputError(
            f"{name} must be a tensor (samples, features), or (samples, channels, positions); found {found}. {advice}"
        )
    if not x.numel():
        raise InputError(f"{name} has no entries: its shape is {tuple(x.shape)}. Give at least one sample and feature.")
    values = x.detach().to(torch.float64 if x.dtype == torch.float64 or not x.is_floating_point() else torch.float32)
    if not values.sum().isfinite() and not values.isfinite().all():  # the sum alone is fast, and may overflow
        bad = int((~values.isfinite()).sum())
        raise InputError(
            f"{name} holds {bad} entries that are not finite (NaN or infinity), and no measure is defined for them. "
            "Find the layer that computes them."
        )
    eps = torch.finfo(x.dtype).eps if x.is_floating_point() else torch.finfo(torch.float64).eps
    return Representation(values, float(eps))


def check_pair(a: Representation, b: Representation) -> None:
    """Two representations are compared sample by sample."""
    if a.samples != b.samples:
        raise MismatchError(
            f"A measure compares two representations of the same samples, but x has {a.samples} and y {b.samples}. "
            "Give the features of the same inputs in the same order."
        )


# -- Results -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class FeatureAlignment:
    """The map from the second representation to the first; parts that a measure does not have are None.

    Attributes:
        permutation: feature i of the first is matched with feature permutation[i] of the second.
        scales: positive factors of the second's features, in the second's order.
        plan: a transport plan between features, first × second.
        write_matrix: computes `matrix`.
    """

    permutation: Int[Tensor, " n"] | None = None
    scales: Float[Tensor, " n"] | None = None
    plan: Float[Tensor, "first second"] | None = None
    write_matrix: Callable[[], Float[Tensor, "second first"]] | None = field(default=None, repr=False)

    @cached_property
    def matrix(self) -> Float[Tensor, "second first"] | None:
        """y @ matrix approximates x (both centred if the measure centres).

        Computed on first use: with more features than samples it is far larger than the representations.
        """
        return None if self.write_matrix is None else self.write_matrix()


@dataclass(frozen=True, eq=False)
class Result:
    """One comparison.

    Attributes:
        measure: its name. value: NaN exactly if `degenerate` gives the reason in words.
        notes: what a reader should know about this value, such as dead features that are left out.
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
        baseline = "" if self.baseline is None else f", unrelated {self.baseline:.4f}"
        return f"Result({self.measure}: {self.value:.6f}{baseline}{tail})"


# -- Measures ----------------------------------------------------------------------------------------------------------

#: Changes of a representation; a measure declares which of these leave its value unchanged.
CHANGES = ("permutation", "positive scales", "signs", "orthogonal", "invertible", "isotropic scale", "translation")
#: What a measure needs in memory at once, from little to much.
FEATURES, SAMPLES, PAIRS = "features", "samples", "pairs of samples"


@dataclass(frozen=True)
class Measure:
    """One measure with its options.

    It works once per representation (`prepare`) and once per pair (`compare`), so that comparing all layers with all
    layers is cheap. `intertwine.testing.check_measure` checks what it declares.

    Attributes:
        kind: "similarity" (larger is closer) or "distance". range: its smallest and largest value.
        at_identity: its value for a representation and itself. invariances: changes of the second representation, out
            of `CHANGES`, that leave the value unchanged.
        prepare_with, compare_with: the computation, with options bound.
        needs: the smallest number of samples. positions: whether it tells channels from positions.
        meets: with `positions`, whether those of both must be the same.
        permute_with: the state of the same representation with its samples in another order, if that is cheaper than
            to prepare it again.
        memory: what is needed at once: products of "features" (one pass over the samples is enough), all "samples", or
            a number for all "pairs of samples".
        baseline: whether every value comes with that of unrelated features, which costs a second comparison.
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
        state = self.prepare_with(x) if x.samples >= self.needs else None
        return PreparedRepresentation(self.name, x.samples, x, state)

    def compare(self, a: PreparedRepresentation, b: PreparedRepresentation) -> Result:
        """The work that is done once per pair."""
        check_pair(a.representation, b.representation)
        if a.samples < self.needs:
            return too_few_samples(self.name, self.needs, a.samples)
        result = self.compare_with(a.state, b.state)
        if not self.baseline or result.degenerate:
            return result
        unrelated = self.permuted(b, derangement(b.samples))
        return replace(result, baseline=self.compare_with(a.state, unrelated.state).value)

    def permuted(self, a: PreparedRepresentation, order: Tensor) -> PreparedRepresentation:
        """A prepared representation with its samples in another order."""
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
    """A representation and the state that one measure computes from it."""

    measure: str
    samples: int
    representation: Representation = field(repr=False)
    state: Any = field(repr=False)


def derangement(samples: int) -> Int[Tensor, " samples"]:
    """A fixed random order in which no sample keeps its place: a single cycle through all of them.

    >>> derangement(2).tolist()
    [1, 0]
    """
    cycle = torch.randperm(samples, generator=torch.Generator().manual_seed(0))
    return torch.empty_like(cycle).scatter_(0, cycle, cycle.roll(1))


def degenerate(name: str, reason: str, notes: tuple[str, ...] = ()) -> Result:
    """The result of a comparison that has no value."""
    return Result(name, nan, reason, notes=notes)


def too_few_samples(name: str, needs: int, samples: int) -> Result:
    """The result of a comparison with too few samples."""
    return degenerate(name, f"it needs at least {needs} samples, and there are {samples}")


def constant_result(name: str, x: bool, y: bool, what: str = CONSTANT) -> Result:
    """The result if x, y or both have nothing to compare."""
    return degenerate(name, f"{'both representations are' if x and y else 'x is' if x else 'y is'} {what}")


# -- The registry ------------------------------------------------------------------------------------------------------

MeasureFactory = Callable[..., Measure]
_MAKERS: dict[str, MeasureFactory] = {}


def register(make: MeasureFactory) -> MeasureFactory:
    """Register a measure of your own under its name, for this process.

    A function of the same name replaces the first, as when a notebook cell runs again or a file is imported twice. The
    names of intertwine's measures cannot be replaced.

    Args:
        make: returns the `Measure`; its keyword arguments are the measure's options, all with defaults.

    Returns:
        `make`, for use as a decorator.

    Raises:
        InputError: the name belongs to a measure of intertwine, or to that of a function with another name.

    Example:
        `@register` above the function, as in docs/bring-your-own-measure.md. A name that is taken is refused:

        >>> from intertwine.measure.measure import find, register
        >>> register(lambda: find("rsa"))
        Traceback (most recent call last):
        intertwine.errors.InputError: The name 'rsa' belongs to intertwine.measure.distances.rsa. Choose another name.
    """
    home, function = _origin(make)
    if not home.startswith("intertwine."):
        _load()  # so that all names of intertwine are known
    name = make().name
    holder, known = _origin(_MAKERS.get(name, make))
    if known != function or (holder.startswith("intertwine.") and holder != home):
        raise InputError(f"The name {name!r} belongs to {holder}.{known}. Choose another name.")
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
        raise InputError(unknown_name("measure", name, sorted(_MAKERS)))
    try:
        return _MAKERS[name](**options)
    except TypeError as error:
        known = list(signature(_MAKERS[name]).parameters)
        offered = f"Its options: {', '.join(known)}." if known else "It has no options: leave them out."
        foreign = [option for option in options if option not in known]
        why = f"it has no option {foreign[0]!r}. {did_you_mean(foreign[0], known)}" if foreign else f"{error}. "
        raise InputError(f"The options {options} do not fit the measure {name}: {why}{offered}") from error


def every() -> Iterator[Measure]:
    """All measures with their default options, by name."""
    _load()
    return (_MAKERS[name]() for name in sorted(_MAKERS))


def _load() -> None:
    """Import the modules that register measures."""
    for name in MODULES:
        import_module(f"intertwine.measure.{name}")


# -- The verbs ---------------------------------------------------------------------------------------------------------


def measure(x: Tensor, y: Tensor, name: str = "linear_cka", **options: Any) -> Result:
    """How similar two representations of the same samples are.

    Args:
        x, y: features (samples, features) of the same samples in the same order; widths may differ. Measures that tell
            channels from positions also take (samples, channels, positions).
        name: one of `measures()`. options: of that measure.

    Returns:
        A `Result`: `.value`, or `.degenerate` with the reason why there is none; `.alignment` if the measure has one.

    Raises:
        InputError: no such measure or option, or not a tensor of finite numbers. MismatchError: the numbers of samples
            differ.

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
