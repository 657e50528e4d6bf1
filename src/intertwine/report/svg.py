"""SVG, element by element, and the few measures and colours that all pictures share."""

from __future__ import annotations

from typing import TypeAlias
from xml.sax.saxutils import escape, quoteattr

Length: TypeAlias = int | float  # in pixels
INK, FAINT, GREY, EDGE, PAPER = "#1f2933", "#69737d", "#e4e7eb", "#cbd2d9", "#ffffff"
PALETTE = (
    *("#0b6fb8", "#d1495b", "#2e8b57", "#b8860b", "#7b4fb3"),
    *("#0f8b8d", "#c2571a", "#b03a8c", "#5b7a1f", "#4a5fc1"),
)
FONT = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
CHARACTER = 6.7  # width of a letter of the 11-pixel type


def element(tag: str, content: str = "", **attributes: str | Length) -> str:
    """`<tag …>content</tag>`; `stroke_width=2` becomes `stroke-width="2"`, and content is taken as it is.

    >>> element("rect", x=1.0, y=2.25, stroke_width=2)
    '<rect x="1" y="2.2" stroke-width="2"/>'
    """
    written = "".join(f" {name.replace('_', '-')}={quoteattr(_number(value))}" for name, value in attributes.items())
    return f"<{tag}{written}>{content}</{tag}>" if content else f"<{tag}{written}/>"


def _number(value: str | Length) -> str:
    return value if isinstance(value, str) else f"{value:.1f}".removesuffix(".0")


def text(x: Length, y: Length, words: str, colour: str = INK, **attributes: str | Length) -> str:
    """A line of text that begins at x (or is centred there, with `text_anchor="middle"`)."""
    return element("text", escape(words), x=x, y=y, fill=colour, **attributes, **{"xml:space": "preserve"})


def document(width: Length, height: Length, title: str, description: str, body: str) -> str:
    """A standalone picture on white paper that says in words what it shows."""
    head = element("title", escape(title), id="picture-title") + element("desc", escape(description), id="picture-desc")
    paper = element("rect", width=width, height=height, fill=PAPER)
    picture = element(
        "svg",
        f"{head}\n{paper}\n{body}\n",
        xmlns="http://www.w3.org/2000/svg",
        width=width,
        height=height,
        viewBox=f"0 0 {_number(width)} {_number(height)}",
        role="img",
        aria_labelledby="picture-title picture-desc",
        font_family=FONT,
        font_size=11,
    )
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{picture}\n'
