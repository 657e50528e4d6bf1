"""The rooms of the package import downward only, and the rooms of one floor never in a circle."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import intertwine

# -- The rooms of the package import downward only, and the rooms of one floor never in a circle --


SOURCE = Path(__file__).parents[1] / "src"
PACKAGE = "intertwine"

# From the ground up. Rooms of one floor may use each other as long as no circle of rooms arises.
FLOORS = (
    {"argument_types", "errors", "figures", "files", "lazy", "version"},
    {"graph"},
    {"symmetry"},
    {"data", "checkpoints"},
    {"canonical"},
    {"align", "connect", "measure", "stitch", "fold", "inspect"},
    {"testing"},
    {"lab.zoo"},
    {"lab.study", "lab.measure_benchmark"},
    {"lab.report"},
    {"lab.papers"},
    {"cli"},
)
FLOOR = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}
ROOT = "__init__"  # the public names: reaches every room, and no room reaches back


class Edge(NamedTuple):
    """One import that leaves its room."""

    source: str
    target: str
    where: str


def room_of(dotted: str) -> str:
    """The room of a dotted name: `intertwine.graph.rules.conv` is in graph, `intertwine.Symmetry` in the root."""
    parts = dotted.split(".")[1:]
    return next((room for room in (".".join(parts[:2]), *parts[:1]) if room in FLOOR), ROOT)


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
    return edge.target == ROOT or FLOOR[edge.target] > FLOOR[edge.source]


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
    lab = SOURCE / PACKAGE / "lab"
    entries = [entry for entry in (SOURCE / PACKAGE).iterdir() if entry != lab]
    rooms = {entry.stem for entry in entries if entry.suffix == ".py" or any(entry.rglob("*.py"))}
    rooms |= {f"lab.{entry.stem}" for entry in lab.iterdir() if any(entry.rglob("*.py"))}
    assert {ROOT, "errors", "graph", "symmetry", "cli", "lab.zoo"} <= rooms
    assert rooms <= {ROOT, *FLOOR}, "give the new room a floor in FLOORS"


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
        ("intertwine.graph.capture", "def f():\n    from ..lab.zoo import build", True),
        ("intertwine.graph.capture", "from intertwine import Symmetry", True),
        ("intertwine.graph.capture", "import intertwine", True),
        ("intertwine.connect.merge", "from intertwine.align import align", False),
        ("intertwine.canonical.sort", "from intertwine.align import align", True),
        ("intertwine.testing.group", "from intertwine.align.align import align", False),
        ("intertwine.testing.group", "from intertwine.lab.zoo import build", True),
        ("intertwine.cli", "from intertwine.lab.report import write", False),
        ("intertwine.lab.zoo.folder", "from intertwine.lab import study", True),
    ],
)
def test_an_upward_import_is_seen(module: str, code: str, upward: bool) -> None:
    edges = edges_of(code, module, module.rpartition(".")[0])
    assert any(is_upward(edge) for edge in edges) is upward


# -- Optional packages stay optional: `import intertwine` loads none of them, and `intertwine --help` not even torch --


OPTIONAL = {
    *("matplotlib", "pandas", "plotly", "polars", "ray"),
    *("rich", "sklearn", "timm", "torchvision", "transformers"),
}
REACH_EVERY_PUBLIC_NAME = """\
import intertwine
for name in dir(intertwine):
    if not name.startswith("_"):
        getattr(intertwine, name)
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that reports, on its standard error, every module it imports."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done


def packages(done: subprocess.CompletedProcess[str]) -> set[str]:
    """The top-level packages that a run imported: the last column of each line of `-X importtime`."""
    lines = (line for line in done.stderr.splitlines() if line.startswith("import time:"))
    return {line.rpartition("|")[2].strip().split(".")[0] for line in lines}


def test_imports_are_seen() -> None:
    assert {"json", "torch", "sympy"} & packages(run("-c", "import json")) == {"json"}


def test_import_loads_no_optional_package() -> None:
    loaded = packages(run("-c", "import intertwine"))
    assert "intertwine" in loaded
    assert loaded & OPTIONAL == set()


def test_no_public_name_needs_an_optional_package() -> None:
    loaded = packages(run("-c", REACH_EVERY_PUBLIC_NAME))
    assert "torch" in loaded, "dir(intertwine) should list the public names, those loaded on first use included"
    assert loaded & OPTIONAL == set()


@pytest.mark.parametrize("command", [["--help"], ["demo", "--help"]], ids=" ".join)
def test_help_does_not_import_torch(command: list[str]) -> None:
    done = run("-m", "intertwine.cli", *command)
    assert "usage:" in done.stdout
    assert packages(done) & {"torch", "scipy", *OPTIONAL - {"rich"}} == set()


def test_a_network_of_the_users_own_loads_no_zoo() -> None:
    done = run("-m", "intertwine.cli", "inspect", str(SOURCE.parent / "examples" / "residual.py") + ":net", "--json")
    assert '"wires"' in done.stdout
    assert "intertwine.symmetry.certify" in done.stderr
    assert "intertwine.lab.zoo" not in done.stderr


