"""The networks of a study: where they are, what tells them apart on any machine, and their training if need be."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from intertwine.errors import InputError, IntertwineError
from intertwine.study.plan import Plan, ZooPlan
from intertwine.zoo.folder import UNFINISHED, load
from intertwine.zoo.manifest import FILE as MANIFEST
from intertwine.zoo.manifest import precision_there, read_manifest
from intertwine.zoo.networks.registry import build
from intertwine.zoo.training import Training, prepare


@dataclass(frozen=True)
class KnownZoo:
    """A zoo as tasks see it.

    Attributes:
        content: what its networks have in common. files: seed → the sum of its weights, where they were there before.
        layers: module paths.
    """

    name: str
    folder: Path
    seeds: tuple[int, ...]
    content: Mapping[str, Any]
    files: Mapping[int, str]
    layers: tuple[str, ...]

    def identity(self, *seeds: int) -> str:
        """Of some networks: the same wherever they are the same, whatever stands beside them."""
        content = {**self.content, "files": [self.files.get(seed) for seed in seeds]}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def known_zoos(plan: Plan, folder: Path) -> dict[str, KnownZoo]:
    """Every zoo of a plan, without training any; those to be trained have their places in the study's folder.

    Raises:
        InputError: a zoo that should be there is missing, or no network of it is finished.
    """
    found = {}
    for name, zoo in plan.zoos.items():
        with _told(plan, name):
            place = place_of(name, zoo, folder)
            found[name] = _planned(name, zoo, place) if zoo.folder is None else _given(name, place)
    return found


@contextmanager
def _told(plan: Plan, name: str) -> Iterator[None]:
    """What is wrong with a zoo is told with its name and line."""
    try:
        yield
    except IntertwineError as error:
        line = f" (line {plan.lines[name]})" if name in plan.lines else ""
        raise type(error)(f"Zoo {name!r}{line}: {error}") from error


def place_of(name: str, zoo: ZooPlan, folder: Path) -> Path:
    """Where the networks of a zoo are, or will be; `folder`: of the study."""
    return folder / "zoos" / name if zoo.folder is None else Path(zoo.folder)


def _given(name: str, folder: Path) -> KnownZoo:
    manifest = read_manifest(folder.resolve())  # a path that is told says what a short one is short for
    if not manifest.records:
        raise InputError(f"its networks are to be taken from {folder.resolve()}, where {UNFINISHED}.")
    networks = load(folder)
    files = {record.seed: record.sha256 for record in manifest.records}
    return KnownZoo(name, folder, networks.seeds, asdict(manifest.plan), files, _layers(networks.factory))


def _planned(name: str, zoo: ZooPlan, folder: Path) -> KnownZoo:
    assert zoo.architecture is not None  # a plan has a folder or an architecture
    content = {key: value for key, value in asdict(zoo).items() if key not in ("folder", "seeds")}
    return KnownZoo(name, folder, zoo.seeds, content, {}, _layers(partial(build, zoo.architecture, **zoo.options)))


def missing(plan: Plan, known: Mapping[str, KnownZoo]) -> list[Training]:
    """The trainings of the networks that a plan asks for and that are not there, checked and not begun.

    Raises:
        IntertwineError: one that cannot be carried out, with the line of its zoo.
    """
    found = []
    for name, zoo in plan.zoos.items():
        folder = known[name].folder
        there = {r.seed for r in read_manifest(folder).records} if (folder / MANIFEST).is_file() else set()
        if zoo.architecture is None or zoo.data is None or there >= set(zoo.seeds):
            continue
        with _told(plan, name):
            training = prepare(
                zoo.architecture, seeds=zoo.seeds, data=zoo.data, out=folder, recipe=zoo.recipe, options=zoo.options,
                precision=precision_there(folder), changes=zoo.changes,
            )  # fmt: skip
        found.append(training)
    return found


def _layers(factory: Callable[[], nn.Module]) -> tuple[str, ...]:
    with torch.random.fork_rng():  # a network draws its first weights, which nobody will look at
        return tuple(name for name, _ in factory().named_modules() if name)
