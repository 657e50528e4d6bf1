"""What was asked of stitching, folding and inspection. Part of docs/benchmarks.py."""

from __future__ import annotations

import statistics
from typing import Any

from asked.row import Asked, mean, only, pick, spread

Rows = list[dict[str, Any]]

# -- stitching ---------------------------------------------------------------------------------------------------------


def _part(results: Any, part: str, **entries: Any) -> Rows:
    return pick(results["rows"], part=part, **entries)


def _layers(rows: Rows, key: str = "penalty") -> dict[str, float]:
    """The mean of every layer over pairs."""
    return {at: mean(pick(rows, at=at), key) for at in dict.fromkeys(row["at"] for row in rows)}


def _in_points(layers: dict[str, float]) -> str:
    return " / ".join(f"{100 * value:.1f}" for value in layers.values())


def _direct(results: Any) -> float:
    rows = _part(results, "direct")
    return (rows[0]["streamed"] + max(row["solved"] for row in rows)) / rows[0]["forwards"]


def _relu(results: Any, fit: str) -> Rows:
    return _part(results, "relu", family="relu", fit=fit)


def _excess(results: Any) -> float:
    """The most that a layer's mean penalty of the direct fit is above the printed one, in points."""
    return max(
        100 * ours - printed for ours, printed in zip(_layers(_relu(results, "direct")).values(), PRINTED, strict=True)
    )


def _gain(results: Any) -> float:
    """The least that training gains over the direct fit, in points, over all layers of all pairs."""
    direct = {(row["at"], *row["pair"]): row["penalty"] for row in _relu(results, "direct")}
    return min(100 * (direct[row["at"], *row["pair"]] - row["penalty"]) for row in _relu(results, "task"))


def _exact(results: Any) -> Rows:
    return [row for row in _part(results, "moved") if row["skip"] != "front"]


def _inside(results: Any) -> float:
    """Share of the cuts inside blocks, with the front's skip path, that change an output."""
    rows = _part(results, "moved", skip="front")
    return sum(row["gap"] > 1e-6 for row in rows) / len(rows)


def _tiny10(results: Any, fit: str) -> dict[str, float]:
    return _layers(_part(results, "tiny10", family="affine", fit=fit), "relative")


def _cka(results: Any) -> list[float]:
    rows = _part(results, "cka", family="affine")
    return [row["cka_images"] for row in rows if row["at"].startswith("relu")]


#: Penalties of G_ReLU stitches of Myrtle pairs that the paper prints, in points.
PRINTED = (8.1, 7.3, 16.5, 5.6)
STITCH = (
    Asked(
        "direct fits of all layers of a ResNet-18 pair, 10,000 images", "≤ 2 × the two forward passes", "stitch-direct",
        _direct, 2.0, shown="{:.2f} ×", beside=lambda r: f"forward passes {_part(r, 'direct')[0]['forwards']:.0f} s",
    ),
    Asked(
        "a network stitched to its moved copy (theorem 4.2), largest change of an output", "0 (≤ 1e-10 in float64)",
        "stitch-moved", lambda r: max(row["gap"] for row in _exact(r)), 1e-10,
        shown=lambda r: f"{max(row['gap'] for row in _exact(r)):.0e}, penalty "
        f"{max(abs(row['penalty']) for row in _exact(r)):g}, {len({row['architecture'] for row in _exact(r)})} "
        "architectures",
    ),
    Asked(
        "inside residual blocks, with the front's skip path, the theorem fails (E.56)", "shown", "stitch-moved",
        _inside, 1.0, "least",
        shown=lambda r: f"{_inside(r):.0%} of {len(_part(r, 'moved', skip='front'))} cuts change the output",
    ),
    Asked(
        "4 layers × 5 families of a Myrtle pair, 20 epochs", "< 180 s on one H200", "stitch-column",
        lambda r: _part(r, "column")[0]["seconds"], 180.0,
        shown=lambda r: f"{_part(r, 'column')[0]['seconds']:.0f} s, {_part(r, 'column')[0]['stitches']} stitches",
    ),
    Asked(
        "G_ReLU by one assignment, penalty by layer in points", f"as printed, {' / '.join(map(str, PRINTED))} "
        "(taken as: 2 points above at most)", "stitch-relu", _excess, 2.0,
        shown=lambda r: _in_points(_layers(_relu(r, "direct"))),
        beside=lambda r: "trained as printed "
        f"{_in_points(_layers(_part(r, 'relu', family='relu:birkhoff', fit='task')))}",
    ),
    Asked(
        "G_ReLU trained, gain over the assignment in every layer of every pair, points", "> 0", "stitch-relu", _gain,
        1e-9, "least",
        shown=lambda r: f"{_gain(r):.1f} at the least; penalties {_in_points(_layers(_relu(r, 'task')))}",
        beside=lambda r: f"one assignment {_in_points(_layers(_relu(r, 'direct')))}",
    ),
    Asked(
        "Tiny-10, task loss: relative accuracy of the worst layer", "stays high (≥ 0.95)", "stitch-tiny10",
        lambda r: min(_tiny10(r, "task").values()), 0.95, "least", shown="{:.3f}",
        beside=lambda r: f"least squares {min(_tiny10(r, 'direct').values()):.3f}",
    ),
    Asked(
        "CKA of Tiny-10 features by least squares, images as samples", "0.883 ± 0.050", "stitch-cka",
        lambda r: statistics.mean(_cka(r)), (0.833, 0.933), "within", shown=lambda r: spread(_cka(r), 3),
    ),
)  # fmt: skip

