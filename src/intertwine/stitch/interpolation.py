"""The line between two stitches at one point: interpolated maps, and the scores of the stitched networks along it.

If all stitches on the line are good, both ends are in one connected set of solutions; on early layers of small networks
they are not (Csiszárik et al. 2021, Experiment 6).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from intertwine.data.batches import labelled_batches
from intertwine.data.evaluate import Loss
from intertwine.errors import InputError, MismatchError
from intertwine.figures import new_figure
from intertwine.stitch.direct import LinearMap
from intertwine.stitch.network import StitchedNetwork
from intertwine.stitch.result import Stitch
from intertwine.stitch.scores import Scorer, StitchScores, run_model
from intertwine.stitch.training import apply_maps

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class StitchPath:
    """The result of `along`.

    Attributes:
        shares: of the first stitch, from 1 to 0. scores: of the stitched network at each.
        first, second: the families of the two ends.
    """

    shares: tuple[float, ...]
    scores: tuple[StitchScores, ...]
    first: str
    second: str

    @property
    def relative_accuracy(self) -> tuple[float | None, ...]:
        """At each point, as a multiple of the back network's on the same data."""
        return tuple(
            scores.accuracy / scores.back_accuracy if scores.accuracy is not None and scores.back_accuracy else None
            for scores in self.scores
        )

    @property
    def lowest(self) -> float | None:
        """The lowest relative accuracy on the line, ends included; the paper requires 0.8."""
        known = [value for value in self.relative_accuracy if value is not None]
        return min(known) if known else None

    def to_rows(self) -> list[dict[str, Any]]:
        """One row per point, as plain data."""
        points = zip(self.shares, self.relative_accuracy, self.scores, strict=True)
        return [{"share": t, "relative_accuracy": value, **scores.to_dict()} for t, value, scores in points]

    def to_dict(self) -> dict[str, Any]:
        """All points, as plain data."""
        return {"first": self.first, "second": self.second, "lowest": self.lowest, "points": self.to_rows()}

    def plot(self) -> Figure:
        """Relative accuracy along the line, or the loss if there is none."""
        figure = new_figure(4.2, 3.2)
        axes = figure.subplots()
        known = self.lowest is not None
        values = [value for value in self.relative_accuracy if value is not None]
        axes.plot(self.shares, values if known else [scores.loss for scores in self.scores], marker=".")
        if known:
            axes.axhline(1, color="0.8", linewidth=0.8, zorder=0)
        axes.set_xlabel(f"share of the first: {self.first} (1), {self.second} (0)", fontsize=8)
        axes.set_ylabel("relative accuracy" if known else "loss", fontsize=8)
        return figure

    def __repr__(self) -> str:
        low = "" if self.lowest is None else f", relative accuracy at least {self.lowest:.4f}"
        return f"StitchPath({self.first} and {self.second}: {len(self.shares)} points{low})"


def interpolate(first: LinearMap, second: LinearMap, share: float) -> LinearMap:
    """λM₁ + (1 − λ)M₂ and the same for the biases, where λ is `share`; a missing bias counts as zero.

    Args:
        first, second: maps between the same numbers of channels. share: of the first map.

    Example:
        >>> import torch
        >>> middle = interpolate(LinearMap(torch.eye(2), torch.ones(2)), LinearMap(torch.zeros(2, 2)), 0.25)
        >>> middle.matrix.diagonal(), middle.bias
        (tensor([0.2500, 0.2500]), tensor([0.2500, 0.2500]))
    """
    if first.matrix.shape != second.matrix.shape:
        raise MismatchError(
            f"{first!r} and {second!r} cannot be interpolated: they map different channels. Give stitches at one point."
        )

    def mixed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return share * a + (1 - share) * b

    biases = [one.bias for one in (first, second) if one.bias is not None]
    if not biases:
        return LinearMap(mixed(first.matrix, second.matrix))
    a, b = (torch.zeros_like(biases[0]) if one.bias is None else one.bias for one in (first, second))
    return LinearMap(mixed(first.matrix, second.matrix), mixed(a, b))


def along(
    first: Stitch, second: Stitch, data: Any, points: int = 11, *, loss: Loss | None = None, together: int = 4
) -> StitchPath:
    """Score the stitched networks on the line between two stitches at one point.

    Args:
        first, second: of the same networks at the same point. data: batches of (inputs, targets), read once.
        points: both ends included. loss: of (outputs, targets); cross-entropy by default.
        together: how many networks share one run of the back.

    Raises:
        MismatchError: stitches of other networks or points. InputError: fewer than two points, or stitches with
            BatchNorm statistics of their own, which cannot be interpolated.

    Example:
        >>> import torch, intertwine
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> data = [(torch.randn(32, 3), torch.randint(2, (32,)))]
        >>> a, b = (intertwine.stitch(net, net, "1", family, "direct", data=data) for family in ("identity", "linear"))
        >>> along(a, b, data, points=3).lowest
        1.0
    """
    if points < 2 or together < 1:
        raise InputError(f"points must be at least 2 and together at least 1, but they are {points} and {together}.")
    model = _common(first, second)
    shares = tuple(torch.linspace(1, 0, points, dtype=torch.float64).tolist())
    maps = [interpolate(first.map, second.map, share) for share in shares]
    groups = [range(i, min(i + together, points)) for i in range(0, points, together)]
    scorers = [Scorer(len(group), loss) for group in groups]
    split, index = model.split, model.index
    with torch.no_grad(), split.running():
        for batch in labelled_batches(data, split.back_model):
            (features,) = split.front(batch.call, [index])
            own = run_model(split.back_model, batch.call)
            for group, scorer in zip(groups, scorers, strict=True):
                rows = apply_maps(features.rows, [maps[i] for i in group])
                scorer.add(split.back(index, rows, features, batch.call, copies=len(group)), own, batch.targets)
    scores = [one for scorer in scorers for one in scorer.scores()]
    return StitchPath(shares, tuple(scores), first.family, second.family)


def _common(first: Stitch, second: Stitch) -> StitchedNetwork:
    """The first network, if both are stitched networks of the same pair at the same point."""
    a, b = first.model, second.model
    if not isinstance(a, StitchedNetwork) or not isinstance(b, StitchedNetwork):
        kinds = " and ".join(type(model).__name__ for model in (a, b))
        raise InputError(f"Interpolation needs two stitched networks, but found {kinds}. Give results of stitch().")
    same = a.split.front_model is b.split.front_model and a.split.back_model is b.split.back_model
    one, two = first.point, second.point
    if not same or (one.front, one.back, one.skip) != (two.front, two.back, two.skip):
        raise MismatchError(
            f"A stitch at {first.place} and one at {second.place} cannot be interpolated: both must join the same two "
            "networks at the same point. Give stitches of one pair at one point."
        )
    if a.statistics is not None or b.statistics is not None:
        raise InputError(
            "The stitches have BatchNorm statistics of their own (norm='adapt'), which cannot be interpolated. Fit "
            "them with norm='frozen'."
        )
    return a
