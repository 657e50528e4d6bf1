"""`intertwine stitch A B --at …`: joins the front of one network to the back of another."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from intertwine.cli import arguments, output
from intertwine.cli.networks import load_networks, read_images
from intertwine.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from intertwine.stitch.collection import Stitches

#: The files in --out: the maps, all results, a picture, and the state of a run that was stopped.
MAPS, RECORDS, PICTURE, STATE = "maps.safetensors", "stitches.json", "stitches.svg", "state"
#: Stitches up to which each gets a row of its own; --json has all.
MAX_TABLE_STITCHES = 24


def add(command: ArgumentParser) -> None:
    """Give the parser its arguments."""
    command.description = (
        "Join the front of network A to the back of network B by a map of features, and measure the loss of accuracy. "
        "All stitch points and families are fitted in one run; both networks stay as they are." + arguments.ZOO
    )
    arguments.add_pair(command)
    arguments.add_input(command)
    command.add_argument(
        "--at", metavar="PATH,…", required=True,
        help="stitch points: module paths such as layer2 or layer1.0.relu:input; FRONT=BACK where they differ",
    )  # fmt: skip
    command.add_argument(
        "--family", metavar="NAME,…", default="relu,linear",
        help="families of maps: identity, permutation, relu, softsort, orthogonal, linear, affine, lowrank:4, "
        "sparse:0.01 or another (default relu,linear)",
    )  # fmt: skip
    command.add_argument(
        "--fit", choices=("direct", "task", "both"), default="task", help="in closed form, or trained (default task)"
    )
    arguments.add_data(command, "at most this many training images to fit on, and test images to score on", needed=True)
    command.add_argument(
        "--recipe", metavar="NAME", default="intertwine",
        help="how to train: intertwine (default), godfrey or csiszarik, the last two as in their papers",
    )  # fmt: skip
    command.add_argument("--epochs", metavar="N", type=arguments.positive, help="instead of the recipe's")
    command.add_argument(
        "--option", metavar="NAME=VALUE", action="append", default=[], help="an option of the training; repeatable"
    )
    command.add_argument("--seeds", metavar="A:B", default="0", help="random starts, one stitch for each (default 0)")
    command.add_argument(
        "--skip", choices=("front", "back"),
        help="the network that feeds the skip connection at a stitch point inside a residual block",
    )  # fmt: skip
    arguments.add_device(command)
    command.add_argument("--out", metavar="DIR", help="write maps, records and a picture; a stopped run resumes there")
    arguments.add_json(command)


def run(options: Namespace) -> int:
    """Carry out the command."""
    from intertwine.stitch.families.names import find_family
    from intertwine.stitch.training import recipe_settings

    settings = _settings(options)
    for family in options.family.split(","):
        recipe_settings(options.recipe, find_family(family).name, settings)
    with output.exclusive_folder(options.out):
        head, found = _fitted(options, settings)
        files = _write(Path(options.out), head, found) if options.out else []
    if options.json:
        output.print_json(head | found.to_dict() | {"out": options.out})
    else:
        details = _details(found) if len(found) <= MAX_TABLE_STITCHES else None
        output.show(_summary(head), output.text("\n".join(found.words())), details, _notes(found), output.wrote(*files))
    return 0


def _settings(options: Namespace) -> dict[str, Any]:
    """Settings of the fit by name; --epochs is short for one of them."""
    settings = dict(map(arguments.parse_option, options.option))
    if options.epochs is None:
        return settings
    if "epochs" in settings:
        raise InputError(
            f"--epochs {options.epochs} and --option epochs={settings['epochs']} cannot be given together. Leave one "
            "of them out."
        )
    return settings | {"epochs": options.epochs}


def _fitted(options: Namespace, settings: dict[str, Any]) -> tuple[dict[str, Any], Stitches]:
    """A description of the run, and the stitches."""
    from intertwine.lab.zoo.augment import shuffled
    from intertwine.lab.zoo.precision import find_device
    from intertwine.lab.zoo.recipe import seeds
    from intertwine.stitch.stitch import stitches

    points, device = [_stitch_point(text) for text in options.at.split(",")], find_device(options.device)
    names = (options.first, options.second)
    with output.progress("reading the data") as step:
        images = read_images(options, names)
        assert images is not None  # the parser requires --data
        step("building the networks", 0.0)
        front, back = load_networks(names, (options.weights, options.weights_b), options.input, images)
        found = stitches(
            front.model.to(device), back.model.to(device), points, options.family.split(","),
            data=shuffled(images.train.dataset, images.train.size), test=images.test,
            fit=("direct", "task") if options.fit == "both" else options.fit, recipe=options.recipe,
            seeds=seeds(options.seeds), skip=options.skip, out=Path(options.out) / STATE if options.out else None,
            progress=step, **settings,
        )  # fmt: skip
    head = {"front": front.name, "back": back.name, "dataset": images.name, "samples": found[0].scores.samples}
    return head | {"front_accuracy": found[0].front_accuracy, "back_accuracy": found[0].back_accuracy}, found


def _stitch_point(text: str) -> str | tuple[str, str]:
    """`layer2`, or `layer2=blocks.1` where the path in the back network differs.

    >>> _stitch_point("layer2"), _stitch_point("layer2=blocks.1")
    ('layer2', ('layer2', 'blocks.1'))
    """
    front, equals, back = text.strip().partition("=")
    if not front or (equals and not back):
        raise InputError(
            f"--at {text!r} is not a stitch point. Write PATH, or FRONT=BACK where the paths differ, and commas "
            "between several."
        )
    return (front, back) if equals else front


def _write(folder: Path, head: dict[str, Any], found: Stitches) -> list[Path]:
    """Write the maps under the numbers of their stitches, all results, and a picture."""
    from intertwine.files import write_json, write_tensors

    maps = {f"{i}.matrix": stitch.map.matrix for i, stitch in enumerate(found)}
    maps |= {f"{i}.bias": stitch.map.bias for i, stitch in enumerate(found) if stitch.map.bias is not None}
    write_tensors(folder / MAPS, maps)
    write_json(folder / RECORDS, head | found.to_dict())
    output.save_picture(found.plot(), folder / PICTURE)
    return [folder / name for name in (MAPS, RECORDS, PICTURE)]


def _summary(head: dict[str, Any]) -> Text:
    found = output.text(f"{head['front']} stitched into {head['back']}", style="bold")
    found.append(f"\non {head['samples']:,} test images of {head['dataset']}", style="not bold")
    for side in ("front", "back"):
        accuracy = head[f"{side}_accuracy"]
        found.append("" if accuracy is None else f", {side} network {accuracy:.2%}", style="not bold")
    return found


def _details(found: Stitches) -> Table:
    """One row per stitch, with the numbers that the table of penalties leaves out."""
    heads = ("at", "map", "accuracy", "relative", "cross-entropy", "rank", "zeros", "off G_ReLU")
    rows = output.table(*heads, left=("at", "map"), no_wrap=True)
    for stitch, kind in found.named():
        entropy = stitch.cross_entropy
        rows.add_row(
            stitch.place, kind, output.percent(stitch.accuracy), output.percent(stitch.relative_accuracy),
            "–" if entropy is None else f"{entropy:.3f}", str(stitch.rank), output.percent(stitch.sparsity, 1),
            output.percent(stitch.closeness.relu, 1),
        )  # fmt: skip
    return rows


def _notes(found: Stitches) -> Text | None:
    diverged = [f"{kind} at {stitch.place}: {stitch.diverged}" for stitch, kind in found.named() if stitch.diverged]
    skips = {stitch.place: stitch.point.skip for stitch in found if stitch.point.skip != "none"}
    notes = [output.text(f"diverged, {words}", style="yellow") for words in diverged]
    notes += [
        output.text(f"at {place} the {side} network feeds the skip connection", style="dim")
        for place, side in skips.items()
    ]
    return output.lines(notes)
