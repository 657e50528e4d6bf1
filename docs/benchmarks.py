"""Write docs/benchmarks.md: every number that was asked for, beside what was measured, from bench/results alone.

python docs/benchmarks.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
sys.path.insert(0, str(Path(__file__).parent))
from asked import alignment, engine, studies, verbs
from asked.row import RESULTS, Asked, Held, Line, read
from benches import ON_A_GPU
from machine import made_of

PAGE = Path(__file__).parent / "benchmarks.md"
ROOMS: dict[str, tuple[Asked, ...]] = engine.ROOMS | alignment.ROOMS | verbs.ROOMS | studies.ROOMS
HEADS = ("what", "asked", "measured", "peer or floor in the same run", "reached", "command")
PREFACE = """\
# Benchmarks

Every number that this project set out to reach, what was measured, and the command that measures it. The page is
written by `python docs/benchmarks.py`; each measured figure is read from a file in `bench/results`, none is typed.
A *peer* is another program on the same job, a *floor* the least that the job can take; both are of the same run as our
figure. `make bench` runs everything that the machine can run, from cheap to dear, and writes this page again;
`python bench/all.py --list` shows the list, `--only NAME` runs one. `PEERS` stands for the Python of another
environment, which has the peers. Under each table: on what and when it was measured, and how busy the machine was.
"""


def page(
    rooms: Mapping[str, Sequence[Asked]] = ROOMS, held: Sequence[Held] = studies.HELD, folder: Path = RESULTS
) -> str:
    """The whole page."""
    read_rooms = {room: [read(row, folder) for row in rows] for room, rows in rooms.items()}
    lines = [line for found in read_rooms.values() for line in found]
    parts = [PREFACE, _summary(lines)]
    parts += ["\n".join(_room(room, found, folder)) for room, found in read_rooms.items()]
    return "\n".join([*parts, *_held(held), *_short(lines)]) + "\n"


def _summary(lines: Sequence[Line]) -> str:
    bars = [line for line in lines if line.row.bar != inf]
    reached, short, open_ = (sum(line.reached is kind for line in bars) for kind in (True, False, None))
    return (
        f"Of {len(bars)} numbers with a bar {reached} are reached, {short} are not, and for {open_} there is no result "
        f"yet; the [last section](#short-of-what-was-asked-and-why) says why. "
        f"{len(lines) - len(bars)} more were asked for without a bar.\n"
    )


def _room(name: str, lines: Sequence[Line], folder: Path) -> Iterator[str]:
    yield f"## {name}\n"
    yield from _head(HEADS)
    for line in lines:
        cells = (line.row.what, line.row.asked, line.measured, line.beside, _word(line), f"`{line.row.source.command}`")
        yield _cells(cells)
    yield ""
    yield from _machines(lines, folder)
    yield ""


def _word(line: Line) -> str:
    if line.row.bar == inf and line.reached:
        return ""
    return {True: "yes", False: "**no**", None: "not known"}[line.reached]


def _machines(lines: Sequence[Line], folder: Path) -> Iterator[str]:
    """One line for all benchmarks of a room that were measured on the same machine, at the same time."""
    where: dict[str, list[str]] = {}
    for bench in {line.row.bench: line.row.source for line in lines}.values():
        file = folder / bench.file
        results = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        where.setdefault(made_of(results, bench.part, bench in ON_A_GPU), []).append(f"`{bench.name}`")
    yield from (f"- {', '.join(names)}: {machine}." for machine, names in where.items())


def _held(held: Sequence[Held]) -> Iterator[str]:
    yield "## Held by the tests\n"
    yield "No benchmark keeps these: a test fails where one of them is missed.\n"
    yield from _head(("what", "asked", "test"))
    yield from (_cells((one.what, one.asked, f"`{one.test}`")) for one in held)
    yield ""


def _short(lines: Iterable[Line]) -> Iterator[str]:
    yield "## Short of what was asked, and why\n"
    for line in lines:
        if not line.reached:
            found = line.measured if line.reached is None else f"measured {line.measured}"
            why = line.row.why or ("" if line.reached is None else "Not looked into yet.")
            yield f"- **{line.row.what}**: asked {line.row.asked}; {found}. {why}".rstrip()


def _head(names: Sequence[str]) -> Iterator[str]:
    yield _cells(names)
    yield "|---" * len(names) + "|"


def _cells(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
