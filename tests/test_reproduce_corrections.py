"""The corrections: every check tells the printed way from the corrected one, as the list of errors says it must."""

from __future__ import annotations

from pathlib import Path

import pytest

from intertwine.errors import InputError
from intertwine.reproduce import experiments
from intertwine.reproduce.kinds.corrections import numbers
from intertwine.reproduce.kinds.corrections.checks import CHECKS
from intertwine.reproduce.plan import read_plan

pytestmark = pytest.mark.usefixtures("one_thread")
#: Check → the printed way and the corrected way lie within these.
BOUNDS = {
    "D4": ((0.5, 0.95), (1 - 1e-6, 1.0 + 1e-9)),
    "D6": ((0.47, 0.56), (0.40, 0.46)),  # independent ReLU features: about 0.446, raised by dead ones to about 0.52
    "D7": ((0.3, 0.9), (1 - 1e-9, 1 + 1e-9)),
    "D9": ((1.0, 1.0), (16.0, 16.0)),
    "D11": ((0.1, 100.0), (0.0, 1e-12)),
    "D13": ((0.01, 10.0), (0.0, 1e-9)),
    "D15": ((0.0, 1e-12), (0.1, 1.0)),
    "D22": ((1.9, 2.1), (0.0, 1e-12)),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_a_check_tells_both_ways_apart(name: str) -> None:
    for value, (low, high) in zip(CHECKS[name].values(3), BOUNDS[name], strict=True):
        assert low <= value <= high


@pytest.mark.slow
def test_nodesort_with_two_hidden_layers() -> None:
    assert CHECKS["D10"].values(0) == (0.0, 1.0)


def test_the_small_plan_runs(tmp_path: Path) -> None:
    result = experiments.reproduce("corrections", "cpu", folder=tmp_path)
    found = numbers(result.plan, result.rows)
    assert list(found["as printed"]) == ["D6", "D9", "D11", "D15", "D22"]
    assert result.plot(tmp_path / "c.svg").stat().st_size > 1000


def test_an_unknown_check_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('title = "t"\nrows = []\nkind = "corrections"\n[corrections]\nchecks = ["D99"]\n')
    with pytest.raises(InputError, match="there are no checks D99; there are D4, D6"):
        read_plan(file)
