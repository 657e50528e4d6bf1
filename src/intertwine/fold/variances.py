"""Variances: data-free REPAIR of a folded network. Merged features vary as much as the features they stand for.

The mean of rows that are not parallel is shorter than the rows, so a merged feature varies less than its members did,
layer after layer. REPAIR measures the loss on data (Jordan et al., 2023), model folding guesses it from the sizes of
groups (Wang et al., 2025). Here it is read off the rows, each input weighted by how much it varies (see `moments`):

    s² = (mean over members i of |r_i|²) / |mean over members of r_i|²

What the layer writes is stretched by s about its mean: rows and running mean of a layer with BatchNorm, whose γ²
becomes the mean of its members'; elsewhere the rows alone, about the bias. Where all members are the same, nothing
changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from intertwine.errors import InputError
from intertwine.fold.fold import finished
from intertwine.fold.folded import Fold
from intertwine.fold.merging import Merging
from intertwine.fold.moments import Moments, Stage
from intertwine.fold.options import Options
from intertwine.fold.prepared import Prepared, prepare
from intertwine.shapes import Float

#: A loss of variance below this share is rounding.
ROUNDING = 1e-12
REPAIRS = (None, "variances")


class GroupMerging:
    """Merges whole groups of features, wire by wire, and repairs variances if asked to."""

    def __init__(self, prepared: Prepared, repair: str | None = None) -> None:
        check_repair(repair)
        self.merging = Merging(prepared.wires, Options(rows="ward"))
        self._prepared = prepared
        self._moments = Moments(prepared) if repair else None

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

    def _lost(self, w: int, groups: Sequence[Sequence[int]]) -> list[tuple[Stage, Tensor | None, list[float]]]:
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
        return finished(self._prepared, self.merging)


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
    merging = GroupMerging(prepare(folded._original, folded._example), "variances")
    merging.merge_named(folded.groups)
    return merging.finish()


def _losses(rows: Float[Tensor, "features entries"], groups: Sequence[Sequence[int]]) -> list[float]:
    """For every group the factor by which its mean row is too short; 1 where the rows are the same, or cancel."""
    found = []
    for group in groups:
        own = rows[list(group)]
        mean = own.mean(0)
        size, apart = float(own.square().sum(1).mean()), float((own - mean).square().sum(1).mean())
        alike, cancelled = apart <= ROUNDING * size, size - apart <= ROUNDING * size
        found.append(1.0 if alike or cancelled else (size / float(mean.square().sum())) ** 0.5)
    return found


def _stretch(stage: Stage, group: Sequence[int], scale: float, sizes: Tensor | None) -> None:
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
