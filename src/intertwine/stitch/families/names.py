"""Families by name ("linear", "lowrank:4", "group:tanh"), the family that an activation allows, and the direct fit of
a family.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from intertwine.errors import InputError, did_you_mean
from intertwine.stitch.direct import LinearMap, PairMoments
from intertwine.stitch.families.base import MapFamily, known_families
from intertwine.stitch.families.linear import Linear, LowRank, Sparse
from intertwine.stitch.families.permutations import Monomial
from intertwine.symmetry.activation import ActivationGroup, activation_group

# ----------------------------------------------------------------------------------------------------
# The family that an activation calls for: the maps that pass it, as the engine finds them.


def family_of(activation: Callable[..., Any], side: str = "after") -> MapFamily:
    """The family of maps that can be moved through an elementwise activation.

    Args:
        activation: any elementwise function. side: "after" the activation, where the factors are φ(a), or "before" it,
            where they are a. An even function passes signs before it which are gone after it.

    Returns:
        Permutations with the factors that the activation's scalar group has; all matrices for a linear function.
        Factors of a discrete group besides (the powers of one number) are left out.

    Example:
        >>> import torch
        >>> [str(family_of(fn)) for fn in (torch.relu, torch.tanh, torch.nn.functional.gelu, torch.square)]
        ['relu', 'signed', 'permutation', 'relu']
        >>> str(family_of(torch.square, "before"))
        'nonzero'
    """
    if side not in ("after", "before"):
        raise InputError(f'The side {side!r} of an activation was asked for. It can be "after" or "before".')
    group = activation_group(activation)
    if group.kind == "all":
        return Linear()
    return Monomial(_factors(group, side))


def _factors(group: ActivationGroup, side: str) -> str:
    scaled = group.kind in ("positive", "nonzero")
    signed = group.kind in ("sign", "nonzero")
    if side == "after":  # φ(a) = a**exponent for positive a, and φ(−1) is the parity
        scaled = scaled and bool(group.exponent)
        signed = signed and group.parity == -1
    return {(False, False): "one", (False, True): "sign", (True, False): "positive", (True, True): "nonzero"}[
        scaled, signed
    ]


def named_activation(name: str) -> Callable[..., Any]:
    """The elementwise function of that name in `torch.nn.functional` or `torch`."""
    for place in (torch.nn.functional, torch):
        found = getattr(place, name, None)
        if callable(found) and not name.startswith("_"):
            return found
    raise InputError(
        f"The group of the activation {name!r} was asked for, and neither torch.nn.functional nor torch has a function "
        'of that name. Write one of them, as in "group:tanh", or pass family_of(your_function).'
    )


# ----------------------------------------------------------------------------------------------------
# Families of stitching maps by name: "linear", "lowrank:4", "sparse:0.01", "relu", "group:tanh".


_BY_NUMBER: dict[str, Callable[[str, bool], MapFamily]] = {
    "lowrank": lambda text, bias: LowRank(int(text), bias=bias),
    "sparse": lambda text, bias: Sparse(float(text), bias=bias),
}


def families() -> tuple[str, ...]:
    """The names of all families; K, λ and the activation stand for what you write there.

    Example:
        >>> "relu" in families(), "lowrank:K" in families()
        (True, True)
    """
    return (*known_families(), "lowrank:K", "lowrank:K+bias", "sparse:λ", "sparse:λ+bias", "group:ACTIVATION")


def find_family(family: str | MapFamily) -> MapFamily:
    """The family of that name; a family is returned as it is.

    Raises:
        InputError: there is no such family, or its number is not one.

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
    if kind in _BY_NUMBER:
        return _numbered(family, kind, rest)
    if kind == "group" and rest:
        name, _, side = rest.partition(":")
        return family_of(named_activation(name), side or "after")
    raise InputError(
        f"The family {family!r} was asked for. {did_you_mean(family, families())}Families: {', '.join(families())}."
    )


def _numbered(family: str, kind: str, rest: str) -> MapFamily:
    number, plus, bias = rest.partition("+")
    try:
        if plus and bias != "bias":
            raise ValueError(bias)
        return _BY_NUMBER[kind](number, bool(plus))
    except InputError:
        raise
    except ValueError:
        example = {"lowrank": "lowrank:4", "sparse": "sparse:0.01"}[kind]
        raise InputError(
            f'The family {family!r} was asked for. {kind} takes one number, as in "{example}" or "{example}+bias".'
        ) from None


def fit_direct(family: str | MapFamily, moments: PairMoments) -> LinearMap:
    """The member of a family nearest to taking the front's features to the back's, from their moments alone.

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
