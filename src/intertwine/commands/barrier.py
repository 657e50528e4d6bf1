"""`intertwine barrier A B`: how much worse the networks between two networks are, on real images."""

from __future__ import annotations

from argparse import Namespace
from itertools import chain

from rich.table import Table
from rich.text import Text

from intertwine.commands import show
from intertwine.commands.document import print_json
from intertwine.commands.networks import load_networks, need_batch_norm, read_images
from intertwine.commands.pictures import check_picture, save_picture
from intertwine.commands.progress import status
from intertwine.connect.barrier import Barrier, barrier
from intertwine.connect.statistics import batch_norms

MIXED = (
    "The networks have BatchNorm, and nothing was reset: between the ends the running statistics are mixed, not those "
    "of the mixed network, and the barrier may be far higher than the weights deserve. Leave --no-reset out."
)


def run(options: Namespace) -> int:
    """Carry out the command."""
    check_picture(options.plot)
    names = (options.first, options.second)
    with status("reading the data") as say:
        images = read_images(options, names)
        assert images is not None  # the parser asks for --data
        say("building the networks")
        a, b = load_networks(names, (options.weights, options.weights_b), options.input, images)
        if options.reset:
            need_batch_norm(a)
        normed = bool(batch_norms(a.model))
        reset = normed if options.reset is None else options.reset
        say(f"scoring {options.points} networks on {images.name}")
        scored = images.test if options.split == "test" else images.train
        found = barrier(a.model, b.model, scored, options.points, images.train if reset else None)
        if options.plot:
            save_picture(found.plot(), options.plot)
    notes = [MIXED] if normed and not reset else []
    if options.json:
        head = {"first": a.name, "second": b.name, "dataset": images.name, "split": options.split}
        tail = {"batch_norm": normed, "reset": reset, "notes": notes, "plot": options.plot}
        print_json(head | found.to_dict() | tail)
    else:
        head = f"{a.name} to {b.name}: {len(found.ts)} networks on {found.data.samples:,} {options.split} images of "
        _show(f"{head}{images.name}", found, notes)
        if options.plot:
            show.terminal().print(Text(f"wrote {options.plot}"))
    return 0


def _show(head: str, found: Barrier, notes: list[str]) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    lines = [found] if found.without_reset is None else [found, found.without_reset]
    for name in ("t", *(f"{kind}{tail}" for tail in ("", ", no reset")[: len(lines)] for kind in ("loss", "error"))):
        table.add_column(name, justify="right")
    for i, t in enumerate(found.ts):
        cells = ((f"{line.loss[i]:.4f}", _share(None if line.error is None else line.error[i])) for line in lines)
        table.add_row(f"{t:.3f}", *chain.from_iterable(cells))
    words = [Text(barrier_words(found), style="bold")]
    if found.without_reset is not None and found.reset_data is not None:
        on = f"on {found.reset_data.samples:,} training images"
        words = [
            Text(f"BatchNorm reset {on}: {barrier_words(found)}", style="bold"),
            Text(f"without reset: {barrier_words(found.without_reset)}"),
        ]
    notices = [Text(note, style="yellow") for note in notes]
    show.terminal().print(show.spaced(Text(head, style="bold"), table, Text("\n").join(words), *notices))


def barrier_words(found: Barrier) -> str:
    """Both barriers in words."""
    error = "" if found.error_barrier is None else f", error barrier {_share(found.error_barrier)}"
    return f"loss barrier {found.loss_barrier:.4f} at t = {found.worst:.3f}{error}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.2%}"
