"""Where two networks are cut, how that is written, and what arrives at a cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from intertwine.errors import InputError, MismatchError, did_you_mean
from intertwine.features.places import Site, sites
from intertwine.shapes import Float

#: One place of both networks, a pair of places (a tuple), or several of these (a list).
At = str | tuple[str, str] | Sequence[str | tuple[str, str]]


@dataclass(frozen=True)
class Cut:
    """One cut: the front runs up to one place, the back goes on behind another.

    Attributes:
        front, back: the places, as `intertwine.features.places` writes them.
        skip: whose values go around the cut, as the skip path of a residual block does: "front", "back", or "none"
            where nothing goes around it. The inputs of the networks do not count: both have the same.
        crossing: the back's values that go around the cut, by name; empty for a back that could only be run whole.
        inputs, outputs: channels of the front at its place, and of the back at its own.
    """

    front: str
    back: str
    skip: str
    crossing: tuple[str, ...]
    inputs: int
    outputs: int


@dataclass(frozen=True, eq=False)
class Arrived:
    """What one run of the front brought to a cut: the features as rows, and the values that go around the cut."""

    rows: Float[Tensor, "samples positions inputs"]
    around: tuple[Any, ...] = ()


def pairs(at: At) -> tuple[tuple[str, str], ...]:
    """The places to cut at, as pairs of front and back.

    >>> pairs("relu"), pairs(("relu", "act")), pairs(["conv", ("relu", "act")])
    ((('relu', 'relu'),), (('relu', 'act'),), (('conv', 'conv'), ('relu', 'act')))
    """
    several: list[Any] = [at] if isinstance(at, (str, tuple)) else list(at)
    found = tuple((one, one) if isinstance(one, str) else tuple(one) for one in several)
    if not found or not all(len(pair) == 2 for pair in found):
        raise InputError(
            f'at={at!r} was asked for. Give a module path of both networks ("layer1.0.relu"), a pair of paths, first '
            'the front\'s ("layer1", "blocks.2"), or a list of these for several cuts.'
        )
    return tuple((front, back) for front, back in found)


def places_of(front: nn.Module, back: nn.Module, at: At) -> list[tuple[Site, Site]]:
    """The places of every pair; a pattern that stands for both networks gives one pair for each path that fits."""
    found: list[tuple[Site, Site]] = []
    for first, second in pairs(at):
        ones, twos = sites(front, first), sites(back, second)
        if len(ones) != len(twos):
            raise MismatchError(
                f"The pair {first!r} and {second!r} was asked for, but it stands for {len(ones)} places of the front "
                f"and {len(twos)} of the back. Name the places one by one."
            )
        found += list(zip(ones, twos, strict=True))
    for site in (site for pair in found for site in pair):
        if not site.path:
            raise InputError(
                f"The place {str(site)!r} is the {site.side} of the whole network, where nothing is to be cut off. "
                "Give the path of a module inside, as model.named_modules() prints it."
            )
    return found


def check_layouts(layouts: Mapping[str, str], places: Sequence[tuple[Site, Site]]) -> None:
    """Refuse a layout of a place where nothing is cut."""
    known = {str(site) for pair in places for site in pair}
    for name in layouts:
        if name not in known:
            raise InputError(
                f"A layout was given for {name!r}, where nothing is cut. {did_you_mean(name, known)}The cuts are at "
                f"{', '.join(sorted(known))}."
            )
