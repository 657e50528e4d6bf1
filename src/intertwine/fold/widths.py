"""Widths: how many features every wire is to keep, asked for as one share or wire by wire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from intertwine.errors import InputError, did_you_mean
from intertwine.fold.sites import Foldable

Widths = float | Mapping[str, int]


def check_share(widths: Widths) -> None:
    """Refuse a share that is none; it needs no network, so it is said before any work."""
    if not isinstance(widths, Mapping) and not 0 < widths < 1:
        raise InputError(
            f"widths={widths} was asked for. It is the share of the features that every wire keeps, above 0 and below "
            "1, or a mapping of wires to whole numbers of features."
        )


def wanted_widths(widths: Widths, wires: Sequence[Foldable]) -> dict[str, int]:
    """Wire → the number of features to keep; at least one. A mapping leaves out the wires it does not name.

    Raises:
        InputError: a share outside (0, 1), a wire that cannot be folded, or more features than a wire has.
    """
    check_share(widths)
    sizes = {wire.name: wire.size for wire in wires}
    if not isinstance(widths, Mapping):
        return {name: max(1, round(widths * size)) for name, size in sizes.items()}
    for name, width in widths.items():
        if name not in sizes:
            raise InputError(
                f"A width was given for {name!r}, which is no wire that can be folded. {did_you_mean(name, sizes)}"
                f"Those are {', '.join(list(sizes)[:8]) or 'none'}{' …' if len(sizes) > 8 else ''}."
            )
        if not 1 <= width <= sizes[name]:
            raise InputError(
                f"The wire {name!r} was to keep {width} features; it has {sizes[name]}, and one must stay. Ask for a "
                f"number from 1 to {sizes[name]}."
            )
    return dict(widths)
