"""Work: what a kind of experiment is handed. What is found of a pair is kept, so that a stopped run goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from intertwine.errors import InputError
from intertwine.files import write_json
from intertwine.reproduce.kinds.registry import Row
from intertwine.reproduce.networks import Pair, Source, Tell, groups, pairs, read_data, trained
from intertwine.reproduce.plan import Plan
from intertwine.reproduce.published import Published
from intertwine.zoo.datasets.dataset import Dataset
from intertwine.zoo.recipe import recipe


@dataclass(frozen=True)
class Work:
    """A plan, the folder of its networks and of what was found, and the device. `tell` is called with what is done."""

    plan: Plan
    folder: Path
    device: torch.device
    tell: Tell = lambda doing: None
    data_folder: Path | None = None

    @cached_property
    def data(self) -> Dataset:
        """The data set as the networks see it."""
        if self.plan.data is None:
            raise InputError(f"{self.plan.name} does not say which data: it lacks the table [data].")
        found, networks = read_data(self.plan.data, self.data_folder), self.plan.networks
        if networks is not None and networks.published:
            return Published(networks.published).seen(found)
        if networks is not None and recipe(networks.recipe, **networks.changes).normalise == "unit":
            return found.normalised([0] * found.shape[0], [255] * found.shape[0])
        return found

    @cached_property
    def placed(self) -> Dataset:
        """The data set on the device."""
        return self.data.to(self.device)

    @cached_property
    def sources(self) -> list[Source]:
        """The networks of every group, trained where they are not yet."""
        with torch.enable_grad():  # whoever asks may be measuring without gradients
            return trained(self.plan, self.data, self.folder, self.device, self.tell, self.data_folder)

    def network(self, end: tuple[int, int]) -> nn.Module:
        """One end of a pair, in eval mode on the device."""
        place, seed = end
        return self.sources[place].seed(seed).to(self.device)

    def per_pair(
        self,
        find: Callable[[Pair, Path], Iterable[Row]],
        asked: Callable[[Pair], Mapping[str, Any]] = lambda pair: {},
    ) -> list[Row]:
        """The rows of all pairs, read from their files where they were found before.

        Args:
            find: gives the rows of a pair, and may keep things of its own in the folder it is handed.
            asked: what the rows of a pair depend on besides data, networks and the settings of the plan.
        """
        values = [group.value for group in groups(self.plan)]
        all_pairs, found = pairs(self.plan), []
        for pair in all_pairs:
            self.tell(f"{self.plan.kind}, pair {pair.number + 1} of {len(all_pairs)}")
            about = {"pair": pair.number, "front_seed": pair.front[1], "back_seed": pair.back[1]}
            about |= {"front_group": values[pair.front[0]], "back_group": values[pair.back[0]]}
            found += [about | row for row in self._kept(pair, find, asked(pair))]
        return found

    def _kept(self, pair: Pair, find: Callable[[Pair, Path], Iterable[Row]], more: Mapping[str, Any]) -> list[Row]:
        asked = self._asked(pair) | dict(more)
        own = self.folder / "found" / hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
        file = own / "rows.json"
        if file.is_file():
            return json.loads(file.read_text(encoding="utf-8"))["rows"]
        rows = list(find(pair, own))
        own.mkdir(parents=True, exist_ok=True)
        write_json(file, {"asked": asked, "rows": rows})
        return rows

    def _asked(self, pair: Pair) -> dict[str, Any]:
        """Everything that the rows of a pair depend on; names of folders and of figures are not among it."""
        own = ("name", "pool", "vary", "options", "trained_on")  # those of each end are given below
        networks = {name: value for name, value in asdict(self.plan.networks).items() if name not in own}  # pyrefly: ignore
        ends = [[groups(self.plan)[place].about, seed] for place, seed in (pair.front, pair.back)]
        settings = {name: value for name, value in asdict(self.plan.settings).items() if name not in ("form", "what")}
        about = {"kind": self.plan.kind, "data": self.data.checksum, "networks": networks}
        return about | {"settings": settings, "ends": ends}
