"""`intertwine inspect MODEL`: the symmetry of a network, its certificate and its picture, and how a symmetry is shown
in the terminal.
"""

from __future__ import annotations

from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from math import floor
from typing import TYPE_CHECKING, Any

from intertwine.cli.arguments import CERTIFICATE, add_exit_codes, add_json, add_model, positive
from intertwine.cli.output import SVG, check_picture, human_count, print_json, spaced, status, terminal
from intertwine.errors import InputError

if TYPE_CHECKING:
    from rich.console import Group
    from rich.text import Text
    from rich.tree import Tree
    from torch import nn

    from intertwine.checkpoints.load import Loaded
    from intertwine.lab.report.outline import OutlineLine, OutlineSection
    from intertwine.symmetry.symmetry import Certificate, Symmetry

# ----------------------------------------------------------------------------------------------------
# Arguments of `intertwine inspect`.


def add(command: ArgumentParser) -> None:
    """Give the parser its arguments."""
    command.description = "Read the symmetry off a network, prove it on random elements, and show it."
    add_exit_codes(command, CERTIFICATE)
    add_model(command)
    command.add_argument(
        "--certify", action=BooleanOptionalAction, default=True, help="prove the symmetry in float64 (default)"
    )
    command.add_argument(
        "--trials", metavar="N", type=positive, default=3, help="random elements to prove it on (default 3)"
    )
    command.add_argument("--continuous", action="store_true", help="let whole matrices act where only linear maps meet")
    command.add_argument("--frozen", action="store_true", help="list every frozen axis with its reason")
    command.add_argument("--slots", action="store_true", help="list where each wire acts")
    add_json(command)
    command.add_argument("--svg", metavar="FILE", help="write a picture of the wires")


# ----------------------------------------------------------------------------------------------------
# A symmetry in the terminal: header, tree of wires, frozen axes by reason, certificate.


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


def symmetry_numbers(symmetry: Symmetry, model: nn.Module) -> list[str]:
    """The symmetry in numbers, each with its word."""
    parameters = sum(p.numel() for p in model.parameters())
    return [
        f"{human_count(parameters)} parameters",
        f"{len(symmetry.wires)} wire{'s' * (len(symmetry.wires) != 1)}",
        f"e^{symmetry.log_order:,.0f} permutations",
        f"{symmetry.dimension:,} continuous dimension{'s' * (symmetry.dimension != 1)}",
        f"{floor(symmetry.coverage(model) * 10**4) / 100:.2f}% coverage",  # 100% means all of them
    ]


def symmetry_header(name: str, symmetry: Symmetry, model: nn.Module) -> Text:
    """The one line that says it all."""
    from rich.text import Text

    return Text.assemble((name, "bold"), " · ", " · ".join(symmetry_numbers(symmetry, model)))


def wire_tree(symmetry: Symmetry, slots: bool = False) -> Group:
    """The wires by module; `slots` adds where each acts."""
    from rich.console import Group
    from rich.text import Text
    from rich.tree import Tree

    from intertwine.lab.report.outline import outline

    root = Tree(Text("wires", style="bold"))
    _add(root, outline(symmetry.wires), slots)
    if not symmetry.wires:
        root.add(Text("none: only the identity keeps this network's function", style="dim"))
    return Group(root, Text(group_legend(symmetry), style="dim"))


def group_legend(symmetry: Symmetry) -> str:
    """What the parts of the groups in this symmetry mean."""
    groups = [str(w.group) + ")⁽" * bool(w.group.copies) for w in symmetry.wires]
    return " · ".join(meaning for part, meaning in MEANINGS.items() if any(part in group for group in groups))


def _add(branch: Tree, section: OutlineSection, slots: bool) -> None:
    from rich.text import Text

    from intertwine.lab.report.outline import title

    for line in section.lines:
        _add_line(branch, line, _widest(section.lines), slots)
    for inner in section.sections:
        _add(branch.add(Text(title(inner), style="bold")), inner, slots)


def _widest(lines: Sequence[OutlineLine]) -> int:
    from intertwine.lab.report.outline import title

    return min(max(len(title(line)) for line in lines), 48)


