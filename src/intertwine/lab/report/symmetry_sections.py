"""Report sections on the networks themselves: accuracy, wires, certificates and canonical forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from intertwine.lab.report.charts import bar_chart, dot_of, grouped, linked_dot
from intertwine.lab.report.entries import Entry, StudyResults
from intertwine.lab.report.naming import Commands, Names, counted, link, linked
from intertwine.lab.report.views import PageSection, heads, html_table, scrolled

MAX_ROWS = 100
WIRES = (
    "A wire is a set of hidden units that can be permuted (and often rescaled) together wherever it occurs, without "
    "changing what the network computes. S_n stands for all permutations of n units, R₊ for positive scales, {±1} for "
    "signs, R* for both."
)
#: Quantity → heading of its column.
SYMMETRY_COLUMNS = {
    "wires": "wires",
    "log_order": "ln of permutations",
    "dimension": "dimensions",
    "coverage": "coverage",
    "feature_error": "feature error",
    "certificate_error": "output error",
}
SYMMETRY_TEXT = (
    "Permutations are those of hidden units, dimensions those of scales and other continuous transformations; coverage "
    "is the share of parameters that a transformation changes. The errors are relative: of hidden features against "
    "their prediction, and of outputs against those of the original network, under random elements."
)
CANONICAL_COLUMNS = {
    "moved": "moved by",
    "changed_predictions": "predictions changed",
    "average_accuracy": "average with copy",
    "average_accuracy_back": "average with recovered copy",
    "way_back_error": "recovery error",
}
CANONICAL_TEXT = (
    "A random element of its symmetry moves the weights of a network far away, but keeps its function. The average of "
    "a network and its moved copy is another function: a distance between weights can be a difference in order, scale "
    "and sign alone. In canonical form the two are equal; the element is recovered from the weights, and once it is "
    "undone the average is the network itself. Distances are relative to the norm of all weights, averages are given "
    "by their accuracy."
)


def networks(results: StudyResults, commands: Commands, outlines: Mapping[str, str]) -> PageSection | None:
    """Accuracies as bars, and the wires of each architecture (HTML); None without either."""
    body = ""
    if entries := results.of("accuracy", "accuracy"):
        groups = grouped(entries, Names.of(entries).in_full)
        bars = [(name, dot_of(0.0, own, commands)) for name, own in groups.items()]
        body = f"<p>Accuracy of each network on the test part.</p>{bar_chart('network', 'accuracy', bars)}"
    if outlines:
        body += f"<h3>Their wires</h3><p>{WIRES}</p>"
    for i, (name, html) in enumerate(outlines.items()):
        opened = "" if i else " open"
        body += f"<details{opened}><summary>{escape(name)}</summary>{scrolled(html, name)}</details>"
    return PageSection("networks", "Networks", body) if body else None


def symmetry_section(results: StudyResults, commands: Commands, most: int) -> PageSection | None:
    """The size of the symmetry of each network, and its certificate."""
    entries = results.of("symmetry")
    if not entries:
        return None
    verdict = _certificate_verdict(results.of("symmetry", "certificate_error"), commands)
    table = _network_table(entries, SYMMETRY_COLUMNS, commands, "Symmetry and proof")
    return PageSection("symmetry", "Symmetry and proof", f"{verdict}<p>{SYMMETRY_TEXT}</p>{table}")


def _certificate_verdict(errors: list[Entry], commands: Commands) -> str:
    """The worst certificate in a sentence. A certificate that failed has a note, or no finite error."""
    if not errors:
        return ""
    failed = [e for e in errors if e.note is not None or e.value is None]
    if failed:
        which = ", ".join(dict.fromkeys(map(Names.of(errors).network, failed)))
        number = linked(failed[0].value, commands.of(failed[:1]), failed[0].note)
        return _verdict(
            False, f"The symmetry does not hold for {escape(which)}: a random element changes the outputs by {number}."
        )
    worst = max(errors, key=lambda e: e.value or 0.0)
    number = linked(worst.value, commands.of([worst]))
    return _verdict(
        True,
        f"The symmetry holds for {counted(len(errors), 'network')}: random elements move the weights, and in float64 "
        f"the outputs change by at most {number}, relative to their size.",
    )


def canonical_section(results: StudyResults, commands: Commands, most: int) -> PageSection | None:
    """Networks moved along their symmetry, the effect on averages, and their recovery."""
    entries = results.of("canonical")
    if not entries:
        return None
    verdict = _fingerprint_verdict(results.of("canonical", "fingerprint_equal"), commands)
    table = _network_table(entries, CANONICAL_COLUMNS, commands, "Canonical form")
    return PageSection("canonical", "Canonical form", f"<p>{CANONICAL_TEXT}</p>{verdict}{table}")


def _fingerprint_verdict(entries: list[Entry], commands: Commands) -> str:
    """Whether every network has the fingerprint of its moved copy, and different networks have different ones."""
    if not entries:
        return ""
    by_network = {Names.of(entries).network(e): e for e in entries}
    listed = []
    for name, entry in by_network.items():
        text, numbers = escape(entry.note or "–"), commands.of([entry])
        listed.append(f"{escape(name)} <code>{f'<a {link(numbers)}>{text}</a>' if numbers else text}</code>")
    names = ", ".join(listed)
    unequal = [name for name, e in by_network.items() if e.value != 1.0]
    if unequal:
        return _verdict(False, f"The moved copy of {escape(', '.join(unequal))} has another fingerprint. {names}")
    total, different = len(by_network), len({e.note for e in by_network.values()})
    have = f"{counted(total, 'network')} {'has' if total == 1 else 'have'} {counted(different, 'fingerprint')}"
    return _verdict(different == total, f"Every network has the fingerprint of its moved copy, and {have}: {names}.")


def _network_table(entries: Sequence[Entry], columns: Mapping[str, str], commands: Commands, title: str) -> str:
    """One row per network, one column per quantity."""
    groups = grouped(entries, Names.of(entries).in_full)
    shown = [quantity for quantity in columns if any(e.quantity == quantity for e in entries)]
    rows = []
    for name, own in list(groups.items())[:MAX_ROWS]:
        dots = {
            quantity: dot_of(0.0, repeats, commands) for quantity, repeats in grouped(own, lambda e: e.quantity).items()
        }
        cells = "".join(f'<td class="number">{linked_dot(dots.get(quantity))}</td>' for quantity in shown)
        rows.append(f'<th scope="row">{escape(name)}</th>{cells}')
    head = "".join(f'<th scope="col" class="number">{escape(columns[quantity])}</th>' for quantity in shown)
    left_out = f'<p class="said">{MAX_ROWS} of {len(groups):,} rows.</p>' if len(groups) > MAX_ROWS else ""
    return scrolled(html_table(heads(["network"]) + head, rows), title) + left_out


def _verdict(good: bool, html: str) -> str:
    return f"<p><strong>{'✓' if good else '✗'}</strong> {html}</p>"
