"""The stitching figures show the numbers of their rows: each form drawn from rows made by hand, and read off again."""

from typing import Any

import numpy as np

from intertwine.reproduce.kinds.stitching.forms import draw, numbers

Row = dict[str, Any]


def row(**changes: Any) -> Row:
    return {
        "label": "3",
        "skip": "none",
        "family": "linear",
        "fit": "task",
        "cka": 0.0,
        "sparsity": 0.0,
        "pair": 0,
    } | changes


def plan_of(form: str, what: Any = "relative_accuracy", **changes: Any) -> dict[str, Any]:
    settings = {"form": form, "what": what} | changes.pop("settings", {})
    base = {"labels": (), "printed": {}, "spread": {}, "networks": {"vary": {}}}
    return base | changes | {"settings": settings}


def drawn(form: str, rows: list[Row], what: Any = "relative_accuracy", **changes: Any) -> Any:
    return draw(plan_of(form, what, **changes), rows)


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
    figure = drawn("penalties", rows, "best_penalty", printed={"full": [1.0, 2.0]})
    (axes,) = figure.axes
    assert line(axes, "full") == line(axes, "G_ReLU") == ([0, 1], [11.0, 31.0])
    assert line(axes, "full, printed") == ([0, 1], [1.0, 2.0])
    assert ticks(axes) == ["3", "8*"]
    assert axes.get_xlabel() == "layer, * inside a residual block"


def test_slopes_are_a_line_each_and_a_matrix_between_them() -> None:
    rows = [
        row(label=label, front_group=a, back_group=b, penalty=a + 10 * b + extra)
        for a in (0.1, 0.5)
        for b in (0.1, 0.5)
        for label, extra in (("3", 0.0), ("8", 0.2))
    ]
    left, right, _ = drawn("slopes", rows, "penalty", networks={"vary": {"slope": [0.1, 0.5]}}).axes
    assert line(left, "slope 0.5") == ([0, 1], [550.0, 570.0])
    assert np.allclose(right.images[0].get_array(), [[120, 520], [160, 560]])
    assert (right.get_xlabel(), right.get_ylabel()) == ("slope of the back", "slope of the front")


def test_histograms_count_what_was_chosen() -> None:
    rows = [row(label=label, alpha=alpha) for label, alpha in (("3", 0.1), ("3", 0.1), ("3", 1.0), ("6", 1.0))]
    figure = drawn("histograms", [row(family="linear"), *rows], settings={"alphas": [0.1, 1.0, 10.0]})
    heights = [[bar.get_height() for bar in axes.patches] for axes in figure.axes]
    assert np.allclose(heights, [[200 / 3, 100 / 3, 0], [0, 100, 0]])
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
    assert line(above, "ℓ1, least squares") == line(above, "ℓ1, task loss") == ([20, 80], [0.9, 0.5])
    assert line(above, "G_ReLU, task loss") == ([95], [0.7])
    assert below.images[0].get_array().tolist() == [[1, 0], [0, -2]]


def test_layers_show_accuracy_cross_entropy_and_what_there_is_without_a_map() -> None:
    rows = [row(fit=fit, relative_accuracy=0.5, cross_entropy=number) for number, fit in enumerate(("direct", "task"))]
    rows += [row(family="identity", fit="direct", relative_accuracy=0.1, cross_entropy=value) for value in (6.0, 8.0)]
    left, right = drawn("layers", rows).axes
    assert line(left, "least squares: relative accuracy") == ([0], [0.5])
    assert line(right, "task loss: cross-entropy") == ([0], [1.0])
    assert left.get_title() == "without a map: cross-entropy 7.00 ± 1.41"


def test_widths_and_ranks_are_lines_over_their_number() -> None:
    wide = [
        row(front_group=width, relative_accuracy=0.1 * width + apart) for width in (3, 1) for apart in (-0.01, 0.01)
    ]
    (axes,) = drawn("groups", wide, networks={"vary": {"width": [1, 3]}}).axes
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
    assert [text.get_text() for text in axes.get_figure().legends[0].get_texts()] == [
        "from random",
        "from least squares",
    ]


def test_iterations_are_means_of_runs() -> None:
    loss = {"epoch": 1, "loss": 2.0}
    rows = [
        row(cka=weight, history=[{"step": 0, "r2": 0.5 + run}, {"step": 5, "r2": weight + run}, loss])
        for weight in (0.1, 1.0)
        for run in (-0.1, 0.1)
    ]
    first, second = drawn("iterations", rows, ["r2", "loss"]).axes
    assert line(first, "weight 1 of the CKA") == ([0, 5], [0.5, 1.0])
    assert line(second, "weight 0.1 of the CKA") == ([1], [2.0])
    assert (first.get_xlabel(), second.get_xlabel()) == ("iteration", "epoch")