def _add_line(branch: Tree, line: OutlineLine, widest: int, slots: bool) -> None:
    from rich.text import Text

    from intertwine.lab.report.outline import title

    wire = line.wire
    text = Text.assemble(f"{title(line):{widest}}  ", (f"{wire.size:>5}", "cyan"), "  ", (str(wire.group), "magenta"))
    if wire.pinned and wire.size > 1:
        text.append(f"  in fixed order: {wire.pinned}", "dim")
    node = branch.add(text)
    for slot in wire.slots if slots else ():
        node.add(Text(str(slot), style="dim"))
    for fibre in line.fibres:
        _add_line(node, fibre, _widest(line.fibres), slots)


def frozen_axes(symmetry: Symmetry, every: bool = False) -> Group:
    """The frozen axes by reason with two examples each, or every one of them; then the ops without a rule."""
    from rich.console import Group
    from rich.text import Text

    from intertwine.lab.report.outline import frozen_reasons

    rows: list[Text] = [Text(f"frozen: {len(symmetry.frozen)} axes", style="bold")]
    if every:
        rows += [Text.assemble(f"  {what}: ", (reason, "dim")) for what, reason in symmetry.frozen]
    else:
        for reason in frozen_reasons(symmetry.frozen):
            examples = ", ".join(reason.axes[:EXAMPLES]) + (", …" if len(reason.axes) > EXAMPLES else "")
            rows.append(Text.assemble((f"{len(reason.axes):>6}  ", "cyan"), reason.text, (f" ({examples})", "dim")))
    rows += _unsupported(symmetry)
    return Group(*rows)


def _unsupported(symmetry: Symmetry) -> Iterator[Text]:
    from rich.text import Text

    if symmetry.unsupported:
        yield Text("ops without a rule, what they touch is frozen:", style="bold yellow")
    first = dict(reversed(symmetry.unsupported))
    for op, count in Counter(op for op, _ in symmetry.unsupported).most_common():
        yield Text.assemble((f"{count:>6}  ", "cyan"), op, (f" (first at {first[op]})", "dim"))


def certificate_verdict(held: Certificate | None) -> Group:
    """The verdict in one line, and what broke where."""
    from rich.console import Group
    from rich.text import Text

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


# ----------------------------------------------------------------------------------------------------
# `intertwine inspect MODEL`: the symmetry of a network, its proof, and its picture.


#: A certificate holds the model, a copy of it in float64 and a moved copy of that: five times its size in float32.
COPIES = 5


def run(options: Namespace) -> int:
    """Carry out the command; 1 when the certificate fails."""
    from rich.text import Text

    from intertwine.checkpoints import load
    from intertwine.files import write_text
    from intertwine.lab.report.wire_graph import wire_graph
    from intertwine.symmetry.symmetry import symmetry

    check_picture(options.svg, SVG)
    with status(f"building {options.model}") as say:
        loaded = load(options.model, options.weights, options.input)
        say("reading its symmetry")
        found = symmetry(loaded.model, *loaded.args, continuous=options.continuous, **loaded.kwargs)
        held: Certificate | None = None
        if options.certify:
            _check_room(loaded)
            say(f"proving it on {options.trials} random elements, in float64")
            held = found.certify(loaded.model, *loaded.args, trials=options.trials, **loaded.kwargs)
            found = held.symmetry
        if options.svg:
            say("drawing")
            write_text(options.svg, wire_graph(found, loaded.model, loaded.name))
    if options.json:
        print_json(as_dict(loaded, found, held))
    else:
        parts = [symmetry_header(loaded.name, found, loaded.model), wire_tree(found, options.slots)]
        parts += [frozen_axes(found, options.frozen), certificate_verdict(held)]
        files = [Text(f"wrote {options.svg}")] if options.svg else []
        terminal().print(spaced(*parts, *files))
    return 0 if held is None or held.ok else 1


def as_dict(loaded: Loaded, found: Symmetry, held: Certificate | None) -> dict[str, Any]:
    """Everything the command found."""
    head = {"model": loaded.name, "parameters": loaded.parameters, "inputs": list(loaded.inputs)}
    tail = {"coverage": found.coverage(loaded.model), "certificate": held.to_dict() if held else None}
    return head | found.to_dict() | tail


def _check_room(loaded: Loaded) -> None:
    from intertwine.checkpoints.libraries import physical_memory

    memory = physical_memory()
    if memory is not None and COPIES * loaded.bytes > memory:
        raise InputError(
            f"A certificate of {loaded.name} needs about {COPIES * loaded.bytes / 1e9:.0f} GB, and this machine has "
            f"{memory / 1e9:.0f} GB. Pass --no-certify, or certify a model with fewer blocks of the same kind."
        )
