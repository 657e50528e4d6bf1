"""`intertwine dissect MODEL --at …`: the concepts that units respond to, in the network's own and in rotated bases."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from intertwine.cli import arguments, output
from intertwine.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table
    from rich.text import Text

    from intertwine.checkpoints.load import Loaded
    from intertwine.inspect.concepts import ConceptData
    from intertwine.inspect.dissection import Dissection
    from intertwine.inspect.rotation_scan import RotationScan

SYNTHETIC = "synthetic"
#: The seed of the pictures; networks are trained on those of `concept_images(…, seed=0)`.
SEED = 1
#: Mean and deviation of the synthetic pictures for pixels from 0 to 1, as in `ConceptImages.inputs`.
SYNTHETIC_NORMALISATION = ((110 / 255,) * 3, (60 / 255,) * 3)
#: The files in --out beside the pictures of single bases.
RESULT_FILE, CURVE_FILE = "dissection.json", "fractions.svg"
#: Rows of the table of the best units.
MAX_UNITS_SHOWN = 5


def add(command: ArgumentParser) -> None:
    """Give the parser its arguments."""
    command.description = (
        "Find the concepts that the units of a layer respond to, in the network's own basis and in rotated ones, and "
        "compare with chance." + arguments.ZOO
    )
    arguments.add_model(command)
    command.add_argument(
        "--at",
        metavar="PATH",
        required=True,
        help="a module path whose output is maps, such as layer4 or layer4.1.relu",
    )
    command.add_argument(
        "--concepts", metavar="FOLDER", default="synthetic",
        help="a folder in the layout of Broden, or synthetic: drawn pictures of colours, textures, shapes and parts "
        "(default)",
    )  # fmt: skip
    command.add_argument("--split", metavar="NAME", help="the part of a Broden folder, such as train or val")
    command.add_argument(
        "--rotation", metavar="α,…", default="0,0.5,1",
        help="powers of a random rotation of the units: 0 is the network's own basis, 1 all of it (default 0,0.5,1)",
    )  # fmt: skip
    command.add_argument("--seeds", metavar="A:B", default="0", help="seeds of the rotations, one each (default 0)")
    command.add_argument("--samples", metavar="N", type=arguments.positive, default=1000, help="images (default 1000)")
    command.add_argument(
        "--batch", metavar="N", type=arguments.positive, default=32, help="images per batch (default 32)"
    )
    command.add_argument("--mean", metavar="R,G,B", help="mean of the network's inputs, for pixels from 0 to 1")
    command.add_argument(
        "--std", metavar="R,G,B",
        help="deviation of the network's inputs (default of both: the zoo's for a network of a zoo, else ImageNet's "
        "for a folder and the pictures' own for synthetic)",
    )  # fmt: skip
    command.add_argument(
        "--level", metavar="L", type=arguments.number, default=0.04, help="overlap that counts (default 0.04)"
    )
    command.add_argument(
        "--share", metavar="S", type=arguments.number, default=0.005,
        help="share of a unit's activations above its threshold (default 0.005)",
    )  # fmt: skip
    command.add_argument(
        "--null",
        metavar="N",
        type=arguments.whole,
        default=1,
        help="draws of the null distribution; 0 for none (default 1)",
    )
    command.add_argument(
        "--units", metavar="N", type=arguments.positive, default=6, help="best units in pictures (default 6)"
    )
    arguments.add_device(command)
    command.add_argument("--out", metavar="DIR", help="write the results, the curve, bars and the best units")
    arguments.add_json(command)


def run(options: Namespace) -> int:
    """Carry out the command."""
    from intertwine.checkpoints import load
    from intertwine.inspect.rotation_scan import rotation_scan
    from intertwine.lab.zoo.precision import find_device
    from intertwine.lab.zoo.recipe import seeds

    alphas = list(dict.fromkeys(arguments.number_list("--rotation", options.rotation, "0,0.5,1")))
    rotations = seeds(options.seeds)
    with output.exclusive_folder(options.out), output.status(f"building {options.model}") as step:
        device = find_device(options.device)
        loaded = load(options.model, options.weights, options.input)
        loaded = replace(loaded, model=loaded.model.to(device))
        step("reading the concepts")
        data = dissection_data(options, loaded)
        step(f"dissecting {options.at} in {len(alphas)} bases")
        scan = rotation_scan(
            loaded.model, options.at, data.images, data.concepts, alphas, seeds=rotations, level=options.level,
            share=options.share, null=options.null,
        )  # fmt: skip
        step("drawing")
        answer = {
            "model": loaded.name, "concepts": data.name, "at": scan.at, "chance": scan.chance,
            "dissections": [{"alpha": a, "seed": s} | one.to_dict() for (a, s), one in scan.dissections.items()],
        }  # fmt: skip
        files = _write(options, loaded, data, scan, answer) if options.out else []
    if options.json:
        output.print_json(answer | {"out": options.out})
    else:
        output.show(_header(loaded, data, scan), _bases(scan), _units(scan), _notes(scan), output.wrote(*files))
    return 0


# -- Images and concepts -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class DissectionData:
    """The images that a network is dissected with, and their concepts."""

    name: str
    images: Any
    concepts: ConceptData


def dissection_data(options: Namespace, loaded: Loaded) -> DissectionData:
    """Images at the size and under the normalisation of a network's training, and the masks of their concepts."""
    import torch

    from intertwine.lab.zoo.datasets.concepts import SMALLEST, concept_images

    size, mean, std = _size(loaded), *_normalisation(options)
    if options.concepts != SYNTHETIC:
        return _broden(options, size, mean, std)
    if options.split is not None:
        raise InputError(f"--split {options.split} needs a Broden folder; synthetic pictures have no parts.")
    if size[0] != size[1] or size[0] < SMALLEST:
        raise InputError(
            f"Synthetic pictures are squares of at least {SMALLEST}×{SMALLEST}, but {loaded.name} takes images of "
            f"{size[0]}×{size[1]}. Give another --input, or a Broden folder by --concepts."
        )
    drawn = concept_images(options.samples, SEED, size[0])
    pixels = drawn.images.movedim(-1, 1).float() / 255
    inputs = (pixels - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    return DissectionData("synthetic concepts", [(part, None) for part in inputs.split(options.batch)], drawn.concepts)


def _broden(options: Namespace, size: tuple[int, int], mean: Sequence[float], std: Sequence[float]) -> DissectionData:
    """--samples images, spread over the whole Broden folder."""
    from intertwine.inspect.concepts import BrodenLabels, read_broden

    found = read_broden(options.concepts, options.split, size, options.batch, mean, std)
    images, labels = found.images, found.concepts.batches
    assert isinstance(labels, BrodenLabels)
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
            f"{loaded.name} is called with {', '.join(loaded.inputs)}, but dissection needs images with three colours. "
            "Give a network of images, or its input, such as --input 1x3x224x224."
        )
    return shape[2], shape[3]


