"""The scores of validity tests, against scipy, scikit-learn and hand-made cases."""

from itertools import product

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import average_precision_score

from intertwine.errors import InputError
from intertwine.testing.validity import average_precision, group_separation, layer_monotonicity, rank_agreement


def test_correlations_are_those_of_scipy_averaged_over_references() -> None:
    rng = np.random.default_rng(0)
    gaps = [rng.normal(size=20) for _ in range(3)]
    distances = [g + rng.normal(size=20) for g in gaps]
    for score, statistic in zip(rank_agreement("t", distances, gaps), (stats.spearmanr, stats.kendalltau), strict=True):
        each = [statistic(d, g, alternative="greater") for d, g in zip(distances, gaps, strict=True)]
        assert score.value == pytest.approx(np.mean([e.statistic for e in each]))
        assert score.p == pytest.approx(min(1, 2 * np.mean([e.pvalue for e in each])))
        assert (score.test, score.chance, score.used) == ("t", 0.0, 60)


def test_a_comparison_without_a_value_is_left_out_and_a_constant_orders_nothing() -> None:
    gaps = [np.arange(6.0)]
    rho, tau = rank_agreement("t", [np.array([0.0, 1.0, np.nan, 3.0, 4.0, 5.0])], gaps)
    assert (rho.value, tau.value, rho.used) == (pytest.approx(1), pytest.approx(1), 5)
    rho, _ = rank_agreement("t", [np.ones(6)], gaps)
    assert (rho.value, rho.p) == (0.0, 1.0)
    rho, _ = rank_agreement("t", [np.full(6, np.nan)], gaps)
    assert np.isnan(rho.value)
    assert rho.to_dict()["value"] is None


@pytest.mark.parametrize("same", [True, False])
def test_layer_triples_are_counted_as_written_down(same: bool) -> None:
    """The definition, spelled out: i ≤ j < k or i ≥ j > k, without i itself within one network."""
    table = np.random.default_rng(1).integers(0, 4, size=(5, 5)).astype(float)  # with ties
    outcomes = []
    for i, j, k in product(range(5), repeat=3):
        if (i <= j < k or i >= j > k) and not (same and i == j):
            outcomes.append(1.0 if table[i, j] < table[i, k] else 0.5 if table[i, j] == table[i, k] else 0.0)
    share, rho = layer_monotonicity("t", [table], [same])
    assert share.value == pytest.approx(np.mean(outcomes))
    assert share.used == len(outcomes)
    pairs = [(table[i, j], abs(i - j)) for i, j in product(range(5), repeat=2) if not (same and i == j)]
    assert rho.value == pytest.approx(stats.spearmanr(*zip(*pairs, strict=True)).statistic)


def test_average_precision_is_that_of_scikit_learn_with_ties() -> None:
    rng = np.random.default_rng(2)
    for most in (3, 10, 1000):
        distances, wanted = rng.integers(0, most, size=60).astype(float), rng.random(60) < 0.3
        assert average_precision(distances, wanted) == pytest.approx(average_precision_score(wanted, -distances))


def test_groups_that_lie_apart_are_told_apart_and_a_constant_tells_nothing() -> None:
    places, groups = np.array([0.0, 0.1, 0.3, 4.0, 4.2, 4.3]), list("aaabbb")
    table = np.abs(np.subtract.outer(places, places))
    share, area = group_separation("t", table, groups)
    assert (share.value, area.value, share.used) == (1.0, 1.0, 6 * 2 * 3)
    assert area.chance == 6 / 15
    share, area = group_separation("t", np.ones((6, 6)), groups)
    assert (share.value, area.value) == (0.5, pytest.approx(area.chance))
    share, area = group_separation("t", -table, groups)
    assert share.value == 0.0
    table[0, 1] = table[1, 0] = np.nan
    share, area = group_separation("t", table, groups)
    assert (share.used, area.used) == (30, 14)


def test_a_table_of_another_size_is_refused() -> None:
    with pytest.raises(InputError, match=r"shape \(2, 2\) were given for 3 members of groups. Give one row"):
        group_separation("t", np.zeros((2, 2)), list("aab"))
