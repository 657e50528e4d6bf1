"""`report.write`: the results of a study as one HTML file under ten megabytes that needs no network."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from intertwine.errors import InputError
from intertwine.files import write_text
from intertwine.lab.report import sections, symmetry_sections, tables
from intertwine.lab.report.entries import Entry, Records, StudyResults, read
from intertwine.lab.report.naming import Commands
from intertwine.lab.report.outline import outline, wires_html
from intertwine.lab.report.tables import Failure
from intertwine.lab.report.views import PageSection
from intertwine.lab.study.plan import Plan, plan_of
from intertwine.lab.study.running import Study
from intertwine.lab.study.store import Store
from intertwine.lab.study.zoos import NetworkCache, zoo_folder
from intertwine.lab.zoo.manifest import MANIFEST_FILE, read_manifest
from intertwine.symmetry.symmetry import symmetry

MAX_BYTES = 9_500_000
MAX_MARKS, MAX_ROWS = 24_000, 60_000  # drawn per section, and listed
#: The sections of the verbs, in the order of the page.
SECTION_MAKERS: Mapping[str, Callable[[StudyResults, Commands, int], PageSection | None]] = {
    "symmetry": symmetry_sections.symmetry_section,
    "canonical": symmetry_sections.canonical_section,
    "compare": sections.similarity,
    "barrier": sections.barriers,
    "connectivity": sections.layerwise(sections.LLFC),
    "stitch": sections.layerwise(sections.STITCHING),
    "fold": sections.folding,
    "complexity": sections.layerwise(sections.COMPLEXITY),
    "dissect": sections.dissection,
}


def write(results: Study | str | Path | Any, path: str | Path) -> Path:
    """Write a report that opens from disk, without a network.

    Args:
        results: the return value of `study.run`, the folder of a study, or a data frame of results.
        path: of the HTML file.

    Raises:
        InputError: the folder holds no study, or the file cannot be written.

    Example:
        >>> import tempfile, intertwine as it
        >>> zoo = {"architecture": "mlp", "data": "digits", "seeds": "0:2", "epochs": 2}
        >>> plan = {"name": "small", "zoos": {"z": zoo}, "parts": [{"verb": "accuracy"}]}
        >>> folder = tempfile.mkdtemp()
        >>> it.report.write(it.study.run(plan, out=folder + "/small"), folder + "/report.html").name
        'report.html'
    """
    if not isinstance(results, Study | str | Path):
        return write_study(results, path)
    folder = results.folder if isinstance(results, Study) else Path(results)
    store = Store.existing(folder)
    networks = _wire_outlines(plan_of(store.plan), folder)
    return write_study(store.frame(), path, plan=store.plan, networks=networks, failures=store.errors())


def _wire_outlines(plan: Plan, folder: Path) -> dict[str, str]:
    """The wires of each zoo's architecture as HTML; zoos that no longer exist are left out."""
    outlines = {}
    for name, zoo in plan.zoos.items():
        place = zoo_folder(name, zoo, folder)
        records = read_manifest(place).records if (place / MANIFEST_FILE).exists() else ()
        if records:
            cache = NetworkCache({name: str(place)})
            network = cache.network(name, records[0].seed)
            outlines[name] = wires_html(outline(symmetry(network, cache.example(name, network)).wires))
    return outlines


def write_study(
    records: Records,
    path: str | Path,
    plan: Mapping[str, Any] | None = None,
    networks: Mapping[str, str] | None = None,
    failures: Sequence[Failure] = (),
) -> Path:
    """Write the report of some results.

    Args:
        records: a polars data frame or records with the columns of a result store.
        path: of the HTML file.
        plan: of the study.
        networks: name → outline of its symmetry in HTML, from `intertwine.lab.report.outline.wires_html`.
        failures: from `Store.errors`.

    >>> import tempfile
    >>> row = {"study": "mine", "verb": "fold", "a": "net", "quantity": "accuracy", "index": 0.5, "value": 0.9}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_study([row], folder + "/report.html").stat().st_size < 10_000_000
    True
    """
    write_text(path, study_page(read(records), plan or {}, networks or {}, failures))
    return Path(path)


def study_page(
    results: StudyResults, plan: Mapping[str, Any], networks: Mapping[str, str], failures: Sequence[Failure]
) -> str:
    """The page, with as many pictures and rows as fit."""
    share, count = 1.0, len(results.entries)
    while True:
        most = int(min(MAX_ROWS, count) * share)
        rows = [results.entries[i * count // most] for i in range(most)] if count > most else list(results.entries)
        text = _page(results, rows, int(min(MAX_MARKS, count) * share), plan, networks, failures)
        size = len(text.encode())
        if size <= MAX_BYTES:
            return text
        if share < 0.001:
            raise InputError(
                f"The report needs {size / 1e6:.0f} MB without its rows, but at most {MAX_BYTES / 1e6:.1f} MB are "
                "allowed: the plan or the outlines of the networks are too large. Give fewer."
            )
        share *= min(0.8, 0.9 * MAX_BYTES / size)


def _page(
    results: StudyResults,
    rows: list[Entry],
    marks: int,
    plan: Mapping[str, Any],
    networks: Mapping[str, str],
    failures: Sequence[Failure],
) -> str:
    commands = Commands()
    made = {"accuracy": symmetry_sections.networks(results, commands, networks)}
    made |= {verb: maker(results, commands, marks) for verb, maker in SECTION_MAKERS.items()}
    drawn = {verb: section for verb, section in made.items() if section is not None}
    parts = [
        tables.overview(results, failures, {verb: section.anchor for verb, section in drawn.items()}),
        *drawn.values(),
        tables.tables(rows, len(results.entries), commands),
        tables.provenance(results.tasks, plan),
        PageSection("commands", "Commands", commands.section()),  # last, when all links to them are written
    ]
    return _document(results.name or "Study", tables.summary(results, failures), parts)


def _document(heading: str, lead: str, sections: Sequence[PageSection]) -> str:
    """The HTML page. Its policy forbids every request, and every script except ours."""
    style, script = (
        files("intertwine.lab.report").joinpath(name).read_text("utf-8") for name in ("study.css", "study.js")
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:"
    links = "".join(f'<li><a href="#{s.anchor}">{escape(s.heading)}</a></li>' for s in sections)
    body = "\n".join(
        f'<section id="{s.anchor}" aria-labelledby="{s.anchor}-h"><h2 id="{s.anchor}-h">{escape(s.heading)}</h2>'
        f"{s.body}</section>"
        for s in sections
    )
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(heading)}</title>\n'
        f"<style>{style}</style>\n</head>\n<body>\n<header><h1>{escape(heading)}</h1>\n"
        f'<p class="lead">{escape(lead)}</p></header>\n<nav aria-label="Sections"><ul>{links}</ul></nav>\n'
        f"<main>\n{body}\n</main>\n<script>{script}</script>\n</body>\n</html>\n"
    )
