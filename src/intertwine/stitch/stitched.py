"""The stitched network: the front of one network, a map, and the back of another, as one module."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torch import nn

from intertwine.errors import MismatchError
from intertwine.stitch.linear_map import LinearMap
from intertwine.stitch.splice import Splice
from intertwine.stitch.statistics import PairStatistics


class StitchedNetwork(nn.Module):
    """T ∘ S ∘ R: the front R up to its cut, the map S, and the back T from its cut on.

    Its parameters are those of the map alone, `weight` and, where the map has one, `bias`. The two networks are neither
    copied nor registered: `.to()`, `.train()`, `.parameters()` and `state_dict()` leave them alone, and a deep copy
    shares them. They run in evaluation mode, and gradients reach the map only, not the inputs.

    Args:
        splice: the networks and their cuts. cut: number of the cut. map: from the front's channels to the back's.
        statistics: of BatchNorm layers, in place of those of the networks; kept in the `state_dict()` too.

    Example:
        >>> import torch
        >>> a = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> x = torch.randn(5, 3)
        >>> stitched = StitchedNetwork(Splice(a, a, "1", ((x,), {})), 0, LinearMap(torch.eye(4)))
        >>> torch.equal(stitched(x), a(x)), list(stitched.state_dict())
        (True, ['weight'])
    """

    def __init__(self, splice: Splice, cut: int, map: LinearMap, statistics: PairStatistics | None = None) -> None:
        super().__init__()
        place = splice.cuts[cut]
        if (map.inputs, map.outputs) != (place.inputs, place.outputs):
            raise MismatchError(
                f"A map of {map.inputs} features to {map.outputs} was given for the cut {place.front!r} → "
                f"{place.back!r}, where {place.inputs} channels meet {place.outputs}. Fit a map for this cut."
            )
        self.splice, self.number = splice, cut
        self.weight = nn.Parameter(map.matrix.detach().clone())
        self.bias = None if map.bias is None else nn.Parameter(map.bias.detach().clone())
        self.statistics = statistics

    @property
    def map(self) -> LinearMap:
        """The map as it stands."""
        return LinearMap(self.weight, self.bias)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call, own = (args, kwargs), self.statistics
        with self.splice.running():
            with nullcontext() if own is None else own.front.applied():
                (arrived,) = self.splice.front(call, [self.number])
            rows = self.map(arrived.rows)
            with nullcontext() if own is None else own.back.applied():
                return self.splice.back(self.number, rows, arrived, call)

    def extra_repr(self) -> str:
        cut = self.splice.cuts[self.number]
        names = type(self.splice.front_model).__name__, type(self.splice.back_model).__name__
        bias = "" if self.bias is None else ", with bias"
        return f"{names[0]} {cut.front} → {names[1]} {cut.back}, {cut.inputs} → {cut.outputs}{bias}"
