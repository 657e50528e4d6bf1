"""Plans of the stitching figures: what a file under experiments/stitching says, checked, and made small where asked."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from intertwine.errors import InputError, did_you_mean

#: How pairs of networks are chosen: at random with replacement (never twice the same network in one pair), each network
#: in one pair only, each network with itself, or every group of networks with every other.
CHOICES = ("random", "disjoint", "self", "groups")
Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Data:
    """A data set by name. `enlarge` repeats every pixel; `train` and `test` keep the first images of each part."""

    name: str
    enlarge: int = 1
    train: int | None = None
    test: int | None = None


@dataclass(frozen=True)
class Networks:
    """The zoo. `name`: its folder. `vary`: one option and its values, each a group of networks of its own.

    `pool`: seeds 0 to pool − 1, of which those that are in a pair are trained. `changes`: to the recipe.
    """

    name: str
    architecture: str
    pool: int
    recipe: str
    options: Mapping[str, Any] = field(default_factory=dict)
    vary: Mapping[str, list[Any]] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)
    select: str = "last"


@dataclass(frozen=True)
class Pairs:
    """How many pairs of each group there are, and how they are chosen (`CHOICES`)."""

    count: int
    choose: str
    seed: int = 0


@dataclass(frozen=True)
class Stitching:
    """What is stitched. `families` are trained, those of `direct` fitted in closed form.

    `batches`: the zoo recipe whose batch size and augmentation the training has. `labels`: what a place is called in
    the figure. `orders`: runs with other data orders and other seeds. `threshold`: entries up to it count as zero.
    `alphas`: of relu:birkhoff, chosen by cross-validation. `matrices`: of the first pair are kept in the rows.
    """

    at: list[str]
    recipe: str
    batches: str
    families: list[str] = field(default_factory=list)
    direct: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    variants: list[dict[str, Any]] = field(default_factory=lambda: [{}])
    options: Mapping[str, Any] = field(default_factory=dict)
    seeds: int = 1
    orders: int = 1
    skip: str | None = None
    threshold: float = 1e-3
    alphas: list[float] = field(default_factory=list)
    trial_epochs: int = 5
    matrices: bool = False


@dataclass(frozen=True)
class Plan:
    """One figure. `form`: how it is drawn (see stitching_figures). `what`: the number of a stitch that it shows."""

    name: str
    title: str
    form: str
    what: str | list[str]
    data: Data
    networks: Networks
    pairs: Pairs
    stitching: Stitching
    printed: Mapping[str, list[float | None]] = field(default_factory=dict)
    small: bool = False

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    def label(self, place: str) -> str:
        """What the figure calls a place."""
        names = self.stitching.labels or self.stitching.at
        return dict(zip(self.stitching.at, names, strict=True)).get(place, place)


#: Tables of a plan and what each is read into.
TABLES = {"data": Data, "networks": Networks, "pairs": Pairs, "stitching": Stitching}
WORDS = ("title", "form", "what")


def read_plan(file: Path, small: bool = False) -> Plan:
    """A plan from its file; `small` puts its table [small] over it, entry by entry."""
    entries = _entries(file)
    smaller = entries.pop("small", {})
    if small:
        for table, changes in smaller.items():
            if table not in TABLES:
                raise InputError(f"{file}: [small.{table}] is no table of a plan; there are {', '.join(TABLES)}.")
            entries[table] = {**entries.get(table, {}), **changes}
        entries.pop("printed", None)  # numbers of other networks
    unknown = sorted(set(entries) - {*TABLES, *WORDS, "printed"})
    missing = sorted({*TABLES, *WORDS} - set(entries))
    if unknown or missing:
        raise InputError(
            f"{file} is no plan of a stitching figure: it has the unknown entries {', '.join(unknown) or 'none'} and "
            f"lacks {', '.join(missing) or 'nothing'}."
        )
    tables: dict[str, Any] = {name: _read(kind, entries[name], f"{file}: [{name}]") for name, kind in TABLES.items()}
    words: dict[str, Any] = {word: entries[word] for word in WORDS}
    plan = Plan(name=file.stem, **words, **tables, printed=entries.get("printed", {}), small=small)
    _check(plan, file)
    return plan


def _entries(file: Path) -> dict[str, Any]:
    """What the file says; with `like`, on top of what another plan beside it says, table by table."""
    if not file.is_file():
        known = sorted(path.stem for path in file.parent.glob("*.toml"))
        hint = did_you_mean(file.stem, known)
        raise InputError(f"The plan {file} was asked for, which does not exist. {hint}Plans: {', '.join(known)}.")
    try:
        entries = tomllib.loads(file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"The plan {file} cannot be read: {error}.") from error
    if "like" in entries:
        entries = {**_entries(file.parent / entries["like"]), **entries}
        entries.pop("like")
    return entries


def _read(kind: type[Kind], entries: Mapping[str, Any], where: str) -> Kind:
    known = [one.name for one in fields(kind)]  # pyrefly: ignore
    for name in entries:
        if name not in known:
            raise InputError(f"{where} has {name!r}. {did_you_mean(name, known)}It may have {', '.join(known)}.")
    try:
        return kind(**entries)
    except TypeError as error:
        raise InputError(f"{where} is not complete: {error}.") from error


def _check(plan: Plan, file: Path) -> None:
    stitching = plan.stitching
    if plan.pairs.choose not in CHOICES:
        raise InputError(f"{file}: pairs are chosen {plan.pairs.choose!r}; they can be {', '.join(CHOICES)}.")
    if stitching.labels and len(stitching.labels) != len(stitching.at):
        raise InputError(f"{file}: there are {len(stitching.at)} places and {len(stitching.labels)} labels.")
    if len(plan.networks.vary) > 1:
        raise InputError(f"{file}: [networks] varies {', '.join(plan.networks.vary)}; one option at a time can vary.")
    if not (stitching.families or stitching.direct or stitching.alphas):
        raise InputError(f"{file}: [stitching] has neither families, nor direct, nor alphas, so nothing is stitched.")
