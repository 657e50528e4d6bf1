"""Connectivity: pairs of networks layer by layer and along the line between them (Zhou et al. 2023).

Each pair is looked at in several ways: two networks that were spawned from one, two that were trained apart, and those
two again after the second was moved onto the first. With BatchNorm everything is measured twice: with the statistics as
they are mixed, which is what the paper's code does, and with statistics estimated again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from intertwine.align.align import SOLVERS, align
from intertwine.connect.barrier import Barrier, barrier
from intertwine.connect.connectivity import connectivity
from intertwine.connect.statistics import batch_norms
from intertwine.errors import InputError
from intertwine.reproduce.kinds.connectivity_pictures import draw
from intertwine.reproduce.kinds.registry import Kind, Numbers, Row
from intertwine.reproduce.networks import Pair, Source, networks_of, trained
from intertwine.reproduce.plan import Plan
from intertwine.reproduce.work import Work
from intertwine.symmetry.symmetry import Symmetry, symmetry

#: How the two networks of a pair came to be where they are; the others are names of ways to align.
SPAWNED, INDEPENDENT = "spawned", "independent"
#: Part of a paper's argument → what of a layer belongs to it.
FORMS: Mapping[str, tuple[str, ...]] = {
    "features": ("llfc", "baseline", "c", "c_std"),
    "conditions": ("additivity", "sign_agreement", "commutativity"),
    "factors": ("weights_apart", "inputs_apart", "commutativity"),
}
#: What of a layer → its name in series.
NAMES: Mapping[str, str] = {
    "llfc": "mix",
    "baseline": "networks",
    "additivity": "weak additivity",
    "sign_agreement": "sign agreement",
    "commutativity": "commutativity",
    "weights_apart": "weights apart",
    "inputs_apart": "inputs apart",
}
ABOUT = ("way", "statistics", "layer", "kind", "alpha")
PERCENT = 100.0


@dataclass(frozen=True)
class Settings:
    """The table [connectivity].

    Attributes:
        form: which part of the argument is told (`FORMS`); all parts are measured. ways: "spawned", "independent", or a
            method of `intertwine.align` that is applied to the independent pair.
        independent: recipe and changes of the networks that share nothing. layers: classes of the modules that are
            looked at. alphas: weights of the first network in the mix.
        samples: test images that features are compared on; the line is taken on all. seen: training images for methods
            and statistics that need data. points: on the line.
    """

    form: str
    ways: list[str] = field(default_factory=lambda: [SPAWNED, INDEPENDENT, "weights", "activations"])
    independent: Mapping[str, Any] = field(default_factory=lambda: {"recipe": "zhou-independent"})
    layers: list[str] = field(default_factory=lambda: ["Conv2d", "Linear", "ReLU"])
    alphas: list[float] = field(default_factory=lambda: [0.25, 0.5, 0.75])
    samples: int = 10_000
    seen: int = 10_000
    points: int = 25

    def check(self, plan: Plan, where: str) -> None:
        """Refuse words that nothing is known of."""
        for word, known in [(self.form, FORMS), *((way, (SPAWNED, INDEPENDENT, *SOLVERS)) for way in self.ways)]:
            if word not in known:
                raise InputError(f"{where}: [connectivity] says {word!r}; it may say {', '.join(known)}.")
        unknown = sorted(set(self.independent) - {"recipe", "changes"})
        if unknown:
            raise InputError(f"{where}: [connectivity] independent has {unknown[0]!r}; it has recipe and changes.")


# -- rows --------------------------------------------------------------------------------------------------------------


def run(work: Work) -> list[Row]:
    """Rows of layers and rows of points on the line, those that the form of the plan needs."""
    sources = {SPAWNED: work.sources}
    if set(work.plan.settings.ways) != {SPAWNED}:
        sources[INDEPENDENT] = trained(_apart(work.plan), work.data, work.folder, work.device, work.tell)
    rows = work.per_pair(lambda pair, _: _pair(work, pair, sources))
    return [kept for row in rows if (kept := _of_form(row, work.plan.settings.form))]


def _apart(plan: Plan) -> Plan:
    """The plan of the networks that share nothing."""
    networks, changes = networks_of(plan), plan.settings.independent
    return replace(plan, networks=replace(networks, name=f"{networks.name}-independent", **changes))


def _of_form(row: Row, form: str) -> Row | None:
    """What a part of the argument needs of a row: results hold nothing else."""
    if "t" in row:
        return row if form == "features" else None
    values = {name: row[name] for name in FORMS[form] if row.get(name) is not None}
    own = set(row) - set(NAMES) - {"c", "c_mean", "c_std", "additivity_residual", "notes"}
    return {name: row[name] for name in row if name in own} | values if values else None


def _pair(work: Work, pair: Pair, sources: Mapping[str, Sequence[Source]]) -> Iterator[Row]:
    settings, data = work.plan.settings, work.data
    seen = _batches(work, "train", min(settings.seen, len(data.labels)))
    test = _batches(work, "test", len(data.test_labels))
    compared = _batches(work, "test", min(settings.samples, len(data.test_labels)))
    known: Symmetry | None = None
    for way in settings.ways:
        places = sources[SPAWNED if way == SPAWNED else INDEPENDENT]
        a, b = (places[place].seed(seed) for place, seed in (pair.front, pair.back))
        if way in SOLVERS:
            known = known or symmetry(a, torch.zeros(1, *data.shape))
            a, b = _aligned(a, b, way, seen, known, work)
        a, b = a.to(work.device), b.to(work.device)
        layers = [path for path, module in a.named_modules() if type(module).__name__ in settings.layers]
        for statistics, reset in [("mixed", None), *([("reset", seen)] if batch_norms(a) else [])]:
            about = {"way": way, "statistics": statistics}
            found = connectivity(a, b, compared, settings.alphas, layers, reset_statistics=reset)
            yield from (about | row for row in found.to_rows())
        line = barrier(a, b, test, settings.points, seen if batch_norms(a) else None)
        yield from _line(way, line)


def _batches(work: Work, split: str, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The first images of a part, in batches on the device."""
    data = work.data.subset(**{split: count}).to(work.device)
    return list(data.batches(split, min(500, count)))


