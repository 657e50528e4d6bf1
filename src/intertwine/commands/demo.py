"""`intertwine demo`: two small networks on real digits, their symmetry, its proof, and what it costs to ignore it."""

from __future__ import annotations

import copy
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from intertwine.canonical.equivalence import equivalent
from intertwine.canonical.fingerprint import fingerprint
from intertwine.commands import show
from intertwine.commands.digits import PRECISION, RECIPE, one_thread, train
from intertwine.commands.inspect import write
from intertwine.report import page as html
from intertwine.report.outline import outline
from intertwine.report.wire_graph import wire_graph
from intertwine.symmetry.certificate import Certificate
from intertwine.symmetry.symmetry import Symmetry, symmetry
from intertwine.zoo.datasets.dataset import Dataset
from intertwine.zoo.datasets.find import data as find_data
from intertwine.zoo.recipe import Recipe
from intertwine.zoo.stacking.stack import Stack
from intertwine.zoo.trainer import score

NAME = "CNN on 1,797 handwritten digits"
SEEDS = (0, 1)
PROSE = 100  # letters in a line of running text


@dataclass(frozen=True)
class Story:
    """What the demo found. Accuracies are on the 360 test images."""

    model: nn.Module
    symmetry: Symmetry
    certificate: Certificate
    accuracies: dict[str, float]
    distance: float  # between the weights before and after the move, relative to the weights
    changed: int  # predictions that differ after the move
    gap: float  # largest change of an output after the move, in float32
    images: int
    marks: tuple[str, str, str]  # fingerprints of A, of A moved, and of B

    @property
    def rows(self) -> list[tuple[str, float]]:
        return list(self.accuracies.items())


def run(options: Namespace) -> int:
    """Carry out the command; 1 when the certificate fails."""
    start = time.monotonic()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(),
    )
    with one_thread(), Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("training two networks", total=RECIPE.epochs + 5)

        def advance(doing: str = "training two networks") -> None:
            progress.update(task, advance=1, description=doing)

        story = tell(find_data("digits"), RECIPE, advance)
        drawing = wire_graph(story.symmetry, story.model, NAME)
    out = Path(options.out)
    write(out / "symmetry.svg", drawing)
    write(out / "report.html", report(story, drawing, time.monotonic() - start))
    _print(story, out, time.monotonic() - start)
    return 0 if story.certificate.ok else 1


def tell(data: Dataset, recipe: Recipe, advance: Callable[..., None]) -> Story:
    """Train, find, prove, move and average."""
    first, second = train(data, SEEDS, recipe, advance)
    images = data.inputs(data.test_images)
    example = images[:8]
    advance("reading the symmetry")
    found = symmetry(first, example)
    advance("proving it")
    held = found.certify(first, example)
    found = held.symmetry
    advance("moving a network")
    moved = found.act(found.random(seed=0), first)
    advance("finding the way back")
    back = equivalent(first, moved, symmetry=found)
    returned = found.act(back, moved) if back is not None else moved
    a, b, c = (fingerprint(m, symmetry=found) for m in (first, moved, second))
    advance("averaging")
    models = {
        "network A": first,
        "network B, another seed": second,
        "A moved by a random element": moved,
        "average of A and B": average(first, second),
        "average of A and A moved": average(first, moved),
        "average of A and A moved, brought back": average(first, returned),
    }
    right = score(Stack(list(models.values())), data, PRECISION).accuracy.tolist()
    accuracies = dict(zip(models, right, strict=True))
    with torch.no_grad():
        before, after = first(images), moved(images)
    changed, gap = int((before.argmax(1) != after.argmax(1)).sum()), float((before - after).abs().max())
    return Story(first, found, held, accuracies, distance(first, moved), changed, gap, len(images), (a, b, c))


def average(a: nn.Module, b: nn.Module) -> nn.Module:
    """The network half-way between two: every parameter and every running statistic is the mean of the two."""
    middle = copy.deepcopy(a)
    other = b.state_dict()
    middle.load_state_dict(
        {k: torch.lerp(t, other[k], 0.5) if t.is_floating_point() else t for k, t in a.state_dict().items()}
    )
    return middle


