"""Data-free variance repair of folded networks: feature means and variances estimated from the weights, and merged
features rescaled to the variance of their members.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from intertwine.align.activation_sites import CapturedForward, activation_sites
from intertwine.argument_types import Float
from intertwine.errors import InputError
from intertwine.fold.fold import build_fold
from intertwine.fold.merging import MergeState, feature_slices
from intertwine.fold.options import Options
from intertwine.fold.prepare import FoldableWire, FoldSlot, PreparedModel, prepare
from intertwine.fold.result import Fold
from intertwine.fold.roles import BatchNormTensors
from intertwine.graph.constraints import Constraint, PointwiseRule
from intertwine.symmetry.geometry import WireAxis

# ----------------------------------------------------------------------------------------------------
# Moments: mean and variance of every feature, estimated from the weights alone.
#
# A layer with BatchNorm knows mean and variance of what it writes: β and γ². Elsewhere they follow from the rows of the
# layer and the moments of what it reads, taken as uncorrelated; the inputs of the network have mean 0 and variance 1. A
# nonlinearity is passed as if what goes into it were Gaussian. Pooling between layers is left out.


Function = Callable[[Tensor], Tensor]
Vector = Float[Tensor, "*features"]
#: Points of the standard normal distribution at which nonlinearities are looked at, and how far out they lie.
POINTS, REACH = 1601, 8.0
#: The vectors that a BatchNorm folded into its layer is kept as; see `working`.
NORM_VECTORS = ("size", "spread", "start", "center", "offset", "shift")


@dataclass(frozen=True)
class WritingLayer:
    """One layer that writes features of a wire: its rows, and the vectors of the BatchNorm behind it, if any.

    `each`: a layer on the way, with a kernel per feature.
    """

    rows: tuple[FoldSlot, ...]
    norm: Mapping[str, FoldSlot]
    each: bool

    def vector(self, what: str) -> Vector:
        """A vector of the norm, one number per feature."""
        return feature_slices(self.norm[what].piece.data, self.norm[what].dim).mean(1)


def writing_layers(wire: FoldableWire, norms: Mapping[str, BatchNormTensors]) -> Iterator[WritingLayer]:
    """The layers that write a wire. `norms`: weight of a layer → the BatchNorm folded into it."""
    by_name: dict[str, list[FoldSlot]] = {}
    for site in wire.sites:
        if site.role != "read":
            by_name.setdefault(site.piece.block.parameter, []).append(site)
    for name, own in by_name.items():
        if own[0].piece.counted == "in" and own[0].piece.data.ndim > 1:
            named = {what: by_name.get(f"{norms[name].mean} {what}") for what in NORM_VECTORS} if name in norms else {}
            yield WritingLayer(tuple(own), {what: at[0] for what, at in named.items() if at}, own[0].role == "each")


class EstimatedMoments:
    """Estimates for a network as its working tensors stand; each is made when first asked for."""

    def __init__(self, prepared: PreparedModel) -> None:
        norms = {norm.layer.weight: norm for norm in prepared.norms if norm.layer}
        self.wires = prepared.wires
        self.stages = [tuple(writing_layers(wire, norms)) for wire in prepared.wires]
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
            self._known[w] = (mean, variance) if function is None else propagate_gaussian(function, mean, variance)
        return self._known[w]

    def _before(self, w: int) -> tuple[Vector, Vector]:
        """Before the nonlinearity: what layers write is added up, and a BatchNorm on the way knows better."""
        mean, variance = torch.zeros(2, self.wires[w].size, dtype=torch.float64).unbind()
        for site in self.wires[w].sites:
            if site.role == "write" and site.piece.counted == "bias" and " " not in site.piece.block.parameter:
                mean = mean + feature_slices(site.piece.data, site.dim).mean(1)
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

    def _written(self, stage: WritingLayer) -> tuple[Vector, Vector]:
        rows = self.rows(stage)
        means = [feature_slices(self._times_inputs(site, 0), site.dim).sum(1) for site in stage.rows]
        return torch.stack(means).sum(0), rows.square().sum(1)

    def rows(self, stage: WritingLayer) -> Float[Tensor, "features entries"]:
        """The rows of a layer, each entry times the deviation of the feature that it reads."""
        return torch.cat([feature_slices(self._times_inputs(site, 1), site.dim) for site in stage.rows], 1)

    def _times_inputs(self, site: FoldSlot, which: int) -> Tensor:
        """A block of rows times the means (0) or the deviations (1) of what it reads."""
        data, known = site.piece.data, False
        for dim, role in enumerate(site.piece.roles):
            tree = site.piece.block.dims[dim].tree
            if dim != site.dim and role == "read" and isinstance(tree, WireAxis) and tree.wire in self._numbers:
                found = self.features(self._numbers[tree.wire])[which]
                shape = [1] * data.ndim
                shape[dim] = -1
                data, known = data * (found.sqrt() if which else found).view(shape), True
        return data if known or which else torch.zeros_like(data)


def propagate_gaussian(function: Function, mean: Vector, variance: Vector) -> tuple[Vector, Vector]:
    """Mean and variance of a function of Gaussian numbers.

    >>> import torch
    >>> mean, variance = propagate_gaussian(torch.relu, torch.zeros(1).double(), torch.ones(1).double())
    >>> round(float(mean), 4), round(float(variance), 4)  # 1/√(2π) and 1/2 − 1/(2π)
    (0.3989, 0.3408)
    """
    t = torch.linspace(-REACH, REACH, POINTS, dtype=torch.float64)
    weight = torch.exp(-t.square() / 2)
    weight = weight / weight.sum()
    values = function(mean[:, None] + variance.sqrt()[:, None] * t)
    found = values @ weight
    return found, (values - found[:, None]).square() @ weight


def _functions(prepared: PreparedModel) -> dict[int, Function]:
    """Strand → the first nonlinearity of one number that its features pass."""
    captured = CapturedForward(prepared.symmetry.geometry)
    laws: dict[str, Function] = {}
    for meeting in captured.geometry.graph.builder.constraints:
        if isinstance(meeting, Constraint) and meeting.call is not None:
            for law in meeting.rules.values():
                if isinstance(law, PointwiseRule):
                    laws[meeting.call.name] = law.fn
    found: dict[int, Function] = {}
    for strand, positions in activation_sites(captured, "post").items():
        names = [captured.program.calls[p].name for p in positions]
        own = [laws[name] for name in names if name in laws]
        if own:
            found[strand] = own[0]
    return found


# ----------------------------------------------------------------------------------------------------
# Variances: data-free REPAIR of a folded network. Merged features vary as much as the features they stand for.
#
# The mean of rows that are not parallel is shorter than the rows, so a merged feature varies less than its members did,
# layer after layer. REPAIR measures the loss on data (Jordan et al., 2023), model folding guesses it from the sizes of
# groups (Wang et al., 2025). Here it is read off the rows, each input weighted by how much it varies (see `moments`):
#
#     s² = (mean over members i of |r_i|²) / |mean over members of r_i|²
#
# What the layer writes is stretched by s about its mean: rows and running mean of a layer with BatchNorm, whose γ²
# becomes the mean of its members'; elsewhere the rows alone, about the bias. Where all members are the same, nothing
# changes.


#: A loss of variance below this share is rounding.
NEGLIGIBLE_LOSS = 1e-12
REPAIRS = (None, "variances")


class GroupMerger:
    """Merges whole groups of features, wire by wire, and repairs variances if asked to."""

    def __init__(self, prepared: PreparedModel, repair: str | None = None) -> None:
        check_repair(repair)
        self.merging = MergeState(prepared.wires, Options(rows="ward"))
        self._prepared = prepared
        self._moments = EstimatedMoments(prepared) if repair else None

    def merge(self, w: int, groups: Sequence[Sequence[int]]) -> None:
        """Merge groups of a wire none of whose features is merged yet. Wires whose features it reads come first."""
        groups = [sorted(group) for group in groups if len(group) > 1]
        lost = self._lost(w, groups)
        for first, *others in groups:
            for other in others:
                self.merging.merge(w, first, other)
        for stage, sizes, scales in lost:
            for group, scale in zip(groups, scales, strict=True):
                if scale != 1.0:
                    _stretch(stage, group, scale, sizes)
        if self._moments is not None:
            self._moments.forget()

    def _lost(self, w: int, groups: Sequence[Sequence[int]]) -> list[tuple[WritingLayer, Tensor | None, list[float]]]:
        """Every layer that writes a wire, its |γ| if it has BatchNorm, and what its groups are to be stretched by."""
        if self._moments is None:
            return []
        return [
            (stage, stage.vector("size").clone() if stage.norm else None, _losses(self._moments.rows(stage), groups))
            for stage in self._moments.stages[w]
        ]

    def merge_named(self, groups: Mapping[str, Sequence[Sequence[int]]]) -> None:
        """Merge groups of some wires, by name."""
        for w, wire in enumerate(self._prepared.wires):
            self.merge(w, groups.get(wire.name, ()))

    def finish(self) -> Fold:
        """The smaller module."""
        return build_fold(self._prepared, self.merging)


def check_repair(repair: str | None) -> None:
    """Refuse a repair that does not exist."""
    if repair not in REPAIRS:
        raise InputError(
            f"repair={repair!r} was asked for. It is None or 'variances', which gives merged features back the "
            "variance that merging takes from them."
        )


def repair_variances(folded: Fold) -> Fold:
    """A folded network whose merged features vary as much as the ones they stand for; no data is needed.

    The groups of the folded network are merged again, BatchNorm taken as part of the layer before it. The head of this
    module says what is done. It is an estimate of one layer at a time: what a layer loses because the layers before it
    are folded is not seen without data. Look at the accuracy with it and without; with data, reset the statistics.

    Args:
        folded: what `fold`, `fold_groups` or another folding gave; it is not changed.

    Example:
        >>> import torch
        >>> from intertwine.fold.fold import fold_groups
        >>> from intertwine.fold.variances import repair_variances
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
        >>> with torch.no_grad():
        ...     _ = model[0].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]))
        >>> folded = fold_groups(model, torch.zeros(1, 2), groups={"0": [(0, 1)]})
        >>> mended = repair_variances(folded)
        >>> [round(m.model[0].weight[0].norm().item(), 3) for m in (folded, mended)]
        [0.707, 1.0]

    Reference: Jordan et al., REPAIR, 2023; Wang et al., Forget the Data and Fine-Tuning! Just Fold the Network to
    Compress, 2025.
    """
    merging = GroupMerger(prepare(folded._original, folded._example), "variances")
    merging.merge_named(folded.groups)
    return merging.finish()


def _losses(rows: Float[Tensor, "features entries"], groups: Sequence[Sequence[int]]) -> list[float]:
    """For every group the factor by which its mean row is too short; 1 where the rows are the same, or cancel."""
    found = []
    for group in groups:
        own = rows[list(group)]
        mean = own.mean(0)
        size, apart = float(own.square().sum(1).mean()), float((own - mean).square().sum(1).mean())
        alike, cancelled = apart <= NEGLIGIBLE_LOSS * size, size - apart <= NEGLIGIBLE_LOSS * size
        found.append(1.0 if alike or cancelled else (size / float(mean.square().sum())) ** 0.5)
    return found


def _stretch(stage: WritingLayer, group: Sequence[int], scale: float, sizes: Tensor | None) -> None:
    """Stretch a merged feature, which stands in the place of the first of its group."""
    for site in stage.rows:
        site.piece.data.select(site.dim, group[0]).mul_(scale)
    if sizes is None:
        return
    own = {what: site.piece.data.select(site.dim, group[0]) for what, site in stage.norm.items()}
    for what in ("center", "offset"):
        if what in own:
            own[what].mul_(scale)
    own["shift"].copy_(own["start"] + scale * (own["shift"] - own["start"]))
    wanted = float(sizes[list(group)].square().mean().sqrt()) * (len(group) if stage.norm["size"].added else 1)
    own["spread"].mul_(wanted / own["size"])  # the deviation that the norm divides by stays, γ is the wanted one
    own["size"].fill_(wanted)
