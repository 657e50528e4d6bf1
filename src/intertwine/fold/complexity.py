"""The number of different features in each layer: counted, compared between networks, and shown as distance maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import ceil, sqrt
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform
from torch import nn

from intertwine.errors import InputError, MismatchError, unknown_name
from intertwine.figures import legend_below, new_figure
from intertwine.fold.fold import merge_all
from intertwine.fold.merging import MergeState, feature_norms
from intertwine.fold.options import Beta, Options
from intertwine.fold.prepare import FoldableWire, Skipped, prepare
from intertwine.fold.result import Fold
from intertwine.lazy import data_frame

if TYPE_CHECKING:
    from matplotlib.figure import Figure


#: A feature is dead if its rows or its columns are shorter than this share of the longest in its layer. Dead features
#: are near each other, and would otherwise count as equivalent.
DEAD = 1e-3
#: The largest number of layers in one picture of distances.
MOST_SHOWN = 12


@dataclass(frozen=True)
class LayerComplexity:
    """One wire: `width` = `classes` + `equivalent` + `dead`.

    `classes`: groups with at least one live feature. `equivalent`: live features merged into others. `dead`: features
    whose rows, or whose columns, are nearly zero. `left`: features that folding leaves, as the paper counts.
    """

    name: str
    width: int
    classes: int
    equivalent: int
    dead: int
    left: int

    @property
    def share(self) -> float:
        """Classes relative to the width."""
        return self.classes / self.width


@dataclass(frozen=True)
class Complexity:
    """The feature complexity of every layer. See `complexity`. `beta` is None where it is not known."""

    layers: tuple[LayerComplexity, ...]
    skipped: tuple[Skipped, ...]
    beta: Beta | None

    @classmethod
    def of(cls, folded: Fold, *, norm: str = "fold", dead: float = DEAD) -> Complexity:
        """The complexity by the groups of a folding; nothing is merged again.

        Args:
            folded: the result of `fold`, or of another way of merging features. norm: the one of that call.
            dead: as for `complexity`.

        Raises:
            InputError: features were absorbed or removed, so that the groups do not show which are equivalent.

        Example:
            >>> import torch
            >>> from intertwine.fold.complexity import Complexity
            >>> from intertwine.fold.fold import fold_groups
            >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
            >>> print(Complexity.of(fold_groups(model, torch.zeros(1, 3), groups={"0": [(1, 4, 6)]})))
            layer  width  classes  equivalent  dead
            0          8        6           2     0
        """
        wires = prepare(folded._original, folded._example, norm).wires
        unmerged = set(folded.rules.values()) - {"sum", "mean"} or any(
            sum(map(len, folded.groups[wire.name])) < wire.size for wire in wires
        )
        if unmerged:
            raise InputError(
                "Features of this folding were absorbed or removed, not merged, so it does not show the complexity. "
                "Use one that merges: fold, fold_kmeans, or fold_to with how='merge'."
            )
        layers = [_layer(wire, folded.groups[wire.name], dead_features(wire, dead)) for wire in wires]
        return cls(tuple(layers), folded.skipped, dict(folded.betas) or None)

    def __getitem__(self, name: str) -> LayerComplexity:
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise InputError(unknown_name("layer", name, [layer.name for layer in self.layers]))

    def to_rows(self) -> list[dict[str, Any]]:
        """One row per layer, as plain data."""
        return [asdict(layer) | {"share": layer.share} for layer in self.layers]

    def to_frame(self) -> Any:
        """The rows as a polars data frame (`pip install 'intertwine[frames]'`)."""
        return data_frame(self.to_rows())

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        beta = dict(self.beta) if isinstance(self.beta, Mapping) else self.beta
        return {"beta": beta, "layers": self.to_rows(), "skipped": [s.to_dict() for s in self.skipped]}

    def __repr__(self) -> str:
        if not self.layers:
            return f"Complexity(no layer to measure; {len(self.skipped)} skipped)"
        long = max(len(name) for name in ("layer", *(x.name for x in self.layers)))
        lines = [f"{'layer':<{long}}  width  classes  equivalent  dead"]
        lines += [
            f"{x.name:<{long}}  {x.width:>5}  {x.classes:>7}  {x.equivalent:>10}  {x.dead:>4}" for x in self.layers
        ]
        return "\n".join(lines)

    def plot(self, relative: bool = False) -> Figure:
        """A bar per layer: classes, equivalent and dead features on top of each other, in numbers or as shares."""
        figure = new_figure(max(4.0, 0.5 * len(self.layers) + 2), 3.5)
        axes = figure.add_subplot()
        names = [x.name for x in self.layers]
        bottom = [0.0] * len(names)
        for kind, colour in (("classes", "#2b6cb0"), ("equivalent", "#a0c4e8"), ("dead", "#cccccc")):
            heights = [getattr(x, kind) / (x.width if relative else 1) for x in self.layers]
            axes.bar(names, heights, bottom=bottom, label=kind, color=colour)
            bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
        axes.set_ylabel("share of features" if relative else "features")
        axes.tick_params(axis="x", rotation=90)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
        return figure


def complexity(
    model: nn.Module,
    *example_args: Any,
    beta: Beta = 0.1,
    schedule: str = "layerwise",
    terms: str = "in",
    bias: bool = True,
    rows: str = "effect",
    maximum: str = "typical",
    norm: str = "fold",
    dead: float = DEAD,
    **example_kwargs: Any,
) -> Complexity:
    """The number of non-equivalent features of every layer, by their weights.

    Args:
        model: any network; it is not changed. *example_args, **example_kwargs: inputs it can be called with.
        beta, schedule, terms, bias, rows, maximum, norm: as for `fold`.
        dead: a feature is dead if its rows or its columns are shorter than this share of the longest in its layer.

    Returns:
        A `Complexity`: one line per layer, `.plot()`, and `.skipped` for the layers that cannot be measured.

    Example:
        >>> import torch
        >>> from intertwine.fold.complexity import complexity
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> with torch.no_grad():
        ...     model[0].weight[5], model[0].bias[5] = model[0].weight[2], model[0].bias[2]
        ...     model[0].weight[7], model[0].bias[7] = torch.zeros(3), 0.0
        >>> print(complexity(model, torch.zeros(1, 3), beta=1e-6))
        layer  width  classes  equivalent  dead
        0          8        6           1     1

    Reference: Chen, Zhou and Yan, Going Beyond Neural Network Feature Similarity, 2024, Definition 3.4 and Figure 5a.
    """
    options = Options(beta, schedule, terms, bias, rows, maximum, norm)
    prepared = prepare(model, (example_args, example_kwargs), norm)
    gone = [dead_features(wire, dead) for wire in prepared.wires]  # before merging, which writes into the wires
    merging = merge_all(prepared, options)
    layers = [_layer(wire, merging.merged(w), gone[w]) for w, wire in enumerate(prepared.wires)]
    return Complexity(tuple(layers), prepared.skipped, beta)


def dead_features(wire: FoldableWire, share: float = DEAD) -> torch.Tensor:
    """A mask of the features of a wire whose rows (with bias) or columns, over all layers, are nearly zero."""
    if not 0 <= share < 1:
        raise InputError(f"dead must be a share of the longest row, from 0 to below 1, but is {share}.")
    written = feature_norms(wire, ("write", "each"))
    read = feature_norms(wire, ("read",))
    return (written <= share * written.max()) | (read <= share * read.max())


def _layer(wire: FoldableWire, groups: Sequence[Sequence[int]], dead: torch.Tensor) -> LayerComplexity:
    gone = dead.tolist()
    classes = sum(any(not gone[i] for i in group) for group in groups)
    live = wire.size - sum(gone)
    return LayerComplexity(wire.name, wire.size, classes, live - classes, sum(gone), len(groups))


def complexity_curves(found: Mapping[str, Complexity], relative: bool = False) -> Figure:
    """Draw the number of different features in every layer, one line per network.

    Args:
        found: label of a line → a `Complexity`: networks of several sizes, one network after several epochs, or one
            with several betas. relative: shares of the width instead of numbers.

    Raises:
        InputError: there is nothing to draw.

    Example:
        >>> import torch
        >>> from intertwine.fold.complexity import complexity, complexity_curves
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> found = {f"β = {b}": complexity(model, torch.zeros(1, 3), beta=b) for b in (0.1, 0.3)}
        >>> len(complexity_curves(found).axes[0].get_lines())
        2

    Reference: Chen, Zhou and Yan, Going Beyond Neural Network Feature Similarity, 2024, Figure 5a.
    """
    empty = [name for name, one in found.items() if not one.layers]
    if empty or not found:
        what = f"{empty[0]!r} has no layer that can be measured" if empty else "no complexity is given"
        raise InputError(f"There is nothing to draw: {what}. Pass name → complexity(model, …).")
    figure = new_figure(5.6, 3.5)
    axes = figure.add_subplot()
    deepest = max(found.values(), key=lambda one: len(one.layers))
    for i, (name, one) in enumerate(found.items()):
        heights = [layer.share if relative else layer.classes for layer in one.layers]
        depth = i / max(len(found) - 1, 1)  # lines go from light to dark
        colour = (0.62 - 0.5 * depth, 0.78 - 0.5 * depth, 0.92 - 0.45 * depth)
        axes.plot(range(len(heights)), heights, "o-", markersize=4, label=name, color=colour)
    names = [layer.name for layer in deepest.layers]
    if any(names != [layer.name for layer in one.layers] for one in found.values()):
        names = [str(i + 1) for i in range(len(names))]
    axes.set_xticks(range(len(names)), names)
    axes.tick_params(axis="x", rotation=90 if max(map(len, names)) > 3 else 0)
    axes.set_xlabel("layer")
    axes.set_ylabel("different features / width" if relative else "different features")
    axes.set_ylim(0, None)
    axes.spines[["top", "right"]].set_visible(False)
    betas = [one.beta for one in found.values()]
    if isinstance(betas[0], float | int) and all(beta == betas[0] for beta in betas):
        axes.set_title(f"β = {betas[0]:g}", fontsize=9)
    legend_below(figure)
    return figure


@dataclass(frozen=True, eq=False)
class DistanceMap:
    """Distances between the features of one wire.

    `table`: squared distances in the order of the network. `groups`: the features behind every row, one each unless the
    network was folded. `dead`: dead rows (see `complexity`). `order`: the rows by average linkage, dead ones last.
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
                f"The groups of {self.name!r} must hold each of its features 0 to {n - 1} once. Pass the groups of the "
                "same network, folded: folded.groups."
            )
        share = np.zeros((len(groups), n))
        for row, group in zip(share, groups, strict=True):
            row[list(group)] = 1 / len(group)
        table = share @ self.table @ share.T  # means of squared distances, which include those inside the two groups
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
        raise InputError(unknown_name("wire", name, known))

    def merged(self, groups: Mapping[str, Sequence[Sequence[int]]]) -> DistanceMaps:
        """The distances after folding: between the means of the groups of every wire; wires not named stay.

        Args:
            groups: wire → groups of its features, each feature in one: `folded.groups`.

        Example:
            >>> import torch
            >>> from intertwine.fold.fold import fold_groups
            >>> from intertwine.fold.complexity import distance_maps
            >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
            >>> folded = fold_groups(model, torch.zeros(1, 3), groups={"0": [(1, 4, 6)]})
            >>> distance_maps(model, torch.zeros(1, 3)).merged(folded.groups)["0"].table.shape
            (6, 6)
        """
        after = {name: self[name].merged(found) for name, found in groups.items()}
        return DistanceMaps(tuple(after.get(wire.name, wire) for wire in self.wires), self.skipped)

    def to_dict(self) -> dict[str, Any]:
        return {"wires": [wire.to_dict() for wire in self.wires], "skipped": [s.to_dict() for s in self.skipped]}

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
            after: the result of `merged`, drawn relative to the largest distance before.
            wires: the wires to show; by default the first twelve.
        """
        if after is not None and {w.name for w in after.wires} != {w.name for w in self.wires}:
            raise MismatchError("`after` has other wires. Pass the distances of the same network, folded.")
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
    """The squared distances between the features of every layer, by their weights.

    A map shows which features a beta would merge with rows="mean": those below beta times the largest distance.

    Args:
        model: any network; it is not changed. *example_args, **example_kwargs: inputs it can be called with.
        terms, bias, norm: the compared weights, as for `fold`; terms="in+out", bias=False, norm="sum" is Eq. 6.

    Returns:
        A `DistanceMaps`: `["layer"].table`, `.smallest`, `.below(beta)`; `.plot()`, one heat map per layer.

    Example:
        >>> import torch
        >>> from intertwine.fold.complexity import distance_maps
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> with torch.no_grad():
        ...     model[0].weight[5], model[0].bias[5] = model[0].weight[2], model[0].bias[2]
        >>> found = distance_maps(model, torch.zeros(1, 3))["0"]
        >>> found.table.shape, found.smallest < 1e-12, abs(found.order.index(2) - found.order.index(5))
        ((8, 8), True, 1)

    Reference: Chen, Zhou and Yan, Going Beyond Neural Network Feature Similarity, 2024, Figures 1a and 6.
    """
    prepared = prepare(model, (example_args, example_kwargs), norm)
    merging = MergeState(prepared.wires, Options(terms=terms, bias=bias, rows="mean", norm=norm))
    return DistanceMaps(tuple(_map(merging, w) for w in range(len(prepared.wires))), prepared.skipped)


def _map(merging: MergeState, w: int) -> DistanceMap:
    wire, distances = merging.wires[w], merging.distances(w)
    table = np.where(distances.table > distances.rounding, distances.table, 0.0)
    np.fill_diagonal(table, 0.0)
    merging.drop(w)
    dead = tuple(dead_features(wire).nonzero().flatten().tolist())
    return DistanceMap(wire.name, table, tuple((i,) for i in range(wire.size)), dead, _order(table, dead))


def _order(table: NDArray[np.float64], last: Sequence[int]) -> tuple[int, ...]:
    """An order in which near rows are together, by average linkage of distances; the rows in `last` come last."""
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
    if wire.dead and live:  # a line before the dead features
        axes.axhline(live - 0.5, color="white", linewidth=0.8)
        axes.axvline(live - 0.5, color="white", linewidth=0.8)
    dead = f", {len(wire.dead)} dead" if wire.dead else ""
    axes.set_title(f"{wire.name}: {n} feature{'s' if n != 1 else ''}{dead}", fontsize=9)
    axes.set_xticks([])
    axes.set_yticks([])
    return picture
