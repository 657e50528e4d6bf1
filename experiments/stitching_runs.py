"""The work behind a stitching figure: train the networks, choose the pairs, stitch each pair, give one row per stitch.

Networks lie in FOLDER/<name of the zoo>, stitches in FOLDER/stitches/<digest of what was asked of the pair>, so that
plans which ask for the same share their work, and a run that was stopped goes on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from stitching_plan import Data, Plan
from torch import nn

import intertwine as it
from intertwine.errors import InputError
from intertwine.files import write_json
from intertwine.stitch.closeness import sparsity
from intertwine.stitch.collection import Stitches
from intertwine.stitch.cross_validation import cross_validate, split
from intertwine.stitch.families.birkhoff import Birkhoff
from intertwine.stitch.families.sparse import Sparse
from intertwine.stitch.family import Family, find_family
from intertwine.zoo.datasets.dataset import Dataset
from intertwine.zoo.feeding import TrainingBatches
from intertwine.zoo.folder import Zoo
from intertwine.zoo.recipe import Recipe
from intertwine.zoo.recipe import recipe as find_recipe

Row = dict[str, Any]
Report = Callable[[str], None]
#: Images in a batch where nothing is trained.
LARGE = 1000


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


def groups(plan: Plan) -> list[Group]:
    """One group per value of the option that varies."""
    networks = plan.networks
    name = f"small/{networks.name}" if plan.small else networks.name
    options = dict(networks.options)
    if not networks.vary:
        return [Group(None, name, options)]
    ((option, values),) = networks.vary.items()
    return [Group(value, f"{name}-{option}{value:g}", options | {option: value}) for value in values]


def pairs(plan: Plan) -> list[Pair]:
    """The pairs of a plan. With the same seed, more pairs begin with the same ones."""
    chosen, pool, size = plan.pairs, plan.networks.pool, len(groups(plan))
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


def read_data(asked: Data, folder: Path | None) -> Dataset:
    """The data set of a plan, enlarged and cut short where the plan says so."""
    found = it.zoo.data(asked.name, folder)
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


def trained(plan: Plan, data: Dataset, folder: Path, device: torch.device, report: Report) -> list[Zoo]:
    """The zoo of every group: the networks that are in a pair, trained where they are not yet."""
    found, networks = [], plan.networks
    for number, group in enumerate(groups(plan)):
        ends = [end for pair in pairs(plan) for end in (pair.front, pair.back)]
        seeds = sorted({seed for place, seed in ends if place == number})
        report(f"training {len(seeds)} networks {group.folder}")
        held = folder / group.folder
        # what was trained on a GPU can be stitched elsewhere
        precision = it.zoo.load(held).manifest.plan.precision if (held / "manifest.json").is_file() else None
        zoo = it.zoo.train(
            networks.architecture, seeds=seeds, data=data, out=held, recipe=networks.recipe, options=group.options,
            device=str(device), precision=precision, select=networks.select, **networks.changes,
        )  # fmt: skip
        found.append(zoo)
    return found


def run(plan: Plan, data: Dataset, folder: Path, device: torch.device, report: Report) -> list[Row]:
    """The rows of all pairs."""
    zoos, placed = trained(plan, data, folder, device, report), data.to(device)
    found, all_pairs = [], pairs(plan)
    for pair in all_pairs:
        report(f"stitching pair {pair.number + 1} of {len(all_pairs)}")
        found += _pair(plan, pair, zoos, placed, folder, device)
    return found


def _pair(plan: Plan, pair: Pair, zoos: list[Zoo], data: Dataset, folder: Path, device: torch.device) -> list[Row]:
    """The rows of one pair, read from its file where they were found before."""
    asked = _asked(plan, pair, data)
    own = folder / "stitches" / hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
    file = own / "rows.json"
    if file.is_file():
        rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    else:
        front, back = (zoos[place].seed(seed).to(device) for place, seed in (pair.front, pair.back))
        rows = list(_stitched(plan, pair, (front, back), data, own))
        own.mkdir(parents=True, exist_ok=True)
        write_json(file, {"asked": asked, "rows": rows})
    values = [group.value for group in groups(plan)]
    about = {"pair": pair.number, "front_seed": pair.front[1], "back_seed": pair.back[1]}
    about |= {"front_group": values[pair.front[0]], "back_group": values[pair.back[0]]}
    return [about | row | {"label": plan.label(row["back"])} for row in rows]


def _asked(plan: Plan, pair: Pair, data: Dataset) -> dict[str, Any]:
    """Everything that the rows of a pair depend on."""
    own = ("name", "pool", "vary", "options")  # the options of each end are given below
    networks = {name: value for name, value in asdict(plan.networks).items() if name not in own}
    stitching = {name: value for name, value in asdict(plan.stitching).items() if name != "labels"}
    ends = [[groups(plan)[place].options, seed] for place, seed in (pair.front, pair.back)]
    first = plan.stitching.matrices and pair.number == 0
    return {"data": data.checksum, "networks": networks, "stitching": stitching, "ends": ends, "matrices": first}


def _stitched(
    plan: Plan, pair: Pair, models: tuple[nn.Module, nn.Module], data: Dataset, folder: Path
) -> Iterator[Row]:  # fmt: skip
    """Everything the plan asks of one pair: trained in every order, fitted directly, and chosen by cross-validation."""
    asked, keep = plan.stitching, plan.stitching.matrices and pair.number == 0
    how = find_recipe(asked.batches)
    shared: dict[str, Any] = {
        "direct_data": data.batches("train", LARGE), "test": data.batches("test", LARGE), "recipe": asked.recipe,
        "skip": asked.skip, **asked.options,
    }  # fmt: skip
    for order in range(asked.orders if asked.families else 0):
        found = it.stitches(
            *models, asked.at, _families(plan, asked.families), data=TrainingBatches(data, how, order), fit="task",
            seeds=range(order * asked.seeds, (order + 1) * asked.seeds), variants=asked.variants,
            out=folder / f"order{order}", **shared,
        )  # fmt: skip
        yield from _rows(found, asked.threshold, keep, {"order": order})
    if asked.direct:
        batches = data.batches("train", LARGE)
        found = it.stitches(*models, asked.at, _families(plan, asked.direct), data=batches, fit="direct", **shared)
        yield from _rows(found, asked.threshold, keep, {})
    if asked.alphas:
        yield from _chosen(plan, models, data, how, shared, folder)


def _families(plan: Plan, names: list[str]) -> list[Family]:
    """The families of these names; a sparse one ends with entries up to the plan's threshold at zero."""
    found = map(find_family, names)
    return [
        replace(one, threshold=float(plan.stitching.threshold)) if isinstance(one, Sparse) else one for one in found
    ]


