"""`intertwine dissect MODEL --at …`: which concepts the units of a layer stand for, in its own and in rotated bases."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table
from rich.text import Text

from intertwine.commands import show
from intertwine.commands.concept_sources import Seen, concepts_for
from intertwine.commands.document import print_json
from intertwine.commands.out_folder import held
from intertwine.commands.pictures import save_picture
from intertwine.commands.progress import status
from intertwine.errors import InputError
from intertwine.files import write_json
from intertwine.inspect.dissection import Dissection
from intertwine.inspect.rotation import rotation
from intertwine.inspect.rotation_scan import RotationScan, rotation_scan
from intertwine.inspect.unit_pictures import draw_units
from intertwine.models import Loaded, load
from intertwine.zoo.precision import find_device
from intertwine.zoo.seeds import seeds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: What --out holds beside pictures of single bases.
ACCOUNT, CURVE = "dissection.json", "fractions.svg"
#: Best units that are listed.
BEST = 5


def run(options: Namespace) -> int:
    """Carry out the command."""
    alphas, numbers = _powers(options.rotation), seeds(options.seeds)
    with held(options.out), status(f"building {options.model}") as say:
        device = find_device(options.device)
        loaded = load(options.model, options.weights, options.input)
        loaded = replace(loaded, model=loaded.model.to(device))
        say("reading the concepts")
        seen = concepts_for(options, loaded)
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
        show.terminal().print(show.spaced(*parts))
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


def _told(loaded: Loaded, seen: Seen, scan: RotationScan) -> dict[str, Any]:
    """Everything that was found, as plain data."""
    found = [{"alpha": a, "seed": s} | one.to_dict() for (a, s), one in scan.dissections.items()]
    return {"model": loaded.name, "concepts": seen.name, "at": scan.at, "chance": scan.chance, "dissections": found}


# -- what is written ---------------------------------------------------------------------------------------------------


def _write(options: Namespace, loaded: Loaded, seen: Seen, scan: RotationScan) -> list[Path]:
    """The account, the curve over the powers, and for each power, with its first rotation, bars and the best units."""
    folder = Path(options.out)
    pictures: dict[str, Figure] = {CURVE: scan.plot()}
    for alpha in scan.curve:
        seed, found = next((seed, one) for (a, seed), one in scan.dissections.items() if a == alpha)
        turn = rotation(len(found.units), alpha, seed, torch.float32) if found.rotated else None
        pictures[f"categories-{alpha:g}.svg"] = found.plot()
        pictures[f"concepts-{alpha:g}.svg"] = found.plot("concept")
        pictures[f"units-{alpha:g}.png"] = draw_units(loaded.model, seen.images, found, turn, units=options.units)
    write_json(folder / ACCOUNT, _told(loaded, seen, scan))
    for name, figure in pictures.items():
        save_picture(figure, str(folder / name))
    return [folder / name for name in (ACCOUNT, *pictures)]


# -- in the terminal ---------------------------------------------------------------------------------------------------


def _first(scan: RotationScan) -> Dissection:
    return next(iter(scan.dissections.values()))


def _head(loaded: Loaded, seen: Seen, scan: RotationScan) -> Text:
    one = _first(scan)
    text = Text(f"{scan.at} of {loaded.name}", style="bold")
    words = f"\n{len(one.units)} units, {one.images:,} images of {seen.name}, {len(one.names)} concepts; a unit counts "
    return text.append(f"{words}where its overlap with a concept is above {one.level:g}", "not bold")


def _bases(scan: RotationScan) -> Table:
    """One line per basis: interpretable units, what chance gives, and units (different concepts) per category."""
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
    best = _first(scan).interpretable[:BEST]
    if not best:
        return []
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("best units", "stands for", "category", "overlap"):
        table.add_column(name, justify="right" if name == "overlap" else "left")
    for unit in best:
        table.add_row(str(unit.unit), unit.concept, unit.category, f"{unit.iou:.3f}")
    return [table]


def _notes(scan: RotationScan) -> list[Text]:
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