def _normalisation(options: Namespace) -> tuple[Sequence[float], Sequence[float]]:
    """Mean and deviation of a network's inputs: as written, else those of its zoo, else those of the images' kind."""
    from intertwine.inspect.concepts import MEAN, STD
    from intertwine.lab.zoo.sources import training_data

    if (options.mean is None) != (options.std is None):
        raise InputError("--mean and --std belong together: give both, such as --mean 0.5,0.5,0.5 --std 0.5,0.5,0.5.")
    if options.mean is not None:
        return _colours("--mean", options.mean), _colours("--std", options.std)
    trained_on = training_data(options.model)
    if trained_on is not None:
        return [m / 255 for m in trained_on["mean"]], [s / 255 for s in trained_on["std"]]
    return SYNTHETIC_NORMALISATION if options.concepts == SYNTHETIC else (MEAN, STD)


def _colours(flag: str, text: str) -> list[float]:
    found = arguments.number_list(flag, text, "0.5,0.5,0.5")
    if len(found) != 3 or (flag == "--std" and min(found) <= 0):
        raise InputError(f"{flag} {text} is not three numbers{' above 0' * (flag == '--std')}. Write 0.5,0.5,0.5.")
    return found


# -- Output ------------------------------------------------------------------------------------------------------------


def _write(
    options: Namespace, loaded: Loaded, data: DissectionData, scan: RotationScan, answer: dict[str, Any]
) -> list[Path]:
    """Write the results, the curve over the powers, and bars and best units for the first rotation of each power."""
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
        pictures[f"units-{alpha:g}.png"] = draw_units(loaded.model, data.images, found, turn, units=options.units)
    write_json(folder / RESULT_FILE, answer)
    for name, figure in pictures.items():
        output.save_picture(figure, folder / name)
    return [folder / name for name in (RESULT_FILE, *pictures)]


def _first(scan: RotationScan) -> Dissection:
    return next(iter(scan.dissections.values()))


def _header(loaded: Loaded, data: DissectionData, scan: RotationScan) -> Text:
    one = _first(scan)
    words = f"\n{len(one.units)} units, {one.images:,} images of {data.name}, {len(one.names)} concepts; a unit counts "
    words += f"where its overlap with a concept is above {one.level:g}"
    return output.text(f"{scan.at} of {loaded.name}", style="bold").append(words, "not bold")


def _bases(scan: RotationScan) -> Table:
    """One row per basis: interpretable units, the share under the null, and units (different concepts) per category."""
    kinds = list(_first(scan).by_category)
    rows = output.table("α", "rotation", "units", "share", "by chance", "above chance", *kinds)
    own = False
    for (alpha, seed), one in sorted(scan.dissections.items(), key=lambda item: item[0]):
        if not one.rotated and own:
            continue  # the network's own basis is the same for every rotation
        own = own or not one.rotated
        shares = one.fraction, None if one.null is None else one.null.above(one.level), one.fraction_above_chance
        rows.add_row(
            f"{alpha:g}", str(seed) if one.rotated else "–", str(len(one.interpretable)),
            *(output.percent(share, 1) for share in shares),
            *(f"{found.units} ({found.concepts})" for found in one.by_category.values()),
        )  # fmt: skip
    return rows


def _units(scan: RotationScan) -> Table | None:
    """The best units of the first basis."""
    best = _first(scan).interpretable[:MAX_UNITS_SHOWN]
    if not best:
        return None
    heads = ("best units", "concept", "category", "overlap")
    rows = output.table(*heads, left=heads[:3])
    for unit in best:
        rows.add_row(str(unit.unit), unit.concept, unit.category, f"{unit.iou:.3f}")
    return rows


def _notes(scan: RotationScan) -> Text | None:
    one = _first(scan)
    notes = []
    if one.null is not None:
        notes.append(
            f"under the null (masks of other images), 95 % of units stay below {one.null.quantile():.4f}; above "
            "chance: the share of units above this bound of their basis"
        )
    notes = [output.text(note, style="dim") for note in [*notes, "per category: units (different concepts)"]]
    if one.left_out:
        names = ", ".join(one.left_out[:5]) + ", …" * (len(one.left_out) > 5)
        notes.append(output.text(f"left out, in no image: {names}", style="yellow"))
    return output.lines(notes)
