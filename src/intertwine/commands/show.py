"""A symmetry in the terminal: header, tree of wires, frozen axes by reason, certificate."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from math import floor

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text
from rich.tree import Tree
from torch import nn

from intertwine.report.outline import Line, Section, outline, reasons, title
from intertwine.symmetry.certificate import Certificate
from intertwine.symmetry.symmetry import Symmetry

#: What the parts of a group mean, in the order in which they are explained.
MEANINGS = {
    "S_": "S_n all orders of n indices",
    "R₊": "R₊ positive scales",
    "R*": "R* scales and signs",
    "±1": "{±1} signs",
    "GL(": "GL(n) invertible matrices",
    "O(": "O(n) rotations and reflections",
    " ⋉ ": "⋉ together",
    ")⁽": "(…)ᵏ one for each of k",
}
EXAMPLES = 2


def terminal() -> Console:
    """Standard output, words as they are: a path may hold [x]. Lines stay whole when it goes into a file or a pipe."""
    return Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else 1000)


def duration(seconds: float) -> str:
    """Time left, as short as it can be said.

    >>> duration(42.0), duration(600.0), duration(9000.0)
    ('42 s', '10 min', '2.5 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def human(count: int) -> str:
    """11689512 → 11.7 M."""
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.1f} {letter}"
    return str(count)


def numbers(symmetry: Symmetry, model: nn.Module) -> list[str]:
    """The symmetry in numbers, each with its word."""
    parameters = sum(p.numel() for p in model.parameters())
    return [
        f"{human(parameters)} parameters",
        f"{len(symmetry.wires)} wire{'s' * (len(symmetry.wires) != 1)}",
        f"e^{symmetry.log_order:,.0f} permutations",
        f"{symmetry.dimension:,} continuous dimension{'s' * (symmetry.dimension != 1)}",
        f"{floor(symmetry.coverage(model) * 10**4) / 100:.2f}% coverage",  # 100% means all of them
    ]


def header(name: str, symmetry: Symmetry, model: nn.Module) -> Text:
    """The one line that says it all."""
    return Text.assemble((name, "bold"), " · ", " · ".join(numbers(symmetry, model)))


def tree(symmetry: Symmetry, slots: bool = False) -> Group:
    """The wires by module; `slots` adds where each acts."""
    root = Tree(Text("wires", style="bold"))
    _add(root, outline(symmetry.wires), slots)
    if not symmetry.wires:
        root.add(Text("none: only the identity keeps this network's function", style="dim"))
    return Group(root, Text(legend(symmetry), style="dim"))


def legend(symmetry: Symmetry) -> str:
    """What the parts of the groups in this symmetry mean."""
    groups = [str(w.group) + ")⁽" * bool(w.group.copies) for w in symmetry.wires]
    return " · ".join(meaning for part, meaning in MEANINGS.items() if any(part in group for group in groups))


def _add(branch: Tree, section: Section, slots: bool) -> None:
    for line in section.lines:
        _add_line(branch, line, _widest(section.lines), slots)
    for inner in section.sections:
        _add(branch.add(Text(title(inner), style="bold")), inner, slots)


def _widest(lines: Sequence[Line]) -> int:
    return min(max(len(title(line)) for line in lines), 48)


def _add_line(branch: Tree, line: Line, widest: int, slots: bool) -> None:
    wire = line.wire
    text = Text.assemble(f"{title(line):{widest}}  ", (f"{wire.size:>5}", "cyan"), "  ", (str(wire.group), "magenta"))
    if wire.pinned and wire.size > 1:
        text.append(f"  in fixed order: {wire.pinned}", "dim")
    node = branch.add(text)
    for slot in wire.slots if slots else ():
        node.add(Text(str(slot), style="dim"))
    for fibre in line.fibres:
        _add_line(node, fibre, _widest(line.fibres), slots)


def frozen(symmetry: Symmetry, every: bool = False) -> Group:
    """The frozen axes by reason with two examples each, or every one of them; then the ops without a rule."""
    rows: list[Text] = [Text(f"frozen: {len(symmetry.frozen)} axes", style="bold")]
    if every:
        rows += [Text.assemble(f"  {what}: ", (reason, "dim")) for what, reason in symmetry.frozen]
    else:
        for reason in reasons(symmetry.frozen):
            examples = ", ".join(reason.axes[:EXAMPLES]) + (", …" if len(reason.axes) > EXAMPLES else "")
            rows.append(Text.assemble((f"{len(reason.axes):>6}  ", "cyan"), reason.text, (f" ({examples})", "dim")))
    rows += _unsupported(symmetry)
    return Group(*rows)


def _unsupported(symmetry: Symmetry) -> Iterator[Text]:
    if symmetry.unsupported:
        yield Text("ops without a rule, what they touch is frozen:", style="bold yellow")
    first = dict(reversed(symmetry.unsupported))
    for op, count in Counter(op for op, _ in symmetry.unsupported).most_common():
        yield Text.assemble((f"{count:>6}  ", "cyan"), op, (f" (first at {first[op]})", "dim"))


def certificate(held: Certificate | None) -> Group:
    """The verdict in one line, and what broke where."""
    if held is None:
        return Group(Text("not certified (--no-certify)", style="yellow"))
    worst = max(held.per_wire.values(), default=0.0)
    measured = (
        f"outputs change by {held.max_error:.1e}, hidden features are within {worst:.1e} of the prediction, "
        f"over {held.trials} random element{'s' * (held.trials != 1)} in float64"
    )
    if held.vacuous:
        verdict = Text(f"certificate empty: the outputs do not depend on the weights ({measured})", style="bold yellow")
    elif held.ok:
        verdict = Text.assemble(("✓ certified: ", "bold green"), (measured, "green"))
    else:
        verdict = Text.assemble(("✗ not a symmetry: ", "bold red"), (measured, "red"))
    broke = [
        Text(f"  broke at {b.op} ({b.place}) by {b.error:.1e}; frozen there: {_few(b.wires)}", style="yellow")
        for b in held.broken
    ]
    return Group(verdict, *broke)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def spaced(*parts: Text | Group | Table) -> Group:
    """Parts with an empty line between them."""
    lines = [line for part in parts for line in (part, Text(""))]
    return Group(*lines[:-1])
