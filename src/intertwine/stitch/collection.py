"""`Stitches`: the stitches of one or several runs as a table of stitch points and families."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from math import isfinite
from typing import TYPE_CHECKING, Any, overload

from intertwine.errors import InputError, unknown_name
from intertwine.lazy import data_frame
from intertwine.stitch.result import Stitch, draw_penalties, summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure


#: The numbers that stitches can be ranked by; whether larger is better.
RANKED = {
    "accuracy": True, "relative_accuracy": True, "best_accuracy": True,
    "penalty": False, "best_penalty": False, "loss": False, "cross_entropy": False,
}  # fmt: skip
#: Marks in the table: a training that diverged, and a stitch point with skip connections around it.
DIVERGED, SKIPPED = "!", "*"


class Stitches(Sequence[Stitch]):
    """Stitches in the order of the request.

    By number: `found[0]`; by place and family, if there is exactly one: `found["layer2", "relu"]`; by anything else:
    `found.select(family="relu", seed=3)`.
    """

    def __init__(self, stitches: Iterable[Stitch]) -> None:
        self._stitches = tuple(stitches)

    def __len__(self) -> int:
        return len(self._stitches)

    def __iter__(self) -> Iterator[Stitch]:
        return iter(self._stitches)

    @overload
    def __getitem__(self, key: int) -> Stitch: ...
    @overload
    def __getitem__(self, key: slice) -> Stitches: ...
    @overload
    def __getitem__(self, key: tuple[str | tuple[str, str], str]) -> Stitch: ...
    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int):
            return self._stitches[key]
        if isinstance(key, slice):
            return Stitches(self._stitches[key])
        if not (isinstance(key, tuple) and len(key) == 2 and isinstance(key[1], str)):
            raise InputError(f"Stitches have no item {key!r}. Give a number, a slice, or [place, family].")
        found = self.select(place=key[0], family=key[1])
        if len(found) > 1:
            raise InputError(
                f"{len(found)} stitches are at {key[0]!r} by {key[1]!r}. Select one with .select(place={key[0]!r}, "
                f"family={key[1]!r}, fit=..., seed=...) or a setting that differs."
            )
        return found[0]

    @property
    def places(self) -> tuple[str, ...]:
        """The stitch points as text, each once."""
        return tuple(dict.fromkeys(stitch.place for stitch in self))

    @property
    def kinds(self) -> tuple[str, ...]:
        """The families, each once, with the fit and settings in which stitches of one family differ; seeds aside."""
        return tuple(dict.fromkeys(self._labels.values()))

    def named(self) -> Iterator[tuple[Stitch, str]]:
        """Every stitch with its kind."""
        return ((stitch, self._labels[id(stitch)]) for stitch in self)

    @cached_property
    def _labels(self) -> dict[int, str]:
        """Id of a stitch → the head of its column."""
        several = len({stitch.fit for stitch in self}) > 1
        groups: dict[tuple[str, str], list[Stitch]] = {}
        for stitch in self:
            groups.setdefault((stitch.family, stitch.fit), []).append(stitch)
        found = {}
        for (family, fit), group in groups.items():
            names = dict.fromkeys(name for stitch in group for name in stitch.settings if name != "seed")
            first = group[0].settings
            differing = [n for n in names if any(stitch.settings.get(n) != first.get(n) for stitch in group)]
            for stitch in group:
                words = [f"{name}={stitch.settings.get(name)}" for name in differing]
                found[id(stitch)] = " ".join([family, *([fit] if several else []), *words])
        return found

    @property
    def families(self) -> tuple[str, ...]:
        """The families, each once."""
        return tuple(dict.fromkeys(stitch.family for stitch in self))

    def select(
        self, place: str | tuple[str, str] | None = None, family: str | None = None, fit: str | None = None,
        **settings: Any,
    ) -> Stitches:  # fmt: skip
        """The stitches at a place, of a family, with a fit or some settings.

        Args:
            place: as in `.places`, or the paths in both networks. family, fit: as of a stitch. settings: by name.

        Raises:
            InputError: no stitch matches.
        """
        if isinstance(place, tuple):
            place = place[0] if place[0] == place[1] else f"{place[0]} into {place[1]}"
        wanted = {"place": place, "family": family, "fit": fit}
        for name, value, known in (("place", place, self.places), ("family", family, self.families)):
            if value is not None and value not in known:
                raise InputError(unknown_name(name, value, known or ["none"]))
        found = [
            stitch
            for stitch in self
            if all(value is None or getattr(stitch, name) == value for name, value in wanted.items())
            and all(name in stitch.settings and stitch.settings[name] == value for name, value in settings.items())
        ]
        if not found:
            given = {name: value for name, value in wanted.items() if value is not None} | settings
            raise InputError(f"None of the {len(self)} stitches has {given}. Select by less, or see .to_rows().")
        return Stitches(found)

    def best(self, by: str = "accuracy") -> Stitch:
        """The best stitch by one of its numbers: accuracy, penalty, relative_accuracy, loss, cross_entropy, ..."""
        if by not in RANKED:
            raise InputError(unknown_name("number to rank by", by, RANKED))
        values = [(value, i) for i, stitch in enumerate(self) if (value := number(stitch, by)) is not None]
        if not values:
            advice = "Rank by 'loss'." if self._unscored is None else f"They are not scored: {self._unscored}"
            raise InputError(f"None of the {len(self)} stitches has a number for {by!r}. {advice}")
        sign = 1 if RANKED[by] else -1
        return self._stitches[max(values, key=lambda pair: (sign * pair[0], -pair[1]))[1]]

    @property
    def _unscored(self) -> str | None:
        """The first reason for which a stitch has no scores."""
        return next((stitch.scores.unscored for stitch in self if stitch.scores.unscored is not None), None)

    def to_rows(self) -> list[dict[str, Any]]:
        """One row per stitch, as plain data: `Stitch.to_dict`, flat, without the history."""
        return [_flat(stitch.to_dict()) for stitch in self]

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {"stitches": [stitch.to_dict() for stitch in self]}

    def to_frame(self) -> Any:
        """The rows as a polars data frame (`pip install 'intertwine[frames]'`)."""
        return data_frame(self.to_rows())

    def table(self, what: str | None = None) -> dict[tuple[str, str], list[float]]:
        """(place, kind) → a number of each stitch; by default the first existing of penalty, accuracy and loss."""
        chosen = what or self._what()
        found: dict[tuple[str, str], list[float]] = {}
        for stitch, kind in self.named():
            if (value := number(stitch, chosen)) is not None:
                found.setdefault((stitch.place, kind), []).append(value)
        return found

    def _what(self) -> str:
        return next(
            (what for what in ("penalty", "accuracy") if any(number(s, what) is not None for s in self)), "loss"
        )

    def plot(self, what: str | None = None) -> Figure:
        """Penalties per place, one line per kind; whiskers are one standard deviation over several stitches.

        A star marks a place inside a residual block, whose skip connection goes around the stitch.
        """
        starred = {stitch.place: _starred(stitch) for stitch in self}
        table = {(starred[place], kind): values for (place, kind), values in self.table(what).items()}
        return draw_penalties(table, (what or self._what()).replace("_", " "))

    def __repr__(self) -> str:
        head, *lines = self.words()
        return "\n".join([f"Stitches({head})", *lines])

    def words(self) -> list[str]:
        """The count, the table line by line, and notes."""
        if not self:
            return ["none"]
        what = self._what()
        table = self.table(what)
        diverged = {(stitch.place, kind) for stitch, kind in self.named() if stitch.diverged is not None}
        lines = [["", *self.kinds]]
        for place in self.places:
            cells = [_cell(table.get((place, kind)), (place, kind) in diverged) for kind in self.kinds]
            lines.append([_starred(next(s for s in self if s.place == place)), *cells])
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        drawn = [
            "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines
        ]
        several = ", mean ± deviation" if max(map(len, table.values()), default=1) > 1 else ""
        notes = [f"{DIVERGED} training diverged: see .diverged"] if diverged else []
        if any(_starred(stitch).endswith(SKIPPED) for stitch in self):
            notes.append(f"{SKIPPED} a skip connection goes around the stitch")
        if self._unscored is not None:
            notes.append(f"not scored: {self._unscored}")
        count = f"{len(self)} stitch{'es' if len(self) > 1 else ''}"
        return [f"{count}; {what}{several}", *drawn, *notes]


def number(stitch: Stitch, name: str) -> float | None:
    """A number of a stitch by its name, or None."""
    value = stitch.scores.loss if name == "loss" else getattr(stitch, name)
    return None if value is None or not isfinite(value) else float(value)


def _starred(stitch: Stitch) -> str:
    return stitch.place + (SKIPPED if stitch.point.skip != "none" else "")


def _cell(values: Sequence[float] | None, diverged: bool) -> str:
    mark = DIVERGED if diverged else ""
    if not values:
        return f"–{mark}"
    mean, spread = summary(values)
    return f"{mean:.4f}{mark}" if len(values) == 1 else f"{mean:.4f} ± {spread:.4f}{mark}"


def _flat(found: dict[str, Any]) -> dict[str, Any]:
    """Agreement, closeness and settings as columns of their own; the history is left out."""
    nested = {"agreement": "", "closeness": "closeness_", "settings": ""}
    row = {name: value for name, value in found.items() if name not in (*nested, "history")}
    for name, head in nested.items():
        row |= {f"{head}{key}": value for key, value in (found[name] or {}).items() if f"{head}{key}" not in row}
    return row
