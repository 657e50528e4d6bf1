"""`complexity`: how many features of every layer are not equivalent, and how many do not act at all.

Two features near zero are near each other, so dead features look like equivalent ones. They are told apart here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from intertwine.errors import InputError
from intertwine.features.pictures import new_figure
from intertwine.fold.effects import lengths
from intertwine.fold.fold import merged
from intertwine.fold.folded import Fold
from intertwine.fold.options import Beta, Options
from intertwine.fold.prepared import prepare
from intertwine.fold.sites import Foldable, Skipped
from intertwine.frames import frame

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: A feature is dead if its rows or its columns are shorter than this share of the longest in its layer.
DEAD = 1e-3


@dataclass(frozen=True)
class LayerComplexity:
    """One wire: `width` = `classes` + `equivalent` + `dead`.

    `classes`: groups with at least one live feature. `equivalent`: live features merged into others. `dead`: features
    whose rows, or whose columns, have almost no length. `left`: features that folding leaves, as the paper counts.
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
        """The complexity that a folding shows; nothing is merged again.

        Args:
            folded: what `fold`, or another way of merging features, gave. norm: the one that it was given.
            dead: as for `complexity`.

        Raises:
            InputError: features were absorbed or removed, so that the groups do not say which are equivalent.

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
                "The complexity of a folding was asked for, but features were absorbed or removed in it, not merged "
                "with others like them. Take one that merges: fold, fold_kmeans, or fold_to with how='merge'."
            )
        layers = [_layer(wire, folded.groups[wire.name], dead_features(wire, dead)) for wire in wires]
        return cls(tuple(layers), folded.skipped, dict(folded.betas) or None)

    def __getitem__(self, name: str) -> LayerComplexity:
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise InputError(f"There is no layer {name!r} here. There are: {', '.join(x.name for x in self.layers)}.")

    def to_rows(self) -> list[dict[str, Any]]:
        """One row per layer, as plain data."""
        return [asdict(layer) | {"share": layer.share} for layer in self.layers]

    def to_frame(self) -> Any:
        """The rows as a polars data frame (`pip install 'intertwine[frames]'`)."""
        return frame(self.to_rows())

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        beta = dict(self.beta) if isinstance(self.beta, Mapping) else self.beta
        skipped = [{"what": s.what, "reason": s.reason} for s in self.skipped]
        return {"beta": beta, "layers": self.to_rows(), "skipped": skipped}

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
    """The number of non-equivalent features of every layer, read off the weights.

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
    silent = [dead_features(wire, dead) for wire in prepared.wires]  # before merging, which writes into the wires
    merging = merged(prepared, options)
    layers = [_layer(wire, merging.merged(w), silent[w]) for w, wire in enumerate(prepared.wires)]
    return Complexity(tuple(layers), prepared.skipped, beta)


def dead_features(wire: Foldable, share: float = DEAD) -> torch.Tensor:
    """Which features of a wire have rows (with bias) or columns of almost no length, all layers taken together."""
    if not 0 <= share < 1:
        raise InputError(f"dead={share} was asked for. It is a share of the longest row, from 0 to below 1.")
    written = lengths(wire, ("write", "each"))
    read = lengths(wire, ("read",))
    return (written <= share * written.max()) | (read <= share * read.max())


def _layer(wire: Foldable, groups: Sequence[Sequence[int]], dead: torch.Tensor) -> LayerComplexity:
    gone = dead.tolist()
    classes = sum(any(not gone[i] for i in group) for group in groups)
    live = wire.size - sum(gone)
    return LayerComplexity(wire.name, wire.size, classes, live - classes, sum(gone), len(groups))
