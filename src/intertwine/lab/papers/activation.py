"""Kind "activation": how far GELU is from positive homogeneity (Godfrey et al. 2022, figure 17 and equation E.22).

ξ(λ) is the root mean square of σ(λX) − λσ(X), X normal. As printed, it is estimated from samples of X; corrected, it is
an integral. "slope" is the limit of ξ(λ)/λ for large λ. The kind needs neither networks nor data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from intertwine.figures import legend_below, new_figure
from intertwine.lab.papers.plan import ExperimentKind, Numbers, Row, gathered
from intertwine.lab.papers.work import Work
from intertwine.symmetry.intertwiner import homogeneity_defect

if TYPE_CHECKING:
    from matplotlib.figure import Figure


#: A scale at which ξ(λ)/λ has converged.
LARGE = 1e4
SLOPE = "slope"


@dataclass(frozen=True)
class ActivationSettings:
    """The table [activation].

    Attributes:
        scales: the λ in the results. samples: of X, for each of `draws` estimates.
        points: of the curve in the figure. largest: the largest λ of that curve.
    """

    scales: list[float]
    samples: int = 100_000
    draws: int = 10
    points: int = 200
    largest: float = 2.0


def run(work: Work) -> list[Row]:
    """One row per scale and draw, one per scale of the integral, and the points of its curve."""
    settings: ActivationSettings = work.plan.settings
    rows: list[Row] = []
    for draw_number in range(settings.draws):
        work.progress(f"activation, draw {draw_number + 1} of {settings.draws}")
        x = torch.randn(settings.samples, generator=torch.Generator().manual_seed(draw_number), dtype=torch.float64)
        values = {f"{scale:g}": sampled_defect(x, scale) for scale in settings.scales}
        values[SLOPE] = sampled_defect(x, LARGE) / LARGE
        rows += [{"series": "GELU, as printed", "label": label, "value": value} for label, value in values.items()]
    exact = {f"{scale:g}": _defect(scale) for scale in settings.scales} | {SLOPE: _defect(LARGE) / LARGE}
    rows += [{"series": "GELU, corrected", "label": label, "value": value} for label, value in exact.items()]
    curve = [settings.largest * i / settings.points for i in range(1, settings.points + 1)]
    return [*rows, *({"series": "curve", "scale": scale, "value": _defect(scale)} for scale in curve)]


def sampled_defect(x: Tensor, scale: float) -> float:
    """ξ(λ) of GELU from samples of X.

    >>> x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    >>> sampled_defect(x, 1.0)
    0.0
    """
    difference = functional.gelu(scale * x) - scale * functional.gelu(x)
    return sqrt(float(difference.square().mean()))


def _defect(scale: float) -> float:
    return homogeneity_defect(functional.gelu, float(scale))


def numbers(plan: Mapping[str, Any], rows: Sequence[Row]) -> Numbers:
    """ξ(λ) by λ: one value per draw, and one of the integral."""
    return gathered((row["series"], row["label"], [row["value"]]) for row in rows if "label" in row)


def draw(plan: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """Left ReLU and GELU, right ξ(λ) and its asymptote."""
    figure = new_figure(8, 3.4)
    left, right = figure.subplots(1, 2)
    x = torch.linspace(-3, 3, 121)
    for name, function in (("ReLU", functional.relu), ("GELU", functional.gelu)):
        left.plot(x.tolist(), function(x).tolist(), label=name)
    curve = [(row["scale"], row["value"]) for row in rows if row["series"] == "curve"]
    right.plot(*zip(*curve, strict=True), label="ξ(λ), integral")
    found = numbers(plan, rows)
    for i, (label, values) in enumerate(found["GELU, as printed"].items()):
        if label != SLOPE and float(label) <= curve[-1][0]:
            name = "ξ(λ), sampled" if not i else None
            right.plot([float(label)] * len(values), values, "k.", markersize=3, label=name)
    slope = found["GELU, corrected"][SLOPE][0]
    ends = (0.0, curve[-1][0])
    right.plot(ends, [slope * end for end in ends], ":", color="0.5", label=f"{slope:.3f} λ")
    left.set_xlabel("x")
    right.set_xlabel("λ")
    legend_below(figure)
    return figure


ACTIVATION = ExperimentKind(ActivationSettings, run, numbers, draw)
