"""`intertwine canonicalize MODEL`: the canonical form of a network, or which checkpoints of a folder are equivalent."""

from __future__ import annotations

from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from intertwine.cli import arguments, output
from intertwine.cli.inspect import certificate_verdict, symmetry_header
from intertwine.errors import InputError, IntertwineError

if TYPE_CHECKING:
    from rich.table import Table
    from torch import nn

    from intertwine.canonical.equivalence import EquivalenceClass
    from intertwine.canonical.form import CanonicalForm
    from intertwine.checkpoints.load import Loaded
    from intertwine.symmetry.symmetry import Certificate, Symmetry

#: The endings of checkpoint files in a folder.
SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
LEXICOGRAPHIC, BASE, TOLERANCE = "lexicographic", 1.1, 1e-6


def add(command: ArgumentParser) -> None:
    """Give the parser its arguments."""
    command.description = (
        "Bring a network to its canonical form, which it shares with all networks that differ from it only by a "
        "symmetry. With --dedupe: find the checkpoints of a folder that are one network up to its symmetry."
    )
    arguments.add_exit_codes(command, arguments.CERTIFICATE)
    arguments.add_model(command)
    command.add_argument(
        "--order",
        choices=("lexicographic", "nodesort", "nodesort-printed"),
        help="how units are sorted (default lexicographic)",
    )
    command.add_argument(
        "--base", metavar="P", type=arguments.number, help="base of the NodeSort orders, above 1 (default 1.1)"
    )
    command.add_argument("--out", metavar="FILE", help="write the canonical weights (safetensors)")
    command.add_argument(
        "--element", metavar="FILE", help="write the element that takes the model to its canonical form"
    )
    command.add_argument("--dedupe", metavar="DIR", help="compare all checkpoints of a folder, and write nothing")
    command.add_argument(
        "--tol",
        metavar="T",
        type=arguments.number,
        help="with --dedupe: largest relative difference of a copy (default 1e-6)",
    )
    command.add_argument(
        "--certify", action=BooleanOptionalAction, default=True, help="certify the symmetry first (default)"
    )
    arguments.add_json(command)


def run(options: Namespace) -> int:
    """Carry out the command; 1 when the certificate fails."""
    from intertwine.checkpoints import load
    from intertwine.symmetry.symmetry import symmetry

    _check(options)
    with output.status(f"building {options.model}") as step:
        loaded = load(options.model, options.weights, options.input)
        step("finding its symmetry")
        found = symmetry(loaded.model, *loaded.args, **loaded.kwargs)
        certificate: Certificate | None = None
        if options.certify:
            step("certifying it in float64")
            certificate = found.certify(loaded.model, *loaded.args, **loaded.kwargs)
            found = certificate.symmetry
    if certificate is not None and not certificate.ok:  # such a network has no canonical form
        if options.json:
            output.print_json({"certificate": certificate.to_dict()})
        else:
            output.terminal().print(certificate_verdict(certificate))
        return 1
    return _dedupe(options, loaded, found) if options.dedupe else _canonicalize(options, loaded, found)


def _check(options: Namespace) -> None:
    """Refuse options that would be ignored, and numbers out of range."""
    alone = arguments.given_flags(options, ("order", "base", "out", "element"))
    if options.dedupe and alone:
        raise InputError(
            f"{alone[0]} and --dedupe cannot be given together: --dedupe compares checkpoints and writes nothing. "
            "Leave one of them out."
        )
    if options.tol is not None and not options.dedupe:
        raise InputError(f"--tol {options.tol:g} has no effect without --dedupe DIR. Leave it out.")
    if options.tol is not None and options.tol < 0:
        raise InputError(f"--tol must be 0 or more, such as 1e-6, but is {options.tol:g}. It is a relative difference.")
    if options.base is not None and options.order in (None, LEXICOGRAPHIC):
        raise InputError(
            f"--base {options.base:g} has no effect on the lexicographic order. Add --order nodesort, or leave it out."
        )
    if options.base is not None and options.base <= 1:
        raise InputError(f"--base must be above 1, but is {options.base:g}. The default is {BASE}.")


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
    fingerprint = form.fingerprint()
    if options.out:
        write_checkpoint(canon.model, options.out)
    if options.element:
        with atomic_write(options.element) as file:
            canon.element.save(file)
    if options.json:
        output.print_json({"model": loaded.name, "fingerprint": fingerprint, **canon.to_dict(), "out": options.out})
    else:
        element = f"{canon.element!r}".replace("Element(", "")[:-1]
        words = [f"\n{canon.order} order: {element}", *(f"\nin doubt: {doubt}" for doubt in canon.doubts)]
        words += [f"\nwrote {path}" for path in (options.out, options.element) if path]
        answer = output.text(("fingerprint  ", "dim"), (fingerprint, "bold"), *words)
        output.show(symmetry_header(loaded.name, found, loaded.model), answer)
    return 0


# -- A folder of checkpoints -------------------------------------------------------------------------------------------


def _dedupe(options: Namespace, loaded: Loaded, found: Symmetry) -> int:
    from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn

    from intertwine.canonical.equivalence import equivalence_classes

    folder = Path(options.dedupe)
    files = sorted(f for f in folder.rglob("*") if f.suffix in SUFFIXES and f.is_file()) if folder.is_dir() else []
    if not files:
        problem = "holds no checkpoint" if folder.is_dir() else "is not a folder"
        raise InputError(f"{folder} {problem}. Give --dedupe a folder with files that end in {', '.join(SUFFIXES)}.")
    refused: dict[str, str] = {}
    columns = (output.text_column("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with output.progress_bar(*columns) as bar:
        task = bar.add_task("comparing checkpoints", total=len(files))
        forms = _forms(files, folder, loaded.model, found, refused, lambda: bar.advance(task))
        groups = equivalence_classes(forms, TOLERANCE if options.tol is None else options.tol)
    if not groups:
        raise InputError(
            f"None of the {len(files)} checkpoints in {folder} fits {loaded.name}. The first: "
            f"{next(iter(refused.values()))}"
        )
    if options.json:
        rows = [family.to_dict() for family in groups]
        output.print_json({"model": loaded.name, "folder": str(folder), "families": rows, "refused": refused})
    else:
        copies = sum(len(family.copies) for family in groups)
        count = f"{len(groups)} different, {copies} {'copy' if copies == 1 else 'copies'} of these"
        count += f", {len(refused)} not read" if refused else ""
        head = f"{loaded.name} · {len(files)} checkpoints in {folder} · {count}"
        notes = output.lines((f"not read: {reason}" for reason in refused.values()), "yellow")
        output.show(output.text(head, style="bold"), _families(groups), notes)
    return 0


def _forms(
    files: list[Path],
    folder: Path,
    model: nn.Module,
    found: Symmetry,
    refused: dict[str, str],
    done: Callable[[], None],
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


def _families(groups: Sequence[EquivalenceClass]) -> Table:
    from rich.table import Table

    rows = Table("network", "is a copy of", "how", "difference", "fingerprint", box=None, pad_edge=False)
    for family in groups:
        rows.add_row(family.first, "", "", "", family.fingerprint[:12])
        for member in family.copies:
            rows.add_row(f"  {member.name}", family.first, member.how, f"{member.difference:.0e}", "")
    return rows
