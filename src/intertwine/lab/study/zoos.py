"""The networks and data of a study: where each zoo is, what identifies it, which ones must be trained, and a cache of
loaded networks per worker.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from intertwine.data.batches import on_device_of
from intertwine.errors import InputError, IntertwineError
from intertwine.lab.study.plan import Plan, ZooPlan
from intertwine.lab.zoo.datasets.dataset import Dataset
from intertwine.lab.zoo.folder import UNFINISHED, Zoo, load
from intertwine.lab.zoo.manifest import MANIFEST_FILE as MANIFEST
from intertwine.lab.zoo.manifest import precision_there, read_manifest
from intertwine.lab.zoo.networks.registry import build
from intertwine.lab.zoo.training import Training, prepare

# ----------------------------------------------------------------------------------------------------
# The networks of a study: where they are, what tells them apart on any machine, and their training if need be.


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
            place = zoo_folder(name, zoo, folder)
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


def zoo_folder(name: str, zoo: ZooPlan, folder: Path) -> Path:
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


def missing_trainings(plan: Plan, known: Mapping[str, KnownZoo]) -> list[Training]:
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


# ----------------------------------------------------------------------------------------------------
# Workbench: networks and data as the verbs of a study want them, read once per worker.


class NetworkCache:
    """What a worker has at hand.

    Args:
        folders: zoo → its folder. data: zoo → its data set, where it is shared and need not be read again.
        device: where networks and batches are put.
    """

    def __init__(
        self, folders: Mapping[str, str], data: Mapping[str, Dataset] | None = None, device: str = "cpu"
    ) -> None:
        self.folders, self._data, self.device = folders, data or {}, device

    def network(self, zoo: str, seed: int) -> nn.Module:
        return _network(*_version(self.folders[zoo]), seed, self.device)

    def data(self, zoo: str) -> Dataset:
        return self._data[zoo] if zoo in self._data else _data(*_version(self.folders[zoo]))

    def images(self, zoo: str, count: int | None) -> Dataset:
        """So many images of each part, or all, where networks compute."""
        data = self.data(zoo)
        return (data if count is None else data.spread(count)).to(torch.device(self.device))

    def example(self, zoo: str, network: nn.Module) -> Tensor:
        """One blank input as a network takes it, of the size that its zoo's manifest tells; no data is read for it."""
        shape = _load(*_version(self.folders[zoo])).manifest.plan.data["shape"]
        ((blank,), _) = on_device_of(((torch.zeros(1, *shape),), {}), network)
        return blank


def _version(folder: str) -> tuple[str, int]:
    """A folder and when its manifest was written: what is kept of it is forgotten once it holds other networks."""
    path = Path(folder) / MANIFEST
    return folder, path.stat().st_mtime_ns if path.exists() else 0


@lru_cache(maxsize=8)
def _load(folder: str, version: int) -> Zoo:
    return load(Path(folder))


@lru_cache(maxsize=16)
def _network(folder: str, version: int, seed: int, device: str) -> nn.Module:
    return _load(folder, version).seed(seed).to(device)


@lru_cache(maxsize=4)
def _data(folder: str, version: int) -> Dataset:
    return _load(folder, version).dataset()
