"""benchmark_measure: a good measure scores far above chance, a bad one at chance, and nothing is hidden."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import average_precision_score

from intertwine.errors import InputError
from intertwine.lab.measure_benchmark.benchmark import (
    TESTS,
    MeasureBenchmark,
    average_precision,
    benchmark_measure,
    group_separation,
    layer_monotonicity,
    rank_agreement,
    score_measure,
)
from intertwine.lab.measure_benchmark.networks import (
    SHARES,
    BenchmarkFeatures,
    BenchmarkNetworks,
    benchmark_networks,
    digits_with_random_labels,
)
from intertwine.measure.measure import Measure, Result, degenerate, find

# -- benchmark_measure --


NETWORKS, EPOCHS = 4, 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("zoos")


@pytest.fixture(scope="module")
def on(folder: Path) -> BenchmarkNetworks:
    return benchmark_networks(folder, NETWORKS, EPOCHS)


@pytest.fixture(scope="module")
def good(folder: Path, on: BenchmarkNetworks) -> MeasureBenchmark:
    return benchmark_measure("linear_cka", folder, NETWORKS, EPOCHS)


def _own(values: object) -> Measure:
    """A measure of one's own that does not look at its input."""
    return replace(find("linear_cka"), name="mine", prepare_with=lambda x: None, compare_with=values)  # pyrefly: ignore


def test_a_good_measure_is_far_above_chance(good: MeasureBenchmark) -> None:
    assert good.score("sensitivity", "spearman").value > 0.5
    assert (good.score("sensitivity", "spearman").p or 0) < 1e-3
    assert good.score("layers within", "conformity").value > 0.9
    assert good.score("layers across", "conformity").value > 0.6
    assert good.score("random labels", "conformity").value > 0.65
    assert good.score("random labels", "AUPRC").value > 2 * good.score("random labels", "AUPRC").chance
    assert good.degenerate == {}


def test_random_numbers_are_at_chance(on: BenchmarkNetworks) -> None:
    """On average over draws: with few networks one draw may be lucky."""
    g = torch.Generator().manual_seed(0)
    noise = _own(lambda a, b: Result("mine", float(torch.rand((), generator=g))))
    draws = [score_measure(noise, on) for _ in range(12)]
    for scores in zip(*(found.scores for found in draws), strict=True):
        assert abs(sum(s.value - s.chance for s in scores) / len(draws)) < 0.12, scores[0]
    assert sum((found.score("sensitivity", "spearman").p or 0) > 0.05 for found in draws) >= 11


def test_a_constant_is_exactly_at_chance(on: BenchmarkNetworks) -> None:
    """Counting ties as right would make it perfect."""
    found = score_measure(_own(lambda a, b: Result("mine", 0.7)), on)
    for score in found.scores:
        assert score.value == pytest.approx(score.chance), score
    assert "No better than chance" in found.describe()


def test_a_distance_and_a_similarity_are_read_the_other_way_round(
    good: MeasureBenchmark, on: BenchmarkNetworks
) -> None:
    plain = find("linear_cka")
    turned = replace(
        plain, kind="distance", compare_with=lambda a, b: replace(r := plain.compare_with(a, b), value=1 - r.value)
    )
    for a, b in zip(good.scores, score_measure(turned, on).scores, strict=True):
        assert a.value == pytest.approx(b.value, abs=1e-3)
    wrong = score_measure(replace(plain, kind="distance"), on)
    assert wrong.score("layers within", "conformity").value < 0.1
    assert "It does the opposite" in wrong.describe()


