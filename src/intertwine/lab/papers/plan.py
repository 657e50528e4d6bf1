"""Plans of experiments, read from the TOML files under experiments/ and checked, and the kinds of experiment by name.

title = "Godfrey et al. 2022, figure 1: Myrtle CNN"
rows = ["000-G57"]              # of the list of everything the papers claim
kind = "stitching"              # its own table is [stitching]
[cost]                          # in words, per scale
[data] [networks] [pairs] [stitching]
[printed] [spread]              # series → one number per label
[[claims]]                      # statements of the paper, see `intertwine.lab.papers.experiments.claims`
[notes]                         # series → one sentence, shown where ours differs; "claims": where a claim fails;
                                # "remark": always
[gpu.pairs] [cpu.networks] …    # override the tables, entry by entry, at that scale
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from intertwine.errors import InputError, did_you_mean, unknown_name

Row = dict[str, Any]
#: Series → place → one value per pair or network, in the unit of the printed numbers.
Numbers = dict[str, dict[str, list[float]]]

#: Kind of experiment → its module beside this one, loaded when a plan of the kind is read, and the constant there.
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
    """A mean in `Numbers` that stands for many values; their deviation and count are kept with it.

    >>> kept = SummaryValue(82.7, 0.3, 499_500)
    >>> kept, kept.deviation, kept.many
    ([82.7], 0.3, 499500)
    """

    def __init__(self, value: float, deviation: float | None, many: int) -> None:
        super().__init__([value])
        self.deviation, self.many = deviation, many


@dataclass(frozen=True)
class ExperimentKind:
    """One kind of experiment.

    Attributes:
        settings: the dataclass of the plan's table of this name; its `check(plan, where)` is called if it has one.
        run: takes a `intertwine.lab.papers.work.Work` and returns the rows.
        numbers: the numbers of the rows, in the form of the printed numbers.
        draw: the figure in the paper's form, from the plan as plain data and the rows.
    """

    settings: type
    run: Callable[[Any], list[Row]]
    numbers: Callable[[Mapping[str, Any], Sequence[Row]], Numbers]
    draw: Callable[[Mapping[str, Any], Sequence[Row]], Any]


def experiment_kind(name: str) -> ExperimentKind:
    """A kind by name; an `InputError` if there is none of that name."""
    if name not in KINDS:
        raise InputError(unknown_name("kind of experiment", name, KINDS))
    module, constant = KINDS[name]
    return getattr(import_module(f"intertwine.lab.papers.{module}"), constant)


def grouped(rows: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """Rows under the value of a key, in their order."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def gathered(points: Iterable[tuple[str, str, list[float]]]) -> Numbers:
    """Values under their series and place.

    >>> gathered([("full", "3", [1.0]), ("full", "3", [2.0]), ("rank 1", "6", [])])
    {'full': {'3': [1.0, 2.0]}}
    """
    found: Numbers = {}
    for series, label, values in points:
        if values:
            found.setdefault(series, {}).setdefault(label, []).extend(values)
    return found


