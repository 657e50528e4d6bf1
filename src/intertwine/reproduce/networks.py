"""The networks of an experiment: its groups, its pairs, its data, and their training where they are not there yet."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from intertwine.errors import InputError
from intertwine.reproduce.plan import Data, Networks, Plan
from intertwine.reproduce.published import Published
from intertwine.zoo.datasets.dataset import Dataset
from intertwine.zoo.datasets.find import data as find_data
from intertwine.zoo.group import initial
from intertwine.zoo.manifest import precision_there
from intertwine.zoo.networks.registry import build
from intertwine.zoo.training import train

Tell = Callable[[str], None]


@runtime_checkable
class Source(Protocol):
    """Where networks come from: a `Zoo`, or what others published."""

    def seed(self, seed: int) -> nn.Module: ...


@dataclass(frozen=True)
class Group:
    """Networks of one kind: the value of what varies (None where nothing does), and their folder.

    `trained_on`: the entries of the data they were trained on where that varies; none for networks never trained.
    """

    value: Any
    folder: str
    options: dict[str, Any]
    trained_on: Mapping[str, Any] | None = None

    @property
    def about(self) -> dict[str, Any]:
        """What tells its networks from those of other groups, as plain data."""
        return self.options if self.trained_on is None else {"options": self.options, "data": dict(self.trained_on)}


@dataclass(frozen=True)
class Untrained:
    """Networks as they would begin their training."""

    architecture: str
    options: Mapping[str, Any]

    def seed(self, seed: int) -> nn.Module:
        """The network of a seed, in eval mode.

        >>> Untrained("mlp", {"widths": [4, 3, 2]}).seed(0)[1]
        Linear(in_features=4, out_features=3, bias=True)
        """
        return initial(lambda: build(self.architecture, **self.options), seed).eval()


@dataclass(frozen=True)
class Pair:
    """Two networks, each as (number of its group, seed)."""

    number: int
    front: tuple[int, int]
    back: tuple[int, int]


def networks_of(plan: Plan) -> Networks:
    """The table [networks] of a plan that needs one."""
    if plan.networks is None:
        raise InputError(f"{plan.name} does not say which networks: it lacks the table [networks].")
    return plan.networks


def groups(plan: Plan) -> list[Group]:
    """One group per value of what varies."""
    networks = networks_of(plan)
    name = f"{plan.scale}/{networks.name}" if plan.scale != "paper" else networks.name
    options = dict(networks.options)
    if networks.trained_on:
        return [
            Group(words, f"{name}-{_slug(words)}", options, entries) for words, entries in networks.trained_on.items()
        ]
    if not networks.vary:
        return [Group(None, name, options)]
    ((option, values),) = networks.vary.items()
    return [Group(value, f"{name}-{option}{value:g}", options | {option: value}) for value in values]


def _slug(words: str) -> str:
    """Words as the name of a folder.

    >>> _slug("MNIST, turned")
    'mnist-turned'
    """
    return "-".join(re.findall("[a-z0-9]+", words.lower()))


def pairs(plan: Plan) -> list[Pair]:
    """The pairs of a plan. With the same seed, more pairs begin with the same ones."""
    if plan.pairs is None:
        raise InputError(f"{plan.name} does not say which pairs: it lacks the table [pairs].")
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
    return [Pair(number, front, back) for number, (front, back) in enumerate(found)]


def _drawn(choose: str, count: int, pool: int, seed: int) -> Iterator[tuple[int, int]]:
    chance = torch.Generator().manual_seed(seed)
    for i in range(count):
        if choose == "random":
            first, second = torch.randperm(pool, generator=chance)[:2].tolist()
            yield first, second
        else:
            yield (i, i) if choose == "self" else (2 * i, 2 * i + 1)


def read_data(asked: Data, folder: Path | None = None) -> Dataset:
    """The data set of a plan, enlarged, turned and cut short where the plan says so."""
    found = find_data(asked.name, folder)
    if asked.enlarge > 1:
        found = _remade(
            found, f"×{asked.enlarge}",
            lambda part: part.repeat_interleave(asked.enlarge, 1).repeat_interleave(asked.enlarge, 2),
        )  # fmt: skip
    if asked.turns:
        found = _remade(found, f", turned {asked.turns}", lambda part: part.rot90(asked.turns, (1, 2)).contiguous())
    return found if asked.train is None and asked.test is None else found.subset(asked.train, asked.test)


def _remade(data: Dataset, mark: str, change: Callable[[Tensor], Tensor]) -> Dataset:
    """The same data with other images. They are (count, rows, columns, colours)."""
    parts = (change(data.images), data.labels), (change(data.test_images), data.test_labels)
    return Dataset.of(data.name + mark, *parts, data.mean, data.std, data.classes)


def trained(
    plan: Plan, data: Dataset, folder: Path, device: torch.device, tell: Tell, data_folder: Path | None = None
) -> list[Source]:
    """The networks of every group that are in a pair, trained where they are not yet.

    `data`: what they are trained on, where the group does not say it. `data_folder`: where data sets are, and networks
    that others published.
    """
    found: list[Source] = []
    networks = networks_of(plan)
    for number, group in enumerate(groups(plan)):
        if networks.published:
            found.append(Published(networks.published, data_folder))
            continue
        if group.trained_on is not None and not group.trained_on:
            found.append(Untrained(networks.architecture, group.options))
            continue
        ends = [end for pair in pairs(plan) for end in (pair.front, pair.back)]
        seeds = sorted({seed for place, seed in ends if place == number})
        tell(f"training {len(seeds)} networks {group.folder}")
        held = folder / group.folder
        own = read_data(Data(**group.trained_on), data_folder) if group.trained_on else data
        found.append(
            train(
                networks.architecture, seeds=seeds, data=own, out=held, recipe=networks.recipe, options=group.options,
                device=str(device), precision=precision_there(held), select=networks.select, **networks.changes,
            )
        )  # fmt: skip
    return found
