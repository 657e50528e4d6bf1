"""The forms of the stitching figures: how each is drawn, and what its numbers are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from intertwine.reproduce.kinds.registry import Numbers, Row
from intertwine.reproduce.kinds.stitching import figures, panel_figures, readings

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Form:
    """Both get the plan as plain data, and the rows."""

    numbers: Callable[[Mapping[str, Any], Sequence[Row]], Numbers]
    draw: Callable[[Mapping[str, Any], Sequence[Row]], Any]


FORMS: Mapping[str, Form] = {
    "penalties": Form(readings.penalties, figures.penalties),
    "slopes": Form(readings.slopes, figures.slopes),
    "histograms": Form(readings.histograms, figures.histograms),
    "sparsity": Form(readings.sparsity, figures.sparsity),
    "layers": Form(readings.layers, figures.layers),
    "averages": Form(readings.averages, figures.averages),
    "several": Form(readings.several, figures.several),
    "groups": Form(readings.groups, panel_figures.groups),
    "fronts": Form(readings.groups, figures.fronts),
    "ranks": Form(readings.layers, panel_figures.ranks),
    "starts": Form(readings.starts, panel_figures.starts),
    "iterations": Form(readings.iterations, panel_figures.iterations),
    "lines": Form(readings.lines, panel_figures.lines),
}


def numbers(plan: Mapping[str, Any], rows: Sequence[Row]) -> Numbers:
    """What the rows say, in the unit of the printed numbers."""
    return FORMS[plan["settings"]["form"]].numbers(plan, rows)


def draw(plan: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """The figure in the paper's form."""
    return FORMS[plan["settings"]["form"]].draw(plan, rows)
