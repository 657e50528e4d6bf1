"""`equivalent`: whether two networks differ only by a symmetry, and by which element; and how many networks group into
equivalence classes. Also the check that two networks have the same architecture.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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

#: Networks are not equivalent if the length of a tensor in canonical form differs by this multiple of the tolerance.
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
        tol: how far two tensors may differ, as ‖x − y‖ / (‖x‖ + ‖y‖); slightly more for tensors of few entries.
        symmetry: the symmetry of the architecture if it is known; it is then not checked that both models have it.

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
        raise InputError(f"tol must be a relative difference, 0 or more, such as 1e-6, but is {tol!r}.")
    found = common_symmetry([a, b], symmetry, example_args, example_kwargs)
    form_a, form_b = (canonical_form(found, weights_of(found, model)) for model in (a, b))
    return equivalent_forms(form_a, form_b, tol)


def equivalent_forms(a: CanonicalForm, b: CanonicalForm, tol: float = 1e-6) -> Element | None:
    """`equivalent` on canonical forms, for comparing many networks."""
    if not bool(((a.lengths - b.lengths).abs() <= FAR * tol * (a.lengths + b.lengths)).all()):
        return None
    for make in (lambda: a.element.inverse() @ b.element, lambda: pair_units(a.symmetry, a.weights, b.weights)):
        g = make()
        if agree(a.symmetry, a.weights, transform_weights(b.symmetry, g, b.weights), tol):
            return g
    return None


def agree(symmetry: Symmetry, a: Mapping[str, Tensor], b: Mapping[str, Tensor], tol: float) -> bool:
    """Whether two sets of weights agree. Over few entries independent noise may be several times its usual size."""
    room = {name: 1 + 3 / sqrt(max(x.numel(), 1)) for name, x in a.items()}
    return all(_difference(symmetry, name, a[name], b[name]) <= tol * room[name] for name in a)


def difference(a: CanonicalForm, b: CanonicalForm, g: Element) -> float:
    """The largest relative difference between a tensor of a and that of b moved by an element."""
    moved = transform_weights(b.symmetry, g, b.weights)
    return max((_difference(a.symmetry, name, a.weights[name], moved[name]) for name in a.weights), default=0.0)


def _difference(symmetry: Symmetry, name: str, x: Tensor, y: Tensor) -> float:
    if not x.is_floating_point():
        return 0.0 if torch.equal(x, y) else float("inf")
    layout, finite = symmetry.layouts.get(name), x.isfinite()
    if not torch.equal(finite, y.isfinite()):
        return float("inf")
    shift = layout.shift if layout is not None else 0.0  # running variances are compared as the (v + eps) that scales
    x, y = (t.double()[finite] + shift for t in (x, y))
    size = float(x.norm() + y.norm())
    return float((x - y).norm()) / size if size else 0.0


def common_symmetry(
    models: Sequence[nn.Module], symmetry: Symmetry | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Symmetry:
    """The symmetry of all models, which must be of one architecture; a symmetry that is given is not checked."""
    if symmetry is not None:
        return symmetry
    found = find_symmetry(models[0], *args, **kwargs)
    for other in models[1:]:
        check_same_symmetry(found, models[0], other, find_symmetry(other, *args, **kwargs))
    return found


def check_same_symmetry(found: Symmetry, a: nn.Module, b: nn.Module, other: Symmetry) -> None:
    """Raise an error for two networks whose weights cannot be compared, and say where they differ."""
    shapes_a, shapes_b = ({n: tuple(t.shape) for n, t in m.state_dict().items()} for m in (a, b))
    for name in [*shapes_a, *shapes_b]:
        if shapes_a.get(name) != shapes_b.get(name):
            words = [f"has shape {s[name]}" if name in s else "does not exist" for s in (shapes_a, shapes_b)]
            raise MismatchError(
                f"The two networks are of different architectures: {name!r} {words[0]} in the first and {words[1]} in "
                "the second. Only networks with the same layers can be equivalent by a symmetry."
            )
    left, right = (s.geometry.graph.program.calls for s in (found, other))
    differ = next(((x, y) for x, y in zip(left, right, strict=False) if x.op != y.op), None)
    if differ is None and found.signature == other.signature and len(left) == len(right):
        return
    modes = dict(b.named_modules())
    for name, module in a.named_modules():
        if name in modes and module.training != modes[name].training:
            which = "first" if module.training else "second"
            what = f"{name!r} of the {which} network" if name else f"The {which} network"
            raise MismatchError(
                f"{what} is in training mode and the other is not, so they compute different functions. Call eval() on "
                "both first."
            )
    if differ is not None:
        raise MismatchError(
            f"The two networks hold the same weights but compute different functions: at {differ[0].place} the first "
            f"calls {differ[0].op}, the second {differ[1].op}. Compare two networks of one architecture."
        )
    raise MismatchError(
        "The two networks hold the same weights but have different symmetries, so they are of different architectures. "
        "Compare intertwine.symmetry(a, …) with intertwine.symmetry(b, …)."
    )


@dataclass(frozen=True)
class EquivalentCopy:
    """One network of an equivalence class. `element` takes it to the first of the class, up to `difference`."""

    name: str
    element: Element = field(repr=False)
    difference: float
    how: str  # "identical", "moved" (bits differ by the symmetry and rounding only) or "moved, with noise"

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "how": self.how, "difference": self.difference}


@dataclass(frozen=True)
class EquivalenceClass:
    """Networks that are equal up to a symmetry, represented by the first one."""

    first: str
    fingerprint: str
    copies: tuple[EquivalentCopy, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"first": self.first, "fingerprint": self.fingerprint, "copies": [c.to_dict() for c in self.copies]}


def equivalence_classes(forms: Iterable[tuple[str, CanonicalForm]], tol: float = 1e-6) -> tuple[EquivalenceClass, ...]:
    """Group networks by equivalence. Every copy is compared with the first of its class, weight by weight.

    Args:
        forms: (name, form) of networks of one architecture; read one by one, the first of each class is kept.
        tol: as for `intertwine.equivalent`.
    """
    firsts: list[tuple[str, CanonicalForm, str]] = []
    copies: list[list[EquivalentCopy]] = []
    for name, form in forms:
        mark = form.fingerprint()
        for i, (_, first, first_mark) in enumerate(firsts):
            element = equivalent_forms(first, form, tol)
            if element is not None:
                identical = all(bool((first.weights[n] == form.weights[n]).all()) for n in first.weights)
                how = "identical" if identical else "moved" if mark == first_mark else "moved, with noise"
                distance = 0.0 if identical else difference(first, form, element)
                copies[i].append(EquivalentCopy(name, element, distance, how))
                break
        else:
            firsts.append((name, form, mark))
            copies.append([])
    return tuple(EquivalenceClass(n, mark, tuple(c)) for (n, _, mark), c in zip(firsts, copies, strict=True))
