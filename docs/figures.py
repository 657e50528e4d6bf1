"""Draw the figures of the pages again: docs/images/gelu-defect.svg. Needs the extra `plot`.

python docs/figures.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch.nn.functional as F

mpl.use("svg")
import matplotlib.pyplot as plt

from intertwine.symmetry.intertwiner import homogeneity_defect

IMAGES = Path(__file__).parent / "images"
#: The same bytes on every machine with the same matplotlib.
STEADY = {"svg.hashsalt": "intertwine", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10}
#: Slope of the defect of GELU for large scales: √E[(X·(1[X > 0] − Φ(X)))²].
SLOPE = 0.12675


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
        figure.savefig(path, format="svg", metadata={"Date": None})
        plt.close(figure)


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    gelu_defect(IMAGES / "gelu-defect.svg")
    print("wrote gelu-defect.svg")


if __name__ == "__main__":
    main()
