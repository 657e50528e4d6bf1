"""What the thesis's experiment reads and keeps: the plan, the images, the trained networks, the result.

Everything is written under another name first and then renamed, so a run that is killed leaves whole files only.
Trained networks are kept in chunks, in a folder named after everything that made them; the next run reads what it finds
there and trains the rest.
"""

from __future__ import annotations

import hashlib
import json
import os
import tomllib
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from stacked_mlp import Recipe, Stack, concatenated, train
from torch import Tensor

from intertwine.errors import InputError

FILE = "mnist.npz"
SOURCE = "https://storage.googleapis.com/tensorflow/tf-keras-datasets/mnist.npz"
#: Names of the four arrays: ours, and those of the file Keras offers.
NAMES = (("train_images", "train_labels", "test_images", "test_labels"), ("x_train", "y_train", "x_test", "y_test"))


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


def read_images(folder: Path | None, device: str) -> Images:
    """MNIST from `mnist.npz` in the folder, or in the one that the environment variable INTERTWINE_DATA names."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(f"asked for the device {device!r}, but torch finds no GPU here; pass --device cpu")
    place = folder or (Path(os.environ["INTERTWINE_DATA"]) if os.environ.get("INTERTWINE_DATA") else None)
    if place is None or not (place / FILE).is_file():
        where = "no folder was given" if place is None else f"{place} does not hold it"
        raise InputError(
            f"the experiment needs the handwritten digits of MNIST in a file {FILE}, but {where}. Download it from "
            f"{SOURCE} and pass its folder with --data DIR or in the environment variable INTERTWINE_DATA"
        )
    with np.load(place / FILE) as archive:
        names = next((names for names in NAMES if set(names) <= set(archive.files)), None)
        if names is None:
            raise InputError(f"{place / FILE} holds {archive.files}; expected {NAMES[0]} or {NAMES[1]}, as in {SOURCE}")
        arrays = [archive[name] for name in names]
    checksum = 0
    for array in arrays:
        checksum = zlib.crc32(np.ascontiguousarray(array).tobytes(), checksum)
    train_x, test_x = (torch.as_tensor(a).flatten(1).float().div(255).to(device) for a in arrays[::2])
    train_y, test_y = (torch.as_tensor(a).long().to(device) for a in arrays[1::2])
    return Images(train_x, train_y, test_x, test_y, checksum)


# -- networks ----------------------------------------------------------------------------------------------------------


def trained(plan: Plan, images: Images, work: Path, chunk: int, report: Callable[[str], None]) -> tuple[Stack, int]:
    """All networks of the plan, and how many had to be trained now; every chunk is kept as soon as it is done."""
    _check_sizes(plan.recipe, images)
    folder = work / _digest(plan, images)
    folder.mkdir(parents=True, exist_ok=True)
    stacks, new = [], 0
    for start in range(0, plan.nets, chunk):
        stop = min(start + chunk, plan.nets)
        file = folder / f"nets-{start:05d}-{stop - 1:05d}.safetensors"
        if not file.is_file():
            seeds = range(plan.first_seed + start, plan.first_seed + stop)
            _keep(train(plan.recipe, seeds, images.train_x, images.train_y, report), file)
            new += stop - start
        else:
            report(f"read {file.name}")
        stacks.append(Stack(**load_file(file), activation=plan.recipe.activation))
    return concatenated(stacks).each(lambda tensor: tensor.to(images.train_x.device)), new


def _check_sizes(recipe: Recipe, images: Images) -> None:
    found = (images.train_x.shape[1], int(images.train_y.max()) + 1)
    if found != (recipe.inputs, recipe.outputs):
        raise InputError(
            f"the plan asks for {recipe.inputs} inputs and {recipe.outputs} outputs, but {FILE} has {found[0]} pixels "
            f"and {found[1]} classes; change `inputs` and `outputs` in the plan or take the other file"
        )


def _digest(plan: Plan, images: Images) -> str:
    """A short name for everything the trained networks depend on."""
    made_of = {"recipe": asdict(plan.recipe), "first_seed": plan.first_seed, "images": images.checksum}
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:12]


def _keep(stack: Stack, file: Path) -> None:
    part = file.with_suffix(".part")
    save_file({name: tensor.cpu().contiguous() for name, tensor in stack.tensors.items()}, part)
    part.replace(file)


def write_json(value: dict[str, Any], path: Path) -> None:
    """Write a result so that the file is either the old one or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    part.replace(path)
