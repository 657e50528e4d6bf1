"""The kind "ordering": figure 2 of the thesis, against Python's own sorting and signs counted by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from intertwine.errors import InputError
from intertwine.reproduce.experiments import Result, find, plans_folder, reproduce
from intertwine.reproduce.kinds.ordering import OCTANT, REGION, octant, ordered
from intertwine.reproduce.plan import read_plan

NAME = "sorensen-fig2"


def test_coordinates_are_sorted_whatever_their_signs() -> None:
    points = [[3.0, -1.0, 2.0], [-0.1, -0.3, -0.2], [0.0, 5.0, -5.0]]
    assert ordered(points) == [sorted(point) for point in points]


def test_the_figure_of_the_thesis(tmp_path: Path) -> None:
    result = reproduce(NAME, "cpu", folder=tmp_path)
    named, drawn = ([row for row in result.rows if bool(row["point"]) == there] for there in (True, False))
    assert [row["after"] for row in result.rows] == [sorted(row["before"]) for row in result.rows]
    assert {octant(row["after"]) for row in named} == {(False, True, True)}
    share = sum(row["after"][0] <= 0 < row["after"][1] for row in drawn) / len(drawn)
    assert result.numbers[OCTANT]["all"].count(100.0) == pytest.approx(share * 50)
    assert 0.2 < share < 0.6, "one sign of three, whichever: 3/8 of normal points"
    assert set(result.numbers[REGION]["all"]) == {100.0}
    assert result.plot(tmp_path / "figure.svg").exists()
    full = Result(result.manifest | {"plan": find(NAME).to_dict()}, result.rows)
    assert {line.verdict for line in full.lines()} == {"agrees"}
    assert [claim.holds for claim in full.claims()] == [True, False, True]


def test_a_point_has_three_coordinates(tmp_path: Path) -> None:
    text = (plans_folder() / f"{NAME}.toml").read_text(encoding="utf-8")
    (tmp_path / "flat.toml").write_text(text.replace("r = [1.4, -3.0, 5.6]", "r = [1.4, -3.0]", 1), encoding="utf-8")
    with pytest.raises(InputError, match="the point 'r' has 2 coordinates; the figure has three axes"):
        read_plan(tmp_path / "flat.toml")
