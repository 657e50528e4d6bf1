"""Rows of stitches and the numbers each figure form reads from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from intertwine.lab.papers.plan import Numbers, Row, gathered, grouped

PlanTable = Mapping[str, Any]
#: The papers' names of families and fits.
FAMILIES = {
    "linear": "full", "affine": "full", "relu:birkhoff": "G_ReLU", "relu": "G_ReLU, one assignment",
    "identity": "no map",
}  # fmt: skip
FITS = {"direct": "least squares", "task": "task loss"}
#: Starts of a training.
STARTS = {"direct": "from least squares", "random": "from random"}
#: Number of a stitch → its name, and the factor of its unit.
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
    """The papers' name of a family.

    >>> family_name({"family": "lowrank:4"}), family_name({"family": "sparse:0.1+bias"})
    ('rank 4', 'ℓ1, λ = 0.1')
    """
    kind, _, number = row["family"].removesuffix("+bias").partition(":")
    words = {"lowrank": f"rank {number}", "sparse": f"ℓ1, λ = {number}"}
    return words.get(kind) or FAMILIES.get(row["family"], row["family"])


def series_of(rows: Iterable[Row]) -> Callable[[Row], str]:
    """The series of a row: its family, its fit if the family has two at any strength, its variant.

    >>> rows = [{"family": "linear", "fit": "task"}, {"family": "linear", "fit": "direct"}]
    >>> [series_of(rows)(row) for row in rows], series_of(rows[:1])(rows[0])
    (['full, task loss', 'full, least squares'], 'full')
    """
    fits = {kind: {row["fit"] for row in some} for kind, some in grouped(rows, _kind).items()}

    def name(row: Row) -> str:
        fit = FITS[row["fit"]] if len(fits[_kind(row)]) > 1 else ""
        words = [family_name(row), fit, row.get("variant", "")]
        return ", ".join(word for word in words if word)

    return name


def _kind(row: Row) -> str:
    """The family without its strength."""
    return family_name(row).partition(" = ")[0]


def group_of(plan: Mapping[str, Any]) -> Callable[[Row], str]:
    """The name of the networks of a row: "width 2" if an option varies, else the training data of the front."""
    if plan["networks"].get("trained_on"):  # older results lack the entry
        return lambda row: row["front_group"]
    (option,) = plan["networks"]["vary"]
    return lambda row: f"{option} {row['front_group']:g}"


def places(rows: Iterable[Row]) -> dict[str, str]:
    """Label → label, with a star if a skip connection bypasses the place, in the order of the network."""
    return {row["label"]: row["label"] + ("*" if row["skip"] != "none" else "") for row in rows}


def label_of(row: Row) -> str:
    return row["label"]


def values(rows: Iterable[Row], what: str) -> list[float]:
    """A number of all rows that have it, in its unit."""
    return [float(NUMBERS[what][1] * row[what]) for row in rows if row.get(what) is not None]


def curves(rows: Iterable[Row], name: str) -> tuple[str, list[dict[int, float]]]:
    """A number over the training of each row: the unit of time, and time → value.

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
    """Rows by the weight of the CKA in their loss, in words; empty if there is one weight only."""
    found = grouped(rows, lambda row: row["cka"])
    return {f"weight {weight:g}" if len(found) > 1 else "": some for weight, some in found.items()}


# -- Numbers by the form of the figure: series → place → one value per pair --


#: The place of a number of all layers.
ALL = "all layers"
#: Least shares of zeros of a sparse map.
SPARSE = (0.5, 0.8)


def each(rows: Sequence[Row], what: str, series: Callable[[Row], str]) -> Iterator[tuple[str, str, list[float]]]:
    """The number of every row at its place."""
    return ((series(row), row["label"], values([row], what)) for row in rows)


def layers(plan: PlanTable, rows: Sequence[Row]) -> Numbers:
    """One series per family, and fit where it has two."""
    return gathered(each(rows, plan["settings"]["what"], series_of(rows)))


def penalties(plan: PlanTable, rows: Sequence[Row]) -> Numbers:
    """The same; those of the last epoch beside those of the best; and means inside and outside of residual blocks.

    The best epoch is selected on the test images, so its penalty is biased; that of the last epoch is not.
    """
    found, series, what = layers(plan, rows), series_of(rows), plan["settings"]["what"]
    if what == "best_penalty":
        trained = [row for row in rows if row["fit"] == "task"]
        found |= gathered(each(trained, "penalty", lambda row: f"{series(row)}, last epoch"))
    if any(row["skip"] != "none" for row in rows):
        found |= gathered(_blocks(rows, what, series))
    return found


def _blocks(
    rows: Sequence[Row], what: str, series: Callable[[Row], str]
) -> Iterator[tuple[str, str, list[float]]]:  # fmt: skip
    """Per pair, the mean over the places inside of blocks, and over those outside."""
    kinds = grouped(rows, lambda row: (series(row), "outside" if row["skip"] == "none" else "inside", row["pair"]))
    for (name, where, _), some in kinds.items():
        held = values(some, what)
        yield f"{name}, {where} blocks", ALL, [fmean(held)] if held else []


