"""Families of stitching maps by name: "linear", "lowrank:4", "sparse:0.01", "relu", "group:tanh"."""

from __future__ import annotations

from collections.abc import Callable

from intertwine.errors import InputError, did_you_mean
from intertwine.stitch.families.base import Family, Parameters
from intertwine.stitch.families.group import family_of, named_activation
from intertwine.stitch.families.lowrank import LowRank
from intertwine.stitch.families.registry import known_families
from intertwine.stitch.families.sparse import Sparse
from intertwine.stitch.linear_map import LinearMap
from intertwine.stitch.moments import Moments

__all__ = ["Family", "Parameters", "families", "family_of", "find_family", "fit_direct"]

_BY_NUMBER: dict[str, Callable[[str, bool], Family]] = {
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


def find_family(family: str | Family) -> Family:
    """The family of that name; a family is returned as it is.

    Raises:
        InputError: there is no such family, or its number is not one.

    Example:
        >>> find_family("lowrank:4")
        LowRank(rank=4, bias=False)
        >>> find_family("group:tanh").name
        'signed'
    """
    if isinstance(family, Family):
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


def _numbered(family: str, kind: str, rest: str) -> Family:
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


def fit_direct(family: str | Family, moments: Moments) -> LinearMap:
    """The member of a family nearest to taking the front's features to the back's, from their moments alone.

    Example:
        >>> import torch
        >>> from intertwine.stitch.moments import Moments
        >>> a, moments = torch.rand(50, 3), Moments()
        >>> moments.update(a, 2 * a[:, [2, 0, 1]])
        >>> fit_direct("relu", moments).matrix.round(decimals=4).float()
        tensor([[0., 0., 2.], [2., 0., 0.], [0., 2., 0.]])
    """
    found = find_family(family)
    found.check(moments.inputs, moments.outputs)
    return found.direct(moments)
