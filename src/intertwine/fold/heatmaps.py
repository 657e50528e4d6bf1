"""`distance_maps`: how far apart the features of every layer are, in the order of their clusters; before and after.

Distances are the squared ones of rows, as the paper compares them, so a picture shows what a beta would merge with
rows="mean": after division by the largest, everything darker than beta.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, sqrt
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform
from torch import nn

from intertwine.errors import InputError, MismatchError, did_you_mean
from intertwine.features.pictures import new_figure
from intertwine.fold.complexity import dead_features
from intertwine.fold.merging import Merging
from intertwine.fold.options import Options
from intertwine.fold.prepared import prepare
from intertwine.fold.sites import Skipped

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: How many layers a picture shows at most.
MOST_SHOWN = 12


@dataclass(frozen=True, eq=False)
class DistanceMap:
    """Distances between the features of one wire.

    `table`: squared distances in the network's order. `groups`: the features behind every row of it; single ones unless
    the network was folded. `dead`: rows that do not act (see `complexity`). `order`: the rows by average linkage, dead
    ones last.
    """

    name: str
    table: NDArray[np.float64]
    groups: tuple[tuple[int, ...], ...]
    dead: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def smallest(self) -> float:
        """The smallest distance between two different features; 0 where there is one feature."""
        return float(_above(self.table).min(initial=np.inf)) if len(self.table) > 1 else 0.0

    @property
    def largest(self) -> float:
        return float(self.table.max())

    def below(self, share: float) -> float:
        """The share of pairs nearer than a share of the largest distance."""
        return float((_above(self.table) <= share * self.largest).mean()) if len(self.table) > 1 else 0.0

    def merged(self, groups: Sequence[Sequence[int]]) -> DistanceMap:
        """Distances between the means of groups of rows; every row is in one group."""
        n = len(self.table)
        if sorted(i for group in groups for i in group) != list(range(n)):
            raise InputError(
                f"The groups of {self.name!r} do not hold each of its features 0 to {n - 1} once. Pass the groups of "
                "the same network, folded: folded.groups."
            )
        share = np.zeros((len(groups), n))
        for row, group in zip(share, groups, strict=True):
            row[list(group)] = 1 / len(group)
        table = share @ self.table @ share.T  # means of squared distances; those inside two groups are too much
        inside = table.diagonal() / 2
        table = np.maximum(table - inside[:, None] - inside[None, :], 0.0)
        np.fill_diagonal(table, 0.0)
        dead = tuple(i for i, group in enumerate(groups) if set(group) <= set(self.dead))
        behind = tuple(tuple(sorted(k for i in group for k in self.groups[i])) for group in groups)
        return DistanceMap(self.name, table, behind, dead, _order(table, dead))

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "features": len(self.table),
            "smallest": self.smallest,
            "largest": self.largest,
            "dead": list(self.dead),
            "order": list(self.order),
            "groups": [list(group) for group in self.groups],
        }


@dataclass(frozen=True, eq=False)
class DistanceMaps:
    """Distances between the features of every wire. See `distance_maps`."""

    wires: tuple[DistanceMap, ...]
    skipped: tuple[Skipped, ...] = field(default=(), repr=False)

    def __getitem__(self, name: str) -> DistanceMap:
        for wire in self.wires:
            if wire.name == name:
                return wire
        known = [wire.name for wire in self.wires]
        raise InputError(f"There is no wire {name!r} here. {did_you_mean(name, known)}There are: {', '.join(known)}.")

    def merged(self, groups: Mapping[str, Sequence[Sequence[int]]]) -> DistanceMaps:
        """The distances after folding: between the means of the groups of every wire; wires not named stay.

        Args:
            groups: wire → groups of its features, each feature in one: `folded.groups`.

        Example:
            >>> import torch
            >>> from intertwine.fold.fold import fold_groups
            >>> from intertwine.fold.heatmaps import distance_maps
            >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
            >>> folded = fold_groups(model, torch.zeros(1, 3), groups={"0": [(1, 4, 6)]})
            >>> distance_maps(model, torch.zeros(1, 3)).merged(folded.groups)["0"].table.shape
            (6, 6)
        """
        after = {name: self[name].merged(found) for name, found in groups.items()}
        return DistanceMaps(tuple(after.get(wire.name, wire) for wire in self.wires), self.skipped)

    def to_dict(self) -> dict[str, Any]:
        skipped = [{"what": s.what, "reason": s.reason} for s in self.skipped]
        return {"wires": [wire.to_dict() for wire in self.wires], "skipped": skipped}

    def __repr__(self) -> str:
        if not self.wires:
            return f"DistanceMaps(no layer to measure; {len(self.skipped)} skipped)"
        long = max(4, *(len(wire.name) for wire in self.wires))
        lines = [f"{'wire':<{long}}  features  dead  smallest / largest  pairs below 0.1"]
        for wire in self.wires:
            ratio = wire.smallest / wire.largest if wire.largest else 0.0
            numbers = f"{len(wire.table):>8}  {len(wire.dead):>4}  {ratio:>18.1e}  {wire.below(0.1):>15.1%}"
            lines.append(f"{wire.name:<{long}}  {numbers}")
        return "\n".join(lines)

    def plot(self, after: DistanceMaps | None = None, wires: Sequence[str] | None = None) -> Figure:
        """A heat map per wire, distances relative to the largest; with `after`, the folded wires below.

        Args:
            after: what `merged` gave; drawn relative to the largest distance before.
            wires: the wires to show; the first twelve where None.
        """
        if after is not None and {w.name for w in after.wires} != {w.name for w in self.wires}:
            raise MismatchError("`after` has other wires than these. Pass the distances of the same network, folded.")
        shown = [self[name] for name in wires] if wires is not None else list(self.wires[:MOST_SHOWN])
        if not shown:
            raise InputError("There is no wire to draw. " + (f"{self!r}" if not self.wires else "Name one or more."))
        columns = min(len(shown), ceil(sqrt(2 * len(shown))))
        if after is not None:
            columns = len(shown)
        cells = [(wire, wire.largest) for wire in shown]
        cells += [(after[wire.name], wire.largest) for wire in shown] if after is not None else []
        rows = ceil(len(cells) / columns)
        figure = new_figure(1.2 + 2.3 * columns, 0.3 + 2.6 * rows)
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes in grid.flat[len(cells) :]:
            axes.set_axis_off()
        pictures = [_draw(axes, *cell) for axes, cell in zip(grid.flat, cells, strict=False)]
        if after is not None:
            grid[0, 0].set_ylabel("before")
            grid[1, 0].set_ylabel("after")
        bar = figure.colorbar(pictures[0], ax=grid.ravel().tolist(), shrink=0.9)
        bar.set_label("squared distance / the largest" + (" before" if after is not None else ""))
        if wires is None and len(self.wires) > len(shown):
            figure.suptitle(f"the first {len(shown)} of {len(self.wires)} wires", fontsize=9)
        return figure


def distance_maps(
    model: nn.Module,
    *example_args: Any,
    terms: str = "in",
    bias: bool = True,
    norm: str = "fold",
    **example_kwargs: Any,
) -> DistanceMaps:
    """The squared distances between the features of every layer, read off the weights.

    Args:
        model: any network; it is not changed. *example_args, **example_kwargs: inputs it can be called with.
        terms, bias, norm: what distances look at, as for `fold`; terms="in+out", bias=False, norm="sum" is Eq. 6.

    Returns:
        A `DistanceMaps`: `["layer"].table`, `.smallest`, `.below(beta)`; `.plot()`, one heat map per layer.

    Example:
        >>> import torch
        >>> from intertwine.fold.heatmaps import distance_maps
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> with torch.no_grad():
        ...     model[0].weight[5], model[0].bias[5] = model[0].weight[2], model[0].bias[2]
        >>> found = distance_maps(model, torch.zeros(1, 3))["0"]
        >>> found.table.shape, found.smallest < 1e-12, abs(found.order.index(2) - found.order.index(5))
        ((8, 8), True, 1)

    Reference: Chen, Zhou and Yan, Going Beyond Neural Network Feature Similarity, 2024, Figures 1a and 6.
    """
    prepared = prepare(model, (example_args, example_kwargs), norm)
    merging = Merging(prepared.wires, Options(terms=terms, bias=bias, rows="mean", norm=norm))
    return DistanceMaps(tuple(_map(merging, w) for w in range(len(prepared.wires))), prepared.skipped)


def _map(merging: Merging, w: int) -> DistanceMap:
    wire, distances = merging.wires[w], merging.distances(w)
    table = np.where(distances.table > distances.rounding, distances.table, 0.0)
    np.fill_diagonal(table, 0.0)
    merging.drop(w)
    dead = tuple(dead_features(wire).nonzero().flatten().tolist())
    return DistanceMap(wire.name, table, tuple((i,) for i in range(wire.size)), dead, _order(table, dead))


def _order(table: NDArray[np.float64], last: Sequence[int]) -> tuple[int, ...]:
    """Rows so that near ones stand together, by average linkage of distances; some rows go last."""
    rows = np.array([i for i in range(len(table)) if i not in set(last)], int)
    if len(rows) > 2:
        apart = squareform(np.sqrt(table[np.ix_(rows, rows)]), checks=False)
        rows = rows[leaves_list(linkage(apart, "average", optimal_ordering=len(rows) <= 256))]  # cubic: slow for more
    return (*rows.tolist(), *last)


def _above(table: NDArray[np.float64]) -> NDArray[np.float64]:
    return table[np.triu_indices(len(table), 1)]


def _draw(axes: Any, wire: DistanceMap, largest: float) -> Any:
    n, live = len(wire.table), len(wire.table) - len(wire.dead)
    shown = wire.table[np.ix_(wire.order, wire.order)] / (largest or 1.0)
    picture = axes.imshow(shown, vmin=0, vmax=1, cmap="viridis", interpolation="none")
    if wire.dead and live:  # dead features stand behind the line
        axes.axhline(live - 0.5, color="white", linewidth=0.8)
        axes.axvline(live - 0.5, color="white", linewidth=0.8)
    dead = f", {len(wire.dead)} dead" if wire.dead else ""
    axes.set_title(f"{wire.name}: {n} feature{'s' if n != 1 else ''}{dead}", fontsize=9)
    axes.set_xticks([])
    axes.set_yticks([])
    return picture
