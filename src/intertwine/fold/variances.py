"""Data-free REPAIR of folded networks: merged features are rescaled to the variance of the features they stand for.

The mean of rows that are not parallel is shorter than the rows, so a merged feature varies less than its members, layer
after layer. REPAIR measures the loss on data (Jordan et al., 2023), model folding guesses it from the sizes of groups
(Wang et al., 2025). Here it is computed from the rows r_i of the members, each input weighted by its deviation:

    s² = (mean over members i of |r_i|²) / |mean over members of r_i|²

The output of the layer is stretched by s about its mean: rows and running mean of a layer with BatchNorm, whose γ²
becomes the mean of its members'; elsewhere the rows alone, about the bias. Equal members are left as they are.

The deviations come from the weights alone. A layer with BatchNorm gives mean and variance of its output: β and γ².
Elsewhere they follow from the rows of the layer and the moments of its inputs, taken as uncorrelated; the inputs of the
network have mean 0 and variance 1. The input of a nonlinearity is taken as Gaussian; pooling is ignored.
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

Function = Callable[[Tensor], Tensor]
Vector = Float[Tensor, "*features"]
#: Points of the standard normal distribution at which nonlinearities are evaluated, and the largest of them.
POINTS, REACH = 1601, 8.0
#: The vectors of a BatchNorm that is folded into its layer; see `working_tensors`.
NORM_VECTORS = ("size", "spread", "start", "center", "offset", "shift")
#: A loss of variance below this share is rounding.
NEGLIGIBLE_LOSS = 1e-12
REPAIRS = (None, "variances")


@dataclass(frozen=True)
class WritingLayer:
    """A layer that writes features of a wire: its rows, and the vectors of the BatchNorm behind it, if any.

    `each`: a layer with one kernel per feature.
    """

    rows: tuple[FoldSlot, ...]
    norm: Mapping[str, FoldSlot]
    each: bool

    def vector(self, what: str) -> Vector:
        """A vector of the norm, one number per feature."""
        return feature_slices(self.norm[what].block.data, self.norm[what].dim).mean(1)


def writing_layers(wire: FoldableWire, norms: Mapping[str, BatchNormTensors]) -> Iterator[WritingLayer]:
    """The layers that write a wire. `norms`: weight of a layer → the BatchNorm folded into it."""
    by_name: dict[str, list[FoldSlot]] = {}
    for slot in wire.slots:
        if slot.role != "read":
            by_name.setdefault(slot.block.parameter, []).append(slot)
    for name, own in by_name.items():
        if own[0].block.counted == "in" and own[0].block.data.ndim > 1:
            named = {what: by_name.get(f"{norms[name].mean} {what}") for what in NORM_VECTORS} if name in norms else {}
            yield WritingLayer(tuple(own), {what: at[0] for what, at in named.items() if at}, own[0].role == "each")


class EstimatedMoments:
    """Mean and variance of the features of every wire, from the current working tensors; cached."""

    def __init__(self, prepared: PreparedModel) -> None:
        norms = {norm.layer.weight: norm for norm in prepared.norms if norm.layer}
        self.wires = prepared.wires
        self.stages = [tuple(writing_layers(wire, norms)) for wire in prepared.wires]
        self._functions = _functions(prepared)
        self._numbers = {wire.index: w for w, wire in enumerate(prepared.wires)}
        self._known: dict[int, tuple[Vector, Vector]] = {}

    def clear(self) -> None:
        """Drop the cached estimates after the weights have changed."""
        self._known.clear()

    def features(self, w: int) -> tuple[Vector, Vector]:
        """Mean and variance of the features of a wire as layers read them."""
        if w not in self._known:
            zeros = torch.zeros(self.wires[w].size, dtype=torch.float64)
            self._known[w] = zeros, zeros + 1  # for a wire that reads itself
            mean, variance = self._before(w)
            function = self._functions.get(self.wires[w].index)
            self._known[w] = (mean, variance) if function is None else propagate_gaussian(function, mean, variance)
        return self._known[w]

    def _before(self, w: int) -> tuple[Vector, Vector]:
        """Before the nonlinearity: the sum over the writing layers, unless a BatchNorm per feature replaces it."""
        mean, variance = torch.zeros(2, self.wires[w].size, dtype=torch.float64).unbind()
        for slot in self.wires[w].slots:
            if slot.role == "write" and slot.block.counted == "bias" and " " not in slot.block.parameter:
                mean = mean + feature_slices(slot.block.data, slot.dim).mean(1)
        for stage in self.stages[w]:
            if stage.norm:
                own = stage.vector("start"), stage.vector("size").square()
            else:
                means = [feature_slices(self._times_inputs(slot, 0), slot.dim).sum(1) for slot in stage.rows]
                own = torch.stack(means).sum(0), self.rows(stage).square().sum(1)
            if not stage.each:
                mean, variance = mean + own[0], variance + own[1]
            elif stage.norm:
                mean, variance = own
        return mean, variance

    def rows(self, stage: WritingLayer) -> Float[Tensor, "features entries"]:
        """The rows of a layer, each entry times the deviation of its input."""
        return torch.cat([feature_slices(self._times_inputs(slot, 1), slot.dim) for slot in stage.rows], 1)

    def _times_inputs(self, slot: FoldSlot, which: int) -> Tensor:
        """A block of rows times the means (0) or the deviations (1) of its inputs."""
        data, known = slot.block.data, False
        for dim, role in enumerate(slot.block.roles):
            axis = slot.block.dims[dim].tree
            if dim != slot.dim and role == "read" and isinstance(axis, WireAxis) and axis.wire in self._numbers:
                found = self.features(self._numbers[axis.wire])[which]
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
    """Wire → the first nonlinear elementwise op on its features."""
    captured = CapturedForward(prepared.symmetry.geometry)
    functions: dict[str, Function] = {}
    for constraint in captured.geometry.graph.builder.constraints:
        if isinstance(constraint, Constraint) and constraint.call is not None:
            for rule in constraint.rules.values():
                if isinstance(rule, PointwiseRule):
                    functions[constraint.call.name] = rule.fn
    found: dict[int, Function] = {}
    for wire, positions in activation_sites(captured, "post").items():
        names = [captured.program.calls[p].name for p in positions]
        own = [functions[name] for name in names if name in functions]
        if own:
            found[wire] = own[0]
    return found


class GroupMerger:
    """Merges whole groups of features, wire by wire, with or without repair of variances."""

    def __init__(self, prepared: PreparedModel, repair: str | None = None) -> None:
        check_repair(repair)
        self.merging = MergeState(prepared.wires, Options(rows="ward"))
        self._prepared = prepared
        self._moments = EstimatedMoments(prepared) if repair else None

    def merge(self, w: int, groups: Sequence[Sequence[int]]) -> None:
        """Merge groups of a wire none of whose features is merged yet. Wires whose features it reads come first."""
        groups = [sorted(group) for group in groups if len(group) > 1]
        # every layer that writes the wire, its |γ| if it has BatchNorm, and the stretch factors of the groups
        stretched: list[tuple[WritingLayer, Tensor | None, list[float]]] = []
        if self._moments is not None:
            for stage in self._moments.stages[w]:
                sizes = stage.vector("size").clone() if stage.norm else None
                stretched.append((stage, sizes, _stretch_factors(self._moments.rows(stage), groups)))
        for first, *others in groups:
            for other in others:
                self.merging.merge(w, first, other)
        for stage, sizes, scales in stretched:
            for group, scale in zip(groups, scales, strict=True):
                if scale != 1.0:
                    _stretch(stage, group, scale, sizes)
        if self._moments is not None:
            self._moments.clear()

    def merge_named(self, groups: Mapping[str, Sequence[Sequence[int]]]) -> None:
        """Merge groups of some wires, by name."""
        for w, wire in enumerate(self._prepared.wires):
            self.merge(w, groups.get(wire.name, ()))

    def finish(self) -> Fold:
        """The smaller module."""
        return build_fold(self._prepared, self.merging)


def check_repair(repair: str | None) -> None:
    """Refuse an unknown repair."""
    if repair not in REPAIRS:
        raise InputError(f"Unknown repair {repair!r}. Choose None or 'variances'.")


def repair_variances(folded: Fold) -> Fold:
    """A folded network whose merged features vary as much as the ones they stand for; no data is needed.

    The groups of the folded network are merged again, BatchNorm as part of the layer before it, and rescaled as the
    docstring of this module describes. Each layer is estimated alone: the loss of variance because the layers before it
    are folded is not seen without data. Compare the accuracy with and without; with data, reset the statistics instead.

    Args:
        folded: the result of `fold`, `fold_groups` or another folding; it is not changed.

    Example:
        >>> import torch
        >>> from intertwine.fold.fold import fold_groups
        >>> from intertwine.fold.variances import repair_variances
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
        >>> with torch.no_grad():
        ...     _ = model[0].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]))
        >>> folded = fold_groups(model, torch.zeros(1, 2), groups={"0": [(0, 1)]})
        >>> repaired = repair_variances(folded)
        >>> [round(m.model[0].weight[0].norm().item(), 3) for m in (folded, repaired)]
        [0.707, 1.0]

    Reference: Jordan et al., REPAIR, 2023; Wang et al., Forget the Data and Fine-Tuning! Just Fold the Network to
    Compress, 2025.
    """
    merging = GroupMerger(prepare(folded._original, folded._example), "variances")
    merging.merge_named(folded.groups)
    return merging.finish()


def _stretch_factors(rows: Float[Tensor, "features entries"], groups: Sequence[Sequence[int]]) -> list[float]:
    """For every group the factor by which its mean row is too short; 1 where the rows are equal, or cancel."""
    found = []
    for group in groups:
        own = rows[list(group)]
        mean = own.mean(0)
        size, apart = float(own.square().sum(1).mean()), float((own - mean).square().sum(1).mean())
        alike, cancelled = apart <= NEGLIGIBLE_LOSS * size, size - apart <= NEGLIGIBLE_LOSS * size
        found.append(1.0 if alike or cancelled else (size / float(mean.square().sum())) ** 0.5)
    return found


def _stretch(stage: WritingLayer, group: Sequence[int], scale: float, sizes: Tensor | None) -> None:
    """Stretch a merged feature, which has the index of the first of its group."""
    for slot in stage.rows:
        slot.block.data.select(slot.dim, group[0]).mul_(scale)
    if sizes is None:
        return
    own = {what: slot.block.data.select(slot.dim, group[0]) for what, slot in stage.norm.items()}
    for what in ("center", "offset"):
        if what in own:
            own[what].mul_(scale)
    own["shift"].copy_(own["start"] + scale * (own["shift"] - own["start"]))
    wanted = float(sizes[list(group)].square().mean().sqrt()) * (len(group) if stage.norm["size"].added else 1)
    own["spread"].mul_(wanted / own["size"])  # the deviation that the norm divides by stays, γ is the wanted one
    own["size"].fill_(wanted)
