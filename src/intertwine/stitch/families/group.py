"""The family that an activation calls for: the maps that pass it, as the engine finds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from intertwine.errors import InputError
from intertwine.stitch.families.base import Family
from intertwine.stitch.families.linear import Linear
from intertwine.stitch.families.monomial import Monomial
from intertwine.symmetry.activation import ActivationGroup, activation_group


def family_of(activation: Callable[..., Any], side: str = "after") -> Family:
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
