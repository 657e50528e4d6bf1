"""The plan of a study, as a TOML file, dataclasses or plain data, checked with line numbers before anything runs.

name = "digits"

[zoos.small]                      # trained into the study's folder if its networks are missing
architecture = "mlp"
data = "digits"
seeds = "0:3"
epochs = 5

[zoos.mine]                       # already trained
folder = "zoos/myrtle"

[[parts]]
verb = "barrier"
zoos = ["small"]
pairs = "all"                     # or "neighbours", or [[0, 1]], by seeds
options = { points = 5 }          # for every task
grid = { method = ["none", "weights"] }    # one task per value
repeats = 1
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import combinations
from pathlib import Path
from typing import Any, NoReturn

from intertwine.errors import InputError, unknown_name
from intertwine.lab.zoo.recipe import Recipe
from intertwine.lab.zoo.recipe import seeds as read_seeds

PAIRS = ("all", "neighbours")
#: The fields of a recipe that a plan may change.
CHANGES = {entry.name for entry in fields(Recipe)} - {"name", "source"}
#: TOML names of the Python types.
TYPE_NAMES: dict[type, str] = {
    dict: "a table", Mapping: "a table", list: "a list", tuple: "a list", str: "a string", int: "an integer",
    float: "a number",
}  # fmt: skip
_TABLE = re.compile(r"\s*\[([^\[\]]+)\]\s*(#.*)?$")
_ENTRY = re.compile(r"\s*\[\[([^\[\]]+)\]\]\s*(#.*)?$")
_KEY = re.compile(r"\s*([\w.\"'-]+)\s*=")
TomlPath = tuple[str | int, ...]


@dataclass(frozen=True)
class ZooPlan:
    """Networks of a study: an existing folder, or how to train them.

    Attributes:
        folder: of existing networks.
        architecture, data, seeds, recipe, options, changes: how to train them, as for `zoo.train`; `changes` are
            changes to the recipe, such as epochs.
    """

    folder: str | None = None
    architecture: str | None = None
    data: str | None = None
    seeds: tuple[int, ...] = ()
    recipe: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """One verb on some networks.

    Attributes:
        verb: one of `intertwine.lab.study.verbs.VERBS`.
        zoos: their names.
        networks: seeds; all networks of the zoos if empty.
        pairs: of seeds, for verbs of two networks: "all", "neighbours" (the first with the second, …), or a list.
        layers: module paths, for verbs that take layers.
        options: the same for all tasks.
        grid: option → values; one task per combination.
        repeats: the number of repeats, each with its own seed.
    """

    verb: str
    zoos: tuple[str, ...]
    networks: tuple[int, ...] = ()
    pairs: str | tuple[tuple[int, int], ...] = "all"
    layers: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    grid: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    repeats: int = 1

    def select_networks(self, seeds: Sequence[int]) -> list[int]:
        """The networks for a verb of one network, given the seeds of a zoo."""
        return list(self.networks or seeds)

    def select_pairs(self, seeds: Sequence[int]) -> list[tuple[int, int]]:
        """The pairs for a verb of two networks, given the seeds of a zoo.

        >>> part = Part("barrier", ("small",), pairs="neighbours")
        >>> part.select_pairs([0, 1, 2, 3])
        [(0, 1), (2, 3)]
        """
        if not isinstance(self.pairs, str):
            return list(self.pairs)
        networks = self.select_networks(seeds)
        return list(
            combinations(networks, 2) if self.pairs == "all" else zip(networks[::2], networks[1::2], strict=False)
        )


@dataclass(frozen=True)
class Plan:
    """A study: its name, zoos by name, and parts."""

    name: str
    zoos: Mapping[str, ZooPlan]
    parts: tuple[Part, ...]
    #: Index of a part, or name of a zoo → its line in the file.
    lines: Mapping[int | str, int] = field(default_factory=dict, compare=False, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, which `plan_of` reads."""
        data = asdict(self)
        del data["lines"]
        return data


