"""`Dissection`, the result of `dissect`: concepts per unit, overlaps by chance, and bar charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from intertwine.argument_types import Float
from intertwine.errors import InputError, unknown_name
from intertwine.figures import legend_below, new_figure
from intertwine.lazy import data_frame

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Curve = Mapping[float, Sequence[float]]  # α → one value per rotation


def draw_categories(table: Mapping[str, tuple[int, int]], title: str) -> Figure:
    """Two bars per category: units, and their different concepts.

    >>> figure = draw_categories({"colour": (5, 2), "shape": (1, 1)}, "layer3")
    >>> [int(bar.get_height()) for bar in figure.axes[0].patches]
    [5, 1, 2, 1]
    """
    figure = new_figure(2.0 + 0.9 * max(2, len(table)), 3.2)
    axes = figure.subplots()
    for i, label in enumerate(("units", "different concepts")):
        places = [x + 0.4 * (i - 0.5) for x in range(len(table))]
        axes.bar(places, [found[i] for found in table.values()], 0.38, label=label, color=f"C{i}")
    axes.set_xticks(range(len(table)), list(table), fontsize=8)
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=7)
    return figure


def draw_concepts(table: Mapping[str, tuple[int, str]], title: str) -> Figure:
    """One bar per concept, its number of units, in the colour of its category.

    >>> figure = draw_concepts({"red": (5, "colour"), "disc": (2, "shape")}, "layer3")
    >>> [int(bar.get_height()) for bar in figure.axes[0].patches]
    [5, 2]
    """
    kinds = list(dict.fromkeys(kind for _, kind in table.values()))
    figure = new_figure(2.0 + 0.26 * max(8, len(table)), 3.2)
    axes = figure.subplots()
    names = list(table)
    for i, kind in enumerate(kinds):
        places = [x for x, name in enumerate(names) if table[name][1] == kind]
        axes.bar(places, [table[names[x]][0] for x in places], label=kind, color=f"C{i}")
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
    axes.set_ylabel("units", fontsize=8)
    axes.set_title(title, fontsize=9)
    if kinds:
        axes.legend(fontsize=7)
    return figure


def draw_fractions(curves: Mapping[str, Curve], chance: Mapping[str, float] | None = None) -> Figure:
    """One line per network: the fraction of interpretable units against α, the mean over rotations and its range.

    Args:
        curves: network → α → one value per rotation. chance: network → the fraction above the same level by chance, a
            dotted line.

    >>> figure = draw_fractions({"with ReLU": {0.0: [0.5], 1.0: [0.2, 0.4]}})
    >>> figure.axes[0].lines[0].get_ydata().tolist()
    [0.5, 0.3]
    """
    figure = new_figure(4.8, 3.4)
    axes = figure.subplots()
    for i, (name, curve) in enumerate(curves.items()):
        alphas = sorted(curve)
        means = [torch.tensor(list(curve[a]), dtype=torch.float64).mean().item() for a in alphas]
        axes.plot(alphas, means, marker="o", markersize=4, label=name, color=f"C{i}")
        axes.fill_between(
            alphas, [min(curve[a]) for a in alphas], [max(curve[a]) for a in alphas], alpha=0.2, color=f"C{i}"
        )
        if chance and name in chance:
            axes.axhline(chance[name], color=f"C{i}", linestyle=":", linewidth=1, label=f"{name}, by chance")
    axes.set_xlabel("α, the power of the rotation", fontsize=9)
    axes.set_ylabel("fraction of interpretable units", fontsize=9)
    axes.set_ylim(bottom=0)
    legend_below(figure)
    return figure


#: A unit is interpretable if its best overlap with a concept is larger (Bau et al. 2017).
LEVEL = 0.04


@dataclass(frozen=True)
class Unit:
    """One unit: the concept it overlaps with most (None if with none), the overlap, and its threshold."""

    unit: int
    concept: str | None
    category: str | None
    iou: float
    threshold: float


@dataclass(frozen=True)
class CategoryCount:
    """The number of interpretable units of one category, and of their different concepts."""

    units: int
    concepts: int


@dataclass(frozen=True, eq=False)
class ChanceOverlaps:
    """Best overlaps of the same units with the masks of other images: the overlaps by chance."""

    values: Float[Tensor, "shifts units"]

    def quantile(self, share: float = 0.95) -> float:
        """The overlap that a share of the units stays below by chance."""
        return torch.quantile(self.values.flatten(), share).item()

    def above(self, level: float) -> float:
        """The share of units above a level by chance."""
        return (self.values > level).double().mean().item()

    def __repr__(self) -> str:
        draws, units = self.values.shape
        return f"ChanceOverlaps({draws} × {units} units, 95 % below {self.quantile():.4f})"


@dataclass(frozen=True, eq=False)
class Dissection:
    """The result of `dissect`.

    Attributes:
        at: the layer. units: one entry per unit. level: above which a unit counts as interpretable.
        share: of a unit's activations above its threshold. images: how many.
        names, categories: of the concepts that occur. iou: of every unit with each of them.
        left_out: concepts that occur in no image. null: overlaps by chance, if computed.
        rotated: whether the units are those of a rotated basis.
    """

    at: str
    units: tuple[Unit, ...] = field(repr=False)
    level: float
    share: float
    images: int
    names: tuple[str, ...]
    categories: tuple[str, ...]
    iou: Float[Tensor, "units concepts"] = field(repr=False)
    left_out: tuple[str, ...] = ()
    null: ChanceOverlaps | None = None
    rotated: bool = False

    @cached_property
    def interpretable(self) -> tuple[Unit, ...]:
        """The units above the level, the largest overlap first."""
        return tuple(sorted((u for u in self.units if u.iou > self.level), key=lambda u: (-u.iou, u.unit)))

    @property
    def fraction(self) -> float:
        """Share of units above the level."""
        return len(self.interpretable) / len(self.units)

    @property
    def fraction_above_chance(self) -> float | None:
        """Share of units above what 95 % of units reach by chance; None without a null."""
        if self.null is None:
            return None
        bound = self.null.quantile()
        return sum(unit.iou > bound for unit in self.units) / len(self.units)

    @cached_property
    def by_category(self) -> dict[str, CategoryCount]:
        """Interpretable units and their different concepts, per category; categories without any included."""
        found: dict[str, list[str]] = {kind: [] for kind in dict.fromkeys(self.categories)}
        for unit in self.interpretable:
            found[unit.category or ""].append(unit.concept or "")
        return {kind: CategoryCount(len(names), len(set(names))) for kind, names in found.items()}

    @cached_property
    def by_concept(self) -> dict[str, tuple[int, ...]]:
        """Interpretable units per concept, most units first; concepts without any are left out."""
        found: dict[str, list[int]] = {}
        for unit in self.interpretable:
            found.setdefault(unit.concept or "", []).append(unit.unit)
        return {name: tuple(units) for name, units in sorted(found.items(), key=lambda item: -len(item[1]))}

    def to_rows(self) -> list[dict[str, Any]]:
        """One row per unit, as plain data."""
        return [asdict(unit) | {"interpretable": unit.iou > self.level} for unit in self.units]

    def to_frame(self) -> Any:
        """The rows as a polars data frame (`pip install 'intertwine[frames]'`)."""
        return data_frame(self.to_rows())

    def to_dict(self) -> dict[str, Any]:
        """As plain data, without the matrix of overlaps."""
        return {
            "at": self.at, "images": self.images, "level": self.level, "share": self.share, "rotated": self.rotated,
            "fraction": self.fraction, "fraction_above_chance": self.fraction_above_chance,
            "null_95": None if self.null is None else self.null.quantile(),
            "by_category": {kind: asdict(found) for kind, found in self.by_category.items()},
            "by_concept": {name: list(units) for name, units in self.by_concept.items()},
            "left_out": list(self.left_out), "units": self.to_rows(),
        }  # fmt: skip

    def plot(self, by: str = "category") -> Figure:
        """Bars of interpretable units: by "category", with their different concepts, or by "concept"."""
        if by not in ("category", "concept"):
            raise InputError(unknown_name("by", by, ("category", "concept")))
        title = f"{self.at}: {self.fraction:.0%} of {len(self.units)} units above {self.level:g}"
        if by == "category":
            table: Mapping[str, tuple[int, int]] = {k: (c.units, c.concepts) for k, c in self.by_category.items()}
            return draw_categories(table, title)
        kinds = dict(zip(self.names, self.categories, strict=True))
        return draw_concepts({name: (len(units), kinds[name]) for name, units in self.by_concept.items()}, title)

    def __repr__(self) -> str:
        basis = ", rotated basis" * self.rotated
        lines = [
            f"Dissection({self.at}{basis}: {len(self.interpretable)} of {len(self.units)} units "
            f"({self.fraction:.1%}) above {self.level:g}, {self.images:,} images, {len(self.names)} concepts)"
        ]
        for kind, found in self.by_category.items():
            units = f"{found.units} unit{'s' * (found.units != 1)}"
            lines.append(f"  {kind}: {units}, {found.concepts} concept{'s' * (found.concepts != 1)}")
        if self.null is not None:
            lines.append(
                f"  by chance: {self.null.above(self.level):.1%} of units score above {self.level:g}, and 95 % below "
                f"{self.null.quantile():.4f}; {self.fraction_above_chance:.1%} of the real units score above that"
            )
        if self.left_out:
            names = ", ".join(self.left_out[:5]) + ", …" * (len(self.left_out) > 5)
            count = f"{len(self.left_out)} concept{'s' * (len(self.left_out) != 1)}"
            lines.append(f"  left out, in no image: {count} ({names})")
        return "\n".join(lines)
