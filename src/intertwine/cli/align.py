"""`intertwine align A B`: moves network B onto network A and measures the barrier before and after."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from intertwine.cli import arguments, output
from intertwine.cli.barrier import describe_barrier
from intertwine.cli.networks import ImageSplits, load_networks, read_images

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from intertwine.align.align import Alignment
    from intertwine.checkpoints.load import Loaded
    from intertwine.connect.barrier import Barrier
    from intertwine.symmetry.symmetry import Symmetry

#: Networks on the line on which the barrier is measured before and after, both ends included.
POINTS = 11
#: A rise of the barrier up to this is rounding.
BARRIER_TOLERANCE = 1e-6
#: Rows of the table of wires; of more wires, those with the largest remaining distance are shown.
MAX_TABLE_WIRES = 24


def add(command: ArgumentParser) -> None:
    """Give the parser its arguments."""
    command.description = (
        "Move network B onto network A by an element of their symmetry, which does not change its function. With "
        "--data, the barrier between the two is measured before and after, on test images." + arguments.ZOO
    )
    arguments.add_pair(command)
    arguments.add_input(command)
    arguments.add_method(
        command,
        "weights (default) or scale-aware; with --data also activations, commutativity, straight-through or sinkhorn",
    )
    arguments.add_data(command, "at most this many training images for the method, and test images for the barrier")
    command.add_argument(
        "--starts",
        metavar="N",
        type=arguments.positive,
        default=3,
        help="number of starts; the best result is kept (default 3)",
    )
    command.add_argument("--wires", metavar="W,…", help="names of the only wires to move, with commas between")
    command.add_argument("--continuous", action="store_true", help="let whole matrices act where only linear maps meet")
    command.add_argument("--out", metavar="FILE", help="write the moved B (safetensors)")
    command.add_argument("--element", metavar="FILE", help="write the element that moves B (safetensors)")
    command.add_argument("--plot", metavar="FILE", help="draw how units correlate, before and after (svg or png)")
    arguments.add_json(command)


@dataclass(frozen=True)
class BarrierChange:
    """The barrier before and after an alignment."""

    before: Barrier
    after: Barrier

    def worse(self) -> list[str]:
        """The barriers that rose, in words."""
        pairs = {
            "loss": (self.before.loss_barrier, self.after.loss_barrier),
            "error": (self.before.error_barrier, self.after.error_barrier),
        }
        return [
            f"the {kind} barrier rose from {x:.4f} to {y:.4f}"
            for kind, (x, y) in pairs.items()
            if x is not None and y is not None and y > x + BARRIER_TOLERANCE
        ]

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {"before": self.before.to_dict(), "after": self.after.to_dict(), "worse": self.worse()}


def run(options: Namespace) -> int:
    """Carry out the command."""
    from intertwine.align.align import align
    from intertwine.align.correlations import matched_correlations
    from intertwine.checkpoints.weights import write_checkpoint
    from intertwine.files import atomic_write

    output.check_picture(options.plot)
    given = arguments.method_options(options.method, options.option)
    arguments.require_method_data(options)
    if options.plot:
        arguments.require_data(options, "--plot shows how units correlate on data")
    names = (options.first, options.second)
    with output.status("building the networks") as step:
        images = read_images(options, names)
        a, b = load_networks(names, (options.weights, options.weights_b), options.input, images)
        step("finding their symmetry")
        symmetry = _common_symmetry(a, b, options.continuous)
        step(f"aligning by {options.method}")
        start = perf_counter()
        found = align(
            a.model, b.model, method=options.method, data=images and images.train, seed=options.seed,
            starts=options.starts, wires=None if options.wires is None else options.wires.split(","),
            symmetry=symmetry, options=given,
        )  # fmt: skip
        seconds = perf_counter() - start
        change = None if images is None else _change(a, b, found, images, step)
        if images is not None and options.plot:
            step("drawing")
            before = matched_correlations(found.reference, symmetry.folded(b.model), images.test, symmetry=symmetry)
            after = matched_correlations(found.reference, found.model, images.test, symmetry=symmetry)
            output.save_picture(after.plot(before), options.plot)
        if options.out:
            write_checkpoint(found.model, options.out)
        if options.element:
            with atomic_write(options.element) as file:
                found.element.save(file)
    files = {"out": options.out, "element": options.element, "plot": options.plot}
    if options.json:
        head = {"first": a.name, "second": b.name, "dataset": None if images is None else images.name}
        tail = {"seconds": seconds, "barrier": None if change is None else change.to_dict(), **files}
        output.print_json(head | found.to_dict() | tail)
    else:
        barriers = None if change is None else _barriers(change)
        output.show(_summary(a, b, found, seconds), _wires(found), barriers, output.wrote(*files.values()))
    return 0


def _common_symmetry(a: Loaded, b: Loaded, continuous: bool) -> Symmetry:
    from intertwine.canonical.equivalence import check_same_symmetry
    from intertwine.symmetry.symmetry import symmetry

    found, other = (symmetry(x.model, *x.args, continuous=continuous, **x.kwargs) for x in (a, b))
    check_same_symmetry(found, a.model, b.model, other)
    return found


def _change(a: Loaded, b: Loaded, found: Alignment, images: ImageSplits, step: output.StatusCallback) -> BarrierChange:
    from intertwine.connect.barrier import barrier
    from intertwine.data.batchnorm import batch_norms

    step(f"scoring {POINTS} networks on {images.name}, before and after")
    reset = images.train if batch_norms(a.model) else None
    return BarrierChange(
        barrier(a.model, b.model, images.test, POINTS, reset),
        barrier(found.reference, found.model, images.test, POINTS, reset),
    )


def _summary(a: Loaded, b: Loaded, found: Alignment, seconds: float) -> Text:
    head = output.text(f"{b.name} moved onto {a.name} by {found.method}, in {seconds:.2f} s\n", style="bold")
    share = f", {_left(found.before, found.after)} left" if found.before else ""
    distances = f"{found.before:.4g} → {found.after:.4g}{share}"
    moved = f"{found.element!r}".replace("Element(", "")[:-1]
    head.append(f"squared distance {distances}; {moved}", style="not bold")
    if not found.before:
        head.append("\nThe two have the same weights; without a checkpoint all networks start alike.", style="yellow")
    elif found.after > found.before:
        head.append(
            "\nThe weights are farther apart than before: this method minimises a measure of its own.", style="yellow"
        )
    return head


def _wires(found: Alignment) -> Table:
    rows = output.table("wire", "size", "before", "after", "left", left=("wire",))
    sizes = {wire.name: wire.size for wire in found.symmetry.wires}
    ranked = sorted(found.per_wire, key=lambda p: -(p.after / p.before if p.before else 0.0))[:MAX_TABLE_WIRES]
    for part in (p for p in found.per_wire if p in ranked):
        cells = (f"{part.before:.4g}", f"{part.after:.4g}", _left(part.before, part.after))
        rows.add_row(part.wire, str(sizes[part.wire]), *cells)
    if (more := len(found.per_wire) - MAX_TABLE_WIRES) > 0:
        rows.add_row(f"and {more} more, with no more left; --json has all", "", "", "", "")
    return rows


def _left(before: float, after: float) -> str:
    return f"{after / before:.1%}" if before > 0 else "–"


def _barriers(change: BarrierChange) -> Text:
    data, reset = change.before.data, change.before.reset_data
    found = output.text(f"on {data.samples:,} test images, {POINTS} networks from one to the other")
    found.append("" if reset is None else f", BatchNorm reset on {reset.samples:,} training images")
    found.append(f"\nbefore: {describe_barrier(change.before)}\nafter:  {describe_barrier(change.after)}", style="bold")
    if worse := change.worse():
        found.append(f"\nThe alignment made it worse: {' and '.join(worse)}.", style="bold red")
    return found