def slopes(plan: PlanTable, rows: Sequence[Row]) -> Numbers:
    """Penalties of networks of one slope, and their range over layers."""
    same = [row for row in rows if row["front_group"] == row["back_group"]]
    name, what = group_of(plan), plan["settings"]["what"]
    found = gathered(each(same, what, name))
    pairs = grouped(same, lambda row: (name(row), row["pair"]))
    reaches = ((f"{slope}, reach", ALL, values(some, what)) for (slope, _), some in pairs.items())
    return found | gathered((series, label, [max(held) - min(held)]) for series, label, held in reaches if held)


def histograms(plan: PlanTable, rows: Sequence[Row]) -> Numbers:
    """Per layer, the percentage of pairs for which each α was chosen."""
    return gathered(
        (f"layer {row['label']}", f"{alpha:g}", [100.0 * (row["alpha"] == alpha)])
        for row in rows
        if "alpha" in row
        for alpha in plan["settings"]["alphas"]
    )


def sparsity(plan: PlanTable, rows: Sequence[Row]) -> Numbers:
    """The number of each strength, its zeros in percent, and the best of the sparse maps of each fit."""
    series, what = series_of(rows), plan["settings"]["what"]
    zeros = ((f"{series(row)}, zeros", row["label"], [100 * float(row["sparsity"])]) for row in rows)
    return layers(plan, rows) | gathered(zeros) | gathered(_sparse(rows, what))


def _sparse(rows: Sequence[Row], what: str) -> Iterator[tuple[str, str, list[float]]]:
    best = min if what in ("penalty", "best_penalty") else max
    for least in SPARSE:
        held = [row for row in rows if row["family"].startswith("sparse") and row["sparsity"] >= least]
        for (fit, label, _), some in grouped(held, lambda row: (row["fit"], row["label"], row["pair"])).items():
            yield f"{FITS[fit]}, {least:.0%} zeros or more", label, [best(values(some, what))]


def groups(plan: PlanTable, rows: Sequence[Row]) -> Numbers:
    """One series per kind of networks, and fit where there are two."""
    name, fits = group_of(plan), {row["fit"] for row in rows}
    fit = (lambda row: f", {FITS[row['fit']]}") if len(fits) > 1 else (lambda row: "")
    return gathered(each(rows, plan["settings"]["what"], lambda row: name(row) + fit(row)))


def starts(plan: PlanTable, rows: Sequence[Row]) -> Numbers:
    """One series per start, and the worst of each."""
    what = plan["settings"]["what"]
    kinds = grouped(rows, lambda row: (STARTS[row["start"]], row["label"], row["pair"]))
    worst = ((f"{start}, worst", label, [min(values(some, what))]) for (start, label, _), some in kinds.items())
    return gathered(each(rows, what, lambda row: STARTS[row["start"]])) | gathered(worst)


def iterations(plan: PlanTable, rows: Sequence[Row]) -> Numbers:
    """Every number at the start and at the end of the training, and the relative accuracy at its end."""
    found = gathered(each(rows, "relative_accuracy", _weighted(rows, "relative accuracy at the end")))
    for what in plan["settings"]["what"]:
        for when, which in (("start", 0), ("end", -1)):
            name = _weighted(rows, f"{NUMBERS[what][0]} at the {when}")
            found |= gathered((name(row), row["label"], _at(row, what, which)) for row in rows)
    return found


def _weighted(rows: Sequence[Row], name: str) -> Callable[[Row], str]:
    """A name with the weight of the CKA, if there are several."""
    words = {some[0]["cka"]: word for word, some in weights(rows).items()}
    return lambda row: ", ".join(word for word in (words[row["cka"]], name) if word)


def _at(row: Row, what: str, which: int) -> list[float]:
    (run,) = curves([row], what)[1]
    return [float(run[sorted(run)[which]])] if run else []


def averages(plan: PlanTable, rows: Sequence[Row]) -> Numbers:
    """The mean over all layers: one value per pair and layer."""
    series, what = series_of(rows), plan["settings"]["what"]
    return gathered((series(row), ALL, values([row], what)) for row in rows)


def several(plan: PlanTable, rows: Sequence[Row]) -> Numbers:
    """One series per number."""
    found: Numbers = {}
    for what in plan["settings"]["what"]:
        found |= gathered(each(rows, what, lambda row, what=what: NUMBERS[what][0]))
    return found


def lines(plan: PlanTable, rows: Sequence[Row]) -> Numbers:
    """Of the lines between stitches: the lower end and the lowest point; and all the stitches themselves."""
    between = [row for row in rows if "line" in row]
    found = gathered(("lowest on the line", row["label"], [float(row["lowest"])]) for row in between)
    found |= gathered(
        ("lower end", row["label"], [float(min(row["line"][0], row["line"][-1]))]) for row in between
    )  # fmt: skip
    return found | gathered(each([row for row in rows if "line" not in row], "relative_accuracy", family_name))
