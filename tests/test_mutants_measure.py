"""Measures, where changed code once went unnoticed: the draws behind an interval, and neighbours of unequal lengths."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from intertwine.measure.calibrate import calibrate
from intertwine.measure.measure import Measure, find
from intertwine.measure.neighbours import nearest
from intertwine.measure.representation import Representation
from intertwine.measure.result import Result


def recorder(seen: list[list[float]]) -> Measure:
    """A measure whose value is the mean of the first feature, and which remembers the rows that it was given."""

    def compare(a: Any, b: Any) -> Result:
        seen.append(a)
        return Result("recorder", sum(a) / len(a))

    def prepare(x: Representation) -> list[float]:
        return x.values[:, 0].tolist()

    wide = (-1000.0, 1000.0)
    return replace(find("r2"), range=wide, at_identity=1e3, prepare_with=prepare, compare_with=compare, baseline=False)


def test_half_samples_are_halves_without_repetition_and_the_interval_is_two_standard_errors() -> None:
    seen: list[list[float]] = []
    rows = torch.arange(21.0)[:, None].repeat(1, 2)
    found = calibrate(rows, rows, recorder(seen), draws=1, resamples=30)
    drawn = seen[-30:]
    assert all(len(part) == len(set(part)) == 10 for part in drawn)
    error = 1.96 * torch.tensor(drawn, dtype=torch.float64).mean(1).std().item()
    assert found.interval == pytest.approx((10 - error, 10 + error))


def test_the_bootstrap_draws_as_many_samples_with_repetition_and_takes_quantiles() -> None:
    seen: list[list[float]] = []
    rows = torch.arange(21.0)[:, None].repeat(1, 2)
    found = calibrate(rows, rows, recorder(seen), draws=1, resamples=41, interval="bootstrap")
    drawn = seen[-41:]
    assert all(len(part) == 21 > len(set(part)) for part in drawn)
    means = sorted(sum(part) / 21 for part in drawn)
    assert found.interval == pytest.approx((means[1], means[39]))  # 0.025 and 0.975 of 40 steps


def test_neighbours_are_those_of_a_search_through_all_pairs() -> None:
    x = torch.randn(30, 4, dtype=torch.float64) * torch.linspace(0.1, 9, 30)[:, None]
    apart = torch.cdist(x, x).fill_diagonal_(torch.inf)
    wanted = torch.zeros(30, 30).scatter_(1, apart.topk(3, largest=False).indices, 1.0)
    for block in (512, 7):
        assert nearest(x, 3, block).toarray().tolist() == wanted.tolist()