def test_averages_stand_beside_what_is_printed() -> None:
    rows = [row(label=label, family="identity", cross_entropy=value) for label, value in (("1", 6.0), ("2", 8.0))]
    plan = {"printed": {"no map": [6.99]}, "spread": {"no map": [1.96]}, "labels": ("all layers",)}
    (axes,) = drawn("averages", rows, "cross_entropy", **plan).axes
    assert line(axes, "ours") == ([0], [7.0])
    assert line(axes, "printed") == ([0.15], [6.99])


def test_lines_are_drawn_in_the_panel_of_their_layer() -> None:
    ends = [row(label=label, relative_accuracy=0.9) for label in ("1", "2")]
    between = row(label="2", fit="line", shares=[1.0, 0.5, 0.0], line=[0.9, 0.3, 0.8], lowest=0.3)
    first, second = drawn("lines", [*ends, between]).axes
    assert list(second.get_lines()[0].get_ydata()) == [0.9, 0.3, 0.8]
    assert len(first.get_lines()) == len(second.get_lines()) - 1
    found = numbers(plan_of("lines"), [*ends, between])
    assert found["lowest on the line"] == {"2": [0.3]}
    assert found["lower end"] == {"2": [0.8]}
    assert found["full"] == {"1": [0.9], "2": [0.9]}


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_penalties_inside_and_outside_of_blocks_are_means_per_pair() -> None:
    rows = [
        row(pair=pair, label=label, skip=skip, best_penalty=base + pair / 10, penalty=1.0)
        for pair in (0, 1)
        for label, skip, base in (("3", "none", 0.1), ("8", "front", 0.3), ("11", "none", 0.2))
    ]
    found = numbers(plan_of("penalties", "best_penalty"), rows)
    assert np.allclose(found["full, outside blocks"]["all layers"], [15, 25])
    assert np.allclose(found["full, inside blocks"]["all layers"], [30, 40])
    assert found["full, last epoch"] == {"3": [100.0] * 2, "8": [100.0] * 2, "11": [100.0] * 2}


def test_the_reach_of_a_slope_is_from_its_lowest_to_its_highest_layer() -> None:
    rows = [
        row(label=label, front_group=1.0, back_group=back, penalty=value)
        for back, label, value in ((1.0, "3", 0.1), (1.0, "8", 0.4), (0.5, "8", 0.9))
    ]
    found = numbers(plan_of("slopes", "penalty", networks={"vary": {"slope": [0.5, 1.0]}}), rows)
    assert found["slope 1"] == {"3": [10.0], "8": [40.0]}
    assert np.allclose(found["slope 1, reach"]["all layers"], [30])


def test_of_sparse_maps_the_best_with_enough_zeros_counts() -> None:
    rows = [
        row(family=f"sparse:{strength}", sparsity=zeros, relative_accuracy=value, penalty=1 - value, pair=pair)
        for pair in (0, 1)
        for strength, zeros, value in (("0.1", 0.5, 0.99), ("0.2", 0.8, 0.6 + pair / 10), ("0.3", 0.9, 0.5))
    ]
    found = numbers(plan_of("sparsity"), rows)
    assert np.allclose(found["task loss, 80% zeros or more"]["3"], [0.6, 0.7])
    low = numbers(plan_of("sparsity", "penalty"), rows)
    assert np.allclose(low["task loss, 80% zeros or more"]["3"], [40, 30])
    assert found["ℓ1, λ = 0.1, zeros"] == {"3": [50.0, 50.0]}


def test_of_starts_the_worst_counts() -> None:
    rows = [row(start=start, relative_accuracy=value) for start in ("random", "direct") for value in (0.9, 0.2, 0.91)]
    found = numbers(plan_of("starts"), rows)
    assert found["from random"] == {"3": [0.9, 0.2, 0.91]}
    assert found["from least squares, worst"] == {"3": [0.2]}


def test_of_a_training_its_first_and_its_last_value_count() -> None:
    history = [{"step": step, "r2": 0.5 - step / 100} for step in (0, 5, 10)]
    rows = [row(cka=weight, history=history, relative_accuracy=0.9) for weight in (0.1, 1.0)]
    found = numbers(plan_of("iterations", ["r2"]), rows)
    assert found["weight 1, R² of the map at the start"] == {"3": [0.5]}
    assert found["weight 0.1, R² of the map at the end"] == {"3": [0.4]}
    assert found["weight 1, relative accuracy at the end"] == {"3": [0.9]}
    assert "R² of the map at the end" in numbers(plan_of("iterations", ["r2"]), rows[:1])
