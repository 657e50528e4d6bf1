"""`equivalent`: do two networks differ by a symmetry only, and by which element of it?"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from intertwine.canonical.blocks import moved, weights_of
from intertwine.canonical.canonicalize import canonical_element
from intertwine.canonical.matching import match
from intertwine.errors import MismatchError
from intertwine.symmetry.element import Element
from intertwine.symmetry.symmetry import Symmetry
from intertwine.symmetry.symmetry import symmetry as find_symmetry

#: Lengths of whole tensors in canonical form that differ by more than this multiple of the tolerance end the search.
FAR = 1e3


def equivalent(
    a: nn.Module,
    b: nn.Module,
    *example_args: Any,
    tol: float = 1e-6,
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
    found = symmetry
    if found is None:
        found = find_symmetry(a, *example_args, **example_kwargs)
        check_same_architecture(found, a, b, find_symmetry(b, *example_args, **example_kwargs))
    return equivalent_weights(found, weights_of(found, a), weights_of(found, b), tol)


def equivalent_weights(
    symmetry: Symmetry, a: Mapping[str, Tensor], b: Mapping[str, Tensor], tol: float = 1e-6
) -> Element | None:
    """The same on weights without models around them."""
    to_a, to_b = canonical_element(symmetry, a)[0], canonical_element(symmetry, b)[0]
    if not _lengths_agree(moved(symmetry, to_a, a), moved(symmetry, to_b, b), FAR * tol):
        return None
    g = to_a.inverse() @ to_b
    if agree(symmetry, a, moved(symmetry, g, b), tol):
        return g
    g = match(symmetry, a, b)
    return g if agree(symmetry, a, moved(symmetry, g, b), tol) else None


def agree(symmetry: Symmetry, a: Mapping[str, Tensor], b: Mapping[str, Tensor], tol: float) -> bool:
    """Whether all tensors of two sets of weights agree."""
    return all(_difference(symmetry, name, a[name], b[name]) <= tol * _room(a[name]) for name in a)


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


def _lengths_agree(a: Mapping[str, Tensor], b: Mapping[str, Tensor], tol: float) -> bool:
    for name in a:
        if a[name].is_floating_point():
            x, y = (float(torch.linalg.vector_norm(t.nan_to_num(0, 0, 0), dtype=torch.float64)) for t in (a[name], b[name]))
            if abs(x - y) > tol * (x + y):
                return False
    return True


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
    left, right = (s._discovery.graph.program.calls for s in (found, other))
    for x, y in zip(left, right, strict=False):
        if x.op != y.op:
            raise MismatchError(
                f"The two networks hold the same weights but compute different things: at {x.place} the first calls "
                f"{x.op}, the second {y.op}. Compare two networks of one architecture."
            )
    if found.signature != other.signature or len(left) != len(right):
        raise MismatchError(
            "The two networks hold the same weights but have different symmetries, so they are of different "
            "architectures. Compare intertwine.symmetry(a, …) with intertwine.symmetry(b, …)."
        )
