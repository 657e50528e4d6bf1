"""The networks of a study: where they are, what tells them apart on any machine, and their training if need be."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from intertwine.errors import InputError
from intertwine.study.plan import Plan, ZooPlan
from intertwine.zoo.folder import load
from intertwine.zoo.manifest import read_manifest
from intertwine.zoo.networks.registry import build
from intertwine.zoo.progress import Progress
from intertwine.zoo.training import train

Report = Callable[[Progress], None]


@dataclass(frozen=True)
class KnownZoo:
    """A zoo as tasks see it. `identity`: the same wherever its networks are the same. `layers`: module paths."""

    name: str
    folder: Path
    seeds: tuple[int, ...]
    identity: str
    layers: tuple[str, ...]


def known_zoos(plan: Plan, folder: Path) -> dict[str, KnownZoo]:
    """Every zoo of a plan, without training any; those to be trained have their places in the study's folder.

    Raises:
        InputError: a zoo that should be there is missing, or no network of it is finished.
    """
    places = {name: place_of(name, zoo, folder) for name, zoo in plan.zoos.items()}
    return {
        name: _planned(name, zoo, places[name]) if zoo.folder is None else _given(name, places[name])
        for name, zoo in plan.zoos.items()
    }


def place_of(name: str, zoo: ZooPlan, folder: Path) -> Path:
    """Where the networks of a zoo are, or will be; `folder`: of the study."""
    return folder / "zoos" / name if zoo.folder is None else Path(zoo.folder)


def _given(name: str, folder: Path) -> KnownZoo:
    manifest = read_manifest(folder)
    if not manifest.records:
        raise InputError(
            f"The zoo {name!r} is to be taken from {folder}, where no network is finished yet. Let its training end: "
            "the same `intertwine zoo train` goes on where it stopped."
        )
    networks = load(folder)
    content = asdict(manifest.plan) | {"files": {r.seed: r.sha256 for r in manifest.records}}
    return KnownZoo(name, folder, networks.seeds, _hash(content), _layers(networks.factory))


def _planned(name: str, zoo: ZooPlan, folder: Path) -> KnownZoo:
    assert zoo.architecture is not None  # a plan has a folder or an architecture
    content = {key: value for key, value in asdict(zoo).items() if key not in ("folder", "seeds")}
    return KnownZoo(name, folder, zoo.seeds, _hash(content), _layers(partial(build, zoo.architecture, **zoo.options)))


def train_missing(plan: Plan, known: Mapping[str, KnownZoo], report: Report = lambda progress: None) -> None:
    """Train the networks that a plan asks for and that are not there; what is there is kept."""
    for name, zoo in plan.zoos.items():
        if zoo.architecture is not None and zoo.data is not None:
            train(
                zoo.architecture, seeds=zoo.seeds, data=zoo.data, out=known[name].folder, recipe=zoo.recipe,
                options=zoo.options, report=report, **zoo.changes,
            )  # fmt: skip


def _layers(factory: Callable[[], nn.Module]) -> tuple[str, ...]:
    with torch.random.fork_rng():  # a network draws its first weights, which nobody will look at
        return tuple(name for name, _ in factory().named_modules() if name)


def _hash(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
