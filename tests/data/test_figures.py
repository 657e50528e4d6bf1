"""Figures are readable: legends cover nothing, titles fit, labels have contrast and room."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from matplotlib.colors import to_rgb

from intertwine.figures import (
    MIDDLE_LUMINANCE,
    ink_on,
    legend_below,
    name_ticks,
    new_figure,
    wrapped_title,
    write_cells,
)
from intertwine.lab.papers.experiments import read_result
from intertwine.lab.papers.plan import experiment_kind

RESULTS = Path(__file__).parents[2] / "experiments" / "results"
#: One of each kind of figure whose key used to lie on its lines, or whose numbers were white on yellow.
KEYED = (
    "csiszarik-fig2-tiny10", "csiszarik-matchable-no-norm", "csiszarik-fig8", "godfrey-fig4", "godfrey-fig14",
    "godfrey-fig15", "chen-fig2b", "zhou-eq2-vgg16", "godfrey-fig10",
)  # fmt: skip


def drawn(name: str) -> Any:
    result = read_result(RESULTS / f"{name}.gpu.json")
    figure = experiment_kind(result.plan["kind"]).draw(result.plan, result.rows)
    wrapped_title(figure, result.plan["title"])
    figure.draw_without_rendering()
    return figure


def contrast(first: tuple[float, ...], second: tuple[float, ...]) -> float:
    """As WCAG 2.1 has it: 1 for the same colour, 21 for black on white."""

    def luminance(colour: tuple[float, ...]) -> float:
        parts = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in colour[:3]]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("name", KEYED)
def test_the_key_lies_below_all_panels_and_the_title_inside(name: str) -> None:
    figure = drawn(name)
    (key,) = figure.legends
    box = key.get_window_extent()
    assert all(axes.get_legend() is None for axes in figure.axes)
    assert box.y1 <= min(axes.get_tightbbox().y0 for axes in figure.axes if axes.get_visible()) + 1
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.width
    title = figure._suptitle.get_window_extent()
    assert title.x0 >= 0
    assert title.x1 <= figure.bbox.width


@pytest.mark.parametrize("name", ["godfrey-fig5", "godfrey-fig16"])
def test_numbers_contrast_with_their_cells(name: str) -> None:
    for axes in drawn(name).axes:
        for text in axes.texts:
            x, y = map(round, text.get_position())
            picture = axes.images[0]
            cell = picture.cmap(picture.norm(picture.get_array()[y, x]))
            assert contrast(to_rgb(text.get_color()), cell) >= 4.5


def test_no_strength_runs_over_its_panel() -> None:
    """Strengths are markers, which the key explains; words beside the points ran over the frame."""
    figure = drawn("csiszarik-fig8")
    assert not [text for axes in figure.axes for text in axes.texts]
    assert {"ℓ1, λ = 0.3", "ℓ1, λ = 0.001"} <= {text.get_text() for text in figure.legends[0].get_texts()}


def test_a_title_is_broken_where_it_would_leave_the_figure_and_no_word_stands_alone() -> None:
    figure = new_figure(3, 2)
    wrapped_title(figure, "Words of a title that is much too long for three inches (scale gpu)")
    figure.draw_without_rendering()
    lines = figure.get_suptitle().split("\n")
    assert len(lines) > 1
    assert min(map(len, lines)) > max(map(len, lines)) / 2
    box = figure._suptitle.get_window_extent()  # type: ignore[attr-defined]
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width
    wide = new_figure(8, 2)
    wrapped_title(wide, "Few words")
    assert wide.get_suptitle() == "Few words"


def test_what_panels_share_stands_in_the_key_once_and_nothing_gives_no_key() -> None:
    figure = new_figure(6, 2)
    legend_below(figure)
    assert not figure.legends
    for axes in figure.subplots(1, 2):
        axes.plot([0, 1], label="ours")
        axes.plot([1, 0], label="printed")
    legend_below(figure)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["ours", "printed"]


def test_names_under_an_axis_do_not_touch() -> None:
    figure = new_figure(2.1, 2)
    axes = figure.subplots()
    names = [f"layer{i // 9}.{i % 9}.conv1" for i in range(39)]
    axes.plot(range(len(names)))
    name_ticks(axes, names)
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in axes.get_xticklabels()]
    numbers = [text.get_text().partition("\n")[0] for text in axes.get_xticklabels()]
    assert [int(number) for number in numbers] == sorted({int(number) for number in numbers})
    assert (numbers[0], numbers[-1]) == ("1", "39")
    assert boxes[0].x1 <= boxes[-1].x0
    name_ticks(axes, ["1", "2", "3"])
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1", "2", "3"]


def test_ink_is_black_on_pale_and_white_on_dark_and_cells_without_a_value_are_empty() -> None:
    assert [ink_on((grey, grey, grey)) for grey in (0.0, 0.3, 0.6, 1.0)] == ["white", "white", "black", "black"]
    assert contrast((0.0,) * 3, (1.0,) * 3) == pytest.approx(21)
    middle = (MIDDLE_LUMINANCE + 0.05) / 0.05  # where both inks are read as well
    assert middle == pytest.approx(1.05 / (MIDDLE_LUMINANCE + 0.05), rel=0.01)
    axes = new_figure(2, 2).subplots()
    axes.imshow([[0.5, float("nan")]], vmin=0, vmax=1)
    write_cells(axes, "{:.1f}")
    assert [text.get_text() for text in axes.texts] == ["0.5"]
