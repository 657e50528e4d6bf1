"""Workbench: networks and data as the verbs of a study want them, read once per worker."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn

from intertwine.features.batches import placed
from intertwine.zoo.datasets.dataset import Dataset
from intertwine.zoo.folder import Zoo, load
from intertwine.zoo.manifest import FILE as MANIFEST


class Workbench:
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
        ((blank,), _) = placed(((torch.zeros(1, *shape),), {}), network)
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
