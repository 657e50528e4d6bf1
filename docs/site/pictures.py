"""Compact picture files for the pages: a short SVG where it stays small, else a PNG with a palette.

`compact_picture` is the one place where the scripts under docs/ save figures. The data of the repository has a budget;
no picture of a page is much larger than 30 kB.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

#: Bytes up to which a picture stays an SVG.
LARGEST_SVG = 30_000
#: Colours of a PNG.
COLOURS = 64
NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")


def short_svg(text: str) -> str:
    r"""The SVG without metadata, comments, line breaks and all but two decimals of its coordinates.

    >>> short_svg('<svg>\n <metadata>by hand</metadata>\n <path d="M 1.23456 2.0 L 3.999 4"/>\n</svg>')
    '<svg><path d="M 1.23 2 L 4 4"/></svg>'
    """
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"<!DOCTYPE.*?>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r">\s+<", "><", text)
    text = re.sub(r"(font(?:-family)?: ?[^;\"]*'DejaVu Sans')[^;\"]*", r"\1, sans-serif", text)

    def short(found: re.Match[str]) -> str:
        return f"{round(float(found[0]), 2) + 0:.10g}"  # + 0: no minus zero

    parts = re.split(r'(\b(?:d|x|y|x1|x2|y1|y2|points|transform|width|height|cx|cy|r|viewBox)="[^"]*")', text)
    parts[1::2] = [re.sub(r"\s+", " ", NUMBER.sub(short, part)) for part in parts[1::2]]
    return "".join(parts).strip()


def small_palette(file: Path) -> None:
    """Reduce a PNG to a few colours."""
    from PIL import Image

    with Image.open(file) as image:
        reduced = image.convert("RGB").quantize(COLOURS, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    reduced.save(file, optimize=True)


def compact_picture(save: Callable[[Path], Any], file: Path) -> Path:
    """Save a picture as `file`, without its ending, in the compact form, and remove the one of the other ending.

    `save` writes the picture to a path, whose ending is .svg or .png.
    """
    with TemporaryDirectory() as folder:
        drawn = Path(folder) / "picture.svg"
        save(drawn)
        text = short_svg(drawn.read_text(encoding="utf-8"))
    svg, png = file.with_name(f"{file.name}.svg"), file.with_name(f"{file.name}.png")
    if len(text.encode()) <= LARGEST_SVG:
        svg.write_text(text, encoding="utf-8")
        png.unlink(missing_ok=True)
        return svg
    save(png)
    small_palette(png)
    svg.unlink(missing_ok=True)
    return png
