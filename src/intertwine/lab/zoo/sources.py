"""Networks of zoos under the names that `intertwine.checkpoints.load` takes: `zoo:NAME` and `ZOO_FOLDER:SEED`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from intertwine.checkpoints.sources import SOURCES
from intertwine.errors import InputError
from intertwine.lab.zoo.manifest import MANIFEST_FILE, read_manifest


def from_zoo(name: str) -> tuple[nn.Module, Any]:
    """An architecture of the zoo with its default options, and one input of its size."""
    from intertwine.lab.zoo.networks.registry import architecture  # slow to import

    entry = architecture(name)
    return entry.factory(), ((entry.example(),), {})


def from_zoo_folder(name: str) -> tuple[nn.Module, Any] | None:
    """The trained network `ZOO_FOLDER:SEED`, and one image of the size it was trained on; None for any other name."""
    folder, _, seed = name.rpartition(":")
    if (Path(name) / MANIFEST_FILE).is_file():
        seeds = [record.seed for record in read_manifest(Path(name)).records]
        count = f"{len(seeds)} network{'s' * (len(seeds) != 1)}"
        which = f"Write {name.rstrip('/')}:{seeds[0]} for the one of seed {seeds[0]}" if seeds else "Train some first"
        raise InputError(
            f"The model {name!r} is a zoo of {count}. {which}; `intertwine zoo list {name}` shows what it holds."
        )
    if not folder or not (Path(folder) / MANIFEST_FILE).is_file():
        return None
    from intertwine.lab.zoo.folder import load  # slow to import

    zoo = load(folder)
    if not seed.isdigit():
        raise InputError(f"{name!r} names no seed of the zoo {folder}. Give one, such as {folder}:{zoo.seeds[0]}.")
    return zoo.seed(int(seed)), ((torch.randn(1, *zoo.manifest.plan.data["shape"]),), {})


def training_data(name: str) -> Mapping[str, Any] | None:
    """The data that `ZOO_FOLDER:SEED` was trained on, as its manifest describes it; None for any other name."""
    folder = Path(name.rpartition(":")[0])
    named = name.partition(":")[0] not in SOURCES and (folder / MANIFEST_FILE).is_file()
    return read_manifest(folder).plan.data if named else None
