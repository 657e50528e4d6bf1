"""benchmark_measure: a good measure scores far above chance, a bad one at chance, and nothing is hidden."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from intertwine.errors import InputError
from intertwine.measure.measure import Measure, degenerate, find
from intertwine.measure.result import Result
from intertwine.testing import MeasureBenchmark, benchmark_measure
from intertwine.testing.benchmark import TESTS, score_measure
from intertwine.testing.benchmark_zoo import SHARES, Layer, Subjects, randomised, subjects

NETWORKS, EPOCHS = 4, 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("zoos")


@pytest.fixture(scope="module")
def on(folder: Path) -> Subjects:
    return subjects(folder, NETWORKS, EPOCHS)


@pytest.fixture(scope="module")
def good(folder: Path, on: Subjects) -> MeasureBenchmark:
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


def test_random_numbers_are_at_chance(on: Subjects) -> None:
    """On average over draws: with few networks one draw may be lucky."""
    g = torch.Generator().manual_seed(0)
    noise = _own(lambda a, b: Result("mine", float(torch.rand((), generator=g))))
    draws = [score_measure(noise, on) for _ in range(12)]
    for scores in zip(*(found.scores for found in draws), strict=True):
        assert abs(sum(s.value - s.chance for s in scores) / len(draws)) < 0.12, scores[0]
    assert sum((found.score("sensitivity", "spearman").p or 0) > 0.05 for found in draws) >= 11


def test_a_constant_is_exactly_at_chance(on: Subjects) -> None:
    """Counting ties as right would make it perfect."""
    found = score_measure(_own(lambda a, b: Result("mine", 0.7)), on)
    for score in found.scores:
        assert score.value == pytest.approx(score.chance), score
    assert "No better than chance" in found.describe()


def test_a_distance_and_a_similarity_are_read_the_other_way_round(good: MeasureBenchmark, on: Subjects) -> None:
    plain = find("linear_cka")
    turned = replace(
        plain, kind="distance", compare_with=lambda a, b: replace(r := plain.compare_with(a, b), value=1 - r.value)
    )
    for a, b in zip(good.scores, score_measure(turned, on).scores, strict=True):
        assert a.value == pytest.approx(b.value, abs=1e-3)
    wrong = score_measure(replace(plain, kind="distance"), on)
    assert wrong.score("layers within", "conformity").value < 0.1
    assert "It does the opposite" in wrong.describe()


def test_comparisons_without_a_value_are_counted(on: Subjects) -> None:
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
    with pytest.raises(
        InputError, match=r"The score 'sensitivity, pearson' was asked for.*There are: sensitivity, spea"
    ):
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
    assert subjects(None, 3, 1).folder.parent == tmp_path / "intertwine" / "benchmark_measure"


def test_the_share_of_labels_asked_for_is_random() -> None:
    true = randomised(0.0)
    assert (len(true.labels), len(true.test_labels)) == (1000, 797)
    for share in SHARES:
        drawn = randomised(share)
        changed = float((drawn.labels != true.labels).double().mean())
        assert changed == pytest.approx(0.9 * share, abs=0.03)  # one in ten is drawn as it was
        assert torch.equal(drawn.test_labels, true.test_labels)
        assert torch.equal(drawn.images, true.images)


def test_deleting_components_keeps_the_largest(on: Subjects) -> None:
    layer = on.trained[0][0]
    x = layer.train - layer.train.mean(0)
    values = torch.linalg.eigvalsh(x.T @ x)
    left = layer.leading(5)
    lost = float((left.train - layer.train).square().sum())
    assert lost == pytest.approx(float(values[:-5].sum()), rel=1e-9)
    assert torch.linalg.matrix_rank(left.test - left.test.mean(0)) == 5


def test_probes_read_off_what_is_there(on: Subjects) -> None:
    sure = [torch.nn.functional.one_hot(labels, 10).double() for labels in (on.labels, on.test_labels)]
    assert on.few_shot(Layer(*sure)) == on.many_shot(Layer(*sure)) == 1.0
    blank = Layer(torch.ones(1000, 3, dtype=torch.float64), torch.ones(797, 3, dtype=torch.float64))
    assert on.many_shot(blank) < 0.15


def test_what_cannot_be_asked_for(folder: Path) -> None:
    with pytest.raises(InputError, match=r"A benchmark on 2 networks was asked for.*Give 3 or more"):
        benchmark_measure("rv", folder, networks=2)
    with pytest.raises(InputError, match="were given beside a measure that is made already"):
        benchmark_measure(find("rv"), folder, side="x")
    with pytest.raises(InputError, match="The measure 'linear_ckaa' was asked for"):
        benchmark_measure("linear_ckaa", folder)