def read_plan(path: str | Path) -> Plan:
    """Read a plan from a TOML file.

    Raises:
        InputError: the file is missing or not TOML, or the plan is invalid; the message names the line.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        data = tomllib.loads(text)
    except OSError as error:
        raise InputError(f"Cannot read the plan {path} ({error.strerror}). Give the path of a TOML file.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"The plan {path} is not valid UTF-8 ({error}). Give a TOML file in UTF-8.") from error
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"The plan {path} is not valid TOML: {error}. Correct that line.") from error
    except RecursionError as error:
        raise InputError(f"Lists or tables in the plan {path} are nested too deeply. Flatten them.") from error
    return plan_of(data, path.name, TomlLines(text))


def plan_of(data: Mapping[str, Any], source: str = "the plan", lines: TomlLines | None = None) -> Plan:
    """Read a plan from plain data.

    Args:
        data: the tables of the plan.
        source: its name in error messages.
        lines: line numbers for error messages, if the plan is from a file.

    Example:
        >>> part = {"verb": "accuracy", "zoos": ["z"]}
        >>> plan = plan_of({"name": "a", "zoos": {"z": {"folder": "zoos/z"}}, "parts": [part]})
        >>> plan.parts[0].verb, plan_of(plan.to_dict()) == plan
        ('accuracy', True)
    """
    reader = _PlanReader(source, lines)
    reader.check_keys(data, {"name", "zoos", "parts"})
    name = reader.typed(data, "name", str, ())
    zoos = {key: reader.zoo(table, key) for key, table in reader.typed(data, "zoos", dict, ()).items()}
    parts = tuple(reader.part(table, i, zoos) for i, table in enumerate(reader.typed(data, "parts", list | tuple, ())))
    if not zoos or not parts:
        reader.refuse("A plan needs at least one zoo ([zoos.NAME]) and one part ([[parts]]).")
    if lines is None:
        return Plan(name, zoos, parts)
    return Plan(
        name, zoos, parts,
        {i: lines.of("parts", i) for i in range(len(parts))} | {zoo: lines.of("zoos", zoo) for zoo in zoos},
    )  # fmt: skip


class _PlanReader:
    """Reads the tables of a plan; error messages name the line."""

    def __init__(self, source: str, lines: TomlLines | None) -> None:
        self.source, self.lines = source, lines

    def refuse(self, problem: str, *place: str | int) -> NoReturn:
        where = f", line {self.lines.of(*place)}" if self.lines else ""
        raise InputError(f"{self.source}{where}: {problem}")

    def check_keys(self, table: Any, known: set[str], *place: str | int) -> None:
        if not isinstance(table, Mapping):
            self.refuse(f"Expected a table, but found {table!r}.", *place)
        for key in table:
            if key not in known:
                self.refuse(unknown_name("key", str(key), sorted(known)), *place, key)

    def typed(
        self, table: Mapping[str, Any], key: str, kind: Any, place: tuple[str | int, ...], default: Any = None
    ) -> Any:
        value = table.get(key, default)
        if not _is(value, kind):
            found = f"but is {value!r}" if key in table else "but is missing"
            self.refuse(f"{key} must be {_type_name(kind)}, {found}.", *place, key)
        return value

    def typed_list(
        self, table: Mapping[str, Any], key: str, kind: Any, place: tuple[str | int, ...]
    ) -> tuple[Any, ...]:
        values = self.typed(table, key, list | tuple, place, ())
        for value in values:
            if not _is(value, kind):
                self.refuse(f"Each entry of {key} must be {_type_name(kind)}, but one is {value!r}.", *place, key)
        return tuple(values)

    def zoo(self, table: Any, name: str) -> ZooPlan:
        place = ("zoos", name)
        changes: dict[str, Any] = {"epochs": int, "batch": int, "rate": int | float, "spawn": int}
        self.check_keys(table, {f.name for f in fields(ZooPlan)} | changes.keys(), *place)
        folder = table.get("folder")
        if (folder is not None) == bool(table.get("architecture")):
            self.refuse(f"Zoo {name!r} needs either a folder, or an architecture to train.", *place)
        if folder is not None:
            for key in table:
                if key != "folder" and table[key]:
                    self.refuse(f"Zoo {name!r} is read from a folder, so {key} has no effect. Remove it.", *place, key)
            return ZooPlan(folder=self.typed(table, "folder", str, place))
        seeds = self.typed(table, "seeds", str | list | tuple, place, "")
        seeds = (
            tuple(read_seeds(seeds))
            if seeds and isinstance(seeds, str)
            else self.typed_list(table, "seeds", int, place)
        )
        if not seeds:
            self.refuse(f'Zoo {name!r} has no seeds. Write seeds = "0:4" for four networks.', *place)
        recipe = self.typed(table, "recipe", str, place) if table.get("recipe") is not None else None
        changed = self.typed(table, "changes", Mapping, place, {})
        self.check_keys(changed, CHANGES, *place, "changes")
        return ZooPlan(
            None, self.typed(table, "architecture", str, place), self.typed(table, "data", str, place), seeds, recipe,
            dict(self.typed(table, "options", Mapping, place, {})),
            {**changed, **{key: self.typed(table, key, changes[key], place) for key in sorted(changes.keys() & table)}},
        )  # fmt: skip

    def part(self, table: Any, number: int, zoos: Mapping[str, ZooPlan]) -> Part:
        place = ("parts", number)
        self.check_keys(table, {f.name for f in fields(Part)}, *place)
        names = self.typed(table, "zoos", list | tuple, place, list(zoos))
        if not names:
            self.refuse("zoos is empty. Leave it out to use all zoos.", *place, "zoos")
        for name in names:
            if not isinstance(name, str) or name not in zoos:
                self.refuse(unknown_name("zoo", str(name), zoos), *place, "zoos")
        pairs = table.get("pairs", "all")
        if not isinstance(pairs, str):
            pairs = self.typed_list(table, "pairs", list | tuple, place)
            for pair in pairs:
                if len(pair) != 2 or not all(isinstance(seed, int) for seed in pair):
                    self.refuse(f"A pair must be two seeds, such as [0, 1], but is {pair!r}.", *place, "pairs")
            pairs = tuple((a, b) for a, b in pairs)
            if table.get("networks"):
                self.refuse("networks has no effect beside a list of pairs. Remove it.", *place, "pairs")
        elif pairs not in PAIRS:
            self.refuse(
                f'pairs must be "all", "neighbours" or a list such as [[0, 1]], but is {pairs!r}.', *place, "pairs"
            )
        grid = self.typed(table, "grid", Mapping, place, {})
        for key, values in grid.items():
            if not isinstance(values, list | tuple) or not values:
                self.refuse(f"grid.{key} must be a list of at least one value, but is {values!r}.", *place, "grid")
        repeats = self.typed(table, "repeats", int, place, 1)
        if repeats < 1:
            self.refuse(f"repeats must be at least 1, but is {repeats}.", *place, "repeats")
        return Part(
            self.typed(table, "verb", str, place), tuple(names), self.typed_list(table, "networks", int, place), pairs,
            self.typed_list(table, "layers", str, place), dict(self.typed(table, "options", Mapping, place, {})),
            {key: tuple(values) for key, values in grid.items()}, repeats,
        )  # fmt: skip


def _is(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _type_name(kind: Any) -> str:
    return " or ".join(dict.fromkeys(TYPE_NAMES.get(one, one.__name__) for one in getattr(kind, "__args__", (kind,))))


class TomlLines:
    """Line numbers of a TOML file by path, such as ("parts", 1, "verb").

    Example:
        >>> lines = TomlLines('name = "a"\\n\\n[[parts]]\\nverb = "fold"\\n\\n[[parts]]\\nverb = "compare"')
        >>> lines.of("parts", 1, "verb"), lines.of("parts", 1, "beta"), lines.of("zoos")
        (7, 6, 1)
    """

    def __init__(self, text: str) -> None:
        self._lines: dict[TomlPath, int] = {(): 1}
        counts: dict[TomlPath, int] = {}
        head: TomlPath = ()
        for number, line in enumerate(text.splitlines(), 1):
            if match := _ENTRY.match(line):
                name = self._path(match[1], counts)
                counts[name] = counts.get(name, -1) + 1
                head = (*name, counts[name])
                self._lines.setdefault(name, number)
                self._lines[head] = number
            elif match := _TABLE.match(line):
                head = self._path(match[1], counts)
                self._lines.setdefault(head, number)
            elif match := _KEY.match(line):
                self._lines.setdefault((*head, *_split_key(match[1])), number)

    @staticmethod
    def _path(dotted: str, counts: dict[TomlPath, int]) -> TomlPath:
        """The path that a header names: below a list of tables, it is in the last table so far."""
        path: TomlPath = ()
        names = _split_key(dotted)
        for i, name in enumerate(names, 1):
            path = (*path, name)
            if path in counts and i < len(names):
                path = (*path, counts[path])
        return path

    def of(self, *path: str | int) -> int:
        """The line of a path, or of the nearest table around it."""
        while path not in self._lines:
            path = path[:-1]
        return self._lines[path]


def _split_key(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))
