"""Families by name ("linear", "lowrank:4", "group:tanh"), the family of an activation, and direct fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from intertwine.errors import InputError, did_you_mean
from intertwine.stitch.direct import LinearMap, PairMoments
from intertwine.stitch.families.base import MapFamily, known_families, register
from intertwine.stitch.families.linear import IdentityFamily, Linear, LowRank, Orthogonal, Sparse
from intertwine.stitch.families.permutations import MASKS, Birkhoff, Masked, Monomial, SoftSort
from intertwine.symmetry.activation import activation_group

#: Families whose names hold a number, and the type of the number.
_BY_NUMBER: dict[str, tuple[Callable[..., MapFamily], type, str]] = {
    "lowrank": (LowRank, int, "lowrank:4"),
    "sparse": (Sparse, float, "sparse:0.01"),
}

register(IdentityFamily(), Linear(), Linear(bias=True))  # in the order of `families`
register(*(Monomial(factors) for factors in ("one", "sign", "positive", "nonzero")))
register(*(Monomial(factors, annealed=True) for factors in ("positive", "nonzero")))
register(Orthogonal(), Orthogonal(bias=True), Birkhoff())
register(*(Masked(mask, bias=bias) for mask in MASKS for bias in (False, True)), SoftSort())


def family_of(activation: Callable[..., Any], side: str = "after") -> MapFamily:
    """The family of maps that can be moved through an elementwise activation.

    Args:
        activation: any elementwise function. side: "after" the activation, where the factors are φ(a), or "before" it,
            where they are a. An even function absorbs signs, so they exist only before it.

    Returns:
        Permutations with the factors of the activation's scalar group; all matrices for a linear function. Other
        factors of a discrete group (the powers of one number) are left out.

    Example:
        >>> import torch
        >>> [str(family_of(fn)) for fn in (torch.relu, torch.tanh, torch.nn.functional.gelu, torch.square)]
        ['relu', 'signed', 'permutation', 'relu']
        >>> str(family_of(torch.square, "before"))
        'nonzero'
    """
    if side not in ("after", "before"):
        raise InputError(f'Unknown side {side!r} of an activation. Choose "after" or "before".')
    group = activation_group(activation)
    if group.kind == "all":
        return Linear()
    scaled, signed = group.kind in ("positive", "nonzero"), group.kind in ("sign", "nonzero")
    if side == "after":  # φ(a) = a**exponent for positive a, and φ(−1) is the parity
        scaled, signed = scaled and bool(group.exponent), signed and group.parity == -1
    return Monomial(("nonzero" if signed else "positive") if scaled else "sign" if signed else "one")


def named_activation(name: str) -> Callable[..., Any]:
    """The elementwise function of that name in `torch.nn.functional` or `torch`."""
    for module in (torch.nn.functional, torch):
        found = getattr(module, name, None)
        if callable(found) and not name.startswith("_"):
            return found
    raise InputError(
        f"Unknown activation {name!r}: neither torch.nn.functional nor torch has a function of that name. Name one of "
        'theirs, as in "group:tanh", or pass family_of(your_function).'
    )


def families() -> tuple[str, ...]:
    """The names of all families. K and λ stand for a number, ACTIVATION for the name of a function.

    Example:
        >>> "relu" in families(), "lowrank:K" in families()
        (True, True)
    """
    return (*known_families(), "lowrank:K", "lowrank:K+bias", "sparse:λ", "sparse:λ+bias", "group:ACTIVATION")


def find_family(family: str | MapFamily) -> MapFamily:
    """The family of a name; a `MapFamily` is returned unchanged.

    Raises:
        InputError: an unknown name, or an invalid number in it.

    Example:
        >>> find_family("lowrank:4")
        LowRank(rank=4, bias=False)
        >>> find_family("group:tanh").name
        'signed'
    """
    if isinstance(family, MapFamily):
        return family
    known = known_families()
    if family in known:
        return known[family]
    kind, _, rest = family.partition(":")
    if kind == "group" and rest:
        name, _, side = rest.partition(":")
        return family_of(named_activation(name), side or "after")
    if kind not in _BY_NUMBER:
        raise InputError(
            f"Unknown family {family!r}. {did_you_mean(family, families())}Choose one of: {', '.join(families())}."
        )
    make, number_type, example = _BY_NUMBER[kind]
    text, plus, bias = rest.partition("+")
    try:
        number = number_type(text)
    except ValueError:
        number = None
    if number is None or (plus and bias != "bias"):
        raise InputError(f'Invalid family {family!r}. {kind} takes one number, as in "{example}" or "{example}+bias".')
    return make(number, bias=bool(plus))


def fit_direct(family: str | MapFamily, moments: PairMoments) -> LinearMap:
    """The member of a family that maps the front's features closest to the back's, from their moments alone.

    Example:
        >>> import torch
        >>> from intertwine.stitch.direct import PairMoments
        >>> a, moments = torch.rand(50, 3), PairMoments()
        >>> moments.update(a, 2 * a[:, [2, 0, 1]])
        >>> fit_direct("relu", moments).matrix.round(decimals=4).float()
        tensor([[0., 0., 2.], [2., 0., 0.], [0., 2., 0.]])
    """
    found = find_family(family)
    found.check(moments.inputs, moments.outputs)
    return found.direct(moments)
