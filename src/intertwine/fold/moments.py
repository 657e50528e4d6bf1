"""Moments: mean and variance of every feature, estimated from the weights alone.

A layer with BatchNorm knows mean and variance of what it writes: β and γ². Elsewhere they follow from the rows of the
layer and the moments of what it reads, taken as uncorrelated; the inputs of the network have mean 0 and variance 1. A
nonlinearity is passed as if what goes into it were Gaussian. Pooling between layers is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from intertwine.align.carriers import carriers
from intertwine.align.hidden import Captured
from intertwine.fold.merging import slices
from intertwine.fold.prepared import Prepared
from intertwine.fold.roles import Norm
from intertwine.fold.sites import Foldable, Site
from intertwine.graph.meeting import Meeting, Pointwise
from intertwine.shapes import Float
from intertwine.symmetry.layout import Leaf

Function = Callable[[Tensor], Tensor]
Vector = Float[Tensor, "*features"]
#: Points of the standard normal distribution at which nonlinearities are looked at, and how far out they lie.
POINTS, REACH = 1601, 8.0
#: The vectors that a BatchNorm folded into its layer is kept as; see `working`.
VECTORS = ("size", "spread", "start", "center", "offset", "shift")


@dataclass(frozen=True)
class Stage:
    """One layer that writes features of a wire: its rows, and the vectors of the BatchNorm behind it, if any.

    `each`: a layer on the way, with a kernel per feature.
    """

    rows: tuple[Site, ...]
    norm: Mapping[str, Site]
    each: bool

    def vector(self, what: str) -> Vector:
        """A vector of the norm, one number per feature."""
        return slices(self.norm[what].piece.data, self.norm[what].dim).mean(1)


def stages_of(wire: Foldable, norms: Mapping[str, Norm]) -> Iterator[Stage]:
    """The layers that write a wire. `norms`: weight of a layer → the BatchNorm folded into it."""
    by_name: dict[str, list[Site]] = {}
    for site in wire.sites:
        if site.role != "read":
            by_name.setdefault(site.piece.block.parameter, []).append(site)
    for name, own in by_name.items():
        if own[0].piece.counted == "in" and own[0].piece.data.ndim > 1:
            named = {what: by_name.get(f"{norms[name].mean} {what}") for what in VECTORS} if name in norms else {}
            yield Stage(tuple(own), {what: at[0] for what, at in named.items() if at}, own[0].role == "each")


class Moments:
    """Estimates for a network as its working tensors stand; each is made when first asked for."""

    def __init__(self, prepared: Prepared) -> None:
        norms = {norm.layer.weight: norm for norm in prepared.norms if norm.layer}
        self.wires = prepared.wires
        self.stages = [tuple(stages_of(wire, norms)) for wire in prepared.wires]
        self._functions = _functions(prepared)
        self._numbers = {wire.strand: w for w, wire in enumerate(prepared.wires)}
        self._known: dict[int, tuple[Vector, Vector]] = {}

    def forget(self) -> None:
        """The weights have changed."""
        self._known.clear()

    def features(self, w: int) -> tuple[Vector, Vector]:
        """Mean and variance of the features of a wire as layers read them."""
        if w not in self._known:
            nothing = torch.zeros(self.wires[w].size, dtype=torch.float64)
            self._known[w] = nothing, nothing + 1  # for a wire that reads itself
            mean, variance = self._before(w)
            function = self._functions.get(self.wires[w].strand)
            self._known[w] = (mean, variance) if function is None else through(function, mean, variance)
        return self._known[w]

    def _before(self, w: int) -> tuple[Vector, Vector]:
        """Before the nonlinearity: what layers write is added up, and a BatchNorm on the way knows better."""
        mean, variance = torch.zeros(2, self.wires[w].size, dtype=torch.float64).unbind()
        for site in self.wires[w].sites:
            if site.role == "write" and site.piece.counted == "bias" and " " not in site.piece.block.parameter:
                mean = mean + slices(site.piece.data, site.dim).mean(1)
        for stage in self.stages[w]:
            if stage.norm:
                own = stage.vector("start"), stage.vector("size").square()
            else:
                own = self._written(stage)
            if not stage.each:
                mean, variance = mean + own[0], variance + own[1]
            elif stage.norm:
                mean, variance = own
        return mean, variance

    def _written(self, stage: Stage) -> tuple[Vector, Vector]:
        rows = self.rows(stage)
        means = [slices(self._times_inputs(site, 0), site.dim).sum(1) for site in stage.rows]
        return torch.stack(means).sum(0), rows.square().sum(1)

    def rows(self, stage: Stage) -> Float[Tensor, "features entries"]:
        """The rows of a layer, each entry times the deviation of the feature that it reads."""
        return torch.cat([slices(self._times_inputs(site, 1), site.dim) for site in stage.rows], 1)

    def _times_inputs(self, site: Site, which: int) -> Tensor:
        """A block of rows times the means (0) or the deviations (1) of what it reads."""
        data, known = site.piece.data, False
        for dim, role in enumerate(site.piece.roles):
            tree = site.piece.block.dims[dim].tree
            if dim != site.dim and role == "read" and isinstance(tree, Leaf) and tree.strand in self._numbers:
                found = self.features(self._numbers[tree.strand])[which]
                shape = [1] * data.ndim
                shape[dim] = -1
                data, known = data * (found.sqrt() if which else found).view(shape), True
        return data if known or which else torch.zeros_like(data)


def through(function: Function, mean: Vector, variance: Vector) -> tuple[Vector, Vector]:
    """Mean and variance of a function of Gaussian numbers.

    >>> import torch
    >>> mean, variance = through(torch.relu, torch.zeros(1).double(), torch.ones(1).double())
    >>> round(float(mean), 4), round(float(variance), 4)  # 1/√(2π) and 1/2 − 1/(2π)
    (0.3989, 0.3408)
    """
    t = torch.linspace(-REACH, REACH, POINTS, dtype=torch.float64)
    weight = torch.exp(-t.square() / 2)
    weight = weight / weight.sum()
    values = function(mean[:, None] + variance.sqrt()[:, None] * t)
    found = values @ weight
    return found, (values - found[:, None]).square() @ weight


def _functions(prepared: Prepared) -> dict[int, Function]:
    """Strand → the first nonlinearity of one number that its features pass."""
    captured = Captured(prepared.symmetry._discovery)
    laws: dict[str, Function] = {}
    for meeting in captured.discovery.graph.tape.meetings:
        if isinstance(meeting, Meeting) and meeting.call is not None:
            for law in meeting.laws.values():
                if isinstance(law, Pointwise):
                    laws[meeting.call.name] = law.fn
    found: dict[int, Function] = {}
    for strand, positions in carriers(captured, "post").items():
        names = [captured.program.calls[p].name for p in positions]
        own = [laws[name] for name in names if name in laws]
        if own:
            found[strand] = own[0]
    return found
