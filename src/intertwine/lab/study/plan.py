"""The plan of a study, read from TOML or plain data and validated with line numbers."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import combinations
from pathlib import Path
from typing import Any, NoReturn

from intertwine.errors import InputError, did_you_mean
from intertwine.lab.zoo.recipe import Recipe
from intertwine.lab.zoo.recipe import seeds as read_seeds

# ----------------------------------------------------------------------------------------------------
# Lines: where in a TOML file a table or a key stands, so that a refused plan can say which line to change.


_TABLE = re.compile(r"\s*\[([^\[\]]+)\]\s*(#.*)?$")
_ENTRY = re.compile(r"\s*\[\[([^\[\]]+)\]\]\s*(#.*)?$")
_KEY = re.compile(r"\s*([\w.\"'-]+)\s*=")
TomlPath = tuple[str | int, ...]


class TomlLines:
    """Line numbers by place, such as ("parts", 1, "verb"); a place that is not there has that of what it is in.

    Example:
        >>> lines = TomlLines('name = "a"\\n\\n[[parts]]\\nverb = "fold"\\n\\n[[parts]]\\nverb = "compare"')
        >>> lines.of("parts", 1, "verb"), lines.of("parts", 1, "beta"), lines.of("zoos")
        (7, 6, 1)
    """

    def __init__(self, text: str) -> None:
        self._found: dict[TomlPath, int] = {(): 1}
        counts: dict[TomlPath, int] = {}
        head: TomlPath = ()
        for number, line in enumerate(text.splitlines(), 1):
            if match := _ENTRY.match(line):
                name = self._within(match[1], counts)
                counts[name] = counts.get(name, -1) + 1
                head = (*name, counts[name])
                self._found.setdefault(name, number)
                self._found[head] = number
            elif match := _TABLE.match(line):
                head = self._within(match[1], counts)
                self._found.setdefault(head, number)
            elif match := _KEY.match(line):
                self._found.setdefault((*head, *_parts(match[1])), number)

    @staticmethod
    def _within(dotted: str, counts: dict[TomlPath, int]) -> TomlPath:
        """The place a header names: behind the name of a list of tables it is in the last of them."""
        place: TomlPath = ()
        names = _parts(dotted)
        for i, name in enumerate(names):
            place = (*place, name)
            if place in counts and i < len(names) - 1:
                place = (*place, counts[place])
        return place

    def of(self, *place: str | int) -> int:
        """The line of a place, or of the nearest thing around it."""
        while place not in self._found:
            place = place[:-1]
        return self._found[place]


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))


# ----------------------------------------------------------------------------------------------------
# Plans: which networks a study looks at, with which verbs and options. A TOML file, or the same as dataclasses.
#
#     name = "digits"
#
#     [zoos.small]                      # trained into the study's folder if it is not there
#     architecture = "mlp"
#     data = "digits"
#     seeds = "0:3"
#     epochs = 5
#
#     [zoos.mine]                       # trained already
#     folder = "zoos/myrtle"
#
#     [[parts]]
#     verb = "barrier"
#     zoos = ["small"]
#     pairs = "all"                     # or "neighbours", or [[0, 1]], by seeds
#     options = { points = 5 }          # for every task
#     grid = { method = ["none", "weights"] }    # one task for each
#     repeats = 1
#
# A mistake is told with its line, before anything runs.


PAIRS = ("all", "neighbours")
#: What a plan may change of a recipe.
CHANGES = {entry.name for entry in fields(Recipe)} - {"name", "source"}
#: Kinds of values in words, as somebody knows them who writes TOML.
KINDS: dict[type, str] = {
    dict: "a table", Mapping: "a table", list: "a list", tuple: "a list", str: "a text", int: "a whole number",
    float: "a number",
}  # fmt: skip


@dataclass(frozen=True)
class ZooPlan:
    """Networks of a study: those in a folder, or how to train them.

    Attributes:
        folder: of networks that are there. architecture, data, seeds, recipe, options, changes: how to train them, as
            `zoo.train` takes them; `changes` are those to the recipe, such as epochs.
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
        verb: see `intertwine.study.verbs`. zoos: by name. networks: seeds, all where none are named.
        pairs: of seeds, for verbs that look at two: "all", "neighbours" (the first with the second, …), or a list.
        layers: module paths, for verbs that look at layers. options: for all tasks. grid: option → its values, crossed.
        repeats: how often, each with a seed of its own.
    """

    verb: str
    zoos: tuple[str, ...]
    networks: tuple[int, ...] = ()
    pairs: str | tuple[tuple[int, int], ...] = "all"
    layers: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    grid: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    repeats: int = 1

    def chosen(self, seeds: Sequence[int]) -> list[int]:
        """The networks of a zoo with these seeds that this part looks at one by one."""
        return list(self.networks or seeds)

    def paired(self, seeds: Sequence[int]) -> list[tuple[int, int]]:
        """The pairs of networks of a zoo with these seeds.

        >>> part = Part("barrier", ("small",), pairs="neighbours")
        >>> part.paired([0, 1, 2, 3])
        [(0, 1), (2, 3)]
        """
        if not isinstance(self.pairs, str):
            return list(self.pairs)
        chosen = self.chosen(seeds)
        if self.pairs == "all":
            return list(combinations(chosen, 2))
        return list(zip(chosen[::2], chosen[1::2], strict=False))


@dataclass(frozen=True)
class Plan:
    """A study: its name, zoos by name, and parts."""

    name: str
    zoos: Mapping[str, ZooPlan]
    parts: tuple[Part, ...]
    #: The number of a part, or the name of a zoo → its line in the file.
    lines: Mapping[int | str, int] = field(default_factory=dict, compare=False, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, which `plan_of` reads."""
        found = asdict(self)
        del found["lines"]
        return found


