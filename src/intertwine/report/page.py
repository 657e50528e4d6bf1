"""The wires of a symmetry as HTML: nested lists, the look of which is that of the page they stand in."""

from __future__ import annotations

from html import escape

from intertwine.report.outline import Line, Section, title


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
