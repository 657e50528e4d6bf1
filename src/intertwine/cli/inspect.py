"""`intertwine inspect MODEL`: the symmetry of a network with its certificate; how commands show a symmetry."""

from __future__ import annotations

from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from math import floor
from typing import TYPE_CHECKING, Any

from intertwine.cli import arguments, output
from intertwine.errors import InputError

if TYPE_CHECKING:
    from rich.console import Group
    from rich.text import Text
    from rich.tree import Tree
    from torch import nn

    from intertwine.checkpoints.load import Loaded
    from intertwine.lab.report.outline import OutlineLine, OutlineSection
    from intertwine.symmetry.symmetry import Certificate, Symmetry

#: The parts of a group's name and their meanings, in the order of the legend.
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
#: Frozen axes that are named for each reason.
EXAMPLES = 2
#: A certificate needs five times the memory of the float32 model: the model, a float64 copy and a moved float64 copy.
COPIES = 5


def add(command: ArgumentParser) -> None:
    """Give the parser its arguments."""
    command.description = "Find the symmetry of a network, certify it on random elements, and show it."
    arguments.add_exit_codes(command, arguments.CERTIFICATE)
    arguments.add_model(command)
    command.add_argument(
        "--certify", action=BooleanOptionalAction, default=True, help="certify the symmetry in float64 (default)"
    )
    command.add_argument(
        "--trials",
        metavar="N",
        type=arguments.positive,
        default=3,
        help="random elements of the certificate (default 3)",
    )
    command.add_argument("--continuous", action="store_true", help="let whole matrices act where only linear maps meet")
    command.add_argument("--frozen", action="store_true", help="list every frozen axis with its reason")
    command.add_argument("--slots", action="store_true", help="list where each wire acts")
    arguments.add_json(command)
    command.add_argument("--svg", metavar="FILE", help="write a picture of the wires")


def run(options: Namespace) -> int:
    """Carry out the command; 1 when the certificate fails."""
    from intertwine.checkpoints import load
    from intertwine.files import write_text
    from intertwine.lab.report.wire_graph import wire_graph
    from intertwine.symmetry.symmetry import symmetry

    output.check_picture(options.svg, output.SVG)
    with output.status(f"building {options.model}") as step:
        loaded = load(options.model, options.weights, options.input)
        step("finding its symmetry")
        found = symmetry(loaded.model, *loaded.args, continuous=options.continuous, **loaded.kwargs)
        certificate: Certificate | None = None
        if options.certify:
            _check_memory(loaded)
            step(f"certifying it on {options.trials} random elements, in float64")
            certificate = found.certify(loaded.model, *loaded.args, trials=options.trials, **loaded.kwargs)
            found = certificate.symmetry
        if options.svg:
            step("drawing")
            write_text(options.svg, wire_graph(found, loaded.model, loaded.name))
    if options.json:
        output.print_json(as_dict(loaded, found, certificate))
    else:
        output.show(
            symmetry_header(loaded.name, found, loaded.model), wire_tree(found, options.slots),
            frozen_axes(found, options.frozen), certificate_verdict(certificate), output.wrote(options.svg),
        )  # fmt: skip
    return 0 if certificate is None or certificate.ok else 1


def as_dict(loaded: Loaded, found: Symmetry, certificate: Certificate | None) -> dict[str, Any]:
    """The whole answer as plain data."""
    head = {"model": loaded.name, "parameters": loaded.parameters, "inputs": list(loaded.inputs)}
    tail = {"coverage": found.coverage(loaded.model), "certificate": certificate.to_dict() if certificate else None}
    return head | found.to_dict() | tail


def _check_memory(loaded: Loaded) -> None:
    from intertwine.checkpoints.libraries import physical_memory

    memory = physical_memory()
    if memory is not None and COPIES * loaded.bytes > memory:
        raise InputError(
            f"A certificate of {loaded.name} needs about {COPIES * loaded.bytes / 1e9:.0f} GB, and this machine has "
            f"{memory / 1e9:.0f} GB. Pass --no-certify, or certify a model with fewer blocks of the same kind."
        )


# -- A symmetry in the terminal ----------------------------------------------------------------------------------------


def symmetry_header(name: str, symmetry: Symmetry, model: nn.Module) -> Text:
    """The symmetry in one line of numbers."""
    numbers = [
        f"{output.human_count(sum(p.numel() for p in model.parameters()))} parameters",
        output.count_of(len(symmetry.wires), "wire"),
        f"e^{symmetry.log_order:,.0f} permutations",
        output.count_of(symmetry.dimension, "continuous dimension"),
        f"{floor(symmetry.coverage(model) * 10**4) / 100:.2f}% coverage",  # rounded down: 100% means all of them
    ]
    return output.text((name, "bold"), " · ", " · ".join(numbers))