def read_plan(path: str | Path) -> Plan:
    """A plan from a TOML file.

    Raises:
        InputError: no such file, no TOML, or a plan that says something there is not; with the line.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"The plan {path} was asked for and cannot be read ({error.strerror}). Give the path of a TOML file."
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(f"The plan {path} is no text ({error}). Give the path of a TOML file in UTF-8.") from error
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"The plan {path} is no TOML: {error}. Mend that line.") from error
    except RecursionError as error:
        raise InputError(f"The plan {path} has lists or tables nested too deeply. Write it flat.") from error
    return plan_of(data, path.name, TomlLines(text))


def plan_of(data: Mapping[str, Any], source: str = "the plan", lines: TomlLines | None = None) -> Plan:
    """A plan from plain data.

    Example:
        >>> part = {"verb": "accuracy", "zoos": ["z"]}
        >>> plan = plan_of({"name": "a", "zoos": {"z": {"folder": "zoos/z"}}, "parts": [part]})
        >>> plan.parts[0].verb, plan_of(plan.to_dict()) == plan
        ('accuracy', True)
    """
    reader = _Reader(source, lines)
    reader.only(data, {"name", "zoos", "parts"})
    name = reader.typed(data, "name", str, ())
    zoos = {key: reader.zoo(entry, key) for key, entry in reader.typed(data, "zoos", dict, ()).items()}
    parts = tuple(reader.part(entry, i, zoos) for i, entry in enumerate(reader.typed(data, "parts", list | tuple, ())))
    if not zoos or not parts:
        reader.refuse("it needs at least one zoo ([zoos.NAME]) and one part ([[parts]])")
    places: dict[int | str, int] = {i: reader.line("parts", i) for i in range(len(parts))}
    places |= {name: reader.line("zoos", name) for name in zoos}
    return Plan(name, zoos, parts, places if lines else {})


class _Reader:
    """Reads the tables of a plan, and refuses what it does not know with the line it stands in."""

    def __init__(self, source: str, lines: TomlLines | None) -> None:
        self.source, self.lines = source, lines

    def line(self, *place: str | int) -> int:
        return self.lines.of(*place) if self.lines else 0

    def refuse(self, why: str, *place: str | int) -> NoReturn:
        where = f", line {self.line(*place)}" if self.lines else ""
        raise InputError(f"{self.source}{where}: {why}.")

    def only(self, table: Any, known: set[str], *place: str | int) -> None:
        if not isinstance(table, Mapping):
            self.refuse(f"a table was expected, and {table!r} is there", *place)
        for key in table:
            if key not in known:
                said = did_you_mean(str(key), known)
                self.refuse(f"there is no {key!r} here. {said}Known are {', '.join(sorted(known))}", *place, key)

    def typed(
        self, table: Mapping[str, Any], key: str, kind: Any, place: tuple[str | int, ...], default: Any = None
    ) -> Any:
        value = table.get(key, default)
        if not isinstance(value, kind) or isinstance(value, bool):
            what = "is missing" if key not in table else f"is {value!r}"
            self.refuse(f"{key} {what}; it must be {_named(kind)}", *place, key)
        return value

    def many(self, table: Mapping[str, Any], key: str, kind: Any, place: tuple[str | int, ...]) -> tuple[Any, ...]:
        """A list whose entries are all of one kind."""
        values = self.typed(table, key, list | tuple, place, ())
        for value in values:
            if not isinstance(value, kind) or isinstance(value, bool):
                self.refuse(f"{key} holds {value!r}; its entries must be {_named(kind)}", *place, key)
        return tuple(values)

    def pair(self, value: Sequence[Any], *place: str | int) -> tuple[int, int]:
        if len(value) != 2 or not all(isinstance(seed, int) for seed in value):
            self.refuse(f"pairs holds {value!r}; a pair is two seeds, such as [0, 1]", *place)
        return value[0], value[1]

    def zoo(self, table: Any, name: str) -> ZooPlan:
        place = ("zoos", name)
        kinds: dict[str, Any] = {"epochs": int, "batch": int, "rate": int | float, "spawn": int}
        self.only(table, {f.name for f in fields(ZooPlan)} | kinds.keys(), *place)
        if ("folder" in table and table["folder"] is not None) == bool(table.get("architecture")):
            self.refuse(f"zoo {name!r} needs either a folder, or an architecture to train", *place)
        if table.get("folder") is not None:
            for key in table:
                if key != "folder" and table[key]:
                    self.refuse(f"zoo {name!r} is read from a folder, so {key} says nothing. Leave it out", *place, key)
            return ZooPlan(folder=self.typed(table, "folder", str, place))
        given = self.typed(table, "seeds", str | list | tuple, place, "")
        seeds = tuple(read_seeds(given)) if isinstance(given, str) and given else self.many(table, "seeds", int, place)
        if not seeds:
            self.refuse(f'zoo {name!r} has no seeds; write seeds = "0:4" for four networks', *place)
        recipe = self.typed(table, "recipe", str, place) if table.get("recipe") is not None else None
        self.only(self.typed(table, "changes", Mapping, place, {}), CHANGES, *place, "changes")
        return ZooPlan(
            None, self.typed(table, "architecture", str, place), self.typed(table, "data", str, place), seeds, recipe,
            dict(self.typed(table, "options", Mapping, place, {})),
            dict(self.typed(table, "changes", Mapping, place, {}))
            | {key: self.typed(table, key, kinds[key], place) for key in sorted(kinds.keys() & table.keys())},
        )  # fmt: skip

    def part(self, table: Any, number: int, zoos: Mapping[str, ZooPlan]) -> Part:
        place = ("parts", number)
        self.only(table, {f.name for f in fields(Part)}, *place)
        names = self.typed(table, "zoos", list | tuple, place, list(zoos))
        if not names:
            self.refuse("it names no zoo; leave zoos out to look at all of them", *place, "zoos")
        for name in names:
            if not isinstance(name, str) or name not in zoos:
                self.refuse(
                    f"there is no zoo {name!r}. {did_you_mean(str(name), zoos)}Zoos: {', '.join(zoos)}", *place, "zoos"
                )
        pairs = table.get("pairs", "all")
        if isinstance(pairs, str) and pairs not in PAIRS:
            self.refuse(f'pairs = {pairs!r}; write "all", "neighbours" or a list such as [[0, 1]]', *place, "pairs")
        if not isinstance(pairs, str):
            pairs = tuple(self.pair(one, *place, "pairs") for one in self.many(table, "pairs", list | tuple, place))
            if table.get("networks"):
                self.refuse("networks and a list of pairs both say which networks. Leave networks out", *place, "pairs")
        grid = self.typed(table, "grid", Mapping, place, {})
        for key, values in grid.items():
            if not isinstance(values, list | tuple) or not values:
                self.refuse(f"grid.{key} must be a list of at least one value", *place, "grid")
        repeats = self.typed(table, "repeats", int, place, 1)
        if repeats < 1:
            self.refuse(f"repeats = {repeats}; it must be 1 or more", *place, "repeats")
        return Part(
            self.typed(table, "verb", str, place), tuple(names), self.many(table, "networks", int, place), pairs,
            self.many(table, "layers", str, place), dict(self.typed(table, "options", Mapping, place, {})),
            {key: tuple(values) for key, values in grid.items()}, repeats,
        )  # fmt: skip


def _named(kind: Any) -> str:
    kinds = getattr(kind, "__args__", (kind,))
    return " or ".join(dict.fromkeys(KINDS.get(one, one.__name__) for one in kinds))