def _chosen(
    plan: Plan, models: tuple[nn.Module, nn.Module], data: Dataset, how: Recipe, shared: dict[str, Any], folder: Path
) -> Iterator[Row]:
    """G_ReLU with α by cross-validation: tried on 80 % of the training images, chosen by the others."""
    first, second = (part.to(data.labels.device) for part in split(len(data.labels), 0.8, seed=plan.pairs.seed))
    one, two = ((data.images[some], data.labels[some]) for some in (first, second))
    cut = Dataset.of(f"{data.name}, split", one, two, data.mean, data.std, data.classes)
    candidates = [Birkhoff(alpha=float(alpha), head_start=0.0) for alpha in plan.stitching.alphas]
    choices = cross_validate(
        *models, plan.stitching.at, candidates, data=TrainingBatches(data, how),
        parts=(TrainingBatches(cut, how), cut.batches("test", LARGE)),
        trial={"epochs": plan.stitching.trial_epochs},
        out=folder / "chosen", **shared,
    )  # fmt: skip
    for choice in choices:
        about = {"alpha": plan.stitching.alphas[choice.chosen], "held_back": list(choice.accuracies)}
        yield from _rows(Stitches([choice.stitch]), plan.stitching.threshold, False, about)


def _rows(found: Stitches, threshold: float, matrices: bool, about: Row) -> Iterator[Row]:
    """One row per stitch; histories where features were traced, matrices where they are kept."""
    for stitch, row in zip(found, found.to_rows(), strict=True):
        row |= about | {"sparsity": sparsity(stitch.matrix, threshold)}
        if row.get("trace_every"):
            row["history"] = stitch.to_dict()["history"]
        if matrices:
            row["matrix"] = [[round(value, 5) for value in line] for line in stitch.matrix.tolist()]
        yield row
