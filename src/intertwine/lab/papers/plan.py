"""Plans: what a TOML file under experiments/ says, checked, at one of three scales; and the experiment kinds by name."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from intertwine.errors import InputError, did_you_mean

# ----------------------------------------------------------------------------------------------------
# The kinds of experiment by name; each is loaded when a plan of it is read.


Row = dict[str, Any]
#: Series → place → one value per pair or network, in the unit of the printed numbers.
Numbers = dict[str, dict[str, list[float]]]

#: Kind of experiment → its module beside this one, and the constant there.
KINDS = {
    "stitching": ("stitching", "STITCHING"),
    "similarity": ("similarity", "SIMILARITY"),
    "accuracy": ("accuracy", "ACCURACY"),
    "rotation": ("rotations", "ROTATION"),
    "connectivity": ("connectivity", "CONNECTIVITY"),
    "folding": ("folding", "FOLDING"),
    "distances": ("nodesort", "DISTANCES"),
    "dissection": ("rotations", "DISSECTION"),
    "activation": ("activation", "ACTIVATION"),
    "ordering": ("ordering", "ORDERING"),
    "corrections": ("corrections", "CORRECTIONS"),
}


class SummaryValue(list[float]):
    """In `Numbers`, one value in the place of many, of which only it, their deviation and their number were kept.

    >>> kept = SummaryValue(82.7, 0.3, 499_500)
    >>> kept, kept.deviation, kept.many
    ([82.7], 0.3, 499500)
    """

    def __init__(self, value: float, deviation: float | None, many: int) -> None:
        super().__init__([value])
        self.deviation, self.many = deviation, many


@dataclass(frozen=True)
class ExperimentKind:
    """One way to experiment.

    Attributes:
        settings: the dataclass of the plan's table of this name; `check(plan, where)` is called where it has one.
        run: does the work and gives the rows; it is handed a `intertwine.lab.papers.work.Work`.
        numbers: what the rows say, in the form of the printed numbers.
        draw: the figure in the paper's form, from the plan as plain data and the rows.
    """

    settings: type
    run: Callable[[Any], list[Row]]
    numbers: Callable[[Mapping[str, Any], Sequence[Row]], Numbers]
    draw: Callable[[Mapping[str, Any], Sequence[Row]], Any]


def experiment_kind(name: str) -> ExperimentKind:
    """A kind by name.

    Raises:
        InputError: there is none of that name.
    """
    if name not in KINDS:
        raise InputError(
            f"There is no kind of experiment {name!r}. {did_you_mean(name, KINDS)}Kinds: {', '.join(KINDS)}."
        )
    module, constant = KINDS[name]
    return getattr(import_module(f"intertwine.lab.papers.{module}"), constant)


# ----------------------------------------------------------------------------------------------------
# Plans: what a file under experiments/ says, checked, at the paper's scale, at one GPU's or at two cores'.
#
# title = "Godfrey et al. 2022, figure 1: Myrtle CNN"
# rows = ["000-G57"]              # of the list of everything the papers claim
# kind = "stitching"              # its own table is [stitching]
# [cost]                          # in words, per scale
# [data] [networks] [pairs] [stitching]
# [printed] [spread]              # series → one number per label
# [[claims]]                      # what the paper says in words, see `intertwine.lab.papers.experiments`
# [notes]                         # series → one sentence, shown where ours differs; "claims": where one of them does not
#                                 # hold; "remark": always
# [gpu.pairs] [cpu.networks] …    # put over the tables, entry by entry, at that scale


SCALES = ("paper", "gpu", "cpu")
#: How pairs of networks are chosen: at random with replacement (never twice the same network in one pair), each network
#: in one pair only, each network with itself, every group of networks with every other, or every group with the first.
CHOICES = ("random", "disjoint", "self", "groups", "into-first")
Made = TypeVar("Made")


@dataclass(frozen=True)
class Data:
    """A data set by name. `enlarge` repeats every pixel; `train` and `test` keep the first images of each part.

    `turns`: by how many right angles every image is turned to the left.
    """

    name: str
    enlarge: int = 1
    train: int | None = None
    test: int | None = None
    turns: int = 0


@dataclass(frozen=True)
class Networks:
    """The zoo. `name`: its folder. `vary`: one option and its values, each a group of networks of its own.

    `trained_on`: in the place of `vary`, what networks were trained on, in words → entries of `Data`, each a group of
    its own; no entries stand for networks that were never trained. The data of the plan are what pairs are judged by.
    `pool`: seeds 0 to pool − 1, of which those that are in a pair are trained. `changes`: to the recipe. `published`:
    networks that others trained, read from the folder of the data instead of being trained here.
    """

    name: str
    architecture: str
    pool: int
    recipe: str = "plain"
    options: Mapping[str, Any] = field(default_factory=dict)
    vary: Mapping[str, list[Any]] = field(default_factory=dict)
    trained_on: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)
    select: str = "last"
    published: str | None = None


@dataclass(frozen=True)
class Pairs:
    """How many pairs of each group there are, and how they are chosen (`CHOICES`)."""

    count: int
    choose: str
    seed: int = 0


@dataclass(frozen=True)
class ExperimentPlan:
    """One table or figure. `settings`: the table of its kind. `labels`: what the columns of `printed` are called."""

    name: str
    title: str
    rows: tuple[str, ...]
    kind: str
    scale: str
    data: Data | None
    networks: Networks | None
    pairs: Pairs | None
    settings: Any
    labels: tuple[str, ...] = ()
    unit: str = ""
    printed: Mapping[str, list[float | None]] = field(default_factory=dict)
    spread: Mapping[str, list[float | None]] = field(default_factory=dict)
    claims: tuple[Mapping[str, Any], ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)
    cost: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


TABLES: Mapping[str, type] = {"data": Data, "networks": Networks, "pairs": Pairs}
WORDS = ("title", "rows", "kind", "labels", "unit", "claims")
NUMBERS = ("printed", "spread", "notes", "cost")


def read_plan(file: str | Path, scale: str = "paper") -> ExperimentPlan:
    """A plan from its file, at a scale.

    Raises:
        InputError: no such file or scale, or an entry that no plan has.
    """
    path = Path(file)
    if scale not in SCALES:
        raise InputError(f"The scale {scale!r} was asked for; there are {', '.join(SCALES)}.")
    entries = _entries(path)
    entries = _scaled(entries, scale, path)
    if "kind" not in entries:
        raise InputError(f"{path} is no plan of an experiment: it does not say its kind.")
    made = experiment_kind(entries["kind"])
    _known(entries, {*TABLES, *WORDS, *NUMBERS, entries["kind"]}, str(path))
    missing = sorted({"title", "rows"} - set(entries))
    if missing:
        raise InputError(f"{path} is no plan of an experiment: it lacks {', '.join(missing)}.")
    plan = _plan(path, scale, entries, made)
    _check(plan, path)
    return plan


def _plan(path: Path, scale: str, entries: Mapping[str, Any], made: ExperimentKind) -> ExperimentPlan:
    tables: dict[str, Any] = {
        name: _read(kind, entries[name], f"{path}: [{name}]") if name in entries else None
        for name, kind in TABLES.items()
    }
    own = _read(made.settings, entries.get(entries["kind"], {}), f"{path}: [{entries['kind']}]")
    words: dict[str, Any] = {word: tuple(entries.get(word, ())) for word in ("rows", "labels", "claims")}
    numbers: dict[str, Any] = {name: entries.get(name, {}) for name in NUMBERS}
    return ExperimentPlan(
        name=path.stem, title=entries["title"], kind=entries["kind"], scale=scale, settings=own,
        unit=entries.get("unit", ""), **words, **tables, **numbers,
    )  # fmt: skip


def _scaled(entries: dict[str, Any], scale: str, path: Path) -> dict[str, Any]:
    """The tables of a scale put over the plan's own, entry by entry."""
    tables = {*TABLES, entries.get("kind", "")}
    overlays = {name: entries.pop(name, {}) for name in SCALES if name != "paper"}
    for name, over in overlays.items():
        _known(over, tables, f"{path}: [{name}]")
    over = overlays.get(scale, {})
    for name, changes in over.items():
        entries[name] = {**entries.get(name, {}), **changes}
    if scale == "cpu":  # other networks on other data: the printed numbers say nothing of them
        for name in ("printed", "spread", "claims", "notes"):
            entries.pop(name, None)
    return entries


