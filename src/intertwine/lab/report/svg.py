"""SVG elements, the colours and sizes of all pictures, and numeric axis scales."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
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
SMALLEST_RANGE, SMALLEST_SHARE = (
    1e-300,
    1e-12,
)  # a range below these, absolute or relative, cannot be divided into steps


def element(tag: str, content: str = "", **attributes: str | Length) -> str:
    """`<tag …>content</tag>` with unescaped content; `stroke_width=2` is `stroke-width="2"`, and `class_` is `class`.

    >>> element("rect", x=1.0, y=2.25, stroke_width=2, class_="bar")
    '<rect x="1" y="2.2" stroke-width="2" class="bar"/>'
    """
    written = "".join(
        f" {name.rstrip('_').replace('_', '-')}={quoteattr(_number(value))}" for name, value in attributes.items()
    )
    return f"<{tag}{written}>{content}</{tag}>" if content else f"<{tag}{written}/>"


def _number(value: str | Length) -> str:
    return value if isinstance(value, str) else f"{value:.1f}".removesuffix(".0")


def text(x: Length, y: Length, words: str, colour: str = INK, **attributes: str | Length) -> str:
    """A line of text that starts at x, or is centred there with `text_anchor="middle"`."""
    return element("text", escape(words), x=x, y=y, fill=colour, **attributes, **{"xml:space": "preserve"})


def document(width: Length, height: Length, title: str, description: str, body: str) -> str:
    """A standalone picture on white, with a title and a description for screen readers."""
    head = element("title", escape(title), id="picture-title") + element("desc", escape(description), id="picture-desc")
    paper = element("rect", width=width, height=height, fill=PAPER)
    picture = element(
        "svg", f"{head}\n{paper}\n{body}\n", xmlns="http://www.w3.org/2000/svg", width=width, height=height,
        viewBox=f"0 0 {_number(width)} {_number(height)}", role="img", aria_labelledby="picture-title picture-desc",
        font_family=FONT, font_size=11,
    )  # fmt: skip
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{picture}\n'


@dataclass(frozen=True)
class Scale:
    """Maps numbers from `low` to `high` to pixels from `start` to `end`."""

    low: float
    high: float
    start: Length
    end: Length

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def step(low: float, high: float, count: int = 5) -> float:
    """The round step (1, 2 or 5 times a power of ten) that divides an interval into about `count` parts.

    >>> step(0.0, 1.0), step(0.0, 37.0), step(0.0, 0.3)
    (0.2, 10.0, 0.1)
    """
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    return next(float(f"{m * power:.3g}") for m in (1, 2, 5, 10) if m * power >= 0.999 * rough)


def around(values: Iterable[float], zero: bool = True, count: int = 10) -> tuple[float, float]:
    """Round limits of an axis that shows the values, and 0 if `zero`; a larger `count` leaves smaller margins.

    >>> around([0.13, 0.92]), around([5.0]), around([])
    ((0.0, 1.0), (0.0, 5.0), (0.0, 1.0))
    >>> around([1e-14, 2.1e-15]), around([-3.3e-16])
    ((0.0, 1e-14), (-3.5e-16, 0.0))
    """
    shown = [*values, *([0.0] if zero else [])]
    low, high = min(shown, default=0.0), max(shown, default=1.0)
    if high - low <= max(SMALLEST_RANGE, SMALLEST_SHARE * max(abs(low), abs(high))):
        high = low + max(1.0, abs(low) / 1000)  # adding 1 to a large number may not change it
    size = step(low, high, count)
    return multiple(math.floor(low / size + 1e-9), size), multiple(math.ceil(high / size - 1e-9), size)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """The round numbers within an interval.

    >>> ticks(0.0, 1.0)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    >>> ticks(0.0, 1e-15)
    [0.0, 2e-16, 4e-16, 6e-16, 8e-16, 1e-15]
    """
    size = step(low, high, count)
    first, last = math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9)
    return [multiple(n, size) for n in range(first, last + 1)]


def multiple(count: int, size: float) -> float:
    """`count * size`, rounded to the decimals of the size.

    >>> 3 * 0.1, multiple(3, 0.1), multiple(7, 2e-17), multiple(12, 500.0)
    (0.30000000000000004, 0.3, 1.4e-16, 6000.0)
    """
    return round(count * size, -math.floor(math.log10(size))) + 0.0  # + 0.0 turns -0.0 into 0.0
