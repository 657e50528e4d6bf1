"""Report sections on the networks themselves: accuracy, wires, certificates and canonical form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from intertwine.lab.report.charts import bar_chart, dot_of, grouped
from intertwine.lab.report.entries import Entry, StudyResults
from intertwine.lab.report.naming import Commands, Names, counted, link, linked
from intertwine.lab.report.views import PageSection, scrolled

# ----------------------------------------------------------------------------------------------------
# Facts: a table with one row per network and one column per quantity, every number with its command.


MOST_ROWS = 100


def facts(entries: Sequence[Entry], columns: Mapping[str, str], commands: Commands, title: str) -> str:
    """The table. `columns`: quantity → what stands above it."""
    groups = grouped(entries, Names.of(entries).in_full)
    shown = [quantity for quantity in columns if any(e.quantity == quantity for e in entries)]
    head = "".join(f'<th scope="col" class="number">{escape(columns[quantity])}</th>' for quantity in shown)
    body = []
    for name, own in list(groups.items())[:MOST_ROWS]:
        of = grouped(own, lambda e: e.quantity)
        dots = [dot_of(0.0, of[quantity], commands) if quantity in of else None for quantity in shown]
        cells = "".join(
            f'<td class="number">{linked(dot.value, dot.commands, dot.note) if dot else ""}</td>' for dot in dots
        )
        body.append(f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>')
    table = f'<table><thead><tr><th scope="col">network</th>{head}</tr></thead><tbody>{"".join(body)}</tbody></table>'
    left_out = f'<p class="said">{MOST_ROWS} of {len(groups):,} rows.</p>' if len(groups) > MOST_ROWS else ""
    return scrolled(table, title) + left_out


def verdict(good: bool, words: str) -> str:
    """A sentence that begins with a tick or a cross. `words` is HTML."""
    return f"<p><strong>{'✓' if good else '✗'}</strong> {words}</p>"


# ----------------------------------------------------------------------------------------------------
# Networks: how good they are, as bars, and the wires of each architecture as a tree.


WIRES = (
    "A wire is a set of hidden units that can be reordered (and often rescaled) together wherever it occurs, without "
    "changing what the network computes. S_n stands for all orders of n units, R₊ for positive scales, {±1} for signs, "
    "R* for both."
)


def networks(results: StudyResults, commands: Commands, outlines: Mapping[str, str]) -> PageSection | None:
    """The section; None where there is neither an accuracy nor an outline. The outlines are HTML."""
    made = _accuracies(results, commands) + _wires(outlines)
    return PageSection("networks", "Networks", made) if made else None


def _accuracies(results: StudyResults, commands: Commands) -> str:
    entries = results.of("accuracy", "accuracy")
    if not entries:
        return ""
    groups = grouped(entries, Names.of(entries).in_full)
    bars = [(name, dot_of(0.0, own, commands)) for name, own in groups.items()]
    return f"<p>Share of the test part that each network gets right.</p>{bar_chart('network', 'accuracy', bars)}"


def _wires(outlines: Mapping[str, str]) -> str:
    """The wire tree of each architecture; the first is open."""
    if not outlines:
        return ""
    made = "".join(
        f"<details{' open' if not i else ''}><summary>{escape(name)}</summary>{scrolled(html, name)}</details>"
        for i, (name, html) in enumerate(outlines.items())
    )
    return f"<h3>Their wires</h3><p>{WIRES}</p>{made}"


# ----------------------------------------------------------------------------------------------------
# Symmetry and proof: how large the symmetry of each network is, and what random elements of it change.


PROOF_COLUMNS = {
    "wires": "wires",
    "log_order": "ln of orders",
    "dimension": "dimensions",
    "coverage": "coverage",
    "feature_error": "features off by",
    "certificate_error": "outputs off by",
}
PROOF_TEXT = (
    "Orders are those of hidden units, dimensions those of scales and other continuous moves; coverage is the share of "
    "parameters that are moved at all. Under random elements, features are off the prediction and outputs off what "
    "they were by the shares of their size given here."
)


def symmetry_section(results: StudyResults, commands: Commands, most: int) -> PageSection | None:
    """The section; None where no symmetry was looked for."""
    entries = results.of("symmetry")
    if not entries:
        return None
    told = _verdict(results.of("symmetry", "certificate_error"), commands)
    table = facts(entries, PROOF_COLUMNS, commands, "Symmetry and proof")
    return PageSection("symmetry", "Symmetry and proof", f"{told}<p>{PROOF_TEXT}</p>{table}")


def _verdict(errors: list[Entry], commands: Commands) -> str:
    """The worst certificate in a sentence. A certificate that failed has a note, or no error that is a number."""
    if not errors:
        return ""
    failed = [e for e in errors if e.note is not None or e.value is None]
    if failed:
        names = Names.of(errors)
        which = ", ".join(dict.fromkeys(names.network(e) for e in failed))
        number = linked(failed[0].value, commands.of(failed[:1]), failed[0].note)
        return verdict(
            False,
            f"The symmetry does not hold for {escape(which)}: moved by a random element, the outputs change by "
            f"{number} of their size.",
        )
    worst = max(errors, key=lambda e: e.value or 0.0)
    return verdict(
        True,
        f"The symmetry holds for {counted(len(errors), 'network')}: random elements of it move the weights, and in "
        f"float64 no output changes by more than {linked(worst.value, commands.of([worst]))} of its size.",
    )


# ----------------------------------------------------------------------------------------------------
# Canonical form: networks moved along their symmetry, what that does to averages, and how they are found again.


CANONICAL_COLUMNS = {
    "moved": "moved by",
    "changed_predictions": "predictions changed",
    "average_accuracy": "average with copy",
    "average_accuracy_back": "average, brought back",
    "way_back_error": "off after the way back",
}
CANONICAL_TEXT = (
    "A random element of its symmetry moves the weights of a network far away, and not what it computes. The network "
    "half-way between a network and its moved copy is another function all the same: what looks like distance between "
    "weights can be a difference in order, scale and sign alone. In canonical form the two are one network; the "
    "element is found again from the weights, and once it is undone the average is the network itself. Distances are "
    "shares of the length of all weights, averages are told by their accuracy."
)


def canonical_section(results: StudyResults, commands: Commands, most: int) -> PageSection | None:
    """The section; None where no canonical form was made."""
    entries = results.of("canonical")
    if not entries:
        return None
    marks = results.of("canonical", "fingerprint_equal")
    table = facts(entries, CANONICAL_COLUMNS, commands, "Canonical form")
    return PageSection("canonical", "Canonical form", f"<p>{CANONICAL_TEXT}</p>{_marks(marks, commands)}{table}")


def _marks(entries: list[Entry], commands: Commands) -> str:
    """Whether a network and its copy share a fingerprint, and whether different networks do not."""
    if not entries:
        return ""
    names = Names.of(entries)
    found = {names.network(e): e for e in entries}
    unequal = [name for name, e in found.items() if e.value != 1.0]
    different = len({e.note for e in found.values()})
    listed = ", ".join(f"{escape(name)} <code>{_mark(e, commands)}</code>" for name, e in found.items())
    if unequal:
        return verdict(False, f"Moved, {escape(', '.join(unequal))} has another fingerprint than before. {listed}")
    copies = "Every network has the fingerprint of its moved copy"
    have = "has" if len(found) == 1 else "have"
    told = f"{copies}, and {counted(len(found), 'network')} {have} {counted(different, 'fingerprint')}: {listed}."
    return verdict(different == len(found), told)


def _mark(entry: Entry, commands: Commands) -> str:
    """The fingerprint as a link to its command."""
    text, numbers = escape(entry.note or "–"), commands.of([entry])
    return f"<a {link(numbers)}>{text}</a>" if numbers else text
