"""The networks of an experiment: its groups, its pairs, its data, and their training where they are not there yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from intertwine.errors import InputError
from intertwine.reproduce.plan import Data, Networks, Plan
from intertwine.reproduce.published import Published
from intertwine.zoo.datasets.dataset import Dataset
from intertwine.zoo.datasets.find import data as find_data
from intertwine.zoo.folder import load
from intertwine.zoo.manifest import FILE as MANIFEST
from intertwine.zoo.training import train

Tell = Callable[[str], None]


@runtime_checkable
class Source(Protocol):
    """Where networks come from: a `Zoo`, or what others published."""

    def seed(self, seed: int) -> nn.Module: ...


@dataclass(frozen=True)
class Group:
    """Networks of one kind: the value of the option that varies (None where none does), and their folder."""

    value: Any
    folder: str
    options: dict[str, Any]


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
    """One group per value of the option that varies."""
    networks = networks_of(plan)
    name = f"{plan.scale}/{networks.name}" if plan.scale != "paper" else networks.name
    options = dict(networks.options)
    if not networks.vary:
        return [Group(None, name, options)]
    ((option, values),) = networks.vary.items()
    return [Group(value, f"{name}-{option}{value:g}", options | {option: value}) for value in values]


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
    if chosen.choose == "groups":
        found = [((a, 2 * i), (b, 2 * i + 1)) for a, b, i in product(range(size), range(size), range(chosen.count))]
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
    """The data set of a plan, enlarged and cut short where the plan says so."""
    found = find_data(asked.name, folder)
    if asked.enlarge > 1:
        images, test = (
            part.repeat_interleave(asked.enlarge, 1).repeat_interleave(asked.enlarge, 2)
            for part in (found.images, found.test_images)
        )
        name = f"{found.name}×{asked.enlarge}"
        found = Dataset.of(
            name, (images, found.labels), (test, found.test_labels), found.mean, found.std, found.classes
        )
    return found if asked.train is None and asked.test is None else found.subset(asked.train, asked.test)


def trained(
    plan: Plan, data: Dataset, folder: Path, device: torch.device, tell: Tell, data_folder: Path | None = None
) -> list[Source]:
    """The networks of every group that are in a pair, trained where they are not yet.

    `data_folder`: where networks that others published are.
    """
    found: list[Source] = []
    networks = networks_of(plan)
    for number, group in enumerate(groups(plan)):
        if networks.published:
            found.append(Published(networks.published, data_folder))
            continue
        ends = [end for pair in pairs(plan) for end in (pair.front, pair.back)]
        seeds = sorted({seed for place, seed in ends if place == number})
        tell(f"training {len(seeds)} networks {group.folder}")
        held = folder / group.folder
        # what was trained on a GPU can be looked at elsewhere
        precision = load(held).manifest.plan.precision if (held / MANIFEST).is_file() else None
        found.append(
            train(
                networks.architecture, seeds=seeds, data=data, out=held, recipe=networks.recipe, options=group.options,
                device=str(device), precision=precision, select=networks.select, **networks.changes,
            )
        )  # fmt: skip
    return found
