"""`intertwine barrier A B`: loss and error on the line between two networks."""

from __future__ import annotations

from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from itertools import chain
from typing import TYPE_CHECKING

from intertwine.cli import arguments, output
from intertwine.cli.networks import load_networks, read_images, require_batch_norm

if TYPE_CHECKING:
    from intertwine.connect.barrier import Barrier

MIXED = (
    "The networks have BatchNorm, and nothing was reset: between the ends the running statistics are mixed, not those "
    "of the mixed network, and the barrier may be far higher than the weights deserve. Leave --no-reset out."
)


def add(command: ArgumentParser) -> None:
    """Give the parser its arguments."""
    command.description = (
        "Loss and error on the straight line from A to B, and how far they rise above the line of the two ends."
        + arguments.ZOO
    )
    arguments.add_pair(command)
    arguments.add_input(command)
    arguments.add_data(command, "images to score on, and training images for a reset", needed=True)
    command.add_argument("--split", choices=("test", "train"), default="test", help="images to score on (default test)")
    command.add_argument(
        "--points",
        metavar="N",
        type=arguments.positive,
        default=25,
        help="networks on the line, both ends too (default 25)",
    )
    command.add_argument(
        "--reset", action=BooleanOptionalAction, default=None,
        help="re-estimate the BatchNorm statistics at every point, on training images (default where there is "
        "BatchNorm); the line without is shown beside it",
    )  # fmt: skip
    command.add_argument("--plot", metavar="FILE", help="draw both curves (svg or png)")
    arguments.add_json(command)


def run(options: Namespace) -> int:
    """Carry out the command."""
    from intertwine.connect.barrier import barrier
    from intertwine.data.batchnorm import batch_norms

    output.check_picture(options.plot)
    names = (options.first, options.second)
    with output.status("reading the data") as step:
        images = read_images(options, names)
        assert images is not None  # the parser requires --data
        step("building the networks")
        a, b = load_networks(names, (options.weights, options.weights_b), options.input, images)
        if options.reset:
            require_batch_norm(a)
        normed = bool(batch_norms(a.model))
        reset = normed if options.reset is None else options.reset
        step(f"scoring {options.points} networks on {images.name}")
        scored = images.test if options.split == "test" else images.train
        found = barrier(a.model, b.model, scored, options.points, images.train if reset else None)
        if options.plot:
            output.save_picture(found.plot(), options.plot)
    notes = [MIXED] if normed and not reset else []
    if options.json:
        head = {"first": a.name, "second": b.name, "dataset": images.name, "split": options.split}
        tail = {"batch_norm": normed, "reset": reset, "notes": notes, "plot": options.plot}
        output.print_json(head | found.to_dict() | tail)
    else:
        head = f"{a.name} to {b.name}: {len(found.ts)} networks on {found.data.samples:,} {options.split} images of "
        _show(f"{head}{images.name}", found, notes)
        if options.plot:
            output.terminal().print(output.wrote(options.plot))
    return 0


def _show(head: str, found: Barrier, notes: list[str]) -> None:
    curves = [found] if found.without_reset is None else [found, found.without_reset]
    rows = output.table(
        "t", *(f"{kind}{tail}" for tail in ("", ", no reset")[: len(curves)] for kind in ("loss", "error"))
    )
    for i, t in enumerate(found.ts):
        cells = ((f"{one.loss[i]:.4f}", output.percent(None if one.error is None else one.error[i])) for one in curves)
        rows.add_row(f"{t:.3f}", *chain.from_iterable(cells))
    words = output.text(describe_barrier(found), style="bold")
    if found.without_reset is not None and found.reset_data is not None:
        on = f"BatchNorm reset on {found.reset_data.samples:,} training images"
        words = output.text(
            (f"{on}: {describe_barrier(found)}\n", "bold"), f"without reset: {describe_barrier(found.without_reset)}"
        )
    output.show(output.text(head, style="bold"), rows, words, output.lines(notes, "yellow"))


def describe_barrier(found: Barrier) -> str:
    """Both barriers in words."""
    error = "" if found.error_barrier is None else f", error barrier {output.percent(found.error_barrier)}"
    return f"loss barrier {found.loss_barrier:.4f} at t = {found.worst:.3f}{error}"
