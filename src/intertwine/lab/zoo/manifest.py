"""The manifest of a zoo: what was trained, on what, how, and with which result. One JSON file beside the weights."""

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
#: What the parts of a plan must say, and of what kind it is.
NEEDED: dict[str, dict[str, type]] = {
    "architecture": {"name": str, "options": dict},
    "recipe": {"name": str},
    "data": {"name": str, "checksum": str, "mean": list, "std": list, "classes": list, "shape": list},
}


@dataclass(frozen=True)
class Record:
    """One network of a zoo. Accuracy (a fraction) and loss are on the test part of the data.

    Attributes:
        file, sha256: its weights. epoch: after which epoch they were taken.
        best_accuracy, best_epoch: the best of all epochs on the test part, for papers that report it.
        together: how many networks were trained at once. seconds: its share of their time.
        loss: 1e30 where training diverged and it is no number any more, which JSON cannot hold.
        history: per epoch the training loss, and the test accuracy where it was taken (else null).
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
    """What all networks of a zoo have in common; plain data throughout."""

    architecture: dict[str, Any]  # name, options
    recipe: dict[str, Any]
    data: dict[str, Any]  # name, checksum, mean, std, classes, shape
    precision: str
    select: str

    def differences(self, other: TrainingPlan) -> list[str]:
        """Where two plans differ, one line each."""
        return [
            f"{name}: {_short(mine)} there, {_short(theirs)} asked for"
            for name, mine, theirs in _pairs(asdict(self), asdict(other))
            if mine != theirs and name not in ("recipe.name", "recipe.source")
        ]


@dataclass(frozen=True)
class Manifest:
    """The plan and the networks that are finished, by seed."""

    plan: TrainingPlan
    records: tuple[Record, ...] = ()

    def with_records(self, new: list[Record]) -> Manifest:
        """The manifest with more networks."""
        return replace(self, records=tuple(sorted((*self.records, *new), key=lambda r: r.seed)))

    def write(self, folder: Path) -> None:
        """Write it, whole or not at all."""
        write_json(folder / MANIFEST_FILE, {"format": FORMAT, **asdict(self)})


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a zoo's folder."""
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise InputError(
            f"{folder} was asked for as a zoo, but it holds no {MANIFEST_FILE}. Give the folder that `intertwine zoo train` "
            "wrote (its --out)."
        )
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(entries, dict) or entries.get("format") != FORMAT:
            found = entries.get("format") if isinstance(entries, dict) else type(entries).__name__
            raise ValueError(f"it has format {found!r}, this version of intertwine reads format {FORMAT}")
        plan = _made(TrainingPlan, "plan", entries["plan"])
        records = [_made(Record, "record", r) for r in entries["records"]]
        _check_needed(plan)
    except (ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)
        raise InputError(
            f"{path} is damaged or of another kind ({reason}). Take it from a copy of the zoo; the weights beside it "
            "are untouched, and training again into this folder needs it moved away first."
        ) from error
    return Manifest(plan, tuple(records))


def precision_there(folder: Path) -> str | None:
    """In which numbers the networks of a folder were trained: those on a GPU are looked at elsewhere, too.

    >>> precision_there(Path("nothing here"))
    """
    return read_manifest(folder).plan.precision if (folder / MANIFEST_FILE).is_file() else None


def check_same(folder: Path, there: TrainingPlan, asked: TrainingPlan) -> None:
    """Refuse to add networks to a zoo that was made otherwise."""
    differ = there.differences(asked)
    if differ:
        raise MismatchError(
            f"{folder} already holds a zoo that was trained otherwise: {'; '.join(differ)}. "
            "Give another folder, or ask for the same training."
        )


def _made(kind: type[Kind], part: str, entries: Any) -> Kind:
    if not isinstance(entries, dict):
        raise ValueError(f"its {part} is {_short(repr(entries))}")
    wanted, found = {field.name for field in fields(kind)}, set(entries)  # pyrefly: ignore
    if wanted != found:
        lacks = [f"lacks {', '.join(sorted(wanted - found))}"] if wanted - found else []
        extra = [f"has an unknown {', '.join(sorted(found - wanted))}"] if found - wanted else []
        raise ValueError(f"its {part} {' and '.join(lacks + extra)}")
    for name, hint in get_type_hints(kind).items():
        right = (int, float) if hint is float else get_origin(hint) or hint
        if not isinstance(entries[name], right):
            raise ValueError(f"the {name} of its {part} is {_short(repr(entries[name]))}")
    return kind(**entries)


def _check_needed(plan: TrainingPlan) -> None:
    for part, kinds in NEEDED.items():
        said = getattr(plan, part)
        lacks = [name for name in kinds if name not in said]
        if lacks:
            raise ValueError(f"the {part} of its plan lacks {', '.join(lacks)}")
        for name, kind in kinds.items():
            if not isinstance(said[name], kind):
                raise ValueError(f"the {name} of the {part} of its plan is {_short(repr(said[name]))}")
    if len(plan.data["shape"]) != 3 or not all(isinstance(size, int) and size > 0 for size in plan.data["shape"]):
        raise ValueError(f"the shape of the data of its plan is {_short(repr(plan.data['shape']))}")
    for name in ("mean", "std"):
        numbers = plan.data[name]
        if len(numbers) != plan.data["shape"][0] or not all(isinstance(x, int | float) for x in numbers):
            raise ValueError(f"the {name} of the data of its plan is {_short(repr(numbers))}")


def _pairs(a: Any, b: Any, name: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(a, dict) and isinstance(b, dict):
        keys = list(dict.fromkeys([*a, *b]))
        return [p for k in keys for p in _pairs(a.get(k), b.get(k), f"{name}.{k}" if name else k)]
    return [(name, list(a) if isinstance(a, tuple) else a, list(b) if isinstance(b, tuple) else b)]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "…"
