"""The work of an experiment: its data, groups and pairs of networks (trained, untrained or published), cached rows."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from intertwine.checkpoints.weights import fill, read_checkpoint
from intertwine.errors import InputError
from intertwine.files import write_json
from intertwine.lab.papers.plan import Data, ExperimentPlan, Networks, Row
from intertwine.lab.zoo.datasets.dataset import Dataset
from intertwine.lab.zoo.datasets.downloads import places
from intertwine.lab.zoo.datasets.loading import data as find_data
from intertwine.lab.zoo.group import initial
from intertwine.lab.zoo.manifest import precision_there
from intertwine.lab.zoo.networks.registry import build
from intertwine.lab.zoo.recipe import recipe
from intertwine.lab.zoo.training import train

Progress = Callable[[str], None]
#: Mean and deviation of the three colours in the training of published networks: the Tiny-10 of Csiszárik et al. 2021.
COLOURS = {"tiny10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))}


@dataclass(frozen=True)
class PublishedNetworks:
    """Published networks of one architecture, in the data folder or the usual folders of data sets."""

    name: str
    folder: Path | None = None

    @property
    def files(self) -> dict[int, Path]:
        """Seed → its file, from the first folder that has any.

        >>> PublishedNetworks("nothing").files
        {}
        """
        for place in places(self.folder):
            files = (place / self.name).glob("seed[0-9]*.safetensors")
            if found := {int(file.stem.removeprefix("seed")): file for file in files}:
                return dict(sorted(found.items()))
        return {}

    def seed(self, seed: int) -> nn.Module:
        """The network of a seed, in eval mode."""
        file = self.files.get(seed)
        if file is None:
            raise InputError(
                f"The published network {self.name} of seed {seed} is missing: there is no "
                f"{self.name}/seed{seed}.safetensors in {', '.join(map(str, places(self.folder)))}. Set "
                f"INTERTWINE_DATA to the folder that holds {self.name}/seed0.safetensors and so on."
            )
        with torch.random.fork_rng(devices=[]):
            model = build(self.name)
        fill(model, read_checkpoint(file), str(file))
        return model.eval()

    def normalised(self, data: Dataset) -> Dataset:
        """The data with the colours of the networks' training."""
        mean, deviation = COLOURS[self.name]
        return data.normalised([255 * value for value in mean], [255 * value for value in deviation])


@runtime_checkable
class NetworkSource(Protocol):
    """A source of networks: a `Zoo`, published or untrained networks."""

    def seed(self, seed: int) -> nn.Module: ...


@dataclass(frozen=True)
class NetworkGroup:
    """Networks of one kind: the value of the option that varies (None if none does), and their folder.

    `trained_on`: the entries of their training data, if that varies; empty for networks that are not trained.
    """

    value: Any
    folder: str
    options: dict[str, Any]
    trained_on: Mapping[str, Any] | None = None

    @property
    def about(self) -> dict[str, Any]:
        """The settings that distinguish the group from others, as plain data."""
        return self.options if self.trained_on is None else {"options": self.options, "data": dict(self.trained_on)}


@dataclass(frozen=True)
class Untrained:
    """Networks at initialisation."""

    architecture: str
    options: Mapping[str, Any]

    def seed(self, seed: int) -> nn.Module:
        """The network of a seed, in eval mode.

        >>> Untrained("mlp", {"widths": [4, 3, 2]}).seed(0)[1]
        Linear(in_features=4, out_features=3, bias=True)
        """
        return initial(lambda: build(self.architecture, **self.options), seed).eval()


@dataclass(frozen=True)
class NetworkPair:
    """Two networks, each as (number of its group, seed)."""

    number: int
    front: tuple[int, int]
    back: tuple[int, int]


def networks_of(plan: ExperimentPlan) -> Networks:
    """The table [networks] of a plan that needs one."""
    if plan.networks is None:
        raise InputError(f"The plan {plan.name} lacks the table [networks].")
    return plan.networks


