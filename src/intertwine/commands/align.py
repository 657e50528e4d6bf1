"""`intertwine align A B`: move one network onto another, and say what that did to the barrier between them."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from rich.table import Table
from rich.text import Text

from intertwine.align.align import SOLVERS, align
from intertwine.align.alignment import Alignment
from intertwine.align.correlations import matched_correlations
from intertwine.canonical.equivalence import check_same_architecture
from intertwine.checkpoint import write_checkpoint
from intertwine.commands import show
from intertwine.commands.barrier import barrier_words
from intertwine.commands.document import print_json
from intertwine.commands.networks import Images, load_networks, need_data, read_images
from intertwine.commands.pictures import check_picture, save_picture
from intertwine.commands.progress import Say, status
from intertwine.commands.settings import settings
from intertwine.connect.barrier import Barrier, barrier
from intertwine.connect.statistics import batch_norms
from intertwine.files import writing
from intertwine.models import Loaded
from intertwine.symmetry.symmetry import Symmetry, symmetry

#: Networks on the line whose barrier is taken before and after, both ends included.
POINTS = 11
#: A barrier that rises by less is taken for rounding.
LEAST = 1e-6
#: Wires in the table; where there are more, those with most left.
MOST = 24


@dataclass(frozen=True)
class Change:
    """The barrier before and after an alignment."""

    before: Barrier
    after: Barrier

    def worse(self) -> list[str]:
        """What rose, in words; empty where nothing did."""
        pairs = {
            "loss": (self.before.loss_barrier, self.after.loss_barrier),
            "error": (self.before.error_barrier, self.after.error_barrier),
        }
        return [
            f"the {kind} barrier rose from {x:.4f} to {y:.4f}"
            for kind, (x, y) in pairs.items()
            if x is not None and y is not None and y > x + LEAST
        ]

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {"before": self.before.to_dict(), "after": self.after.to_dict(), "worse": self.worse()}


def run(options: Namespace) -> int:
    """Carry out the command."""
    check_picture(options.plot)
    given = settings(options.method, options.option)
    if options.data is None and options.method in SOLVERS and SOLVERS[options.method].needs_data:
        need_data(f"The method {options.method!r} looks at what the networks do on data")
    if options.data is None and options.plot:
        need_data("The picture shows how units correlate on data")
    names = (options.first, options.second)
    with status("building the networks") as say:
        images = read_images(options, names)
        a, b = load_networks(names, (options.weights, options.weights_b), options.input, images)
        say("reading their symmetry")
        known = _common_symmetry(a, b, options.continuous)
        say(f"aligning by {options.method}")
        start = perf_counter()
        found = align(
            a.model, b.model, method=options.method, data=images and images.train, seed=options.seed,
            starts=options.starts, wires=None if options.wires is None else options.wires.split(","), symmetry=known,
            options=given,
        )  # fmt: skip
        seconds = perf_counter() - start
        change = None if images is None else _change(a, b, found, images, say)
        if images is not None and options.plot:
            say("drawing")
            before = matched_correlations(found.reference, known.folded(b.model), images.test, symmetry=known)
            after = matched_correlations(found.reference, found.model, images.test, symmetry=known)
            save_picture(after.plot(before), options.plot)
        if options.out:
            write_checkpoint(found.model, options.out)
        if options.element:
            with writing(options.element) as file:
                found.element.save(file)
    wrote = {"out": options.out, "element": options.element, "plot": options.plot}
    if options.json:
        head = {"first": a.name, "second": b.name, "dataset": None if images is None else images.name}
        tail = {"seconds": seconds, "barrier": None if change is None else change.to_dict(), **wrote}
        print_json(head | found.to_dict() | tail)
    else:
        parts = [_told(a, b, found, seconds), _wires(found), *([] if change is None else [_changed(change)])]
        files = [Text(f"wrote {path}") for path in wrote.values() if path]
        show.terminal().print(show.spaced(*parts, *([Text("\n").join(files)] if files else [])))
    return 0


def _common_symmetry(a: Loaded, b: Loaded, continuous: bool) -> Symmetry:
    found, other = (symmetry(x.model, *x.args, continuous=continuous, **x.kwargs) for x in (a, b))
    check_same_architecture(found, a.model, b.model, other)
    return found


def _change(a: Loaded, b: Loaded, found: Alignment, images: Images, say: Say) -> Change:
    say(f"scoring {POINTS} networks on {images.name}, before and after")
    reset = images.train if batch_norms(a.model) else None
    return Change(
        barrier(a.model, b.model, images.test, POINTS, reset),
        barrier(found.reference, found.model, images.test, POINTS, reset),
    )


# -- in the terminal ---------------------------------------------------------------------------------------------------


def _told(a: Loaded, b: Loaded, found: Alignment, seconds: float) -> Text:
    head = Text(f"{b.name} moved onto {a.name} by {found.method}, in {seconds:.2f} s\n", style="bold")
    share = f", {_left(found.before, found.after)} left" if found.before else ""
    distances = f"{found.before:.4g} → {found.after:.4g}{share}"
    moved = f"{found.element!r}".replace("Element(", "")[:-1]
    head.append(f"squared distance {distances}; {moved}", style="not bold")
    if not found.before:
        head.append(
            "\nThe two have the same weights already; without a checkpoint all are random alike.", style="yellow"
        )
    elif found.after > found.before:
        head.append(
            "\nThe weights are farther apart than before: this method lowers a measure of its own.", style="yellow"
        )
    return head


def _wires(found: Alignment) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("wire", "size", "before", "after", "left"):
        table.add_column(name, justify="left" if name == "wire" else "right")
    sizes = {wire.name: wire.size for wire in found.symmetry.wires}
    ranked = sorted(found.per_wire, key=lambda p: -(p.after / p.before if p.before else 0.0))[:MOST]
    for part in (p for p in found.per_wire if p in ranked):
        cells = (f"{part.before:.4g}", f"{part.after:.4g}", _left(part.before, part.after))
        table.add_row(part.wire, str(sizes[part.wire]), *cells)
    if len(found.per_wire) > MOST:
        table.add_row(f"and {len(found.per_wire) - MOST} more, with no more left; --json has all", "", "", "", "")
    return table


def _left(before: float, after: float) -> str:
    return f"{after / before:.1%}" if before > 0 else "–"


def _changed(change: Change) -> Text:
    data, reset = change.before.data, change.before.reset_data
    text = Text(f"on {data.samples:,} test images, {POINTS} networks from one to the other")
    text.append("" if reset is None else f", BatchNorm reset on {reset.samples:,} training images")
    text.append(f"\nbefore: {barrier_words(change.before)}\nafter:  {barrier_words(change.after)}", style="bold")
    if worse := change.worse():
        text.append(f"\nThe alignment made it worse: {' and '.join(worse)}.", style="bold red")
    return text
