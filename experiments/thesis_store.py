"""What the thesis's experiment reads and keeps: the plan, the images, the trained networks, the result.

Trained networks are kept in chunks, in a folder named after everything that made them; the next run reads what it finds
there and trains the rest. A run that is killed leaves whole files only.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from stacked_mlp import Recipe, Stack, concatenated, train
from torch import Tensor

from intertwine import zoo
from intertwine.errors import InputError
from intertwine.files import write_tensors
from intertwine.zoo.datasets.dataset import PARTS
from intertwine.zoo.precision import find_device


@dataclass(frozen=True)
class Plan:
    """The plan file: how networks are made (`recipe`), how many, and what is measured on them."""

    recipe: Recipe
    nets: int
    first_seed: int
    bases: list[float]
    matched_pairs: int
    matching_images: int
    average_sizes: list[int]
    average_groups: int
    curve_pairs: int
    curve_points: int
    noise: list[float]
    noise_nets: int
    control_nets: int
    seed: int
    printed: dict[str, dict[str, dict[str, float]]]


def read_plan(path: Path, **changes: int | None) -> Plan:
    """The plan in a TOML file, with some of its numbers changed by the caller."""
    tables: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    printed = tables.pop("printed", {})
    entries = {key: value for table in tables.values() for key, value in table.items()}
    entries |= {key: value for key, value in changes.items() if value is not None}
    recipe = {field.name: entries.pop(field.name) for field in fields(Recipe) if field.name in entries}
    wanted = {field.name for field in fields(Plan)} - {"recipe", "printed"}
    if wanted != set(entries):
        raise InputError(
            f"the plan {path} does not fit: missing {sorted(wanted - set(entries))}, "
            f"unknown {sorted(set(entries) - wanted)}; compare it with experiments/thesis_table1.toml"
        )
    if entries["nets"] < 2:
        raise InputError(f"the experiment compares networks, so it needs at least 2; {entries['nets']} were asked for")
    return Plan(recipe=Recipe(**recipe), printed=printed, **entries)


# -- images ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Images:
    """Images (samples, pixels) with values in [0, 1] and their labels, for training and for testing."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    checksum: int


def read_images(folder: Path | None, device: str, check: bool = True) -> Images:
    """MNIST as the zoo finds it, with pixels from 0 to 1; without the check, any images in files named like its own."""
    place = find_device(device)
    found = zoo.data("mnist", folder, check=check)
    checksum = 0
    for part in PARTS:  # labels are bytes in MNIST's own files
        checksum = zlib.crc32(getattr(found, part).to(torch.uint8).numpy().tobytes(), checksum)
    # divided here, since a GPU would multiply by the rounded 1/255
    train_x, test_x = (images.flatten(1).float().div(255) for images in (found.images, found.test_images))
    train_x, train_y, test_x, test_y = (t.to(place) for t in (train_x, found.labels, test_x, found.test_labels))
    return Images(train_x, train_y, test_x, test_y, checksum)


# -- networks ----------------------------------------------------------------------------------------------------------


def trained(plan: Plan, images: Images, work: Path, chunk: int, report: Callable[[str], None]) -> tuple[Stack, int]:
    """All networks of the plan, and how many had to be trained now; every chunk is kept as soon as it is done."""
    _check_sizes(plan.recipe, images)
    folder = work / _digest(plan, images)
    stacks, new = [], 0
    for start in range(0, plan.nets, chunk):
        stop = min(start + chunk, plan.nets)
        file = folder / f"nets-{start:05d}-{stop - 1:05d}.safetensors"
        if not file.is_file():
            seeds = range(plan.first_seed + start, plan.first_seed + stop)
            write_tensors(file, train(plan.recipe, seeds, images.train_x, images.train_y, report).tensors)
            new += stop - start
        else:
            report(f"read {file.name}")
        stacks.append(Stack(**load_file(file), activation=plan.recipe.activation))
    return concatenated(stacks).each(lambda tensor: tensor.to(images.train_x.device)), new


def _check_sizes(recipe: Recipe, images: Images) -> None:
    found = (images.train_x.shape[1], int(images.train_y.max()) + 1)
    if found != (recipe.inputs, recipe.outputs):
        raise InputError(
            f"the plan asks for {recipe.inputs} inputs and {recipe.outputs} outputs, but the images have {found[0]} "
            f"pixels and {found[1]} classes; change `inputs` and `outputs` in the plan, or take other images"
        )


def _digest(plan: Plan, images: Images) -> str:
    """A short name for everything the trained networks depend on."""
    made_of = {"recipe": asdict(plan.recipe), "first_seed": plan.first_seed, "images": images.checksum}
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:12]
