"""`intertwine canonicalize MODEL`: the canonical form of a network, or which checkpoints of a folder are equivalent."""

from __future__ import annotations

from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from intertwine.cli.arguments import CERTIFICATE, add_exit_codes, add_json, add_model, number
from intertwine.cli.inspect import certificate_verdict, symmetry_header
from intertwine.cli.output import print_json, progress_bar, spaced, status, terminal, text_column
from intertwine.errors import InputError, IntertwineError

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text
    from torch import nn

    from intertwine.canonical.equivalence import EquivalenceClass
    from intertwine.canonical.form import Canonical, CanonicalForm
    from intertwine.checkpoints.load import Loaded
    from intertwine.symmetry.symmetry import Certificate, Symmetry

# ----------------------------------------------------------------------------------------------------
# Arguments of `intertwine canonicalize`.


def add(command: ArgumentParser) -> None:
    """Give the parser its arguments."""
    command.description = (
        "Bring a network to its canonical form, which it shares with all networks that differ from it only by a "
        "symmetry. With --dedupe: find the checkpoints of a folder that are one network up to its symmetry."
    )
    add_exit_codes(command, CERTIFICATE)
    add_model(command)
    command.add_argument(
        "--order",
        choices=("lexicographic", "nodesort", "nodesort-printed"),
        help="how units are sorted (default lexicographic)",
    )
    command.add_argument("--base", metavar="P", type=number, help="base of the NodeSort orders, above 1 (default 1.1)")
    command.add_argument("--out", metavar="FILE", help="write the canonical weights (safetensors)")
    command.add_argument(
        "--element", metavar="FILE", help="write the element that takes the model to its canonical form"
    )
    command.add_argument("--dedupe", metavar="DIR", help="compare all checkpoints of a folder, and write nothing")
    command.add_argument(
        "--tol",
        metavar="T",
        type=number,
        help="with --dedupe: relative difference up to which a copy counts (default 1e-6)",
    )
    command.add_argument(
        "--certify", action=BooleanOptionalAction, default=True, help="prove the symmetry first (default)"
    )
    add_json(command)


# ----------------------------------------------------------------------------------------------------
# `intertwine canonicalize MODEL`: the canonical form of a network, or which checkpoints of a folder are the same.


#: Files of a folder that are taken for checkpoints.
SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
#: What counts where nothing else was asked for.
LEXICOGRAPHIC, BASE, TOLERANCE = "lexicographic", 1.1, 1e-6


def run(options: Namespace) -> int:
    """Carry out the command; 1 when the certificate fails."""
    from intertwine.checkpoints import load
    from intertwine.symmetry.symmetry import symmetry

    _check(options)
    with status(f"building {options.model}") as say:
        loaded = load(options.model, options.weights, options.input)
        say("reading its symmetry")
        found = symmetry(loaded.model, *loaded.args, **loaded.kwargs)
        held: Certificate | None = None
        if options.certify:
            say("proving it in float64")
            held = found.certify(loaded.model, *loaded.args, **loaded.kwargs)
            found = held.symmetry
    if held is not None and not held.ok:
        _refuse(held, options.json)
        return 1
    return _dedupe(options, loaded, found) if options.dedupe else _canonicalize(options, loaded, found)


def _check(options: Namespace) -> None:
    """Options that would be left unread are refused, and so are numbers that mean nothing."""
    alone = ("order", "base", "out", "element")
    if options.dedupe and (given := [f"--{name}" for name in alone if getattr(options, name) is not None]):
        raise InputError(
            f"{given[0]} was given beside --dedupe, which compares checkpoints and writes nothing. Leave out one of "
            "the two."
        )
    if options.tol is not None and not options.dedupe:
        raise InputError(f"--tol {options.tol:g} was given without --dedupe DIR, where it belongs. Leave it out.")
    if options.tol is not None and options.tol < 0:
        raise InputError(f"--tol {options.tol:g} was asked for. It is a relative difference, 0 or more, such as 1e-6.")
    if options.base is not None and options.order in (None, LEXICOGRAPHIC):
        raise InputError(
            f"--base {options.base:g} was given, but the lexicographic order has none. Add --order nodesort, or leave "
            "it out."
        )
    if options.base is not None and options.base <= 1:
        raise InputError(f"NodeSort needs a base above 1, {options.base:g} was given. Try 1.1, the default.")


def _refuse(held: Certificate, as_json: bool) -> None:
    """A network whose symmetry does not hold has no canonical form; say what was seen."""
    if as_json:
        print_json({"certificate": held.to_dict()})
    else:
        terminal().print(certificate_verdict(held))


# -- one network -------------------------------------------------------------------------------------------------------


