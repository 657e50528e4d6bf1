"""Self-contained HTML pages: they open from disk, load nothing from anywhere, and run no script."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

from intertwine.report.outline import Line, Section, title

STYLE = """
:root { color-scheme: light; }
body { margin: 0 auto; padding: 2.5rem 1.5rem 4rem; max-width: 62rem; background: #fff; color: #1f2933;
       font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.9rem; margin: 0 0 .3rem; } h2 { font-size: 1.25rem; margin: 2.6rem 0 .6rem; }
p { max-width: 44rem; } .lead { color: #52606d; font-size: 1.1rem; margin-top: 0; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
td { padding: .35rem 1.4rem .35rem 0; border-bottom: 1px solid #e4e7eb; } td.number { text-align: right; }
caption { text-align: left; font-weight: 600; color: #52606d; padding-bottom: .2rem; }
.bar { background: #e4e7eb; border-radius: 3px; width: 16rem; height: .8rem; }
.bar span { display: block; height: 100%; border-radius: 3px; background: #0b6fb8; }
.bar.low span { background: #d1495b; }
.verdict { border-left: 4px solid #2e8b57; background: #f1f8f4; padding: .7rem 1rem; margin: 1rem 0; }
.verdict.bad { border-color: #d1495b; background: #fdf2f3; }
code, .wires { font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: .85rem; }
.wires ul { list-style: none; margin: 0; padding-left: 1.3rem; border-left: 1px solid #e4e7eb; }
.wires > ul { padding-left: 0; border: 0; }
.wires span { margin-left: .9em; } .wires .size { color: #0b6fb8; } .wires .group { color: #7b4fb3; }
.picture { overflow-x: auto; border: 1px solid #e4e7eb; border-radius: 6px; } .picture svg { display: block; }
footer { margin-top: 3rem; color: #69737d; font-size: .85rem; }
"""


@dataclass(frozen=True)
class Chapter:
    """A heading and the HTML under it."""

    heading: str
    body: str


def page(heading: str, lead: str, chapters: Iterable[Chapter], footer: str = "") -> str:
    """A whole page. `lead` and `footer` are plain text."""
    parts = "\n".join(f"<h2>{escape(c.heading)}</h2>\n{c.body}" for c in chapters)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(heading)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n"
        f'<h1>{escape(heading)}</h1>\n<p class="lead">{escape(lead)}</p>\n{parts}\n'
        f"<footer>{escape(footer)}</footer>\n</body>\n</html>\n"
    )


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def verdict(text: str, good: bool) -> str:
    """A sentence in a box, green or red."""
    return f'<p class="verdict{"" if good else " bad"}">{escape(text)}</p>'


def bars(caption: str, rows: Iterable[tuple[str, float]], low: float) -> str:
    """Fractions as bars with their values; those below `low` are red."""
    made = "".join(
        f'<tr><td>{escape(label)}</td><td><div class="bar{" low" if value < low else ""}">'
        f'<span style="width:{value:.1%}"></span></div></td><td class="number">{value:.1%}</td></tr>'
        for label, value in rows
    )
    return f"<table><caption>{escape(caption)}</caption><tbody>{made}</tbody></table>"


def picture(svg: str) -> str:
    """An SVG document, inline."""
    inline = re.sub(r"^<\?xml[^>]*\?>\s*", "", svg)
    return f'<div class="picture">{inline}</div>'


def wires(section: Section) -> str:
    """An outline as nested lists."""
    return f'<div class="wires">{_section(section)}</div>'


def _section(section: Section) -> str:
    inner = "".join(f"<li><b>{escape(title(s))}</b>{_section(s)}</li>" for s in section.sections)
    return f"<ul>{''.join(map(_line, section.lines))}{inner}</ul>"


def _line(line: Line) -> str:
    wire = line.wire
    fibres = f"<ul>{''.join(map(_line, line.fibres))}</ul>" if line.fibres else ""
    size, group = f'<span class="size">{wire.size}</span>', f'<span class="group">{escape(str(wire.group))}</span>'
    return f"<li>{escape(title(line))}{size}{group}{fibres}</li>"
