"""The stitching figures show the numbers of their rows: each form drawn from rows made by hand, and read off again."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from intertwine.errors import InputError

sys.path.insert(0, str(Path(__file__).parents[1] / "experiments"))

from stitching_figures import draw  # pyrefly: ignore[missing-import]

Row = dict[str, Any]


def row(**changes: Any) -> Row:
    return {"label": "3", "skip": "none", "family": "linear", "fit": "task", "cka": 0.0, "sparsity": 0.0} | changes


def drawn(form: str, rows: list[Row], what: Any = "relative_accuracy", **plan: Any) -> Any:
    about = {"name": "own", "title": "a title", "form": form, "what": what, "printed": {}, "small": False} | plan
    return draw({"manifest": {"plan": about}, "rows": rows})


def line(axes: Any, label: str) -> tuple[list[float], list[float]]:
    """The x and y of the line with a label; whiskers have theirs in a container."""
    found = [one.lines[0] for one in axes.containers if one.get_label() == label]
    (one,) = found or [one for one in axes.get_lines() if one.get_label() == label]
    x, y = (np.round(np.asarray(values, float), 6).tolist() for values in one.get_data())
    return x, y


def ticks(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.get_xticklabels()]


def test_penalties_are_means_over_pairs_in_per_cent_with_stars_and_what_is_printed() -> None:
    rows = [
        row(label=label, skip=skip, family=family, best_penalty=base + pair)
        for label, skip, base in (("3", "none", 0.1), ("8", "front", 0.3))
        for family in ("linear", "relu:birkhoff")
        for pair in (0.0, 0.02)
    ]
    figure = drawn("penalties", rows, "best_penalty", printed={"linear": [1.0, 2.0]})
    (axes,) = figure.axes
    assert line(axes, "full") == line(axes, "G_ReLU") == ([0, 1], [11.0, 31.0])
    assert line(axes, "full, printed") == ([0, 1], [1.0, 2.0])
    assert ticks(axes) == ["3", "8*"]
    assert axes.get_xlabel() == "layer, * inside a residual block"
    assert figure.get_suptitle() == "a title"


def test_slopes_are_a_line_each_and_a_matrix_between_them() -> None:
    rows = [
        row(label=label, front_group=a, back_group=b, penalty=a + 10 * b + extra)
        for a in (0.1, 0.5)
        for b in (0.1, 0.5)
        for label, extra in (("3", 0.0), ("8", 0.2))
    ]
    left, right, _ = drawn("slopes", rows, "penalty").axes
    assert line(left, "slope 0.5") == ([0, 1], [550.0, 570.0])
    assert np.allclose(right.images[0].get_array(), [[120, 520], [160, 560]])
    assert (right.get_xlabel(), right.get_ylabel()) == ("slope of the back", "slope of the front")


def test_histograms_count_what_was_chosen() -> None:
    rows = [row(label=label, alpha=alpha) for label, alpha in (("3", 0.1), ("3", 0.1), ("3", 1.0), ("6", 1.0))]
    figure = drawn("histograms", [row(family="linear"), *rows], stitching={"alphas": [0.1, 1.0, 10.0]})
    heights = [[bar.get_height() for bar in axes.patches] for axes in figure.axes]
    assert heights == [[2, 1, 0], [0, 1, 0]]
    assert ticks(figure.axes[0]) == ["0.1", "1", "10"]


def test_sparsity_joins_the_strengths_of_a_fit() -> None:
    rows = [
        row(family=f"sparse:{strength:g}", fit=fit, sparsity=zeros + apart, relative_accuracy=value)
        for fit in ("task", "direct")
        for strength, zeros, value in ((0.1, 0.8, 0.5), (0.01, 0.2, 0.9))
        for apart in (-0.1, 0.1)
    ]
    rows.append(row(family="relu:birkhoff", sparsity=0.95, relative_accuracy=0.7))
    rows.append(row(family="sparse:0.01", sparsity=0.2, relative_accuracy=0.9, matrix=[[1.0, 0.0], [0.0, -2.0]]))
    above, below = drawn("sparsity", rows).axes
    assert line(above, "ℓ1, least squares") == line(above, "ℓ1, task loss") == ([0.2, 0.8], [0.9, 0.5])
    assert line(above, "G_ReLU, task loss") == ([0.95], [0.7])
    assert below.images[0].get_array().tolist() == [[1, 0], [0, -2]]


def test_layers_show_accuracy_cross_entropy_and_what_there_is_without_a_map() -> None:
    rows = [row(fit=fit, relative_accuracy=0.5, cross_entropy=number) for number, fit in enumerate(("direct", "task"))]
    rows += [row(family="identity", fit="direct", relative_accuracy=0.1, cross_entropy=value) for value in (6.0, 8.0)]
    left, right = drawn("layers", rows).axes
    assert line(left, "least squares") == ([0], [0.5])
    assert line(right, "task loss") == ([0], [1.0])
    assert left.get_title() == "without a map: cross-entropy 7.00 ± 1.41"


def test_widths_and_ranks_are_lines_over_their_number() -> None:
    wide = [
        row(front_group=width, relative_accuracy=0.1 * width + apart) for width in (3, 1) for apart in (-0.01, 0.01)
    ]
    (axes,) = drawn("widths", wide).axes
    assert line(axes, "task loss") == ([1, 3], [0.1, 0.3])
    ranks = [
        row(family=f"lowrank:{rank}", fit=fit, relative_accuracy=base + rank / 100)
        for fit, base in (("task", 0.5), ("direct", 0.2))
        for rank in (4, 16)
    ]
    (axes,) = drawn("ranks", ranks).axes
    assert line(axes, "task loss") == ([4, 16], [0.54, 0.66])
    assert line(axes, "least squares") == ([4, 16], [0.24, 0.36])


def test_starts_are_two_histograms() -> None:
    rows = [row(start=start, relative_accuracy=value) for start in ("random", "direct") for value in (0.2, 0.9, 0.91)]
    (axes,) = drawn("starts", rows).axes
    for bars in axes.containers:
        assert sum(bar.get_height() for bar in bars) == 3
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["random", "least squares"]


def test_iterations_are_means_of_runs() -> None:
    loss = {"epoch": 1, "loss": 2.0}
    rows = [
        row(cka=weight, history=[{"step": 0, "r2": 0.5 + run}, {"step": 5, "r2": weight + run}, loss])
        for weight in (0.1, 1.0)
        for run in (-0.1, 0.1)
    ]
    first, second = drawn("iterations", rows, ["r2", "loss"]).axes
    assert line(first, "weight of CKA 1") == ([0, 5], [0.5, 1.0])
    assert line(second, "weight of CKA 0.1") == ([1], [2.0])
    assert (first.get_xlabel(), second.get_xlabel()) == ("iteration", "epoch")


def test_a_form_that_there_is_not_is_refused() -> None:
    with pytest.raises(InputError, match="own is to be drawn as 'bars'; there are penalties, slopes"):
        drawn("bars", [row()])
