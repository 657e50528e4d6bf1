"""The networks and data of a study: where each zoo is, its identity, missing trainings, and a cache per worker."""

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
from intertwine.lab.zoo.manifest import MANIFEST_FILE, precision_there, read_manifest
from intertwine.lab.zoo.networks.registry import build
from intertwine.lab.zoo.training import Training, prepare


@dataclass(frozen=True)
class KnownZoo:
    """A zoo, its networks trained or not.

    Attributes:
        content: what its networks have in common.
        files: seed → checksum of the weights, for zoos that are given as a folder.
        layers: module paths.
    """

    name: str
    folder: Path
    seeds: tuple[int, ...]
    content: Mapping[str, Any]
    files: Mapping[int, str]
    layers: tuple[str, ...]

    def identity(self, *seeds: int) -> str:
        """A hash of some networks: equal on every machine, whatever other networks the zoo holds."""
        content = {**self.content, "files": [self.files.get(seed) for seed in seeds]}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def known_zoos(plan: Plan, folder: Path) -> dict[str, KnownZoo]:
    """Every zoo of a plan, without training any; missing ones get a place in the study's folder.

    Raises:
        InputError: the folder of a zoo is missing, or holds no finished network.
    """
    zoos = {}
    for name, zoo in plan.zoos.items():
        with _located_errors(plan, name):
            place = zoo_folder(name, zoo, folder)
            if zoo.architecture is not None:
                content = {key: value for key, value in asdict(zoo).items() if key not in ("folder", "seeds")}
                layers = _layers(partial(build, zoo.architecture, **zoo.options))
                zoos[name] = KnownZoo(name, place, zoo.seeds, content, {}, layers)
                continue
            manifest = read_manifest(place.resolve())  # absolute, so that error messages name the whole path
            if not manifest.records:
                raise InputError(f"Cannot use the networks in {place.resolve()}: {UNFINISHED}.")
            networks = load(place)
            files = {record.seed: record.sha256 for record in manifest.records}
            content, layers = asdict(manifest.plan), _layers(networks.factory)
            zoos[name] = KnownZoo(name, place, networks.seeds, content, files, layers)
    return zoos


def zoo_folder(name: str, zoo: ZooPlan, folder: Path) -> Path:
    """Where the networks of a zoo are, or will be; `folder` is that of the study."""
    return folder / "zoos" / name if zoo.folder is None else Path(zoo.folder)


def missing_trainings(plan: Plan, known: Mapping[str, KnownZoo]) -> list[Training]:
    """The trainings of the missing networks of a plan, checked but not started.

    Raises:
        IntertwineError: a training is impossible; the message names the line of its zoo.
    """
    trainings = []
    for name, zoo in plan.zoos.items():
        folder = known[name].folder
        done = {r.seed for r in read_manifest(folder).records} if (folder / MANIFEST_FILE).is_file() else set()
        if zoo.architecture is None or zoo.data is None or done >= set(zoo.seeds):
            continue
        with _located_errors(plan, name):
            training = prepare(
                zoo.architecture, seeds=zoo.seeds, data=zoo.data, out=folder, recipe=zoo.recipe, options=zoo.options,
                precision=precision_there(folder), changes=zoo.changes,
            )  # fmt: skip
        trainings.append(training)
    return trainings


@contextmanager
def _located_errors(plan: Plan, name: str) -> Iterator[None]:
    """Put the name and the line of a zoo in front of its errors."""
    try:
        yield
    except IntertwineError as error:
        line = f" (line {plan.lines[name]})" if name in plan.lines else ""
        raise type(error)(f"Zoo {name!r}{line}: {error}") from error


def _layers(factory: Callable[[], nn.Module]) -> tuple[str, ...]:
    with torch.random.fork_rng():  # building a network draws random weights
        return tuple(name for name, _ in factory().named_modules() if name)


# -- The cache ---------------------------------------------------------------------------------------------------------


class NetworkCache:
    """Loads networks and data of zoos, once per process.

    Args:
        folders: zoo → its folder.
        data: zoo → its data set, for those that are already in memory.
        device: of networks and batches.
    """

    def __init__(
        self, folders: Mapping[str, str], data: Mapping[str, Dataset] | None = None, device: str = "cpu"
    ) -> None:
        self.folders, self._data, self.device = folders, data or {}, device

    def network(self, zoo: str, seed: int) -> nn.Module:
        return _load_network(*_version(self.folders[zoo]), seed, self.device)

    def data(self, zoo: str) -> Dataset:
        return self._data[zoo] if zoo in self._data else _load_data(*_version(self.folders[zoo]))

    def images(self, zoo: str, count: int | None) -> Dataset:
        """`count` images of each part, or all, on the device."""
        data = self.data(zoo)
        return (data if count is None else data.spread(count)).to(torch.device(self.device))

    def example(self, zoo: str, network: nn.Module) -> Tensor:
        """A blank input of a network; its shape is read from the zoo's manifest."""
        shape = _load_zoo(*_version(self.folders[zoo])).manifest.plan.data["shape"]
        ((blank,), _) = on_device_of(((torch.zeros(1, *shape),), {}), network)
        return blank


def _version(folder: str) -> tuple[str, int]:
    """A folder with the time of its manifest, so that the cache misses when the folder holds other networks."""
    path = Path(folder) / MANIFEST_FILE
    return folder, path.stat().st_mtime_ns if path.exists() else 0


@lru_cache(maxsize=8)
def _load_zoo(folder: str, version: int) -> Zoo:
    return load(Path(folder))


@lru_cache(maxsize=16)
def _load_network(folder: str, version: int, seed: int, device: str) -> nn.Module:
    return _load_zoo(folder, version).seed(seed).to(device)


@lru_cache(maxsize=4)
def _load_data(folder: str, version: int) -> Dataset:
    return _load_zoo(folder, version).dataset()
