"""The tables of bench/stitch.py for docs/stitching.md."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "stitch.json"
Row = dict[str, Any]


def page(rows: Sequence[Row]) -> str:
    """All tables."""
    parts: list[tuple[str, Callable[[list[Row]], Iterable[str]]]] = [
        ("direct", _direct), ("column", _column), ("relu", _relu), ("tiny10", _tiny10), ("cka", _cka),
        ("moved", _moved),
    ]  # fmt: skip
    lines: list[str] = []
    for name, table in parts:
        chosen = [row for row in rows if row["part"] == name]
        if chosen:
            lines += [*table(chosen), ""]
    return "\n".join(lines)


def _head(*cells: str) -> Iterator[str]:
    yield f"| {' | '.join(cells)} |"
    yield "|---" * len(cells) + "|"


def _mean(values: Iterable[float | None], scale: float = 100.0, digits: int = 2) -> str:
    held = [scale * value for value in values if value is not None]
    if not held:
        return ""
    spread = f" ± {statistics.stdev(held):.{digits}f}" if len(held) > 1 else ""
    return f"{statistics.mean(held):.{digits}f}{spread}"


def _keys(rows: Iterable[Row], name: str) -> list[Any]:
    return list(dict.fromkeys(row[name] for row in rows))


def _direct(rows: list[Row]) -> Iterator[str]:
    heads = "family", "images", "layers", "two forwards, s", "one streaming pass, s", "solving, s", "all over forwards"
    yield from _head(*heads)
    for row in rows:
        share = (row["streamed"] + row["solved"]) / row["forwards"]
        yield (
            f"| {row['family']} | {row['images']:,} | {row['layers']} | {row['forwards']:.1f} | {row['streamed']:.1f} "
            f"| {row['solved']:.1f} | {share:.2f}× |"
        )


def _column(rows: list[Row]) -> Iterator[str]:
    families = _keys(rows, "family")
    first = rows[0]
    yield (
        f"{first['stitches']} stitches, {first['epochs']} epochs, batches of {first['batch']}, {first['precision']}: "
        f"{first['seconds']:.0f} s, {first['device']}. Penalties in points:"
    )
    yield ""
    yield from _head("ReLU at", *families)
    for at in _keys(rows, "at"):
        cells = [_mean(r["penalty"] for r in rows if r["at"] == at and r["family"] == family) for family in families]
        yield f"| {at} | {' | '.join(cells)} |"


def _relu(rows: list[Row]) -> Iterator[str]:
    kinds = list(dict.fromkeys((row["family"], row["fit"]) for row in rows))
    pairs = len({tuple(row["pair"]) for row in rows})
    yield f"Penalty of G_ReLU stitches in points, {pairs} pair{'s' * (pairs > 1)} ({rows[0]['device']}):"
    yield ""
    yield from _head("ReLU at", *(f"{family}, {fit}" for family, fit in kinds))
    for at in _keys(rows, "at"):
        cells = [_mean(r["penalty"] for r in rows if (r["at"], r["family"], r["fit"]) == (at, *kind)) for kind in kinds]
        yield f"| {at} | {' | '.join(cells)} |"


def _tiny10(rows: list[Row]) -> Iterator[str]:
    kinds = [("identity", "direct"), ("affine", "direct"), ("affine", "task")]
    pairs = len({tuple(row["pair"]) for row in rows})
    yield (
        f"{pairs} pair{'s' * (pairs > 1)} of the published networks ({rows[0]['device']}, {_epochs(rows)} epochs): "
        "relative accuracy, cross-entropy to the back network, CKA."
    )
    yield ""
    names, kept = ("identity", "least squares", "task loss"), ("rel. acc.", "CE", "CKA")
    yield from _head("before ReLU", *(f"{name}, {what}" for name in names for what in kept))
    for at in [*_keys(rows, "at"), None]:
        cells = []
        for kind in kinds:
            chosen = [r for r in rows if (r["family"], r["fit"]) == kind and at in (r["at"], None)]
            for what, digits in (("relative", 3), ("cross_entropy", 2), ("cka", 3)):
                cells.append(_mean((r[what] for r in chosen), 1.0, digits))
        yield f"| {at or 'all layers'} | {' | '.join(cells)} |"


def _cka(rows: list[Row]) -> Iterator[str]:
    pairs = len({tuple(row["pair"]) for row in rows})
    yield f"CKA of the same networks, {pairs} pairs, all layers, by what counts as a sample (printed: 0.883 ± 0.050):"
    yield ""
    sides = {"before ReLU": "bn", "behind ReLU": "relu"}
    yield from _head("features", *(f"{side}, {what}" for side in sides for what in ("positions", "images")))
    for name, family in (("untouched", "identity"), ("by least squares", "affine")):
        cells = []
        for start in sides.values():
            chosen = [r for r in rows if r["family"] == family and r["at"].startswith(start)]
            cells += [_mean((r[what] for r in chosen), 1.0, 3) for what in ("cka", "cka_images")]
        yield f"| {name} | {' | '.join(cells)} |"


def _epochs(rows: list[Row]) -> int:
    return max(row["epochs"] for row in rows)


def _moved(rows: list[Row]) -> Iterator[str]:
    heads = "architecture", "cuts", "skip", "families", "largest penalty", "largest change of an output, relative"
    yield from _head(*heads)
    for name in _keys(rows, "architecture"):
        for skip in _keys([r for r in rows if r["architecture"] == name], "skip"):
            chosen = [r for r in rows if (r["architecture"], r["skip"]) == (name, skip)]
            families = ", ".join(_keys(chosen, "family"))
            penalty = max(abs(r["penalty"]) for r in chosen)
            gap = max(r["gap"] for r in chosen)
            yield f"| {name} | {len(chosen)} | {skip} | {families} | {penalty:.3f} | {gap:.0e} |"