def test_the_verbs_load_no_kernels() -> None:
    done = run(
        "-c", "import intertwine.symmetry.certify, intertwine.checkpoints.load, intertwine.lab.report.wire_graph"
    )
    assert {"intertwine", "torch"} <= packages(done)
    assert "triton" not in packages(done)


# -- Public names: few at the top, those of the contract among them, the same ones for type checkers and for users --


#: What docs and users may rely on, whatever is moved behind it.
CONTRACT = set(
    """symmetry activation_group canonicalize fingerprint equivalent align align_many interpolate barrier connectivity
    merge measure measures compare stitch complexity fold rotation dissect guided_backprop features
    zoo study report""".split()
)
MOST = 40
LAZY = ("intertwine", "intertwine.lab.zoo", "intertwine.lab.study", "intertwine.lab.report")


def names_for_type_checkers(package: str) -> set[str]:
    """What stands under `if TYPE_CHECKING:` in a package's `__init__`."""
    tree = ast.parse(inspect.getsource(import_module(package)))
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name for node in imports for alias in node.names}


def test_the_top_level_is_small_and_holds_the_contract() -> None:
    names = {name for name in dir(intertwine) if not name.startswith("_")}
    assert names >= CONTRACT
    assert len(names) <= MOST, "what fewer users need is imported from its own module; see docs/api/index.md"


@pytest.mark.parametrize("package", LAZY)
def test_type_checkers_and_users_see_the_same_names(package: str) -> None:
    module = import_module(package)
    assert names_for_type_checkers(package) == set(dir(module))
    for name in dir(module):
        assert getattr(module, name).__name__.rpartition(".")[2] == name


@pytest.mark.parametrize("package", LAZY)
def test_a_name_that_is_not_there_is_said_as_python_says_it(package: str) -> None:
    with pytest.raises(AttributeError, match=f"^module '{package}' has no attribute 'nothing'$"):
        import_module(package).nothing  # noqa: B018


# -- The suite's own safety nets are up: shape checking of the package, warnings as errors, fixed seeds --


WRONG = '''
"""A module whose only function returns the wrong shape."""
from jaxtyping import Float
from torch import Tensor

def first(x: Float[Tensor, "rows columns"]) -> Float[Tensor, "columns"]:
    return x[:, 0]
'''


def test_the_package_is_checked_against_its_shape_annotations(tmp_path: Path) -> None:
    """A module named as if it were inside the package is instrumented, so its wrong shape is caught."""
    (tmp_path / "intertwine").mkdir()
    (tmp_path / "intertwine" / "wrong.py").write_text(WRONG)
    finder = next(f for f in sys.meta_path if type(f).__module__.startswith("jaxtyping"))
    spec = finder.find_spec("intertwine.wrong", [str(tmp_path / "intertwine")])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(Exception, match="first"):
        module.first(torch.zeros(2, 3))


def test_a_warning_is_an_error() -> None:
    with pytest.raises(UserWarning, match="look here"):
        warnings.warn("look here", stacklevel=1)


@pytest.mark.parametrize("turn", [1, 2])
def test_every_test_starts_from_the_same_seed(turn: int) -> None:
    expected = torch.rand(3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.rand(3), expected), f"turn {turn} found the global generator moved by another test"


@pytest.mark.models
@pytest.mark.parametrize("library", ["torchvision", "timm", "transformers"])
def test_model_libraries_can_be_imported(library: str) -> None:
    __import__(library)


# -- Every Python file of the project opens with a docstring that says what it is for --


ROOT_EVERY_FILE_SAYS_WHAT_IT_IS_FOR = Path(__file__).parents[1]
FOLDERS = ("src", "tests", "bench", "docs", "examples", "experiments")
FILES = sorted(file for folder in FOLDERS for file in (ROOT_EVERY_FILE_SAYS_WHAT_IT_IS_FOR / folder).rglob("*.py"))


def purpose(code: str) -> str:
    """The docstring of a module, or nothing."""
    return (ast.get_docstring(ast.parse(code)) or "").strip()


def test_the_files_are_found() -> None:
    assert Path(__file__) in FILES
    assert ROOT_EVERY_FILE_SAYS_WHAT_IT_IS_FOR / "src" / "intertwine" / "__init__.py" in FILES


@pytest.mark.parametrize(
    "file", FILES, ids=lambda file: file.relative_to(ROOT_EVERY_FILE_SAYS_WHAT_IT_IS_FOR).as_posix()
)
def test_opens_with_its_purpose(file: Path) -> None:
    assert len(purpose(file.read_text(encoding="utf-8")).split()) >= 3, "begin the file with a line on what it is for"


@pytest.mark.parametrize("code", ["", "x = 1", "# a comment", '"""  """'])
def test_a_silent_file_is_seen(code: str) -> None:
    assert purpose(code) == ""
