"""Symmetry and proof: how large the symmetry of each network is, and what random elements of it change."""

from __future__ import annotations

from html import escape

from intertwine.report.study.commands import Commands, linked
from intertwine.report.study.entries import Entry, Results
from intertwine.report.study.facts import facts, verdict
from intertwine.report.study.naming import Names, counted
from intertwine.report.study.views import Section

COLUMNS = {
    "wires": "wires",
    "log_order": "ln of orders",
    "dimension": "dimensions",
    "coverage": "coverage",
    "feature_error": "features off by",
    "certificate_error": "outputs off by",
}
WHAT = (
    "Orders are those of hidden units, dimensions those of scales and other continuous moves; coverage is the share of "
    "parameters that are moved at all. Under random elements, features are off the prediction and outputs off what "
    "they were by the shares of their size given here."
)


def proof(results: Results, commands: Commands, most: int) -> Section | None:
    """The section; None where no symmetry was looked for."""
    entries = results.of("symmetry")
    if not entries:
        return None
    told = _verdict(results.of("symmetry", "certificate_error"), commands)
    table = facts(entries, COLUMNS, commands, "Symmetry and proof")
    return Section("symmetry", "Symmetry and proof", f"{told}<p>{WHAT}</p>{table}")


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