def _aligned(
    a: nn.Module, b: nn.Module, method: str, seen: Any, known: Symmetry, work: Work
) -> tuple[nn.Module, nn.Module]:
    """The first network, and the second moved onto it."""
    # descent is many small steps, which a CPU does sooner; what looks at data runs where the networks run
    place = work.device if SOLVERS[method].needs_data else torch.device("cpu")
    data = seen if SOLVERS[method].needs_data else None
    found = align(a.to(place), b.to(place), method=method, data=data, symmetry=known)
    return found.reference, found.model


def _line(way: str, found: Barrier) -> Iterator[Row]:
    lines = {"mixed": found.without_reset or found} | ({"reset": found} if found.without_reset else {})
    for statistics, line in lines.items():
        for row in line.to_rows():
            yield {"way": way, "statistics": statistics} | {name: row[name] for name in ("t", "loss", "error")}


# -- numbers -----------------------------------------------------------------------------------------------------------


def numbers(plan: Mapping[str, Any], rows: Sequence[Row]) -> Numbers:
    """Series such as "spawned: mix" → layer → one value per pair; the largest over α where there are several."""
    found: Numbers = {}
    shown = [name for name in FORMS[plan["settings"]["form"]] if name in NAMES]
    largest: dict[tuple[str, str, int], float] = {}
    for row in rows:
        for name in shown if "layer" in row else ():
            if name in row:
                key = (f"{_way(row)}: {NAMES[name]}", row["layer"], row["pair"])
                largest[key] = max(row[name], largest.get(key, row[name]))
    for (series, layer, _), value in largest.items():
        found.setdefault(series, {}).setdefault(layer, []).append(value)
    _add_ratios(found)
    _add_lines(found, [row for row in rows if "t" in row])
    return found


def _way(row: Row) -> str:
    return row["way"] + (", statistics reset" if row["statistics"] == "reset" else "")


def _add_ratios(found: Numbers) -> None:
    """How far the mix is from the mix of features, in units of how far the networks are from each other."""
    for series in [name for name in found if name.endswith(": mix")]:
        apart = found[series.removesuffix("mix") + "networks"]
        found[f"{series} / networks"] = {
            layer: [mix / whole for mix, whole in zip(values, apart[layer], strict=True) if whole > 0]
            for layer, values in found[series].items()
            if layer in apart
        }


def _add_lines(found: Numbers, rows: Sequence[Row]) -> None:
    """Barriers in points, and how far the error lies above the sum of those of the ends (the lemma LLFC ⇒ LMC)."""
    lines: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        lines.setdefault((_way(row), row["pair"]), []).append(row)
    for (way, _), line in lines.items():
        first, last = line[0], line[-1]
        for name, unit in (("error", PERCENT), ("loss", 1.0)):
            excess = [row[name] - (1 - row["t"]) * first[name] - row["t"] * last[name] for row in line[1:-1]]
            found.setdefault(f"{way}: barrier", {}).setdefault(name, []).append(unit * max(excess))
        bound = first["error"] + last["error"]
        over = PERCENT * max(row["error"] - bound for row in line)
        found.setdefault(f"{way}: error above Err_A + Err_B", {}).setdefault("largest", []).append(over)


KIND = Kind(Settings, run, numbers, draw)
