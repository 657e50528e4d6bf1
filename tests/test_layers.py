"""The rooms of the package import downward only, and the rooms of one floor never in a circle."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).parents[1] / "src"
PACKAGE = "intertwine"

# From the ground up. Rooms of one floor may use each other as long as no circle of rooms arises.
FLOORS = (
    {"errors", "files", "frames", "lazy_names", "reals", "shapes", "version"},
    {"graph"},
    {"checkpoint", "symmetry"},
    {"canonical", "features"},
    {"align", "connect", "measure", "stitch", "fold", "inspect"},
    {"zoo", "models"},
    {"study"},
    {"report"},
    {"reproduce"},
    {"commands"},
    {"cli"},
)
FLOOR = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}
ROOT = "__init__"  # the public names: reaches every room, and no room reaches back
TESTING = "testing"  # the conformance suites: reach every room below study, and no room reaches them


class Edge(NamedTuple):
    """One import that leaves its room."""

    source: str
    target: str
    where: str


def room_of(dotted: str) -> str:
    """The room of a dotted name: `intertwine.graph.rules.conv` is in graph, `intertwine.Symmetry` in the root."""
    rooms = [part for part in dotted.split(".")[1:2] if part in FLOOR or part == TESTING]
    return rooms[0] if rooms else ROOT


def imported(node: ast.AST, package: list[str]) -> Iterator[str]:
    """The dotted names that one statement inside `package` imports."""
    match node:
        case ast.Import():
            yield from (alias.name for alias in node.names)
        case ast.ImportFrom():
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = [*base, *([node.module] if node.module else [])]
            yield from (".".join([*origin, alias.name]) for alias in node.names)


def edges_of(code: str, module: str, package: str) -> list[Edge]:
    """Every import of one module that reaches another room.

    Imports inside functions and under TYPE_CHECKING count too: they lean on the other room just as much.
    """
    names = (
        (name, getattr(node, "lineno", 0))
        for node in ast.walk(ast.parse(code))
        for name in imported(node, package.split("."))
        if name.split(".")[0] == PACKAGE
    )
    source = room_of(module)
    edges = [Edge(source, room_of(name), f"{module}, line {line}") for name, line in names]
    return [edge for edge in edges if edge.target != edge.source]


def is_upward(edge: Edge) -> bool:
    """Whether an import breaks the order of the floors."""
    if edge.source == ROOT:
        return False
    if edge.target in (ROOT, TESTING):
        return True
    if edge.source == TESTING:
        return FLOOR[edge.target] >= FLOOR["study"]
    return FLOOR[edge.target] > FLOOR[edge.source]


def all_edges() -> list[Edge]:
    """The imports between rooms, over the whole package."""
    edges = []
    for file in sorted((SOURCE / PACKAGE).rglob("*.py")):
        parts = file.relative_to(SOURCE).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        edges += edges_of(file.read_text(encoding="utf-8"), module, ".".join(parts[:-1]))
    return edges


def test_imports_run_downward() -> None:
    upward = [f"{edge.where}: {edge.source} imports {edge.target}" for edge in all_edges() if is_upward(edge)]
    assert not upward, "\n".join(["these imports climb; move the idea down or its caller up:", *upward])


def test_rooms_form_no_circle() -> None:
    uses: dict[str, set[str]] = {}
    for edge in all_edges():
        if edge.source != ROOT:
            uses.setdefault(edge.source, set()).add(edge.target)
    TopologicalSorter(uses).prepare()  # raises CycleError, which names the circle


def test_every_room_has_a_floor() -> None:
    entries = (SOURCE / PACKAGE).iterdir()
    rooms = {entry.stem for entry in entries if entry.suffix == ".py" or any(entry.rglob("*.py"))}
    assert {ROOT, "errors", "graph", "symmetry", "cli"} <= rooms
    assert rooms <= {ROOT, TESTING, *FLOOR}, "give the new room a floor in FLOORS"


@pytest.mark.parametrize(
    ("module", "code", "upward"),
    [
        ("intertwine.graph.capture", "from intertwine.errors import CaptureError", False),
        ("intertwine.graph.capture", "from ..errors import CaptureError", False),
        ("intertwine.graph.capture", "from . import axes", False),
        ("intertwine.graph.capture", "import inspect", False),
        ("intertwine.graph.capture", "import intertwine.symmetry.wire", True),
        ("intertwine.graph.capture", "from intertwine import symmetry", True),
        ("intertwine.graph.capture", "from .. import align", True),
        ("intertwine.graph.capture", "def f():\n    from ..zoo import build", True),
        ("intertwine.graph.capture", "from intertwine import Symmetry", True),
        ("intertwine.graph.capture", "import intertwine", True),
        ("intertwine.connect.merge", "from intertwine.align import align", False),
        ("intertwine.canonical.sort", "from intertwine.align import align", True),
        ("intertwine.testing.group", "from intertwine.zoo import build", False),
        ("intertwine.testing.group", "from intertwine.study import run", True),
        ("intertwine.cli", "from intertwine.report import write", False),
        ("intertwine.cli", "from intertwine.testing import check_group", True),
    ],
)
def test_an_upward_import_is_seen(module: str, code: str, upward: bool) -> None:
    edges = edges_of(code, module, module.rpartition(".")[0])
    assert any(is_upward(edge) for edge in edges) is upward