def _entries(file: Path) -> dict[str, Any]:
    """What the file says; with `like`, on top of what another plan beside it says."""
    if not file.is_file():
        known = sorted(path.stem for path in file.parent.glob("*.toml"))
        hint = did_you_mean(file.stem, known)
        raise InputError(f"The experiment {file.stem!r} was asked for, but {file} does not exist. {hint}See --list.")
    try:
        entries = tomllib.loads(file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"The plan {file} cannot be read: {error}.") from error
    return _over(_entries(file.parent / entries.pop("like")), entries) if "like" in entries else entries


def _over(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Tables put over tables, entry by entry, also at each scale; printed numbers are never mixed.

    A note on claims goes with them: a plan with claims of its own does not take the note on another's.
    """
    if "claims" in over and "notes" in under:
        under = {**under, "notes": {name: note for name, note in under["notes"].items() if name != "claims"}}
    mixed = {
        name: _over(under[name], table) if name in SCALES else {**under[name], **table}
        for name, table in over.items()
        if name not in NUMBERS and isinstance(table, dict) and name in under
    }
    return {**under, **over, **mixed}


def _known(entries: Mapping[str, Any], known: set[str], where: str) -> None:
    for name in entries:
        if name not in known:
            raise InputError(
                f"{where} has {name!r}. {did_you_mean(name, known)}It may have {', '.join(sorted(known))}."
            )


def _read(kind: type[Made], entries: Mapping[str, Any], where: str) -> Made:
    _known(entries, {one.name for one in fields(kind)}, where)  # pyrefly: ignore
    try:
        return kind(**entries)
    except TypeError as error:
        raise InputError(f"{where} is not complete: {error}.") from error


def _check(plan: ExperimentPlan, file: Path) -> None:
    if plan.pairs is not None and plan.pairs.choose not in CHOICES:
        raise InputError(f"{file}: pairs are chosen {plan.pairs.choose!r}; they can be {', '.join(CHOICES)}.")
    if plan.networks is not None:
        _check_groups(plan.networks, file)
    for table in (plan.printed, plan.spread):
        for series, numbers in table.items():
            if len(numbers) != len(plan.labels):
                raise InputError(
                    f"{file}: {series} has {len(numbers)} numbers, but there are {len(plan.labels)} labels."
                )
    if hasattr(plan.settings, "check"):
        plan.settings.check(plan, str(file))


def _check_groups(networks: Networks, file: Path) -> None:
    varied = [*networks.vary, *(["trained_on"] if networks.trained_on else [])]
    if len(varied) > 1:
        raise InputError(f"{file}: [networks] varies {', '.join(varied)}; one thing at a time can vary.")
    for words, entries in networks.trained_on.items():
        if entries:
            _read(Data, entries, f"{file}: [networks.trained_on] {words!r}")
