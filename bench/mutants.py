"""The mutants of bench/mutation.py: single changes to a source file that a good test detects.

A mutant replaces one expression or one keyword. Docstrings, annotations, decorators, error messages, texts for people
(`__repr__`, f-strings) and returned values turned into None are left out: no test should check them, or the type
checker finds the change.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult,
}  # fmt: skip
RENAMED = {"min": "max", "max": "min", "any": "all", "all": "any"}
FOR_PEOPLE = {"__repr__", "__str__", "_repr_html_"}
#: Keywords that guard against programming mistakes; changing them changes no result.
GUARDS = {"strict", "frozen", "slots", "kw_only", "repr", "stacklevel"}


@dataclass(frozen=True)
class Mutant:
    """One change: `before` at `line` of `file` becomes `after`, inside `function` (empty: outside all functions)."""

    file: str
    line: int
    column: int
    function: str
    before: str
    after: str

    def applied(self, source: str) -> str:
        """The source with the change in it.

        >>> Mutant("a.py", 1, 4, "", "x < y", "x <= y").applied("z = x < y")
        'z = (x <= y)'
        """
        lines = source.encode().splitlines(keepends=True)
        start = sum(map(len, lines[: self.line - 1])) + self.column
        text, old = source.encode(), self.before.encode()
        if text[start : start + len(old)] != old:
            raise ValueError(f"{self.file}:{self.line} no longer reads {self.before!r}")
        return (text[:start] + f"({self.after})".encode() + text[start + len(old) :]).decode()

    def same_change(self, other: Mutant) -> bool:
        """Whether the other is the same change, in a file whose lines may have moved."""
        return replace(self, line=0, column=0) == replace(other, line=0, column=0)


def changes(node: ast.expr) -> Iterator[ast.expr]:
    """The replacements of one expression.

    >>> [ast.unparse(new) for new in changes(ast.parse("a < b", mode="eval").body)]
    ['a <= b']
    >>> [ast.unparse(new) for new in changes(ast.parse("3", mode="eval").body)]
    ['4']
    """
    match node:
        case ast.Compare(left, [operator], others) if type(operator) in COMPARED:
            yield ast.Compare(left, [COMPARED[type(operator)]()], others)
        case ast.BinOp(left, operator, right) if type(operator) in COMPUTED and not text(left) and not text(right):
            yield ast.BinOp(left, COMPUTED[type(operator)](), right)
        case ast.BoolOp(ast.And(), values):
            yield ast.BoolOp(ast.Or(), values)
        case ast.BoolOp(ast.Or(), values):
            yield ast.BoolOp(ast.And(), values)
        case ast.UnaryOp(ast.Not() | ast.USub(), operand) if not isinstance(operand, ast.Constant):
            yield operand
        case ast.IfExp(condition, body, orelse):
            yield ast.IfExp(condition, orelse, body)
        case ast.Constant(bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(int() | float() as value):
            yield ast.Constant(value + 1)
        case ast.Call(ast.Name(name), arguments, keywords) if name in RENAMED:
            yield ast.Call(ast.Name(RENAMED[name]), arguments, keywords)


def text(node: ast.expr) -> bool:
    """Whether an expression is a string literal, so that `+` concatenates."""
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def conditions(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """`if c` becomes `if not c`, in statements and in comprehensions, where c is not already a comparison."""
    tests = [node.test] if isinstance(node, ast.If | ast.While) else getattr(node, "ifs", [])
    for test in tests:
        if not isinstance(test, ast.Compare | ast.UnaryOp | ast.BoolOp) and ast.unparse(test) != "TYPE_CHECKING":
            yield test, ast.UnaryOp(ast.Not(), test)


def children(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a node that may be mutated."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            if name not in FOR_PEOPLE:
                yield from [*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body]
        case ast.ClassDef():
            yield from node.body
        case ast.AnnAssign():
            yield from [node.value] if node.value else []
        case ast.If(test=ast.Name("TYPE_CHECKING")) | ast.Raise() | ast.JoinedStr() | ast.Assert():
            return
        case ast.keyword(arg=name) if name in GUARDS:
            return
        case ast.Expr(ast.Constant()):
            return
        case _:
            yield from ast.iter_child_nodes(node)


def walk(node: ast.AST, within: tuple[str, ...] = ()) -> Iterator[tuple[ast.AST, tuple[str, ...]]]:
    """Every node that may be mutated, with the names of the classes and functions around it."""
    for child in children(node):
        yield child, within
        named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        yield from walk(child, (*within, child.name) if named else within)


def outermost(within: tuple[str, ...], tree: ast.Module) -> str:
    """`Class.method` or `function`, as the tracer records it; inner functions count as part of the outer one."""
    depth, body = 0, tree.body
    for name in within:
        found = next((n for n in body if getattr(n, "name", None) == name), None)
        depth += 1
        if not isinstance(found, ast.ClassDef):
            break
        body = found.body
    else:
        return ""
    return ".".join(within[:depth])


def mutants(source: str, file: str) -> Iterator[Mutant]:
    """Every mutant of a source file.

    >>> [f"{m.before} → {m.after}" for m in mutants("def f(x: int = 1) -> bool:\\n    return x > 2", "a.py")]
    ['1 → 2', 'x > 2 → x >= 2', '2 → 3']
    """
    tree = ast.parse(source)
    for node, within in walk(tree):
        pairs = [(node, new) for new in changes(node)] if isinstance(node, ast.expr) else []
        for old, new in [*pairs, *conditions(node)]:
            before = ast.get_source_segment(source, old)
            if before is not None:
                function = outermost(within, tree)
                yield Mutant(file, old.lineno, old.col_offset, function, before, ast.unparse(new))


def sample(root: Path, room: str, size: int, seed: int) -> list[Mutant]:
    """`size` mutants of a room, in the order of the files.

    The rank of a mutant in the draw is a hash of the seed and its change, so an edit elsewhere in the room keeps the
    sample.
    """
    folder = root / "src" / "intertwine" / room
    every = [
        mutant
        for file in sorted(folder.rglob("*.py"))
        for mutant in mutants(file.read_text(encoding="utf-8"), file.relative_to(root).as_posix())
    ]
    seen: Counter[Mutant] = Counter()
    places = []
    for mutant in every:
        change = replace(mutant, line=0, column=0)
        seen[change] += 1
        places.append(sha256(f"{seed} {seen[change]} {change}".encode()).digest())
    drawn = sorted(range(len(every)), key=places.__getitem__)[:size]
    return [every[index] for index in sorted(drawn)]
