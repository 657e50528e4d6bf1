"""Whose values go around a cut, as the skip path of a residual block does: the front's or the back's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from intertwine.errors import InputError, MismatchError, did_you_mean
from intertwine.stitch.half import Half
from intertwine.stitch.hooked import Taken
from intertwine.stitch.splitting import Traced

SKIPS = ("front", "back")


def check_skip(skip: str | None) -> None:
    """Refuse a choice that there is not."""
    if skip not in (None, *SKIPS):
        raise InputError(
            f"skip={skip!r} was asked for. {did_you_mean(str(skip), SKIPS)}It is whose values go around a cut: "
            '"front", "back", or None to choose.'
        )


def choose_skip(front: Half, back: Half, cut: int, asked: str | None, begun: Sequence[Taken]) -> str:
    """Whose values go around a cut, or "none". `begun`: what the front and the back have there."""
    if isinstance(back.run, Traced) and not back.run.crossing[cut]:
        return "none"
    problem = _not_the_front(front, back, cut, begun)
    if asked == "front" and problem:
        raise MismatchError(
            f'skip="front" was asked for at {str(back.run.places[cut])!r}, but {problem}. Use skip="back", or cut '
            "outside of the block."
        )
    return asked or ("back" if problem else "front")


def _not_the_front(front: Half, back: Half, cut: int, begun: Sequence[Taken]) -> str:
    """Why the front's values cannot go around a cut of the back."""
    if not isinstance(front.run, Traced) or not isinstance(back.run, Traced):
        reason = back.reason or front.reason
        return f"a network that cannot be traced is run whole, and what goes around the cut is then its own ({reason})"
    if not front.run.same_as(back.run, cut, cut):
        return "the networks do not take the same steps, or are not cut behind the same one"
    if [tree_map(_shape, x) for x in begun[0].around] != [tree_map(_shape, x) for x in begun[1].around]:
        return "the values that go around it have other sizes in the front"
    return ""


def _shape(x: Tensor) -> torch.Size:
    return x.shape