# -- folding and inspection --------------------------------------------------------------------------------------------


def _folded(results: Any, name: str, decay: float, method: str, share: float) -> dict[str, Any]:
    """The most accurate row of a method that is small enough (half a percent above the share still counts)."""
    rows = pick(results["curves"], architecture=name, weight_decay=decay, method=method)
    small = [row for row in rows if row.get("parameters_share", 9.0) <= share + 0.005]
    return max(small, key=lambda row: row["accuracy"])


def _whole(results: Any, name: str, decay: float) -> float:
    return only(results["curves"], architecture=name, weight_decay=decay, method="none")["accuracy"]


def _left(row: dict[str, Any], key: str = "accuracy") -> str:
    return f"{100 * row[key]:.2f} % right with {100 * row['parameters_share']:.1f} % of the parameters"


def _vgg(decay: float, bench: str) -> Asked:
    return Asked(
        f"VGG-16 (weight decay {decay:g}) folded to 20 %, without data", "≥ 91.8 % right", bench,
        lambda r: 100 * _folded(r, "vgg16_bn", decay, "fold-to", 0.2)["accuracy"], 91.8, "least",
        shown=lambda r: _left(_folded(r, "vgg16_bn", decay, "fold-to", 0.2)),
        beside=lambda r: f"whole {100 * _whole(r, 'vgg16_bn', decay):.2f} %; L1 pruning "
        f"{100 * _folded(r, 'vgg16_bn', decay, 'prune-l1', 0.25)['accuracy']:.1f} %",
    )  # fmt: skip


def _printed_point(results: Any) -> dict[str, Any]:
    rows = pick(results["curves"], architecture="vgg16_bn", weight_decay=5e-4, method="fold-paper-code")
    return min(rows, key=lambda row: abs(row["parameters_share"] - 0.2303))


def _vgg_speed(results: Any) -> dict[str, Any]:
    return only(results["speed"], what="vgg16_bn", options="PRINTED")


FOLD = (
    Asked(
        "merging of VGG-16 beside distances made anew before every merge", "≥ 50 × faster, same merges", "fold-speed",
        lambda r: _vgg_speed(r)["ratio"] * _vgg_speed(r)["same_merges"], 50.0, "least",
        shown=lambda r: f"{_vgg_speed(r)['ratio']:.0f} × ({_vgg_speed(r)['merging']:.2f} s; whole fold "
        f"{_vgg_speed(r)['ratio_whole']:.0f} ×), {_vgg_speed(r)['merges']:,} merges "
        f"{'the same' if _vgg_speed(r)['same_merges'] else 'NOT the same'}",
        beside=lambda r: f"as printed {_vgg_speed(r)['printed']:.1f} s; Gram matrices {_vgg_speed(r)['floor']:.2f} s",
    ),
    Asked(
        "folding torchvision's ResNet-50", "< 60 s", "fold-speed",
        lambda r: max(row["whole"] for row in pick(r["speed"], what="torchvision resnet50")), 60.0,
        shown="{:.1f} s at the most",
    ),
    _vgg(5e-4, "fold-vgg16"),
    _vgg(1e-4, "fold-vgg16-decay"),
    Asked(
        "the printed point of VGG-16, 91.78 % at 23.03 %, by the paper's rule after a reset", "≥ 91.78 % right",
        "fold-vgg16", lambda r: 100 * _printed_point(r)["accuracy_reset"], 91.78, "least",
        shown=lambda r: _left(_printed_point(r), "accuracy_reset"),
        beside=lambda r: f"without the reset {100 * _printed_point(r)['accuracy']:.1f} %",
    ),
    Asked(
        "ResNet-18 with 60 % of the parameters removed, accuracy over that of the whole", "≥ 0.95", "fold-resnet18",
        lambda r: _folded(r, "resnet18", 5e-4, "fold-to", 0.4)["accuracy"] / _whole(r, "resnet18", 5e-4), 0.95, "least",
        shown=lambda r: _left(_folded(r, "resnet18", 5e-4, "fold-to", 0.4)),
        beside=lambda r: f"whole {100 * _whole(r, 'resnet18', 5e-4):.2f} %; L1 pruning "
        f"{100 * _folded(r, 'resnet18', 5e-4, 'prune-l1', 0.4)['accuracy']:.1f} %",
    ),
)  # fmt: skip

INSPECT = (
    Asked(
        "Q and Q^α, n = 2048, two cores", "< 15 s", "rotation", lambda r: only(r["rotation"], threads=2)["seconds"],
        15.0, shown="{:.1f} s",
    ),
    Asked(
        "dissection of 512 units × 1,000 images × 100 concepts at 112×112", "< 300 s, bounded memory", "dissect",
        lambda r: max(row["whole"] for row in pick(r["dissect"])), 300.0,
        shown=lambda r: f"{max(row['whole'] for row in r['dissect']):.0f} s, memory grown by "
        f"{max(row['grown_mib'] for row in r['dissect']):.0f} MiB",
    ),
)  # fmt: skip

ROOMS = {"Stitching": STITCH, "Folding": FOLD, "Inspection": INSPECT}
