"""`equivalent`: whether two networks differ only by a symmetry, and by which element; and how many networks group into
equivalence classes. Also the check that two networks have the same architecture.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from intertwine.argument_types import finite_float
from intertwine.canonical.form import CanonicalForm, canonical_form
from intertwine.canonical.pairing import pair_units
from intertwine.errors import InputError, MismatchError
from intertwine.symmetry.blocks import transform_weights, weights_of
from intertwine.symmetry.element import Element
from intertwine.symmetry.symmetry import Symmetry
from intertwine.symmetry.symmetry import symmetry as find_symmetry

# ----------------------------------------------------------------------------------------------------
# `equivalent`: do two networks differ by a symmetry only, and by which element of it?


#: Lengths of whole tensors in canonical form that differ by more than this multiple of the tolerance end the search.
FAR = 1e3


def equivalent(
    a: nn.Module,
    b: nn.Module,
    *example_args: Any,
    tol: float | int = 1e-6,
    symmetry: Symmetry | None = None,
    **example_kwargs: Any,
) -> Element | None:
    """The element that takes b to a, or None if no element of the symmetry does.

    Both canonical forms are compared first; if noise has changed an order, units are paired by distance instead.

    Args:
        a, b: two networks of one architecture. *example_args, **example_kwargs: inputs, as for `intertwine.symmetry`.
        tol: how far two tensors may differ, as ‖x − y‖ / (‖x‖ + ‖y‖); tensors of few entries get a little more room.
        symmetry: the symmetry of the architecture where it is already known; both models are then trusted to be of it.

    Returns:
        An `Element` g such that `symmetry.act(g, b)` has the weights of a, or None.

    Raises:
        MismatchError: the networks are of different architectures. InputError: weights that are not finite.

    Example:
        >>> import torch, intertwine
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> x = torch.zeros(1, 3)
        >>> sym = intertwine.symmetry(model, x)
        >>> g = sym.random(seed=0)
        >>> found = intertwine.equivalent(model, sym.act(g, model), x)
        >>> (found @ g).distance(sym.identity()) < 1e-5
        True
    """
    if finite_float(tol) is None or tol < 0:
        raise InputError(f"tol={tol!r} was asked for. It is a relative difference, 0 or more, such as 1e-6.")
    found = symmetry
    if found is None:
        found = find_symmetry(a, *example_args, **example_kwargs)
        check_same_architecture(found, a, b, find_symmetry(b, *example_args, **example_kwargs))
    return equivalent_forms(
        canonical_form(found, weights_of(found, a)), canonical_form(found, weights_of(found, b)), tol
    )


def equivalent_forms(a: CanonicalForm, b: CanonicalForm, tol: float = 1e-6) -> Element | None:
    """The same on canonical forms, where many networks are compared."""
    if not bool(((a.lengths - b.lengths).abs() <= FAR * tol * (a.lengths + b.lengths)).all()):
        return None
    g = a.element.inverse() @ b.element
    if agree(a.symmetry, a.weights, transform_weights(b.symmetry, g, b.weights), tol):
        return g
    g = pair_units(a.symmetry, a.weights, b.weights)
    return g if agree(a.symmetry, a.weights, transform_weights(b.symmetry, g, b.weights), tol) else None


def agree(symmetry: Symmetry, a: Mapping[str, Tensor], b: Mapping[str, Tensor], tol: float) -> bool:
    """Whether all tensors of two sets of weights agree."""
    return all(_difference(symmetry, name, a[name], b[name]) <= tol * _room(a[name]) for name in a)


def difference(a: CanonicalForm, b: CanonicalForm, g: Element) -> float:
    """The largest difference of a tensor of a from that of b moved by an element."""
    there = transform_weights(b.symmetry, g, b.weights)
    return max((_difference(a.symmetry, name, a.weights[name], there[name]) for name in a.weights), default=0.0)


def _room(x: Tensor) -> float:
    """Independent noise averages out over many entries; over few it may be several times its usual size."""
    return 1 + 3 / sqrt(max(x.numel(), 1))


def _difference(symmetry: Symmetry, name: str, x: Tensor, y: Tensor) -> float:
    if not x.is_floating_point():
        return 0.0 if torch.equal(x, y) else float("inf")
    layout = symmetry.layouts.get(name)
    shift = layout.shift if layout is not None else 0.0  # running variances are judged as the (v + eps) that acts
    finite = x.isfinite()
    if not torch.equal(finite, y.isfinite()):
        return float("inf")
    x, y = (t.double()[finite] + shift for t in (x, y))
    size = float(x.norm() + y.norm())
    return float((x - y).norm()) / size if size else 0.0


def check_same_architecture(found: Symmetry, a: nn.Module, b: nn.Module, other: Symmetry) -> None:
    """Refuse two networks whose weights cannot be compared, and say where they part."""
    shapes_a, shapes_b = ({n: tuple(t.shape) for n, t in m.state_dict().items()} for m in (a, b))
    for name in [*shapes_a, *shapes_b]:
        if shapes_a.get(name) != shapes_b.get(name):
            words = [f"has shape {s[name]}" if name in s else "does not exist" for s in (shapes_a, shapes_b)]
            raise MismatchError(
                f"The two networks are of different architectures: {name!r} {words[0]} in the first and {words[1]} in "
                "the second. Only networks with the same layers can be equivalent by a symmetry."
            )
    left, right = (s.geometry.graph.program.calls for s in (found, other))
    for x, y in zip(left, right, strict=False):
        if x.op != y.op:
            check_same_mode(a, b)
            raise MismatchError(
                f"The two networks hold the same weights but compute different things: at {x.place} the first calls "
                f"{x.op}, the second {y.op}. Compare two networks of one architecture."
            )
    if found.signature != other.signature or len(left) != len(right):
        check_same_mode(a, b)
        raise MismatchError(
            "The two networks hold the same weights but have different symmetries, so they are of different "
            "architectures. Compare intertwine.symmetry(a, …) with intertwine.symmetry(b, …)."
        )


def check_same_mode(a: nn.Module, b: nn.Module) -> None:
    """Refuse two networks one of which is in training mode where the other is in evaluation mode."""
    modes = dict(b.named_modules())
    for name, module in a.named_modules():
        if name in modes and module.training != modes[name].training:
            which = "first" if module.training else "second"
            what = f"{name!r} of the {which} network" if name else f"The {which} network"
            raise MismatchError(
                f"{what} is in training mode and the other is not, so they compute different things. Call "
                "eval() on both first."
            )


# ----------------------------------------------------------------------------------------------------
# Families: which of many networks of one architecture are the same up to a symmetry.


@dataclass(frozen=True)
class EquivalentCopy:
    """One network of a family. `element` takes it to the first of the family, up to `difference`."""

    name: str
    element: Element = field(repr=False)
    difference: float
    how: str  # "identical", "moved" (bits differ by the symmetry and rounding only) or "moved, with noise"

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "how": self.how, "difference": self.difference}


@dataclass(frozen=True)
class EquivalenceClass:
    """Networks that are one up to a symmetry; the first that was met stands for all."""

    first: str
    fingerprint: str
    copies: tuple[EquivalentCopy, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"first": self.first, "fingerprint": self.fingerprint, "copies": [c.to_dict() for c in self.copies]}


def equivalence_classes(forms: Iterable[tuple[str, CanonicalForm]], tol: float = 1e-6) -> tuple[EquivalenceClass, ...]:
    """Group networks by equivalence. Every copy was checked against the first of its family, weight by weight.

    Args:
        forms: (name, form) of networks of one architecture; read one by one, the first of each family is kept.
        tol: as for `intertwine.equivalent`.
    """
    firsts: list[tuple[str, CanonicalForm, str]] = []
    copies: list[list[EquivalentCopy]] = []
    for name, form in forms:
        mark = form.fingerprint()
        for i, (_, first, first_mark) in enumerate(firsts):
            element = equivalent_forms(first, form, tol)
            if element is not None:
                copies[i].append(_member(name, first, form, element, mark == first_mark))
                break
        else:
            firsts.append((name, form, mark))
            copies.append([])
    return tuple(EquivalenceClass(n, mark, tuple(c)) for (n, _, mark), c in zip(firsts, copies, strict=True))


def _member(name: str, first: CanonicalForm, form: CanonicalForm, element: Element, same_mark: bool) -> EquivalentCopy:
    if all(bool((first.weights[n] == form.weights[n]).all()) for n in first.weights):
        return EquivalentCopy(name, element, 0.0, "identical")
    return EquivalentCopy(
        name, element, difference(first, form, element), "moved" if same_mark else "moved, with noise"
    )
