"""The manifest of a zoo: architecture, recipe, data and results, in one JSON file beside the weights."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar, get_origin, get_type_hints

from intertwine.errors import InputError, MismatchError
from intertwine.files import write_json

MANIFEST_FILE = "manifest.json"
FORMAT = 1
Kind = TypeVar("Kind")
#: The required entries of each part of a plan, and their types.
NEEDED: dict[str, dict[str, type]] = {
    "architecture": {"name": str, "options": dict},
    "recipe": {"name": str},
    "data": {"name": str, "checksum": str, "mean": list, "std": list, "classes": list, "shape": list},
}


@dataclass(frozen=True)
class Record:
    """One network of a zoo; accuracy (a fraction) and loss are on the test split.

    Attributes:
        file, sha256: its weights. epoch: the epoch they are from.
        loss: 1e30 for NaN and infinity, which JSON cannot hold.
        best_accuracy, best_epoch: the best of all epochs on the test split, for papers that report it.
        together: number of networks trained at once. seconds: its share of their time.
        history: per epoch the training loss, and the test accuracy where it was measured (else null).
    """

    seed: int
    file: str
    sha256: str
    accuracy: float
    loss: float
    epoch: int
    best_accuracy: float
    best_epoch: int
    together: int
    seconds: float
    device: str
    finished: str
    versions: dict[str, str]
    history: dict[str, list[float | None]]


@dataclass(frozen=True)
class TrainingPlan:
    """What all networks of a zoo have in common, as plain data."""

    architecture: dict[str, Any]  # name, options
    recipe: dict[str, Any]
    data: dict[str, Any]  # name, checksum, mean, std, classes, shape
    precision: str
    select: str

    def differences(self, other: TrainingPlan) -> list[str]:
        """The differences to another plan, one line each."""
        return [
            f"{name}: {_short(mine)} stored, {_short(theirs)} wanted"
            for name, mine, theirs in _pairs(asdict(self), asdict(other))
            if mine != theirs and name not in ("recipe.name", "recipe.source")
        ]


@dataclass(frozen=True)
class Manifest:
    """The plan and the records of the finished networks, by seed."""

    plan: TrainingPlan
    records: tuple[Record, ...] = ()

    def with_records(self, new: list[Record]) -> Manifest:
        """The manifest with the records of more networks."""
        return replace(self, records=tuple(sorted((*self.records, *new), key=lambda r: r.seed)))

    def write(self, folder: Path) -> None:
        """Write the file atomically."""
        write_json(folder / MANIFEST_FILE, {"format": FORMAT, **asdict(self)})


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a zoo's folder."""
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise InputError(
            f"{folder} is not a zoo: it holds no {MANIFEST_FILE}. Give the folder that `intertwine zoo train` wrote "
            "(its --out)."
        )
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(entries, dict) or entries.get("format") != FORMAT:
            found = entries.get("format") if isinstance(entries, dict) else type(entries).__name__
            raise ValueError(f"it has format {found!r}, this version of intertwine reads format {FORMAT}")
        plan = _from_entries(TrainingPlan, "plan", entries["plan"])
        records = [_from_entries(Record, "record", record) for record in entries["records"]]
        _check_plan(plan)
    except (ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)
        raise InputError(
            f"{path} is damaged or of another kind ({reason}). Restore it from a copy of the zoo, or move the folder "
            "away to train again; the weights beside it are unchanged."
        ) from error
    return Manifest(plan, tuple(records))


def precision_there(folder: Path) -> str | None:
    """The precision in which the networks of a folder were trained; None without a zoo.

    >>> precision_there(Path("nothing here"))
    """
    return read_manifest(folder).plan.precision if (folder / MANIFEST_FILE).is_file() else None


def check_same(folder: Path, stored: TrainingPlan, wanted: TrainingPlan) -> None:
    """Raise if the stored zoo was trained by another plan than the wanted networks."""
    differ = stored.differences(wanted)
    if differ:
        raise MismatchError(
            f"{folder} already holds a zoo with another training: {'; '.join(differ)}. "
            "Give another folder, or repeat the stored training."
        )


def _from_entries(kind: type[Kind], part: str, entries: Any) -> Kind:
    if not isinstance(entries, dict):
        raise ValueError(f"its {part} is {_short(repr(entries))}")
    expected, found = {field.name for field in fields(kind)}, set(entries)  # pyrefly: ignore
    if expected != found:
        lacks = [f"lacks {', '.join(sorted(expected - found))}"] if expected - found else []
        extra = [f"has an unknown {', '.join(sorted(found - expected))}"] if found - expected else []
        raise ValueError(f"its {part} {' and '.join(lacks + extra)}")
    for name, hint in get_type_hints(kind).items():
        right = (int, float) if hint is float else get_origin(hint) or hint
        if not isinstance(entries[name], right):
            raise ValueError(f"the {name} of its {part} is {_short(repr(entries[name]))}")
    return kind(**entries)


def _check_plan(plan: TrainingPlan) -> None:
    for part, kinds in NEEDED.items():
        entries = getattr(plan, part)
        lacks = [name for name in kinds if name not in entries]
        if lacks:
            raise ValueError(f"the {part} of its plan lacks {', '.join(lacks)}")
        for name, kind in kinds.items():
            if not isinstance(entries[name], kind):
                raise ValueError(f"the {name} of the {part} of its plan is {_short(repr(entries[name]))}")
    shape = plan.data["shape"]
    if len(shape) != 3 or not all(isinstance(size, int) and size > 0 for size in shape):
        raise ValueError(f"the shape of the data of its plan is {_short(repr(shape))}")
    for name in ("mean", "std"):
        numbers = plan.data[name]
        if len(numbers) != shape[0] or not all(isinstance(x, int | float) for x in numbers):
            raise ValueError(f"the {name} of the data of its plan is {_short(repr(numbers))}")


def _pairs(a: Any, b: Any, name: str = "") -> list[tuple[str, Any, Any]]:
    """The entries of two nested dictionaries side by side, by their dotted names."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = list(dict.fromkeys([*a, *b]))
        return [p for k in keys for p in _pairs(a.get(k), b.get(k), f"{name}.{k}" if name else k)]
    return [(name, list(a) if isinstance(a, tuple) else a, list(b) if isinstance(b, tuple) else b)]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "…"
