"""`intertwine compare A B`: how similar the layers of two networks are on real data."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from intertwine.cli import arguments, output
from intertwine.cli.networks import load_networks, read_images

if TYPE_CHECKING:
    from rich.table import Table

    from intertwine.measure.compare import Comparison
    from intertwine.measure.measure import Result

#: Layers up to which a table of all pairs fits a terminal.
MAX_MATRIX_LAYERS = 12


def add(command: ArgumentParser) -> None:
    """Give the parser its arguments."""
    command.description = (
        "Compare every layer of A with every layer of B, on test images of a data set." + arguments.ZOO
    )
    arguments.add_pair(command)
    arguments.add_data(command, "test images", default="digits")
    command.add_argument(
        "--layer", metavar="PATH", action="append", help="a layer or a pattern such as layer1.*.relu2; repeatable"
    )
    command.add_argument("--layer-b", metavar="PATH", action="append", help="layers of B, where they differ from A's")
    command.add_argument("--measure", metavar="NAME", action="append", help="repeatable (default linear_cka)")
    command.add_argument(
        "--policy", choices=("channels", "flatten", "pool", "tokens"), default="channels",
        help="what a sample is: every position of an image (channels, the default) or every token (tokens), or the "
        "whole image, all its positions being features (flatten) or their mean (pool)",
    )  # fmt: skip
    command.add_argument("--svg", metavar="FILE", help="write a heat map of the first measure")
    arguments.add_json(command)


def run(options: Namespace) -> int:
    """Carry out the command."""
    from intertwine.measure.compare import compare

    output.check_picture(options.svg, output.SVG)
    names, weights = (options.first, options.second), (options.weights, options.weights_b)
    with output.status("reading the data") as step:
        images = read_images(options, names)
        assert images is not None  # there is a default
        step("building the networks")
        first, second = load_networks(names, weights, (), images)
        step(f"comparing on {len(images.test.dataset.test_labels):,} test images of {images.name}")
        found = compare(
            first.model, second.model, images.test, options.layer or None, options.measure or ["linear_cka"],
            options.policy, options.layer_b or None,
        )  # fmt: skip
        if options.svg:
            output.save_picture(found.plot(names=(first.name, second.name)), options.svg)
    if options.json:
        output.print_json(found.to_dict())
    else:
        _show(found, first.name, second.name)
        if options.svg:
            output.terminal().print(output.text(f"\nwrote {options.svg}"))
    return 0


def _show(found: Comparison, first: str, second: str) -> None:
    console = output.terminal()
    console.print(output.text(f"{first} (rows) and {second} (columns): {found.words()}", style="bold"))
    for measure in found.measures:
        small = len(found.second) <= MAX_MATRIX_LAYERS
        console.print(output.text(f"\n{measure}", style="bold"))
        console.print(_all_pairs(found, measure) if small else _most_similar(found, measure))
        if any(r.baseline is not None for (name, *_), r in found.results.items() if name == measure):
            console.print(output.text("in brackets: the same features with shuffled samples, unrelated", style="dim"))
    for reason in sorted({result.degenerate for result in found.results.values() if result.degenerate}):
        console.print(output.text(f"no value (–): {reason}", style="yellow"))


def _all_pairs(found: Comparison, measure: str) -> Table:
    rows = output.table("", *found.second, left=("",))
    for first in found.first:
        rows.add_row(first, *(_number(found.result(first, second, measure)) for second in found.second))
    return rows


def _most_similar(found: Comparison, measure: str) -> Table:
    """For each layer of the first network its most similar layer in the second, and the layer of the same name."""
    rows = output.table("layer", "same layer", "most similar", "value", left=("layer", "most similar"))
    for first in found.first:
        results = {second: found.result(first, second, measure) for second in found.second}
        known = {second: result.value for second, result in results.items() if not result.degenerate}
        best = max(known, key=lambda name: known[name]) if known else "–"
        same = _number(results[first]) if first in results else ""
        rows.add_row(first, same, best, _number(results[best]) if known else "–")
    return rows


def _number(result: Result) -> str:
    """The value, and in brackets that of unrelated features where the measure gives it."""
    if result.degenerate:
        return "–"
    return f"{result.value:.3f}" + ("" if result.baseline is None else f" ({result.baseline:.3f})")
