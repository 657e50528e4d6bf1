"""One stitch of two networks: the front of one, a map, the back of the other."""

from __future__ import annotations

from typing import Any

from torch import nn

from intertwine.errors import InputError
from intertwine.stitch.family import Family
from intertwine.stitch.many import stitches
from intertwine.stitch.outcome import Stitch


def stitch(
    front: nn.Module,
    back: nn.Module,
    at: str | tuple[str, str],
    family: str | Family = "linear",
    fit: str = "task",
    *,
    data: Any,
    test: Any | None = None,
    seed: int = 0,
    **options: Any,
) -> Stitch:
    """Join the front of one network to the back of another by a map of features, and see how well that works.

    Args:
        front, back: the networks; both stay as they are. at: where to cut, a module path or one in each network.
        family: identity, linear, affine, orthogonal, permutation, relu (permutations with positive scales),
            "lowrank:4", "sparse:0.01", softsort and more, see `intertwine.stitch.family`.
        fit: "direct", in closed form from one pass over the data, or "task", trained on the task's loss.
        data: batches of (inputs, targets) to fit on. test: to score on; the same where None.
        options: as in `stitches`: recipe, epochs, targets, start, norm, skip, loss, out, progress and others.

    Example:
        >>> import torch
        >>> import intertwine
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> symmetry = intertwine.symmetry(net, torch.zeros(1, 3))
        >>> moved = symmetry.act(symmetry.random(seed=1), net)
        >>> data = [(torch.randn(64, 3), torch.randint(2, (64,)))]
        >>> found = intertwine.stitch(moved, net, "1", family="relu", fit="direct", data=data)
        >>> found.penalty
        0.0
    """
    if not isinstance(fit, str):
        raise InputError(f"One stitch is fitted in one way, but {fit!r} was asked for. Use stitches() for several.")
    return stitches(front, back, at, family, data=data, test=test, fit=fit, seeds=(seed,), **options)[0]
