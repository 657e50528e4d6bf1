"""Canonical form: networks moved along their symmetry, what that does to averages, and how they are found again."""

from __future__ import annotations

from html import escape

from intertwine.report.study.commands import Commands, link
from intertwine.report.study.entries import Entry, Results
from intertwine.report.study.facts import facts, verdict
from intertwine.report.study.naming import Names, counted
from intertwine.report.study.views import Section

COLUMNS = {
    "moved": "moved by",
    "changed_predictions": "predictions changed",
    "average_accuracy": "average with copy",
    "average_accuracy_back": "average, brought back",
    "way_back_error": "off after the way back",
}
WHY = (
    "A random element of its symmetry moves the weights of a network far away, and not what it computes. The network "
    "half-way between a network and its moved copy is another function all the same: what looks like distance between "
    "weights can be a difference in order, scale and sign alone. In canonical form the two are one network; the "
    "element is found again from the weights, and once it is undone the average is the network itself. Distances are "
    "shares of the length of all weights, averages are told by their accuracy."
)


def moving(results: Results, commands: Commands, most: int) -> Section | None:
    """The section; None where no canonical form was made."""
    entries = results.of("canonical")
    if not entries:
        return None
    marks = results.of("canonical", "fingerprint_equal")
    table = facts(entries, COLUMNS, commands, "Canonical form")
    return Section("canonical", "Canonical form", f"<p>{WHY}</p>{_marks(marks, commands)}{table}")


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
