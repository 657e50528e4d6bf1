"""Save figures of the pages in a compact form, and draw docs/images/gelu-defect.svg. Needs `plot`, `data`.

python docs/figures.py            # draw docs/images/gelu-defect.svg
python docs/figures.py FILE …     # make pictures compact that other commands wrote

Every script under docs/ that draws saves through `save_figure`: a short SVG where it is small, else a PNG with a
palette. The data of the repository has a budget, so that no picture should be much larger than 30 kB.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
import torch.nn.functional as F

mpl.use("svg")
import matplotlib.pyplot as plt

from intertwine.symmetry.intertwiner import homogeneity_defect

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IMAGES = Path(__file__).parent / "images"
#: The same bytes on every machine with the same matplotlib.
STEADY = {"svg.hashsalt": "intertwine", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10}
#: Bytes up to which a picture stays an SVG.
LARGEST_SVG = 30_000
#: Colours of a PNG.
COLOURS = 128
NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
#: Slope of the defect of GELU for large scales: √E[(X·(1[X > 0] − Φ(X)))²].
SLOPE = 0.12675


def short_svg(text: str) -> str:
    r"""The SVG without metadata, comments, line breaks and all but two decimals of its coordinates.

    >>> short_svg('<svg>\n <metadata>by hand</metadata>\n <path d="M 1.23456 2.0 L 3.999 4"/>\n</svg>')
    '<svg><path d="M 1.23 2 L 4 4"/></svg>'
    """
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"<!DOCTYPE.*?>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r">\s+<", "><", text)
    text = re.sub(r"(font(?:-family)?: ?[^;\"]*'DejaVu Sans')[^;\"]*", r"\1, sans-serif", text)

    def short(part: str) -> str:
        decimals = 4 if part.startswith("transform") else 2  # a scale may be small
        found = NUMBER.sub(lambda number: f"{round(float(number[0]), decimals) + 0:.10g}", part)  # + 0: no minus zero
        return re.sub(r"\s+", " ", found)

    parts = re.split(r'(\b(?:d|x|y|x1|x2|y1|y2|points|transform|width|height|cx|cy|r|viewBox)="[^"]*")', text)
    parts[1::2] = map(short, parts[1::2])
    return "".join(parts).strip()


def small_palette(file: Path) -> None:
    """Reduce a PNG to a few colours."""
    from PIL import Image

    with Image.open(file) as image:
        reduced = image.convert("RGB").quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    reduced.save(file, optimize=True)


def save_compact(save: Callable[[Path], Any], file: Path, largest: int = LARGEST_SVG) -> Path:
    """Save a picture as .svg, or as .png where the SVG would have more than `largest` bytes. Returns its file.

    `save` writes the picture to a path in the format of its ending. A picture of the other ending is removed.
    """
    svg, png = file.with_suffix(".svg"), file.with_suffix(".png")
    save(svg)
    text = short_svg(svg.read_text(encoding="utf-8"))
    if len(text.encode()) <= largest:
        svg.write_text(text, encoding="utf-8")
        png.unlink(missing_ok=True)
        return svg
    svg.unlink()
    save(png)
    small_palette(png)
    return png


def save_figure(figure: Figure, file: Path, largest: int = LARGEST_SVG) -> None:
    """Save a figure of matplotlib in the compact form, see `save_compact`, and print the name of its file."""

    def save(path: Path) -> None:
        form = path.suffix.removeprefix(".")
        figure.savefig(path, format=form, dpi=100, metadata={"Date": None} if form == "svg" else None)

    print(f"wrote {save_compact(save, file, largest).name}")


def gelu_defect(path: Path) -> None:
    """ξ(λ) for GELU and SiLU, with the line that GELU's approaches."""
    scales = np.linspace(0.0, 3.0, 121)
    curves = {"GELU": F.gelu, "SiLU": F.silu, "ReLU": F.relu}
    with mpl.rc_context(STEADY):
        figure, axes = plt.subplots(figsize=(6.4, 3.6))
        for name, function in curves.items():
            axes.plot(scales, [homogeneity_defect(function, float(s)) for s in scales], label=name)
        axes.plot(scales, SLOPE * scales, "--", color="0.6", linewidth=1, label="0.127 λ, what GELU approaches")
        axes.annotate("0.0726 at λ = 0.39", (0.39, 0.0726), (0.2, 0.16), arrowprops={"arrowstyle": "-", "color": "0.5"})
        axes.set(xlabel="scale λ", ylabel="ξ(λ)", xlim=(0, 3), ylim=(-0.008, None))
        axes.set_title("How far σ(λx) is from λσ(x), x normal", loc="left", fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        figure.tight_layout()
        save_figure(figure, path)
        plt.close(figure)


def main() -> None:
    for file in map(Path, sys.argv[1:]):
        if file.suffix == ".svg":
            file.write_text(short_svg(file.read_text(encoding="utf-8")), encoding="utf-8")
        else:
            small_palette(file)
    if not sys.argv[1:]:
        gelu_defect(IMAGES / "gelu-defect.svg")


if __name__ == "__main__":
    main()