def distance(a: nn.Module, b: nn.Module) -> float:
    """How far the parameters of two networks lie apart, relative to those of the first."""

    def flat(model: nn.Module) -> Tensor:
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    return float((flat(a) - flat(b)).norm() / flat(a).norm())


def sentences(story: Story) -> tuple[str, str, str, str]:
    """The move, the proof, the way back and the average, each in a sentence or two."""
    a, b, moved, middle, self_middle, returned = story.accuracies.values()
    held = story.certificate
    move = (
        f"A random element of the symmetry moved the weights of A by {story.distance:.0%} of their length. "
        f"Of {story.images} predictions, {story.changed} changed: accuracy {a:.1%} before, {moved:.1%} after. "
        f"No output moved by more than {story.gap:.0e} in float32."
    )
    proof = (
        f"The symmetry {'holds' if held.ok else 'does not hold'}: under {held.trials} random elements, in float64, "
        f"the outputs change by {held.max_error:.1e} of their size."
    )
    first, twin, other = (mark[:12] for mark in story.marks)
    form = (
        f"In canonical form A and its moved copy are one network: their fingerprints are {first} and {twin}, that of B "
        f"is {other}. The element that was applied is found again from the weights alone, and after it is undone the "
        f"average of A and its copy reaches {returned:.1%}."
    )
    mean = (
        f"A and B are about equally good ({a:.1%} and {b:.1%}), yet the network half-way between their weights reaches "
        f"{middle:.1%}. The same happens between A and its own moved copy ({self_middle:.1%}), two networks that "
        "compute one function. What looks like distance between weights can be a difference in order, scale and sign "
        "alone; aligning two networks before averaging them takes that part away."
    )
    return move, proof, form, mean


def _print(story: Story, out: Path, seconds: float) -> None:
    move, _, form, mean = sentences(story)
    rows = Table(box=None, show_header=False, pad_edge=False)
    for name, value in story.rows:
        rows.add_row(name, Text(f"{value:.1%}", style="green" if value > 0.9 else "red"))
    parts = [
        show.header(NAME, story.symmetry, story.model),
        show.tree(story.symmetry),
        show.certificate(story.certificate),
        Text("\n".join(wrap(move, PROSE))),
        Text("accuracy on the test images", style="bold"),
    ]
    console = show.terminal()
    console.print(show.spaced(*parts))
    console.print(rows)
    console.print(Text("\n".join(["", *wrap(mean, PROSE), "", *wrap(form, PROSE)])))
    console.print(Text(f"\nwrote {out / 'report.html'} and {out / 'symmetry.svg'} ({seconds:.0f} s)", style="bold"))


def report(story: Story, drawing: str, seconds: float) -> str:
    """The page that `demo` writes."""
    move, proof, form, mean = sentences(story)
    networks = (
        "A and B are the same small convolutional network with BatchNorm, trained from two seeds on 1,437 of "
        "scikit-learn's 1,797 real handwritten digits and tested on the other 360. They learned the same task, but "
        "nothing made their hidden units stand in the same order or have the same scale."
    )
    wires = (
        "A wire is a set of hidden units that can be reordered (and often rescaled) together wherever it occurs, "
        f"without changing what the network computes. {show.legend(story.symmetry)}."
    )
    return html.page(
        "The symmetry of a small network",
        " · ".join(show.numbers(story.symmetry, story.model)),
        [
            html.Chapter(
                "Two networks", html.paragraph(networks) + html.bars("accuracy on the test images", story.rows[:2], 0.9)
            ),
            html.Chapter("Their symmetry", html.paragraph(wires) + html.wires(outline(story.symmetry.wires))),
            html.Chapter("Where the wires act", html.picture(drawing)),
            html.Chapter("Proof", html.verdict(proof, story.certificate.ok) + html.paragraph(move)),
            html.Chapter(
                "Why it matters", html.bars("accuracy on the test images", story.rows, 0.9) + html.paragraph(mean)
            ),
            html.Chapter("The same network, found again", html.paragraph(form)),
        ],
        f"Written by intertwine demo in {seconds:.0f} seconds. "
        "An average takes the mean of every parameter and of every running statistic.",
    )
