"""Statistics of the source tree: sizes, imports, helpers, names, and the calls of one verb.

    python bench/house.py                              # the tree of this checkout
    python bench/house.py --trace                      # also the calls of each verb on a small ResNet-20
    python bench/house.py --tree DIR --json FILE       # another checkout; the numbers as JSON
    python bench/house.py --against FILE               # compared with stored numbers, as a Markdown table

Definitions. A *module* is a .py file of src/intertwine that is not an `__init__`. Its *room* is the folder below
src/intertwine, and the folder below that inside `lab`; files of the top folder are the room "(top)".

- lines: all lines of modules. Files under 60 lines are counted with the `__init__`s, all else is of modules alone.
- one importer: modules that exactly one other file of src names in an import (at any depth, also under TYPE_CHECKING).
- private functions used once: functions and methods whose name begins with one underscore. One is used once if its name
  stands once in its module (as a name or an attribute) besides its definition.
- imports: lines of import statements over those and the lines of code, without blank lines, comments and docstrings.
- duplicate classes: names of public top-level classes that more than one file defines.
- unreferenced: public top-level functions and classes whose name stands nowhere in src but in their definition: not as
  a name, attribute or import, and not in a string that is a dotted name or word. Functions with a decorator, which may
  register them, and those that the command line finds by their name (`run`, `main`, `add_arguments`) are left out.
- data: files that git tracks, by size. A data file is none of .py, .md, .toml, .txt, .cff, .yml, Makefile or LICENSE:
  pictures, results, style sheets and scripts.
- trace: functions of the package that are called while a verb runs once on its own, in one thread, after one run that
  imports everything. A call is across rooms if the nearest function of the package above it is in another room.
  Lambdas and comprehensions count, all of one kind in one function as one function more, and generators each time they
  go on; bodies of classes and modules, and what dataclasses write, do not count. Exports are calls of
  torch.export.export, model copies those of copy.deepcopy on a module outside of another copy, and cuts those of
  functions named by `--cuts`, which cut the weights into blocks. Python 3.12 and later call comprehensions of lists in
  place: compare runs of one version.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = "intertwine"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NO_DATA = {".py", ".md", ".toml", ".txt", ".cff", ".yml", ".yaml", ".typed", ".gitignore", ""}
FOUND_BY_NAME = {"run", "add_arguments", "main"}
WORD = re.compile(r"[\w.]+")


# -- the source --------------------------------------------------------------------------------------------------------


@dataclass
class Source:
    """One parsed file of the package."""

    name: str
    room: str
    text: str
    init: bool
    tree: ast.Module = field(repr=False)
    #: Every name and attribute in it, with its count.
    words: Counter[str] = field(default_factory=Counter, repr=False)

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())


def room_of(parts: tuple[str, ...]) -> str:
    """The room of a file, by its path below the package.

    >>> room_of(("align", "many.py")), room_of(("lab", "zoo", "train.py")), room_of(("errors.py",))
    ('align', 'lab/zoo', '(top)')
    """
    folders = parts[:-1]
    if not folders:
        return "(top)"
    return "/".join(folders[:2]) if folders[0] == "lab" else folders[0]


def sources(tree: Path) -> list[Source]:
    """All files of the package, in the order of their names."""
    top = tree / "src" / PACKAGE
    found = []
    for path in sorted(top.rglob("*.py")):
        below = path.relative_to(top).parts
        text = path.read_text(encoding="utf-8")
        stem = [PACKAGE, *below[:-1], *([] if path.stem == "__init__" else [path.stem])]
        source = Source(".".join(stem), room_of(below), text, path.stem == "__init__", ast.parse(text))
        source.words.update(_words(source.tree))
        found.append(source)
    return found


def _words(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


def importers(every: list[Source]) -> Mapping[str, set[str]]:
    """Module → the files that import it."""
    known = {source.name for source in every}
    found: dict[str, set[str]] = defaultdict(set)
    for source in every:
        for node in ast.walk(source.tree):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name if name in known else node.module for name in inner]
            for name in set(names) & known - {source.name}:
                found[name].add(source.name)
    return found


def private_functions(source: Source) -> Iterator[bool]:
    """For each private function and method of a file, whether it is used once."""
    for node in ast.walk(source.tree):
        if isinstance(node, FUNCTIONS) and node.name.startswith("_") and not node.name.startswith("__"):
            yield source.words[node.name] == 1


def code_and_imports(source: Source) -> tuple[int, int]:
    """The number of lines of code without imports, and of import statements.

    >>> text = "'''Words.'''\\nimport sys\\n\\n# more\\nx = 1\\n"
    >>> code_and_imports(Source("a", "(top)", text, False, ast.parse(text)))
    (1, 1)
    """
    docs, imports = set(), set()
    for node in ast.walk(source.tree):
        span = range(getattr(node, "lineno", 0), (getattr(node, "end_lineno", None) or 0) + 1)
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.update(span)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docs.update(span)
    lines = enumerate(source.text.splitlines(), start=1)
    kept = {i for i, line in lines if line.strip() and not line.strip().startswith("#")} - docs
    return len(kept - imports), len(kept & imports)


def definitions(source: Source) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Public functions and classes of a file's top level."""
    for node in source.tree.body:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and not node.name.startswith("_"):
            yield node