def _canonicalize(options: Namespace, loaded: Loaded, found: Symmetry) -> int:
    from intertwine.canonical.form import CanonicalForm, canonical_form, canonicalize
    from intertwine.checkpoints.weights import write_checkpoint
    from intertwine.files import atomic_write
    from intertwine.symmetry.blocks import weights_of

    order = options.order or LEXICOGRAPHIC
    canon = canonicalize(loaded.model, order=order, base=options.base, symmetry=found)
    weights = weights_of(found, loaded.model)
    lexicographic = order == LEXICOGRAPHIC  # the order of fingerprints
    form = (
        CanonicalForm(found, weights, canon.element, canon.doubts) if lexicographic else canonical_form(found, weights)
    )
    mark = form.fingerprint()
    if options.out:
        write_checkpoint(canon.model, options.out)
    if options.element:
        with atomic_write(options.element) as file:
            canon.element.save(file)
    if options.json:
        print_json({"model": loaded.name, "fingerprint": mark, **canon.to_dict(), "out": options.out})
    else:
        terminal().print(spaced(symmetry_header(loaded.name, found, loaded.model), _told(canon, mark, options)))
    return 0


def _told(canon: Canonical, mark: str, options: Namespace) -> Text:
    from rich.text import Text

    lines = [
        ("fingerprint  ", "dim"),
        (mark, "bold"),
        f"\n{canon.order} order: {canon.element!r}".replace("Element(", "")[:-1],
    ]
    lines += [f"\nin doubt: {doubt}" for doubt in canon.doubts]
    lines += [f"\nwrote {path}" for path in (options.out, options.element) if path]
    return Text.assemble(*lines)


# -- a folder of checkpoints -------------------------------------------------------------------------------------------


def _dedupe(options: Namespace, loaded: Loaded, found: Symmetry) -> int:
    from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn
    from rich.text import Text

    from intertwine.canonical.equivalence import equivalence_classes

    folder = Path(options.dedupe)
    files = sorted(f for f in folder.rglob("*") if f.suffix in SUFFIXES and f.is_file()) if folder.is_dir() else []
    if not files:
        what = "holds no checkpoint" if folder.is_dir() else "is no folder"
        raise InputError(
            f"Copies were looked for in {folder}, but it {what}. Give a folder with files that end in "
            f"{', '.join(SUFFIXES)}."
        )
    refused: dict[str, str] = {}
    columns = (text_column("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with progress_bar(*columns) as progress:
        task = progress.add_task("comparing checkpoints", total=len(files))
        forms = _forms(files, folder, loaded.model, found, refused, lambda: progress.advance(task))
        groups = equivalence_classes(forms, TOLERANCE if options.tol is None else options.tol)
    if not groups:
        raise InputError(
            f"Copies were looked for in {folder}, but none of its {len(files)} checkpoints fits {loaded.name}. "
            f"The first: {next(iter(refused.values()))}"
        )
    if options.json:
        rows = [family.to_dict() for family in groups]
        print_json({"model": loaded.name, "folder": str(folder), "families": rows, "refused": refused})
    else:
        head = f"{loaded.name} · {len(files)} checkpoints in {folder} · {_count(groups, len(refused))}"
        terminal().print(spaced(Text(head, style="bold"), _table(groups), *_refusals(refused)))
    return 0


def _forms(
    files: list[Path], folder: Path, model: nn.Module, found: Symmetry, refused: dict[str, str], done: Any
) -> Iterator[tuple[str, CanonicalForm]]:
    """The canonical form of every checkpoint that fits the model; the others go into `refused` with their reason."""
    from intertwine.canonical.form import canonical_form
    from intertwine.checkpoints.weights import fill, read_checkpoint
    from intertwine.graph.model import copy_module
    from intertwine.symmetry.blocks import weights_of

    for file in files:
        name = str(file.relative_to(folder))
        try:
            filled = copy_module(model)
            fill(filled, read_checkpoint(file), name)
            yield name, canonical_form(found, weights_of(found, filled))
        except IntertwineError as error:
            refused[name] = str(error)
        done()


def _count(groups: tuple[EquivalenceClass, ...], refused: int) -> str:
    copies = sum(len(family.copies) for family in groups)
    text = f"{len(groups)} different, {copies} {'copy' if copies == 1 else 'copies'} of these"
    return text + (f", {refused} not read" if refused else "")


def _table(groups: tuple[EquivalenceClass, ...]) -> Table:
    from rich.table import Table

    table = Table("network", "is a copy of", "how", "difference", "fingerprint", box=None, pad_edge=False)
    for family in groups:
        table.add_row(family.first, "", "", "", family.fingerprint[:12])
        for member in family.copies:
            table.add_row(f"  {member.name}", family.first, member.how, f"{member.difference:.0e}", "")
    return table


def _refusals(refused: dict[str, str]) -> list[Text]:
    from rich.text import Text

    return [Text("\n".join(f"not read: {reason}" for reason in refused.values()), style="yellow")] if refused else []
