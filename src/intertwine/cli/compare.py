"""`intertwine compare A B`: how similar the layers of two networks are on real data."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from intertwine.cli.arguments import ZOO, add_data, add_json, add_pair
from intertwine.cli.networks import load_networks, read_images
from intertwine.cli.output import SVG, check_picture, print_json, save_picture, status, terminal

if TYPE_CHECKING:
    from rich.table import Table

    from intertwine.measure.compare import Comparison
    from intertwine.measure.measure import Result

# ----------------------------------------------------------------------------------------------------
# Arguments of `intertwine compare`.


def add(command: ArgumentParser) -> None:
    """Give the parser its arguments."""
    command.description = (
        "Every layer of one network against every layer of another, on test images of a data set." + ZOO
    )
    add_pair(command)
    add_data(command, "test images", default="digits")
    command.add_argument(
        "--layer", metavar="PATH", action="append", help="a layer or a pattern such as layer1.*.relu2; repeat it"
    )
    command.add_argument("--layer-b", metavar="PATH", action="append", help="of B, where they are not the same")
    command.add_argument(
        "--measure", metavar="NAME", action="append", help="repeat it for several (default linear_cka)"
    )
    command.add_argument(
        "--policy",
        choices=("channels", "flatten", "pool", "tokens"),
        default="channels",
        help="what a sample is: every position of an image (channels, the default) or every token (tokens), or the "
        "whole image, all its positions being features (flatten) or their mean (pool)",
    )
    command.add_argument("--svg", metavar="FILE", help="write a heat map of the first measure")
    add_json(command)


# ----------------------------------------------------------------------------------------------------
# `intertwine compare A B`: how similar the layers of two networks are, on real data.


#: Layers up to which a table of all pairs fits a terminal.
MAX_MATRIX_LAYERS = 12


def run(options: Namespace) -> int:
    """Carry out the command."""
    from rich.text import Text

    from intertwine.measure.compare import compare

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
    from rich.text import Text

    console = terminal()
    console.print(Text(f"{first} (rows) and {second} (columns): {found.words()}", style="bold"))
    for measure in found.measures:
        small = len(found.second) <= MAX_MATRIX_LAYERS
        console.print(Text(f"\n{measure}", style="bold"))
        console.print(_all_pairs(found, measure) if small else _nearest(found, measure))
        if any(r.baseline is not None for (name, *_), r in found.results.items() if name == measure):
            console.print(Text("in brackets: the same features with samples in another order, unrelated", style="dim"))
    reasons = {result.degenerate for result in found.results.values() if result.degenerate}
    for reason in sorted(reasons):
        console.print(Text(f"no value (–): {reason}", style="yellow"))


def _all_pairs(found: Comparison, measure: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    for name in found.second:
        table.add_column(name, justify="right")
    for first in found.first:
        table.add_row(first, *(_number(found.result(first, second, measure)) for second in found.second))
    return table


def _nearest(found: Comparison, measure: str) -> Table:
    """With many layers: for each of the first network, the layer of the second that is most similar, and its own."""
    from rich.table import Table

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