def test_comparisons_without_a_value_are_counted(on: BenchmarkNetworks) -> None:
    asked = 0

    def every_third(a: object, b: object) -> Result:
        nonlocal asked
        asked += 1
        return Result("mine", float(asked)) if asked % 3 else degenerate("mine", "too tired")

    found = score_measure(_own(every_third), on)
    assert found.comparisons == asked
    assert found.degenerate == {"too tired": asked // 3}
    assert f"No value {asked // 3:,} times: too tired." in found.describe()
    assert f"{asked // 3:,} without a value" in repr(found)
    nothing = score_measure(_own(lambda a, b: degenerate("mine", "never")), on)
    assert all(score["value"] is None for score in nothing.to_dict()["scores"])
    assert "No comparison has a value" in nothing.describe()
    assert "none" in repr(nothing)


def test_what_is_found_reads_well(good: MeasureBenchmark) -> None:
    text = json.dumps(good.to_dict(), allow_nan=False)
    assert json.loads(text)["measure"] == "linear_cka"
    assert {score.test for score in good.scores} == set(TESTS)
    assert all(test in good.describe() for test in TESTS)
    assert repr(good).startswith("MeasureBenchmark(linear_cka: 4 networks, ")
    assert len(repr(good).splitlines()) == 1 + len(good.scores)
    with pytest.raises(InputError, match=r"Unknown score 'sensitivity, pearson'.*Choose one of: sensitivity, spea"):
        good.score("sensitivity", "pearson")


def test_networks_are_trained_once(folder: Path, good: MeasureBenchmark) -> None:
    before = {file: file.stat().st_mtime_ns for file in good.folder.rglob("*.safetensors")}
    assert len(before) == NETWORKS + 2 * (len(SHARES) - 1)
    assert good.folder.parent == folder
    again = benchmark_measure("linear_cka", folder, NETWORKS, EPOCHS)
    assert {file: file.stat().st_mtime_ns for file in good.folder.rglob("*.safetensors")} == before
    assert again == good


def test_networks_go_to_the_cache_folder_where_none_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert benchmark_networks(None, 3, 1).folder.parent == tmp_path / "intertwine" / "benchmark_measure"


def test_the_share_of_labels_asked_for_is_random() -> None:
    true = digits_with_random_labels(0.0)
    assert (len(true.labels), len(true.test_labels)) == (1000, 797)
    for share in SHARES:
        drawn = digits_with_random_labels(share)
        changed = float((drawn.labels != true.labels).double().mean())
        assert changed == pytest.approx(0.9 * share, abs=0.03)  # one in ten is drawn as it was
        assert torch.equal(drawn.test_labels, true.test_labels)
        assert torch.equal(drawn.images, true.images)


def test_deleting_components_keeps_the_largest(on: BenchmarkNetworks) -> None:
    layer = on.trained[0][0]
    x = layer.train - layer.train.mean(0)
    values = torch.linalg.eigvalsh(x.T @ x)
    left = layer.leading(5)
    lost = float((left.train - layer.train).square().sum())
    assert lost == pytest.approx(float(values[:-5].sum()), rel=1e-9)
    assert torch.linalg.matrix_rank(left.test - left.test.mean(0)) == 5


def test_probes_read_off_what_is_there(on: BenchmarkNetworks) -> None:
    sure = [torch.nn.functional.one_hot(labels, 10).double() for labels in (on.labels, on.test_labels)]
    assert on.few_shot(BenchmarkFeatures(*sure)) == on.many_shot(BenchmarkFeatures(*sure)) == 1.0
    blank = BenchmarkFeatures(torch.ones(1000, 3, dtype=torch.float64), torch.ones(797, 3, dtype=torch.float64))
    assert on.many_shot(blank) < 0.15


def test_what_cannot_be_asked_for(folder: Path) -> None:
    with pytest.raises(InputError, match="networks must be at least 3, but is 2"):
        benchmark_measure("rv", folder, networks=2)
    with pytest.raises(InputError, match="do not apply to a measure that is already built"):
        benchmark_measure(find("rv"), folder, side="x")
    with pytest.raises(InputError, match=r"Unknown measure 'linear_ckaa'. Did you mean 'linear_cka'"):
        benchmark_measure("linear_ckaa", folder)


# -- The scores of validity tests, against scipy, scikit-learn and hand-made cases --


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
    with pytest.raises(InputError, match=r"shape \(2, 2\), but there are 3 members of groups. Pass one row"):
        group_separation("t", np.zeros((2, 2)), list("aab"))
