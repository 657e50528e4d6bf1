"""Rows of a stitching result as figures need them: names of families and places, groups, means, panels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from intertwine.features.pictures import new_figure
from intertwine.stitch.pictures import summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = dict[str, Any]

#: What the papers call the families, and the fits.
FAMILIES = {"linear": "full", "affine": "full", "relu:birkhoff": "G_ReLU", "identity": "no map"}
FITS = {"direct": "least squares", "task": "task loss"}
#: What a number is called on its axis, and the factor it is shown with.
NUMBERS = {
    "penalty": ("stitching penalty, %", 100),
    "best_penalty": ("stitching penalty, best epoch, %", 100),
    "relative_accuracy": ("relative accuracy", 1),
    "cross_entropy": ("cross-entropy", 1),
    "accuracy": ("accuracy", 1),
    "linear_cka_biased": ("linear CKA", 1),
    "r2": ("R² of the map", 1),
    "loss": ("loss in training", 1),
}


def family_name(row: Row) -> str:
    """A family as the papers call it.

    >>> family_name({"family": "lowrank:4"}), family_name({"family": "sparse:0.1+bias"})
    ('rank 4', 'ℓ1, λ = 0.1')
    """
    kind, _, number = row["family"].removesuffix("+bias").partition(":")
    words = {"lowrank": f"rank {number}", "sparse": f"ℓ1, λ = {number}"}
    return words.get(kind) or FAMILIES.get(row["family"], row["family"])


def places(rows: Iterable[Row]) -> dict[str, str]:
    """Label → label with a star where values go around the cut, in the order of the network."""
    return {row["label"]: row["label"] + ("*" if row["skip"] != "none" else "") for row in rows}


def by(rows: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """Rows under the value of a key, in the order of their coming."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def values(rows: Iterable[Row], what: str) -> list[float]:
    """A number of all rows that have it, as it is shown."""
    return [float(NUMBERS[what][1] * row[what]) for row in rows if row.get(what) is not None]


def over_places(axes: Axes, rows: Sequence[Row], what: str, label: str, **style: Any) -> None:
    """One line over the places, whiskers of one deviation."""
    order = list(places(rows))
    held = [(i, summary(found)) for i, place in enumerate(order) if (found := values(by(rows, label_of)[place], what))]
    axes.errorbar(
        [i for i, _ in held], [mean for _, (mean, _) in held], [spread for _, (_, spread) in held], label=label,
        marker="o", markersize=4, capsize=3, linewidth=1.2, **style,
    )  # fmt: skip


def label_of(row: Row) -> str:
    return row["label"]


def named(axes: Axes, rows: Sequence[Row], what: str) -> None:
    """The places under the axis, the number beside it, and a legend."""
    names = list(places(rows).values())
    axes.set_xticks(range(len(names)), names, fontsize=8, rotation=45 if max(map(len, names)) > 4 else 0)
    axes.set_xlabel("layer" + (", * inside a residual block" if any(name.endswith("*") for name in names) else ""))
    axes.set_ylabel(NUMBERS[what][0])
    axes.legend(fontsize=8)


def panels(rows: Sequence[Row], width: float = 3.0, below: int = 0) -> tuple[Figure, dict[str, Axes], Any]:
    """One panel per place side by side, and rows of empty panels below."""
    order = places(rows)
    figure = new_figure(width * len(order) + 0.6, 3.2 + 2.4 * below)
    grid = figure.subplots(1 + below, len(order), squeeze=False)
    for axes, place in zip(grid[0], order, strict=True):
        axes.set_title(f"layer {order[place]}", fontsize=9)
    return figure, dict(zip(order, grid[0], strict=True)), grid[1:]


def curves(rows: Iterable[Row], name: str) -> tuple[str, list[dict[int, float]]]:
    """A number over the training of each row: the name of its clock, and time → value.

    >>> curves([{"history": [{"step": 0, "r2": 0.5}, {"epoch": 1, "loss": 2.0}]}], "loss")
    ('epoch', [{1: 2.0}])
    """
    clock, runs = "epoch", []
    for row in rows:
        held = [record for record in row["history"] if record.get(name) is not None]
        clock = next((key for key in ("step", "epoch") if held and key in held[0]), clock)
        runs.append({record[clock]: record[name] for record in held})
    return ("iteration" if clock == "step" else clock), runs
