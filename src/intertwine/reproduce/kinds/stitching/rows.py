"""Rows of stitches as figures and numbers need them: names of families and places, groups, values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from intertwine.reproduce.kinds.registry import Row

#: What the papers call the families, and the fits.
FAMILIES = {
    "linear": "full", "affine": "full", "relu:birkhoff": "G_ReLU", "relu": "G_ReLU, one assignment",
    "identity": "no map",
}  # fmt: skip
FITS = {"direct": "least squares", "task": "task loss"}
#: Where a training started.
STARTS = {"direct": "from least squares", "random": "from random"}
#: What a number is called, and the factor it is shown with.
NUMBERS = {
    "penalty": ("stitching penalty, %", 100),
    "best_penalty": ("stitching penalty, best epoch, %", 100),
    "relative_accuracy": ("relative accuracy", 1),
    "cross_entropy": ("cross-entropy", 1),
    "accuracy": ("accuracy", 1),
    "linear_cka_biased": ("linear CKA", 1),
    "cka_images": ("linear CKA, images as samples", 1),
    "cka_positions": ("linear CKA, positions as samples", 1),
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


def series_of(rows: Iterable[Row]) -> Callable[[Row], str]:
    """What the line of a row is called: its family, its fit where the family has two at any strength, its variant.

    >>> rows = [{"family": "linear", "fit": "task"}, {"family": "linear", "fit": "direct"}]
    >>> [series_of(rows)(row) for row in rows], series_of(rows[:1])(rows[0])
    (['full, task loss', 'full, least squares'], 'full')
    """
    fits = {kind: {row["fit"] for row in some} for kind, some in by(rows, _kind).items()}

    def name(row: Row) -> str:
        fit = FITS[row["fit"]] if len(fits[_kind(row)]) > 1 else ""
        words = [family_name(row), fit, row.get("variant", "")]
        return ", ".join(word for word in words if word)

    return name


def _kind(row: Row) -> str:
    """The family, whatever its strength."""
    return family_name(row).partition(" = ")[0]


def group_of(plan: Mapping[str, Any]) -> Callable[[Row], str]:
    """What the networks of a row are called: "width 2" where an option varies, or what the front was trained on."""
    if plan["networks"].get("trained_on"):  # results of before have no such entry
        return lambda row: row["front_group"]
    (option,) = plan["networks"]["vary"]
    return lambda row: f"{option} {row['front_group']:g}"


def places(rows: Iterable[Row]) -> dict[str, str]:
    """Label → label with a star where values go around the cut, in the order of the network."""
    return {row["label"]: row["label"] + ("*" if row["skip"] != "none" else "") for row in rows}


def label_of(row: Row) -> str:
    return row["label"]


def by(rows: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """Rows under the value of a key, in the order of their coming."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def values(rows: Iterable[Row], what: str) -> list[float]:
    """A number of all rows that have it, as it is shown."""
    return [float(NUMBERS[what][1] * row[what]) for row in rows if row.get(what) is not None]


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


def weights(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by the weight of the CKA in their loss, in words; no words where there is one weight only."""
    found = by(rows, lambda row: row["cka"])
    return {f"weight {weight:g}" if len(found) > 1 else "": some for weight, some in found.items()}
