"""Families by name: every file of this folder registers its own members, and importing them all makes them known."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from intertwine.stitch.families.base import Family

_MEMBERS: dict[str, Family] = {}


def register(*members: Family) -> None:
    """Make families known by their names; one of the same name takes the place of the first.

    Example:
        >>> from intertwine.stitch.families.linear import Linear
        >>> register(Linear())
        >>> "linear" in known_families()
        True
    """
    _MEMBERS.update({member.name: member for member in members})


def known_families() -> dict[str, Family]:
    """All families whose names hold no number, by name."""
    _import_all()
    return dict(_MEMBERS)


@cache
def _import_all() -> None:
    """Only once: what is imported has registered itself."""
    for module in iter_modules([str(Path(__file__).parent)]):
        import_module(f"{__package__}.{module.name}")
