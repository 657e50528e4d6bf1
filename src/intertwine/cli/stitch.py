"""`intertwine stitch A B --at …`: joins the front of one network to the back of another."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from intertwine.cli.arguments import ZOO, add_data, add_device, add_input, add_json, add_pair, parse_option, positive
from intertwine.cli.networks import load_networks, read_images
from intertwine.cli.output import exclusive_folder, print_json, progress, save_picture, spaced, terminal
from intertwine.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from intertwine.stitch.collection import Stitches

# ----------------------------------------------------------------------------------------------------
# Arguments of `intertwine stitch`.


def add(command: ArgumentParser) -> None:
    """Give the parser its arguments."""
    command.description = (
        "Join the front of network A to the back of network B by a map of features, and see how much accuracy that "
        "costs. All places and families are fitted in one run; both networks stay as they are." + ZOO
    )
    add_pair(command)
    add_input(command)
    command.add_argument(
        "--at",
        metavar="PATH,…",
        required=True,
        help="where to cut: module paths such as layer2 or layer1.0.relu:input; FRONT=BACK where they differ",
    )
    command.add_argument(
        "--family",
        metavar="NAME,…",
        default="relu,linear",
        help="of the map: identity, permutation, relu, softsort, orthogonal, linear, affine, lowrank:4, sparse:0.01 or "
        "another (default relu,linear)",
    )
    command.add_argument(
        "--fit", choices=("direct", "task", "both"), default="task", help="in closed form, or trained (default task)"
    )
    add_data(command, "at most so many training images to fit on, and test images to score on", needed=True)
    command.add_argument(
        "--recipe",
        metavar="NAME",
        default="intertwine",
        help="how to train: intertwine (default), godfrey or csiszarik, the last two as in their papers",
    )
    command.add_argument("--epochs", metavar="N", type=positive, help="instead of the recipe's")
    command.add_argument(
        "--option", metavar="NAME=VALUE", action="append", default=[], help="of the training; repeat it for several"
    )
    command.add_argument(
        "--seeds", metavar="A:B", default="0", help="of random starts, one stitch for each (default 0)"
    )
    command.add_argument(
        "--skip", choices=("front", "back"), help="whose values go around a cut inside a residual block"
    )
    add_device(command)
    command.add_argument(
        "--out", metavar="DIR", help="write maps, records and a picture; a run that was stopped goes on from there"
    )
    add_json(command)


# ----------------------------------------------------------------------------------------------------
# `intertwine stitch A B --at …`: the front of one network joined to the back of another by maps of features.


#: What --out holds: the maps, everything that is said of them, a picture, and the state of a run that was stopped.
MAPS, RECORDS, PICTURE, STATE = "maps.safetensors", "stitches.json", "stitches.svg", "state"
#: Stitches up to which each gets a line of its own; --json has all.
MAX_TABLE_STITCHES = 24


def run(options: Namespace) -> int:
    """Carry out the command."""
    from rich.text import Text

    from intertwine.stitch.families.names import find_family
    from intertwine.stitch.training import recipe_settings

    given = _settings(options)
    for family in options.family.split(","):
        recipe_settings(options.recipe, find_family(family).name, given)
    with exclusive_folder(options.out):
        head, found = _fitted(options, given)
        wrote = _write(Path(options.out), head, found) if options.out else []
    if options.json:
        print_json(head | found.to_dict() | {"out": options.out})
    else:
        files = [Text("\n").join(Text(f"wrote {path}") for path in wrote)] if wrote else []
        table = Text("\n".join(found.words()))
        terminal().print(spaced(_told(head), table, *_details(found), *_notes(found), *files))
    return 0


def _fitted(options: Namespace, given: dict[str, Any]) -> tuple[dict[str, Any], Stitches]:
    """What was stitched into what, and the stitches."""
    from intertwine.lab.zoo.augment import shuffled
    from intertwine.lab.zoo.precision import find_device
    from intertwine.lab.zoo.recipe import seeds
    from intertwine.stitch.stitch import stitches

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
    given = dict(map(parse_option, options.option))
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
    from intertwine.files import write_json, write_tensors

    maps = {f"{i}.matrix": stitch.map.matrix for i, stitch in enumerate(found)}
    maps |= {f"{i}.bias": stitch.map.bias for i, stitch in enumerate(found) if stitch.map.bias is not None}
    write_tensors(folder / MAPS, maps)
    write_json(folder / RECORDS, head | found.to_dict())
    save_picture(found.plot(), str(folder / PICTURE))
    return [folder / name for name in (MAPS, RECORDS, PICTURE)]


# -- in the terminal ---------------------------------------------------------------------------------------------------


def _told(head: dict[str, Any]) -> Text:
    from rich.text import Text

    text = Text(f"{head['front']} stitched into {head['back']}", style="bold")
    text.append(f"\non {head['samples']:,} test images of {head['dataset']}", style="not bold")
    for side in ("front", "back"):
        accuracy = head[f"{side}_accuracy"]
        text.append("" if accuracy is None else f", {side} network {accuracy:.2%}", style="not bold")
    return text


def _details(found: Stitches) -> list[Table]:
    return [_table(found)] if len(found) <= MAX_TABLE_STITCHES else []


def _table(found: Stitches) -> Table:
    """One line per stitch, with what the table of penalties leaves out."""
    from rich.table import Table

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
    from rich.text import Text

    broken = [f"{kind} at {stitch.place}: {stitch.diverged}" for stitch, kind in found.named() if stitch.diverged]
    around = {stitch.place: stitch.cut.skip for stitch in found if stitch.cut.skip != "none"}
    lines = [Text(f"broke off, {words}", style="yellow") for words in broken]
    lines += [Text(f"around the cut at {place} go values of the {whose}", "dim") for place, whose in around.items()]
    return [Text("\n").join(lines)] if lines else []