def groups(plan: ExperimentPlan) -> list[NetworkGroup]:
    """One group per value of what varies."""
    networks = networks_of(plan)
    name = f"{plan.scale}/{networks.name}" if plan.scale != "paper" else networks.name
    options = dict(networks.options)
    if networks.trained_on:
        slugs = {words: "-".join(re.findall("[a-z0-9]+", words.lower())) for words in networks.trained_on}
        return [
            NetworkGroup(words, f"{name}-{slugs[words]}", options, data) for words, data in networks.trained_on.items()
        ]
    if not networks.vary:
        return [NetworkGroup(None, name, options)]
    ((option, values),) = networks.vary.items()
    return [NetworkGroup(value, f"{name}-{option}{value:g}", options | {option: value}) for value in values]


def pairs(plan: ExperimentPlan) -> list[NetworkPair]:
    """The pairs of a plan. With the same seed, more pairs begin with the same ones."""
    if plan.pairs is None:
        raise InputError(f"The plan {plan.name} lacks the table [pairs].")
    chosen, pool, size = plan.pairs, networks_of(plan).pool, len(groups(plan))
    needed = {"random": 2, "self": chosen.count}.get(chosen.choose, 2 * chosen.count)
    if pool < needed:
        raise InputError(
            f"{plan.name}: {chosen.count} pairs, chosen {chosen.choose!r}, need at least {needed} networks, but the "
            f"pool is {pool}."
        )
    if chosen.choose in ("groups", "into-first"):
        backs = range(size if chosen.choose == "groups" else 1)
        found = [((a, 2 * i), (b, 2 * i + 1)) for a, b, i in product(range(size), backs, range(chosen.count))]
    else:
        found = [
            ((group, first), (group, second))
            for group in range(size)
            for first, second in _drawn(chosen.choose, chosen.count, pool, chosen.seed)
        ]
    return [NetworkPair(number, front, back) for number, (front, back) in enumerate(found)]


def _drawn(choose: str, count: int, pool: int, seed: int) -> Iterator[tuple[int, int]]:
    chance = torch.Generator().manual_seed(seed)
    for i in range(count):
        if choose == "random":
            first, second = torch.randperm(pool, generator=chance)[:2].tolist()
            yield first, second
        else:
            yield (i, i) if choose == "self" else (2 * i, 2 * i + 1)


def read_data(spec: Data, folder: Path | None = None) -> Dataset:
    """The data set of a plan, enlarged, rotated and truncated as specified."""
    found, name = find_data(spec.name, folder), ""
    images = [found.images, found.test_images]  # (count, rows, columns, colours)
    if spec.enlarge > 1:
        name += f"×{spec.enlarge}"
        images = [part.repeat_interleave(spec.enlarge, 1).repeat_interleave(spec.enlarge, 2) for part in images]
    if spec.turns:
        name += f", turned {spec.turns}"
        images = [part.rot90(spec.turns, (1, 2)).contiguous() for part in images]
    if name:
        train, test = zip(images, (found.labels, found.test_labels), strict=True)
        found = Dataset.of(found.name + name, train, test, found.mean, found.std, found.classes)
    return found if spec.train is None and spec.test is None else found.subset(spec.train, spec.test)


def trained(
    plan: ExperimentPlan,
    data: Dataset,
    folder: Path,
    device: torch.device,
    progress: Progress,
    data_folder: Path | None = None,
) -> list[NetworkSource]:
    """The networks of every group that are in a pair; missing ones are trained.

    `data`: the training data of groups without their own. `data_folder`: of data sets and published networks.
    """
    found: list[NetworkSource] = []
    networks = networks_of(plan)
    for number, group in enumerate(groups(plan)):
        if networks.published:
            found.append(PublishedNetworks(networks.published, data_folder))
            continue
        if group.trained_on is not None and not group.trained_on:
            found.append(Untrained(networks.architecture, group.options))
            continue
        ends = [end for pair in pairs(plan) for end in (pair.front, pair.back)]
        seeds = sorted({seed for place, seed in ends if place == number})
        progress(f"training {len(seeds)} networks {group.folder}")
        zoo = folder / group.folder
        own = read_data(Data(**group.trained_on), data_folder) if group.trained_on else data
        found.append(
            train(
                networks.architecture, seeds=seeds, data=own, out=zoo, recipe=networks.recipe, options=group.options,
                device=str(device), precision=precision_there(zoo), select=networks.select, **networks.changes,
            )
        )  # fmt: skip
    return found