def unreferenced(every: list[Source]) -> list[str]:
    """Public definitions that no file of the package names."""
    named: Counter[str] = Counter()
    for source in every:
        named.update(source.words)
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                # A name that a package re-exports (`from room.file import name as name`) is public.
                named.update(alias.name for alias in node.names)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and WORD.fullmatch(node.value):
                named.update(node.value.split("."))
    found = []
    for source in every:
        for node in definitions(source):
            registered = isinstance(node, FUNCTIONS) and bool(node.decorator_list)
            if not named[node.name] and not registered and node.name not in FOUND_BY_NAME:
                found.append(f"{source.name}.{node.name}")
    return found


def duplicates(every: list[Source]) -> dict[str, int]:
    """Name of a public class → number of files that define it, if more than one."""
    names = Counter(node.name for s in every for node in definitions(s) if isinstance(node, ast.ClassDef))
    return {name: count for name, count in sorted(names.items()) if count > 1}


def tracked(tree: Path) -> dict[str, float]:
    """Megabytes tracked by git: data files, and all files."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=tree, capture_output=True, check=True, text=True).stdout
    paths = [tree / name for name in listed.split("\0") if name and (tree / name).is_file()]
    data = sum(path.stat().st_size for path in paths if path.suffix not in NO_DATA)
    return {"data files, MB": data / 1e6, "all tracked files, MB": sum(p.stat().st_size for p in paths) / 1e6}


def counted(some: list[Source], imported: Mapping[str, set[str]]) -> dict[str, float]:
    """The numbers of some files: of all, or of one room."""
    modules = [source for source in some if not source.init]
    lines = [source.lines for source in modules]
    single = sum(len(imported.get(source.name, ())) == 1 for source in modules)
    private = [once for source in some for once in private_functions(source)]
    counts = [code_and_imports(source) for source in some]
    code, imports = sum(one for one, _ in counts), sum(one for _, one in counts)
    return {
        "modules": len(modules),
        "lines": sum(lines),
        "median lines a module": median(lines) if lines else 0,
        "modules under 40 lines": sum(n < 40 for n in lines),
        "files under 60 lines": sum(source.lines < 60 for source in some),
        "modules over 600 lines": sum(n > 600 for n in lines),
        "modules with one importer": single,
        "one importer, %": percent(single, len(modules)),
        "private functions": len(private),
        "used once": sum(private),
        "used once, %": percent(sum(private), len(private)),
        "imports, % of code": percent(imports, code + imports),
    }


def percent(part: float, whole: float) -> float:
    return 100 * part / whole if whole else 0.0


def house(tree: Path) -> dict[str, Any]:
    """All statistics of the source."""
    every = sources(tree)
    imported = importers(every)
    twice, alone = duplicates(every), unreferenced(every)
    whole = counted(every, imported) | {
        "public class names defined more than once": len(twice),
        "their classes": sum(twice.values()),
        "unreferenced definitions": len(alone),
    }
    rooms = {room: counted([s for s in every if s.room == room], imported) for room in sorted({s.room for s in every})}
    return {"whole": whole | tracked(tree), "rooms": rooms, "duplicate names": twice, "unreferenced": alone}


# -- the calls of a verb -----------------------------------------------------------------------------------------------


class Trace:
    """A context that counts the calls of the package."""

    def __init__(self, package: Path) -> None:
        self.package = str(package) + "/"
        self.known: dict[CodeType, str | None] = {}
        self.calls = self.across = self.exports = self.copies = self.copying = 0
        self.seen: Counter[CodeType] = Counter()
        self.above: list[str] = []

    def __enter__(self) -> Trace:
        import torch

        self.export, self.deepcopy = torch.export.export, copy.deepcopy
        torch.export.export = self._export
        setattr(copy, "deepcopy", self._copy)  # noqa: B010 — said this way, type checkers let it pass
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        import torch

        sys.setprofile(None)
        torch.export.export, copy.deepcopy = self.export, self.deepcopy

    def _room(self, code: CodeType) -> str | None:
        """The room of a function of the package; None for all others, and for bodies of classes and modules."""
        if code not in self.known:
            own = code.co_filename.startswith(self.package) and code.co_flags & 2  # CO_NEWLOCALS: not a module
            below = code.co_filename.removeprefix(self.package)
            self.known[code] = room_of(Path(below).parts) if own and code.co_flags & 1 else None
        return self.known[code]

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if event not in ("call", "return"):
            return
        room = self._room(frame.f_code)
        if room is None:
            return
        if event == "return":
            if self.above:
                self.above.pop()
            return
        self.calls += 1
        self.seen[frame.f_code] += 1
        self.across += bool(self.above) and self.above[-1] != room
        self.above.append(room)

    def _export(self, *args: Any, **kwargs: Any) -> Any:
        self.exports += 1
        return self.export(*args, **kwargs)

    def _copy(self, x: Any, memo: Any = None, *rest: Any) -> Any:
        from torch import nn

        self.copies += isinstance(x, nn.Module) and not self.copying
        self.copying += 1
        try:
            return self.deepcopy(x, memo, *rest)
        finally:
            self.copying -= 1

    def numbers(self, cuts: set[str]) -> dict[str, int]:
        """All counts; `cuts` are the functions that cut weights into blocks."""
        functions = {(code.co_filename, code.co_qualname) for code in self.seen}
        return {
            "modules": len({file for file, _ in functions}),
            "functions": len(functions),
            "calls": self.calls,
            "across rooms": self.across,
            "exports": self.exports,
            "model copies": self.copies,
            "cuts into blocks": sum(count for code, count in self.seen.items() if code.co_name in cuts),
            "alignments": sum(count for code, count in self.seen.items() if code.co_name == "align"),
        }


def verbs() -> dict[str, Callable[[], Any]]:
    """Each verb on small ResNet-20s with random weights, prepared here outside the trace."""
    import torch

    import intertwine as it

    torch.set_num_threads(1)

    def network(seed: int) -> Any:
        torch.manual_seed(seed)
        return it.zoo.build("resnet20", width=0.5).eval()

    a, b = network(0), network(1)
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    data = [(torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(1)), torch.arange(16) % 10)]
    sym = it.symmetry(a, x)
    place = "layer1.0.relu1" if "layer1.0.relu1" in dict(a.named_modules()) else "layer1.0"
    return {
        "symmetry": lambda: it.symmetry(a, x),
        "certify": lambda: sym.certify(a, x),
        "canonicalize": lambda: it.canonicalize(a, x),
        "align, weights": lambda: it.align(a, b, x),
        "align, activations": lambda: it.align(a, b, x, method="activations", data=data),
        "merge of two": lambda: it.merge([a, b], x, data=data),
        "barrier": lambda: it.barrier(a, b, data, points=3),
        "fold": lambda: it.fold(a, x),
        "fold_to": lambda: it.fold_to(a, x, parameters=0.5),
        "stitch": lambda: it.stitch(a, b, place, family="linear", fit="direct", data=data),
        "compare": lambda: it.compare(a, b, data, [place, "layer2.0"], ["linear_cka"]),
    }


def traced(cuts: set[str]) -> dict[str, dict[str, int]]:
    """Verb → what it calls."""
    import intertwine

    found = {}
    for name, verb in verbs().items():
        verb()  # a first run for imports and caches
        with Trace(Path(str(intertwine.__file__)).parent) as trace:
            verb()
        found[name] = trace.numbers(cuts)
        print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    return found


# -- as text -----------------------------------------------------------------------------------------------------------


def said(x: float | None) -> str:
    """A number as text.

    >>> said(12345), said(12.345), said(None)
    ('12,345', '12.3', '')
    """
    if x is None:
        return ""
    return f"{x:,}" if isinstance(x, int) else f"{x:,.1f}"


def table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page(now: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> str:
    """The numbers in Markdown; compared with earlier ones, `before → now` in each cell."""
    old = before or {}

    def cell(one: float | None, was: float | None) -> str:
        return said(one) if before is None else f"{said(was)} → {said(one)}"

    def grid(part: str, first: str) -> str:
        names = list(dict.fromkeys([*old.get(part, {}), *now.get(part, {})]))
        sides = [(name, now[part].get(name, {}), old.get(part, {}).get(name, {})) for name in names]
        heads = list(next(iter(now[part].values())))
        return table([first, *heads], [[name, *(cell(n.get(h), o.get(h)) for h in heads)] for name, n, o in sides])

    if before is None:
        parts = [table(["", "now"], [[name, said(x)] for name, x in now["whole"].items()])]
    else:
        rows = [[name, said(old["whole"].get(name)), said(x)] for name, x in now["whole"].items()]
        parts = [table(["", "before", "now"], rows)]
    parts.append(grid("rooms", "room"))
    if "trace" in now:
        parts.append(grid("trace", "verb"))
    return "\n\n".join(parts)


def main() -> int:
    """Count, print and store."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--tree", type=Path, default=ROOT, help="the checkout (default: this one)")
    asked.add_argument("--trace", action="store_true", help="also trace the calls of each verb (a minute or two)")
    asked.add_argument(
        "--cuts", default="pieces,block_weights", metavar="NAME,…", help="functions that cut weights into blocks"
    )
    asked.add_argument("--json", type=Path, metavar="FILE", help="write the numbers")
    asked.add_argument("--against", type=Path, metavar="FILE", help="stored numbers to compare with")
    chosen = asked.parse_args()
    tree = chosen.tree.resolve()
    numbers = house(tree)
    if chosen.trace:
        sys.path.insert(0, str(tree / "src"))  # ahead of what is installed
        numbers["trace"] = traced(set(chosen.cuts.split(",")))
    print(page(numbers, json.loads(chosen.against.read_text(encoding="utf-8")) if chosen.against else None))
    if chosen.json:
        chosen.json.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
