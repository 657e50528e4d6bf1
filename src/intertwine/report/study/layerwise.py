"""Layer by layer: linear connectivity of features, penalties of stitching, and complexity."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from intertwine.report.study.commands import Commands
from intertwine.report.study.curves import Series, beyond, gather, grouped, spread, told
from intertwine.report.study.entries import Entry, Results
from intertwine.report.study.lines import Axes, line_chart
from intertwine.report.study.naming import Names, short
from intertwine.report.study.views import Section, View, family


@dataclass(frozen=True)
class Kind:
    """What one section draws over the layers. `told`: the title, in which {} stands for the networks."""

    verb: str
    quantity: str
    heading: str
    told: str
    pairs: bool  # of networks; single networks otherwise
    joined: bool  # by a line
    beside: str = ""  # a quantity to compare with, the same whatever the options


LLFC = Kind(
    "connectivity",
    "llfc",
    "Linear connectivity of features",
    "How far the features of the mixed network are from the mixed features (llfc), {}",
    pairs=True,
    joined=True,
)
STITCHING = Kind(
    "stitch",
    "penalty",
    "Stitching",
    "Accuracy lost (penalty) by stitching at each layer, front → back: {}",
    pairs=True,
    joined=False,
)
COMPLEXITY = Kind(
    "complexity",
    "classes",
    "Complexity",
    "Features that are not equivalent to each other (classes) in each layer of {}",
    pairs=False,
    joined=True,
    beside="width",
)


def layerwise(kind: Kind) -> Callable[[Results, Commands, int], Section | None]:
    """The maker of one section."""

    def section(results: Results, commands: Commands, most: int) -> Section | None:
        entries = [e for e in results.of(kind.verb, kind.quantity, kind.beside) if e.layer is not None]
        if not entries:
            return None
        names = Names.of(entries)
        groups = grouped(entries, names.pair if kind.pairs else names.network)

        def views() -> Iterator[View]:
            for label, own in groups.items():
                yield _view(kind, label, own, names, commands)

        return Section(kind.verb, kind.heading, family(("networks",), views(), len(groups), most))

    return section


def _view(kind: Kind, label: str, entries: list[Entry], names: Names, commands: Commands) -> View:
    first = entries[0].task
    entries = [e for e in entries if e.quantity == kind.quantity or e.task is first]
    layers = list(dict.fromkeys(e.layer or "" for e in entries))
    place = {layer: float(i) for i, layer in enumerate(layers)}
    alphas = len({e.index for e in entries}) > 1

    def name(entry: Entry) -> str:
        if entry.quantity == kind.beside:
            return kind.beside
        alpha = f"α={short(entry.index)}" if alphas and entry.index is not None else ""
        said = ", ".join(part for part in (names.settings(entry), alpha) if part)
        return said or (kind.quantity if kind.beside else "")  # beside another line it needs a name of its own

    series = gather(entries, name, lambda e: place[e.layer or ""], commands)
    title = kind.told.format(label)
    axes = Axes(title, "layer", kind.quantity, tuple(layers), kind.joined)
    largest = told(_largest(series, layers))
    said = f" Largest: {largest}." if largest else " No layer has a value."
    caption = f"{title}.{said}{_interval(series)}{beyond(entries, name)}"
    return View((label,), caption, line_chart(axes, series), sum(len(one.dots) for one in series))


def _largest(series: list[Series], layers: list[str]) -> Iterator[tuple[Series, float, str]]:
    """Of each series its largest value and the layer it is at."""
    for one in series:
        best = max(((dot.value, dot.x) for dot in one.known if dot.value is not None), default=None)
        if best is not None:
            yield one, best[0], f" at {layers[round(best[1])]}"


def _interval(series: list[Series]) -> str:
    """What the bars are: the repeats' spread, or the interval that the verb gave."""
    given = any(dot.low is not None for one in series for dot in one.dots)
    return spread(series) or (" The bars are the interval of each number." if given else "")