# -- Tables of a plan --


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
    """The zoo. `name`: its folder. `vary`: one option and its values; each value has a group of networks.

    `trained_on`: instead of `vary`, a name → the entries of `Data` that a group is trained on; a group without entries
    is not trained. Pairs are evaluated on the data of the plan. `pool`: the seeds are 0 to pool − 1, and those in a
    pair are trained. `changes`: to the recipe. `published`: an architecture of published networks, which are read from
    the data folder instead of being trained.
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
        raise InputError(unknown_name("scale", scale, SCALES))
    entries = _scaled(_entries(path), scale, path)
    missing = sorted({"kind", "title", "rows"} - set(entries))
    if missing:
        raise InputError(f"{path} is not a plan of an experiment: it lacks {', '.join(missing)}.")
    kind = entries["kind"]
    made = experiment_kind(kind)
    _check_entries(entries, {*TABLES, *WORDS, *NUMBERS, kind}, str(path))
    tables: dict[str, Any] = {
        name: _read(table, entries[name], f"{path}: [{name}]") if name in entries else None
        for name, table in TABLES.items()
    }
    words: dict[str, Any] = {word: tuple(entries.get(word, ())) for word in ("rows", "labels", "claims")}
    plan = ExperimentPlan(
        name=path.stem, title=entries["title"], kind=kind, scale=scale, unit=entries.get("unit", ""),
        settings=_read(made.settings, entries.get(kind, {}), f"{path}: [{kind}]"), **words, **tables,
        **{name: entries.get(name, {}) for name in NUMBERS},
    )  # fmt: skip
    _check(plan, path)
    return plan


def _scaled(entries: dict[str, Any], scale: str, path: Path) -> dict[str, Any]:
    """The plan with the tables of a scale put over its own, entry by entry."""
    tables = {*TABLES, entries.get("kind", "")}
    overlays = {name: entries.pop(name, {}) for name in SCALES if name != "paper"}
    for name, over in overlays.items():
        _check_entries(over, tables, f"{path}: [{name}]")
    over = overlays.get(scale, {})
    for name, changes in over.items():
        entries[name] = {**entries.get(name, {}), **changes}
    if scale == "cpu":  # other networks on other data: the printed numbers do not apply
        for name in ("printed", "spread", "claims", "notes"):
            entries.pop(name, None)
    return entries


def _entries(file: Path) -> dict[str, Any]:
    """The entries of a file; with `like`, put over those of another plan beside it."""
    if not file.is_file():
        known = sorted(path.stem for path in file.parent.glob("*.toml"))
        hint = did_you_mean(file.stem, known)
        raise InputError(f"There is no experiment {file.stem!r}: {file} does not exist. {hint}See --list.")
    try:
        entries = tomllib.loads(file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"The plan {file} cannot be read: {error}.") from error
    return _over(_entries(file.parent / entries.pop("like")), entries) if "like" in entries else entries


def _over(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Tables put over tables, entry by entry, also at each scale. Printed numbers are not mixed.

    A plan with claims of its own does not inherit the note on claims.
    """
    if "claims" in over and "notes" in under:
        under = {**under, "notes": {name: note for name, note in under["notes"].items() if name != "claims"}}
    mixed = {
        name: _over(under[name], table) if name in SCALES else {**under[name], **table}
        for name, table in over.items()
        if name not in NUMBERS and isinstance(table, dict) and name in under
    }
    return {**under, **over, **mixed}


def _check_entries(entries: Mapping[str, Any], known: set[str], where: str) -> None:
    for name in entries:
        if name not in known:
            raise InputError(f"{where}: {unknown_name('entry', name, sorted(known))}")


def _read(kind: type[Made], entries: Mapping[str, Any], where: str) -> Made:
    _check_entries(entries, {one.name for one in fields(kind)}, where)  # pyrefly: ignore
    try:
        return kind(**entries)
    except TypeError as error:
        raise InputError(f"{where} is not complete: {error}.") from error


def _check(plan: ExperimentPlan, file: Path) -> None:
    if plan.pairs is not None and plan.pairs.choose not in CHOICES:
        raise InputError(f"{file}: [pairs] {unknown_name('choice', plan.pairs.choose, CHOICES)}")
    if plan.networks is not None:
        varied = [*plan.networks.vary, *(["trained_on"] if plan.networks.trained_on else [])]
        if len(varied) > 1:
            raise InputError(f"{file}: [networks] varies {', '.join(varied)}, but one thing at a time can vary.")
        for name, entries in plan.networks.trained_on.items():
            if entries:
                _read(Data, entries, f"{file}: [networks.trained_on] {name!r}")
    for table in (plan.printed, plan.spread):
        for series, numbers in table.items():
            if len(numbers) != len(plan.labels):
                raise InputError(
                    f"{file}: {series} has {len(numbers)} numbers, but there are {len(plan.labels)} labels."
                )
    if hasattr(plan.settings, "check"):
        plan.settings.check(plan, str(file))


def check_single_networks(plan: ExperimentPlan, where: str) -> None:
    """Refuse pairs of different networks: the experiment looks at networks one by one."""
    if plan.pairs is None or plan.pairs.choose != "self":
        raise InputError(f'{where}: the experiment is of single networks. Set choose = "self" in [pairs].')
