"""`intertwine dissect MODEL --at …`: which concepts the units of a layer respond to, in the network's own and in
rotated bases.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from intertwine.cli.arguments import ZOO, add_device, add_json, add_model, number, positive, whole
from intertwine.cli.networks import zoo_data
from intertwine.cli.output import exclusive_folder, print_json, save_picture, spaced, status, terminal
from intertwine.errors import InputError

if TYPE_CHECKING:
    import torch
    from rich.table import Table
    from rich.text import Text

    from intertwine.checkpoints.load import Loaded
    from intertwine.inspect.concepts import ConceptData
    from intertwine.inspect.dissection import Dissection
    from intertwine.inspect.rotation_scan import RotationScan

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# ----------------------------------------------------------------------------------------------------
# Arguments of `intertwine dissect`.


def add(command: ArgumentParser) -> None:
    """Give the parser its arguments."""
    command.description = (
        "Which concepts the units of a layer stand for, in the network's own basis and in rotated ones, and what "
        "chance gives." + ZOO
    )
    add_model(command)
    command.add_argument(
        "--at", metavar="PATH", required=True, help="a module path that gives maps, such as layer4 or layer4.1.relu"
    )
    command.add_argument(
        "--concepts",
        metavar="FOLDER",
        default="synthetic",
        help="a folder in the layout of Broden, or synthetic: drawn pictures of colours, textures, shapes and parts "
        "(default)",
    )
    command.add_argument("--split", metavar="NAME", help="the part of a Broden folder, such as train or val")
    command.add_argument(
        "--rotation",
        metavar="α,…",
        default="0,0.5,1",
        help="powers of a random rotation of the units: 0 is the network's own basis, 1 all of it (default 0,0.5,1)",
    )
    command.add_argument("--seeds", metavar="A:B", default="0", help="of the rotations, one each (default 0)")
    command.add_argument("--samples", metavar="N", type=positive, default=1000, help="images (default 1000)")
    command.add_argument("--batch", metavar="N", type=positive, default=32, help="images at once (default 32)")
    command.add_argument("--mean", metavar="R,G,B", help="of the network's inputs, for pixels from 0 to 1")
    command.add_argument(
        "--std",
        metavar="R,G,B",
        help="likewise (default of both: the zoo's for a network of a zoo, else ImageNet's for a folder and the "
        "pictures' own for synthetic)",
    )
    command.add_argument("--level", metavar="L", type=number, default=0.04, help="overlap that counts (default 0.04)")
    command.add_argument(
        "--share", metavar="S", type=number, default=0.005, help="of a unit's activations that are high (default 0.005)"
    )
    command.add_argument(
        "--null", metavar="N", type=whole, default=1, help="how often chance is drawn; 0 for not (default 1)"
    )
    command.add_argument("--units", metavar="N", type=positive, default=6, help="best units in pictures (default 6)")
    add_device(command)
    command.add_argument("--out", metavar="DIR", help="write the account, the curve, bars and the best units")
    add_json(command)


# ----------------------------------------------------------------------------------------------------
# Where `dissect` takes images and concepts from: a Broden folder, or pictures drawn for a network's input size.


SYNTHETIC = "synthetic"
#: Pictures to dissect with are others than those of `concept_images(…, seed=0)`, which networks are trained on.
SEED = 1
#: Of the drawn pictures, for pixels from 0 to 1, as `ConceptImages.inputs` has them.
DRAWN = ((110 / 255,) * 3, (60 / 255,) * 3)
Normalisation = tuple[Sequence[float], Sequence[float]]


@dataclass(frozen=True, eq=False)
class DissectionData:
    """What a network is dissected with."""

    name: str
    images: Any
    concepts: ConceptData


def dissection_data(options: Namespace, loaded: Loaded) -> DissectionData:
    """The images at the size a network takes and normalised as it saw them, with the masks of their concepts."""
    from intertwine.lab.zoo.datasets.concepts import SMALLEST, concept_images

    size, mean, std = _size(loaded), *_normalisation(options)
    if options.concepts != SYNTHETIC:
        return _broden(options, size, mean, std)
    if options.split is not None:
        raise InputError(f"--split {options.split} is a part of a Broden folder; synthetic pictures have no parts.")
    if size[0] != size[1] or size[0] < SMALLEST:
        raise InputError(
            f"Synthetic pictures are squares of at least {SMALLEST}×{SMALLEST}, but {loaded.name} takes images of "
            f"{size[0]}×{size[1]}. Give another --input, or a Broden folder by --concepts."
        )
    drawn = concept_images(options.samples, SEED, size[0])
    pixels = drawn.images.movedim(-1, 1).float() / 255
    inputs = (pixels - _per_channel(mean)) / _per_channel(std)
    return DissectionData("synthetic concepts", [(part, None) for part in inputs.split(options.batch)], drawn.concepts)


def _broden(options: Namespace, size: tuple[int, int], mean: Sequence[float], std: Sequence[float]) -> DissectionData:
    """So many images of a Broden folder, over the whole of it."""
    from intertwine.inspect.concepts import BrodenLabels, read_broden

    found = read_broden(options.concepts, options.split, size, options.batch, mean, std)
    images, labels = found.images, found.concepts.batches
    assert isinstance(labels, BrodenLabels)  # read_broden has no others
    count = min(options.samples, images.samples)
    chosen = [i * images.samples // count for i in range(count)]
    few = replace(images, files=tuple(images.files[i] for i in chosen))
    masks = replace(labels, rows=tuple(labels.rows[i] for i in chosen))
    return DissectionData(Path(options.concepts).name, few, replace(found.concepts, batches=masks))


def _size(loaded: Loaded) -> tuple[int, int]:
    import torch

    shape = tuple(loaded.args[0].shape) if loaded.args and isinstance(loaded.args[0], torch.Tensor) else ()
    if len(shape) != 4 or shape[1] != 3:
        raise InputError(
            f"{loaded.name} is called with {', '.join(loaded.inputs)}; dissection shows it images with three colours. "
            "Give a network of images, or its input, such as --input 1x3x224x224."
        )
    return shape[2], shape[3]


def _normalisation(options: Namespace) -> Normalisation:
    """Mean and deviation that the network wants: as written, else its zoo's, else those of the images' kind."""
    from intertwine.inspect.concepts import MEAN, STD

    if (options.mean is None) != (options.std is None):
        raise InputError("--mean and --std belong together; give both, such as --mean 0.5,0.5,0.5 --std 0.5,0.5,0.5.")
    if options.mean is not None:
        return _three("--mean", options.mean), _three("--std", options.std)
    learnt = zoo_data(options.model)
    if learnt is not None:
        return [m / 255 for m in learnt["mean"]], [s / 255 for s in learnt["std"]]
    return DRAWN if options.concepts == SYNTHETIC else (MEAN, STD)


def _three(what: str, text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if len(found) != 3 or (what == "--std" and min(found) <= 0):
        raise InputError(f"{what} {text} was asked for. Write three numbers, such as {what} 0.5,0.5,0.5; std above 0.")
    return found


def _per_channel(values: Sequence[float]) -> torch.Tensor:
    import torch

    return torch.tensor(values)[:, None, None]


# ----------------------------------------------------------------------------------------------------
# `intertwine dissect MODEL --at …`: which concepts the units of a layer stand for, in its own and in rotated bases.


#: What --out holds beside pictures of single bases.
RESULT_FILE, CURVE_FILE = "dissection.json", "fractions.svg"
#: Best units that are listed.
MAX_UNITS_SHOWN = 5


def run(options: Namespace) -> int:
    """Carry out the command."""
    from rich.text import Text

    from intertwine.checkpoints import load
    from intertwine.inspect.rotation_scan import rotation_scan
    from intertwine.lab.zoo.precision import find_device
    from intertwine.lab.zoo.recipe import seeds

    alphas, numbers = _powers(options.rotation), seeds(options.seeds)
    with exclusive_folder(options.out), status(f"building {options.model}") as say:
        device = find_device(options.device)
        loaded = load(options.model, options.weights, options.input)
        loaded = replace(loaded, model=loaded.model.to(device))
        say("reading the concepts")
        seen = dissection_data(options, loaded)
        say(f"dissecting {options.at} in {len(alphas)} bases")
        scan = rotation_scan(
            loaded.model, options.at, seen.images, seen.concepts, alphas, seeds=numbers, level=options.level,
            share=options.share, null=options.null,
        )  # fmt: skip
        say("drawing")
        wrote = _write(options, loaded, seen, scan) if options.out else []
    if options.json:
        print_json(_told(loaded, seen, scan) | {"out": options.out})
    else:
        files = [Text("\n").join(Text(f"wrote {path}") for path in wrote)] if wrote else []
        parts = [_head(loaded, seen, scan), _bases(scan), *_units(scan), *_notes(scan), *files]
        terminal().print(spaced(*parts))
    return 0


def _powers(text: str) -> list[float]:
    """`0,0.5,1`, each once.

    >>> _powers("0,0.5,1")
    [0.0, 0.5, 1.0]
    """
    try:
        return list(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError as error:
        raise InputError(
            f"The rotations {text!r} were asked for. Write powers of a rotation with commas between, such as 0,0.5,1; "
            "0 is the network's own basis."
        ) from error


def _told(loaded: Loaded, seen: DissectionData, scan: RotationScan) -> dict[str, Any]:
    """Everything that was found, as plain data."""
    found = [{"alpha": a, "seed": s} | one.to_dict() for (a, s), one in scan.dissections.items()]
    return {"model": loaded.name, "concepts": seen.name, "at": scan.at, "chance": scan.chance, "dissections": found}


# -- what is written ---------------------------------------------------------------------------------------------------


def _write(options: Namespace, loaded: Loaded, seen: DissectionData, scan: RotationScan) -> list[Path]:
    """The account, the curve over the powers, and for each power, with its first rotation, bars and the best units."""
    import torch

    from intertwine.files import write_json
    from intertwine.inspect.rotation import rotation
    from intertwine.inspect.top_images import draw_units

    folder = Path(options.out)
    pictures: dict[str, Figure] = {CURVE_FILE: scan.plot()}
    for alpha in scan.curve:
        seed, found = next((seed, one) for (a, seed), one in scan.dissections.items() if a == alpha)
        turn = rotation(len(found.units), alpha, seed, torch.float32) if found.rotated else None
        pictures[f"categories-{alpha:g}.svg"] = found.plot()
        pictures[f"concepts-{alpha:g}.svg"] = found.plot("concept")
        pictures[f"units-{alpha:g}.png"] = draw_units(loaded.model, seen.images, found, turn, units=options.units)
    write_json(folder / RESULT_FILE, _told(loaded, seen, scan))
    for name, figure in pictures.items():
        save_picture(figure, str(folder / name))
    return [folder / name for name in (RESULT_FILE, *pictures)]


# -- in the terminal ---------------------------------------------------------------------------------------------------


def _first(scan: RotationScan) -> Dissection:
    return next(iter(scan.dissections.values()))


def _head(loaded: Loaded, seen: DissectionData, scan: RotationScan) -> Text:
    from rich.text import Text

    one = _first(scan)
    text = Text(f"{scan.at} of {loaded.name}", style="bold")
    words = f"\n{len(one.units)} units, {one.images:,} images of {seen.name}, {len(one.names)} concepts; a unit counts "
    return text.append(f"{words}where its overlap with a concept is above {one.level:g}", "not bold")


def _bases(scan: RotationScan) -> Table:
    """One line per basis: interpretable units, what chance gives, and units (different concepts) per category."""
    from rich.table import Table

    kinds = list(_first(scan).by_category)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("α", "rotation", "units", "share", "by chance", "above chance", *kinds):
        table.add_column(name, justify="right")
    own = False
    for (alpha, seed), one in sorted(scan.dissections.items(), key=lambda item: item[0]):
        if not one.rotated and own:
            continue  # the same for every rotation
        own = own or not one.rotated
        null, above = one.null, one.fraction_above_chance
        per_kind = [f"{found.units} ({found.concepts})" for found in one.by_category.values()]
        table.add_row(
            f"{alpha:g}", str(seed) if one.rotated else "–", str(len(one.interpretable)), f"{one.fraction:.1%}",
            "–" if null is None else f"{null.above(one.level):.1%}", "–" if above is None else f"{above:.1%}",
            *per_kind,
        )  # fmt: skip
    return table


def _units(scan: RotationScan) -> list[Table]:
    """The best units of the first basis."""
    from rich.table import Table

    best = _first(scan).interpretable[:MAX_UNITS_SHOWN]
    if not best:
        return []
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("best units", "stands for", "category", "overlap"):
        table.add_column(name, justify="right" if name == "overlap" else "left")
    for unit in best:
        table.add_row(str(unit.unit), unit.concept, unit.category, f"{unit.iou:.3f}")
    return [table]


def _notes(scan: RotationScan) -> list[Text]:
    from rich.text import Text

    one = _first(scan)
    lines = []
    if one.null is not None:
        bound = one.null.quantile()
        lines.append(
            Text(f"by chance, with the masks of other images, 95 % of units stay below {bound:.4f}; "
                 "above chance: the share of units above the bound of their own basis", "dim")
        )  # fmt: skip
    lines.append(Text("per category: units (different concepts)", "dim"))
    if one.left_out:
        names = ", ".join(one.left_out[:5]) + ", …" * (len(one.left_out) > 5)
        lines.append(Text(f"left out, in no image: {names}", "yellow"))
    return [Text("\n").join(lines)]