@dataclass(frozen=True)
class Work:
    """A plan, the folder of its networks and cached rows, and the device. `progress` is called with every step."""

    plan: ExperimentPlan
    folder: Path
    device: torch.device
    progress: Progress = lambda step: None
    data_folder: Path | None = None

    @cached_property
    def data(self) -> Dataset:
        """The data set with the normalisation of the networks."""
        if self.plan.data is None:
            raise InputError(f"The plan {self.plan.name} lacks the table [data].")
        found, networks = read_data(self.plan.data, self.data_folder), self.plan.networks
        if networks is not None and networks.published:
            return PublishedNetworks(networks.published).normalised(found)
        if networks is not None and recipe(networks.recipe, **networks.changes).normalise == "unit":
            return found.normalised([0] * found.shape[0], [255] * found.shape[0])
        return found

    @cached_property
    def placed(self) -> Dataset:
        """The data set on the device."""
        return self.data.to(self.device)

    @cached_property
    def sources(self) -> list[NetworkSource]:
        """The networks of every group; missing ones are trained."""
        with torch.enable_grad():  # the caller may have turned gradients off
            return trained(self.plan, self.data, self.folder, self.device, self.progress, self.data_folder)

    def network(self, end: tuple[int, int]) -> nn.Module:
        """One end of a pair, in eval mode on the device."""
        place, seed = end
        return self.sources[place].seed(seed).to(self.device)

    def per_pair(
        self,
        measure: Callable[[NetworkPair, Path], Iterable[Row]],
        more: Callable[[NetworkPair], Mapping[str, Any]] = lambda pair: {},
    ) -> list[Row]:
        """The rows of all pairs; rows of an earlier run are read from their files.

        Args:
            measure: returns the rows of a pair; it may write files of its own to the folder it is given.
            more: settings that the rows of a pair depend on besides data, networks and the settings of the plan.
        """
        values = [group.value for group in groups(self.plan)]
        all_pairs, found = pairs(self.plan), []
        for pair in all_pairs:
            self.progress(f"{self.plan.kind}, pair {pair.number + 1} of {len(all_pairs)}")
            about = {"pair": pair.number, "front_seed": pair.front[1], "back_seed": pair.back[1]}
            about |= {"front_group": values[pair.front[0]], "back_group": values[pair.back[0]]}
            key = self._key(pair) | dict(more(pair))
            own = self.folder / "found" / hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
            file = own / "rows.json"
            if file.is_file():
                rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
            else:
                rows = list(measure(pair, own))
                own.mkdir(parents=True, exist_ok=True)
                write_json(file, {"asked": key, "rows": rows})
            found += [about | row for row in rows]
        return found

    def _key(self, pair: NetworkPair) -> dict[str, Any]:
        """Everything that the rows of a pair depend on, without names of folders and forms of figures."""
        own = ("name", "pool", "vary", "options", "trained_on")  # given below for each end
        networks = {name: value for name, value in asdict(self.plan.networks).items() if name not in own}  # pyrefly: ignore
        ends = [[groups(self.plan)[place].about, seed] for place, seed in (pair.front, pair.back)]
        settings = {name: value for name, value in asdict(self.plan.settings).items() if name not in ("form", "what")}
        about = {"kind": self.plan.kind, "data": self.data.checksum, "networks": networks}
        return about | {"settings": settings, "ends": ends}
