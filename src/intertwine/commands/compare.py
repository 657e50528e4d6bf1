"""`intertwine compare A B`: how similar the layers of two networks are, on real data."""

from __future__ import annotations

from argparse import Namespace

from rich.table import Table
from rich.text import Text

from intertwine.commands.document import print_json
from intertwine.commands.networks import load_networks, read_images
from intertwine.commands.pictures import SVG, check_picture, save_picture
from intertwine.commands.progress import status
from intertwine.commands.show import terminal
from intertwine.measure.compare import compare
from intertwine.measure.comparison import Comparison
from intertwine.measure.result import Result

#: Layers up to which a table of all pairs fits a terminal.
WIDE = 12


def run(options: Namespace) -> int:
    """Carry out the command."""
    check_picture(options.svg, SVG)
    names, weights = (options.first, options.second), (options.weights, options.weights_b)
    with status("reading the data") as say:
        images = read_images(options, names)
        assert images is not None  # there is a default
        say("building the networks")
        first, second = load_networks(names, weights, (), images)
        say(f"comparing on {len(images.test.dataset.test_labels):,} test images of {images.name}")
        found = compare(
            first.model, second.model, images.test, options.layer or None, options.measure or ["linear_cka"],
            options.policy, options.layer_b or None,
        )  # fmt: skip
        if options.svg:
            save_picture(found.plot(names=(first.name, second.name)), options.svg)
    if options.json:
        print_json(found.to_dict())
    else:
        _show(found, first.name, second.name)
        if options.svg:
            terminal().print(Text(f"\nwrote {options.svg}"))
    return 0


def _show(found: Comparison, first: str, second: str) -> None:
    console = terminal()
    console.print(Text(f"{first} (rows) and {second} (columns): {found.words()}", style="bold"))
    for measure in found.measures:
        small = len(found.second) <= WIDE
        console.print(Text(f"\n{measure}", style="bold"))
        console.print(_all_pairs(found, measure) if small else _nearest(found, measure))
        if any(r.baseline is not None for (name, *_), r in found.results.items() if name == measure):
            console.print(Text("in brackets: the same features with samples in another order, unrelated", style="dim"))
    reasons = {result.degenerate for result in found.results.values() if result.degenerate}
    for reason in sorted(reasons):
        console.print(Text(f"no value (–): {reason}", style="yellow"))


def _all_pairs(found: Comparison, measure: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    for name in found.second:
        table.add_column(name, justify="right")
    for first in found.first:
        table.add_row(first, *(_number(found.result(first, second, measure)) for second in found.second))
    return table


def _nearest(found: Comparison, measure: str) -> Table:
    """With many layers: for each of the first network, the layer of the second that is most similar, and its own."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in ("layer", "same layer", "most similar", "value"):
        table.add_column(head, justify="right" if head in ("same layer", "value") else "left")
    for first in found.first:
        results = {second: found.result(first, second, measure) for second in found.second}
        known = {second: result.value for second, result in results.items() if not result.degenerate}
        best = max(known, key=lambda name: known[name]) if known else "–"
        own = _number(results[first]) if first in results else ""
        table.add_row(first, own, best, _number(results[best]) if known else "–")
    return table


def _number(result: Result) -> str:
    """The value, and beside it that of unrelated features where the measure gives it."""
    if result.degenerate:
        return "–"
    return f"{result.value:.3f}" + ("" if result.baseline is None else f" ({result.baseline:.3f})")
