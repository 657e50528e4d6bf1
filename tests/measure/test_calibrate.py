"""`calibrate`: the null is that of independent samples, p-values are uniform under it, intervals cover."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import intertwine as it
from intertwine.errors import InputError, MismatchError
from intertwine.measure.calibrate import calibrate
from intertwine.measure.distances import nearest
from intertwine.measure.measure import Measure, Representation, Result, find


def pair(seed: int, samples: int = 40, width: int = 10, share: float = 0.0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x, noise = (torch.randn(samples, width, generator=g, dtype=torch.float64) for _ in range(2))
    return x, share * x + (1 - share) * noise


def test_the_null_is_the_measure_on_permuted_samples() -> None:
    x, y = pair(0)
    found = calibrate(x, y, draws=5, seed=3)
    g = torch.Generator().manual_seed(3)
    plain = [it.measure(x, y[torch.randperm(40, generator=g)]).value for _ in range(5)]
    assert found.null.tolist() == pytest.approx(plain, abs=1e-12)
    assert found.baseline == pytest.approx(sum(plain) / 5)


@pytest.mark.parametrize("name", [m.name for m in it.measures()])
def test_a_permuted_state_is_that_of_permuted_samples(name: str) -> None:
    measure = find(name)
    x, y = pair(1)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    quick = measure.compare(measure.prepare(x), measure.permuted(measure.prepare(y), order))
    assert quick.value == pytest.approx(measure(x, y[order]).value, abs=1e-10)


def test_p_values_of_independent_pairs_are_spread_evenly() -> None:
    """Under the null a p-value below u has chance u, whatever the width."""
    values = [calibrate(*pair(seed), draws=39, resamples=2).p_value for seed in range(60)]
    assert sum(v <= 0.5 for v in values) / 60 == pytest.approx(0.5, abs=0.2)
    assert sum(v <= 0.05 for v in values) <= 9


def test_a_common_part_is_found() -> None:
    found = calibrate(*pair(0, share=0.5), draws=99)
    assert found.p_value == 0.01
    assert 0.2 < found.score < 1


def test_the_score_does_not_grow_with_the_width() -> None:
    """The biased value of an independent pair is large where there are many features; its score is not."""
    wide = calibrate(*pair(0, width=400), "linear_cka_biased", draws=50)
    assert wide.result.value > 0.85
    assert abs(wide.score) < 0.05


def test_identity_scores_one() -> None:
    x, _ = pair(0)
    assert calibrate(x, x, draws=20).score == pytest.approx(1)


def test_intervals_cover_the_value_of_many_samples() -> None:
    truth = it.measure(*pair(99, samples=20000, share=0.5)).value
    intervals = [calibrate(*pair(seed, 100, share=0.5), draws=1, resamples=60).interval for seed in range(20)]
    assert sum(low <= truth <= high for low, high in intervals) >= 15
    assert all(high - low < 0.5 for low, high in intervals)


def test_the_bootstrap_is_lifted_by_repeated_samples() -> None:
    x, y = pair(0)
    low, high = calibrate(x, y, draws=1, interval="bootstrap").interval
    assert low < high
    assert high > it.measure(x, y).value


def test_an_interval_that_is_missing_has_a_reason() -> None:
    """Debiased CKA needs four samples: halves of six have three, halves of eight have enough."""
    x, y = pair(0, samples=6, width=3)
    found = calibrate(x, y, draws=3, resamples=20)
    reason = it.measure(x[:3], y[:3]).degenerate
    assert reason is not None
    assert all(bound != bound for bound in found.interval)
    assert found.result.notes == (f"no interval: of 3 samples there may be no value ({reason})",)
    assert "without an interval, baseline" in repr(found)
    assert reason in repr(found)
    assert found.to_dict()["notes"] == list(found.result.notes)
    enough = calibrate(*pair(0, samples=8, width=3), draws=3, resamples=20)
    assert enough.result.notes == ()
    assert enough.interval[0] < enough.interval[1]


def test_resamples_without_a_value_are_counted() -> None:
    """A feature that differs in one sample only: a half without that sample has nothing to compare."""
    x, y = pair(0, samples=20, width=1)
    x = torch.where(torch.arange(20)[:, None] == 0, 1.0, torch.zeros_like(x))
    found = calibrate(x, y, "linear_cka_biased", draws=3, resamples=40)
    g = torch.Generator().manual_seed(1)
    held = sum(0 in torch.randperm(20, generator=g)[:10].tolist() for _ in range(40))
    assert 2 < held < 38
    reason = "x is constant: no feature varies over the samples"
    assert found.result.notes == (
        f"the interval is of {held} of 40 resamples: of 10 samples there may be no value ({reason})",
    )


def test_degenerate_and_wrong_input() -> None:
    x, y = pair(0)
    found = calibrate(x, torch.ones_like(y))
    assert repr(found) == "Calibrated(linear_cka: degenerate, y is constant: no feature varies over the samples)"
    with pytest.raises(InputError, match=r"Unknown interval 't'. Choose one of: half-samples, bootstrap"):
        calibrate(x, y, interval="t")
    with pytest.raises(InputError, match="draws must be at least 1 and resamples at least 2, but are 0 and 200"):
        calibrate(x, y, draws=0)
    with pytest.raises(MismatchError, match="x has 40 and y 39"):
        calibrate(x, y[1:])


def test_the_same_seed_gives_the_same_numbers() -> None:
    x, y = pair(0, share=0.3)
    first, second = calibrate(x, y, draws=10, seed=1), calibrate(x, y, draws=10, seed=1)
    assert first.to_dict() == second.to_dict()
    assert repr(first).startswith("Calibrated(linear_cka: 0.")


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