def wire_tree(symmetry: Symmetry, slots: bool = False) -> Group:
    """The wires by module, with a legend of their groups; `slots` adds where each acts."""
    from rich.console import Group
    from rich.tree import Tree

    from intertwine.lab.report.outline import outline

    root = Tree(output.text("wires", style="bold"))
    _add_section(root, outline(symmetry.wires), slots)
    if not symmetry.wires:
        root.add(output.text("none: only the identity preserves the function of this network", style="dim"))
    return Group(root, output.text(group_legend(symmetry), style="dim"))


def group_legend(symmetry: Symmetry) -> str:
    """The meanings of the parts of the groups in this symmetry."""
    groups = [str(w.group) + ")⁽" * bool(w.group.copies) for w in symmetry.wires]
    return " · ".join(meaning for part, meaning in MEANINGS.items() if any(part in group for group in groups))


def _add_section(branch: Tree, section: OutlineSection, slots: bool) -> None:
    from intertwine.lab.report.outline import title

    _add_lines(branch, section.lines, slots)
    for inner in section.sections:
        _add_section(branch.add(output.text(title(inner), style="bold")), inner, slots)


def _add_lines(branch: Tree, lines: Sequence[OutlineLine], slots: bool) -> None:
    from intertwine.lab.report.outline import title

    widest = min(max((len(title(line)) for line in lines), default=0), 48)
    for line in lines:
        wire = line.wire
        shown = output.text(
            f"{title(line):{widest}}  ", (f"{wire.size:>5}", "cyan"), "  ", (str(wire.group), "magenta")
        )
        if wire.pinned and wire.size > 1:
            shown.append(f"  in fixed order: {wire.pinned}", "dim")
        node = branch.add(shown)
        for slot in wire.slots if slots else ():
            node.add(output.text(str(slot), style="dim"))
        _add_lines(node, line.dependents, slots)


def frozen_axes(symmetry: Symmetry, every: bool = False) -> Group:
    """The frozen axes by reason with two examples each, or every one of them; then the ops without a rule."""
    from rich.console import Group

    from intertwine.lab.report.outline import frozen_reasons

    rows = [output.text(f"frozen: {len(symmetry.frozen)} axes", style="bold")]
    if every:
        rows += [output.text(f"  {what}: ", (reason, "dim")) for what, reason in symmetry.frozen]
    else:
        for reason in frozen_reasons(symmetry.frozen):
            examples = ", ".join(reason.axes[:EXAMPLES]) + (", …" if len(reason.axes) > EXAMPLES else "")
            rows.append(output.text((f"{len(reason.axes):>6}  ", "cyan"), reason.text, (f" ({examples})", "dim")))
    return Group(*rows, *_unsupported(symmetry))


def _unsupported(symmetry: Symmetry) -> Iterator[Text]:
    if symmetry.unsupported:
        yield output.text("ops without a rule, what they touch is frozen:", style="bold yellow")
    first = dict(reversed(symmetry.unsupported))
    for op, count in Counter(op for op, _ in symmetry.unsupported).most_common():
        yield output.text((f"{count:>6}  ", "cyan"), op, (f" (first at {first[op]})", "dim"))


def certificate_verdict(certificate: Certificate | None) -> Group:
    """The verdict in one line, and where the symmetry broke."""
    from rich.console import Group

    if certificate is None:
        return Group(output.text("not certified (--no-certify)", style="yellow"))
    worst = max(certificate.per_wire.values(), default=0.0)
    measured = (
        f"outputs change by {certificate.max_error:.1e}, hidden features are within {worst:.1e} of the prediction, "
        f"over {output.count_of(certificate.trials, 'random element')} in float64"
    )
    if certificate.vacuous:
        verdict = output.text(
            f"certificate empty: the outputs do not depend on the weights ({measured})", style="bold yellow"
        )
    elif certificate.ok:
        verdict = output.text(("✓ certified: ", "bold green"), (measured, "green"))
    else:
        verdict = output.text(("✗ not a symmetry: ", "bold red"), (measured, "red"))
    broken = []
    for b in certificate.broken:
        wires = ", ".join(b.wires[:3]) + (f" and {len(b.wires) - 3} more" if len(b.wires) > 3 else "")
        broken.append(
            output.text(f"  broke at {b.op} ({b.place}) by {b.error:.1e}; frozen there: {wires}", style="yellow")
        )
    return Group(verdict, *broken)
