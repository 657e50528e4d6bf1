"""`intertwine stitch A B --at …`: the front of one network joined to the back of another by maps of features."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from intertwine.commands import show
from intertwine.commands.document import print_json
from intertwine.commands.networks import load_networks, read_images
from intertwine.commands.out_folder import held
from intertwine.commands.pictures import save_picture
from intertwine.commands.progress import progress
from intertwine.commands.words import option
from intertwine.errors import InputError
from intertwine.files import write_json, write_tensors
from intertwine.stitch.collection import Stitches
from intertwine.stitch.family import find_family
from intertwine.stitch.many import stitches
from intertwine.stitch.settings import of_recipe
from intertwine.zoo.feeding import shuffled
from intertwine.zoo.precision import find_device
from intertwine.zoo.seeds import seeds

#: What --out holds: the maps, everything that is said of them, a picture, and the state of a run that was stopped.
MAPS, RECORDS, PICTURE, STATE = "maps.safetensors", "stitches.json", "stitches.svg", "state"
#: Stitches up to which each gets a line of its own; --json has all.
MOST = 24


def run(options: Namespace) -> int:
    """Carry out the command."""
    given = _settings(options)
    for family in options.family.split(","):
        of_recipe(options.recipe, find_family(family).name, given)
    with held(options.out):
        head, found = _fitted(options, given)
        wrote = _write(Path(options.out), head, found) if options.out else []
    if options.json:
        print_json(head | found.to_dict() | {"out": options.out})
    else:
        files = [Text("\n").join(Text(f"wrote {path}") for path in wrote)] if wrote else []
        table = Text("\n".join(found.words()))
        show.terminal().print(show.spaced(_told(head), table, *_details(found), *_notes(found), *files))
    return 0


def _fitted(options: Namespace, given: dict[str, Any]) -> tuple[dict[str, Any], Stitches]:
    """What was stitched into what, and the stitches."""
    places, device = [_place(text) for text in options.at.split(",")], find_device(options.device)
    names = (options.first, options.second)
    with progress("reading the data") as tell:
        images = read_images(options, names)
        assert images is not None  # the parser asks for --data
        tell("building the networks", 0.0)
        front, back = load_networks(names, (options.weights, options.weights_b), options.input, images)
        found = stitches(
            front.model.to(device), back.model.to(device), places, options.family.split(","),
            data=shuffled(images.train.dataset, images.train.size), test=images.test,
            fit=("direct", "task") if options.fit == "both" else options.fit, recipe=options.recipe,
            seeds=seeds(options.seeds), skip=options.skip, out=Path(options.out) / STATE if options.out else None,
            progress=tell, **given,
        )  # fmt: skip
    head = {"front": front.name, "back": back.name, "dataset": images.name, "samples": found[0].scores.samples}
    return head | {"front_accuracy": found[0].front_accuracy, "back_accuracy": found[0].back_accuracy}, found


# -- what was asked ----------------------------------------------------------------------------------------------------


def _settings(options: Namespace) -> dict[str, Any]:
    """Settings of the fit by name; --epochs is short for one of them."""
    given = dict(map(option, options.option))
    if options.epochs is None:
        return given
    if "epochs" in given:
        raise InputError(
            f"--epochs {options.epochs} and --option epochs={given['epochs']} were given. Leave one of them out."
        )
    return given | {"epochs": options.epochs}


def _place(text: str) -> str | tuple[str, str]:
    """`layer2`, or `layer2=blocks.1` where the back is cut at another place.

    >>> _place("layer2"), _place("layer2=blocks.1")
    ('layer2', ('layer2', 'blocks.1'))
    """
    front, equals, back = text.strip().partition("=")
    if not front or (equals and not back):
        raise InputError(
            f"The place {text!r} was asked for. Write PATH, or FRONT=BACK where the paths differ, and commas between "
            "several."
        )
    return (front, back) if equals else front


# -- what is written ---------------------------------------------------------------------------------------------------


def _write(folder: Path, head: dict[str, Any], found: Stitches) -> list[Path]:
    """The maps under the numbers of their stitches, all that is said of them, and a picture."""
    maps = {f"{i}.matrix": stitch.map.matrix for i, stitch in enumerate(found)}
    maps |= {f"{i}.bias": stitch.map.bias for i, stitch in enumerate(found) if stitch.map.bias is not None}
    write_tensors(folder / MAPS, maps)
    write_json(folder / RECORDS, head | found.to_dict())
    save_picture(found.plot(), str(folder / PICTURE))
    return [folder / name for name in (MAPS, RECORDS, PICTURE)]


# -- in the terminal ---------------------------------------------------------------------------------------------------


def _told(head: dict[str, Any]) -> Text:
    text = Text(f"{head['front']} stitched into {head['back']}", style="bold")
    text.append(f"\non {head['samples']:,} test images of {head['dataset']}", style="not bold")
    for side in ("front", "back"):
        accuracy = head[f"{side}_accuracy"]
        text.append("" if accuracy is None else f", {side} network {accuracy:.2%}", style="not bold")
    return text


def _details(found: Stitches) -> list[Table]:
    return [_table(found)] if len(found) <= MOST else []


def _table(found: Stitches) -> Table:
    """One line per stitch, with what the table of penalties leaves out."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    heads = ("at", "map", "accuracy", "relative", "cross-entropy", "rank", "zeros", "off G_ReLU")
    for name in heads:
        table.add_column(name, justify="left" if name in ("at", "map") else "right", no_wrap=True)
    for stitch, kind in found.named():
        shares = (stitch.accuracy, stitch.relative_accuracy)
        entropy, apart = stitch.cross_entropy, stitch.closeness.relu
        table.add_row(
            stitch.place, kind, *("–" if share is None else f"{share:.2%}" for share in shares),
            "–" if entropy is None else f"{entropy:.3f}", str(stitch.rank), f"{stitch.sparsity:.1%}",
            "–" if apart is None else f"{apart:.1%}",
        )  # fmt: skip
    return table


def _notes(found: Stitches) -> list[Text]:
    broken = [f"{kind} at {stitch.place}: {stitch.diverged}" for stitch, kind in found.named() if stitch.diverged]
    around = {stitch.place: stitch.cut.skip for stitch in found if stitch.cut.skip != "none"}
    lines = [Text(f"broke off, {words}", style="yellow") for words in broken]
    lines += [Text(f"around the cut at {place} go values of the {whose}", "dim") for place, whose in around.items()]
    return [Text("\n").join(lines)] if lines else []
