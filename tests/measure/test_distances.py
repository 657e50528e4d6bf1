"""RSA and mutual neighbours against scipy and definitions; declared invariances against random changes."""

from itertools import permutations
from math import isfinite
from typing import Any

import numpy as np
import pytest
import torch
from scipy.spatial.distance import pdist, squareform
from scipy.stats import pearsonr, rankdata, spearmanr
from torch import Tensor

from intertwine.errors import InputError
from intertwine.measure.distances import RSA_METRICS, nearest, ranks
from intertwine.measure.measure import CHANGES, Measure, Result, find

Array = np.ndarray


def measure(x: Tensor, y: Tensor, name: str, **options: Any) -> Result:
    return find(name, **options)(x, y)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def related(n: int = 40, p: int = 5, q: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two representations with something in common, each off centre."""
    base = normal(n, 3, seed=seed)
    x, y = (base @ normal(3, k, seed=seed + i + 1) + normal(n, k, seed=seed + i + 3) for i, k in enumerate((p, q)))
    return x + 1.5, y - 0.5


# -- what is declared --------------------------------------------------------------------------------------------------

ALL: list[tuple[str, dict[str, Any]]] = [
    *[(f"{kind}_procrustes", {"center": center}) for kind in ("orthogonal", "permutation") for center in (True, False)],
    *[("relu_procrustes", {"center": c, "dead": dead}) for c in (True, False) for dead in ("drop", "paper")],
    *[("soft_matching", {"score": score}) for score in ("correlation", "distance")],
    *[("cca", {"statistic": statistic}) for statistic in ("mean", "mean_squared")],
    *[("svcca", {"variance": variance}) for variance in (0.99, 0.7)],
    *[("pwcca", {"side": side}) for side in ("x", "y")],
    *[("r2", options) for options in ({}, {"center": False}, {"matrix": normal(5, 5, seed=9)})],
    *[("rsa", {"metric": metric, "method": method}) for metric in RSA_METRICS for method in ("spearman", "pearson")],
    *[("mutual_knn", {"metric": metric, "k": 4}) for metric in ("euclidean", "cosine")],
]
NAMES = sorted({name for name, _ in ALL})


def label(case: object) -> str:
    return ",".join(f"{k}={v}" for k, v in case.items() if k != "matrix") if isinstance(case, dict) else str(case)


def changed(y: Tensor, change: str, seed: int) -> Tensor:
    """A representation moved by a random change of the kind."""
    d = y.shape[1]
    match change:
        case "permutation":
            return y[:, torch.randperm(d, generator=torch.Generator().manual_seed(seed))]
        case "positive scales":
            return y * normal(d, seed=seed).exp()
        case "signs":
            return y * torch.tensor([1.0, -1.0] * d)[:d].roll(seed)
        case "orthogonal":
            return y @ torch.linalg.qr(normal(d, d, seed=seed)).Q
        case "invertible":
            return y @ (normal(d, d, seed=seed) + 2 * torch.eye(d))
        case "isotropic scale":
            return y * (seed + 1.5)
        case _:
            return y + normal(d, seed=seed)


@pytest.mark.parametrize(("name", "options"), ALL, ids=label)
def test_000_G26_invariances_are_those_declared_and_no_others(name: str, options: dict[str, Any]) -> None:
    made = find(name, **options)
    held = set()
    for change in CHANGES:
        pairs = [related(seed=10 * seed) for seed in range(4)]
        moved = [(made(x, y).value, made(x, changed(y, change, i)).value) for i, (x, y) in enumerate(pairs)]
        if all(a == pytest.approx(b, abs=1e-9) for a, b in moved):
            held.add(change)
    assert held == made.invariances


@pytest.mark.parametrize(("name", "options"), ALL, ids=label)
def test_000_G26_range_and_value_at_identity_are_those_declared(name: str, options: dict[str, Any]) -> None:
    made = find(name, **options)
    low, high = made.range
    for seed in range(6):
        x, y = related(seed=seed)
        assert made.kind in ("similarity", "distance")
        assert low - 1e-12 <= made(x, y).value <= high + 1e-12
        assert low - 1e-12 <= made(x, -y).value <= high + 1e-12
        if isfinite(made.at_identity):
            assert made(x, x).value == pytest.approx(made.at_identity, abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_prepared_once_compared_often(name: str) -> None:
    made: Measure = find(name)
    x, y = related()
    a, b = made.prepare(x), made.prepare(y)
    assert made.compare(a, b).value == made(x, y).value
    assert made.compare(b, a).value == made(y, x).value
    assert made.compare(a, a).value == pytest.approx(1, abs=1e-12)


HARD = {
    "constant": lambda x: torch.full_like(x, 3.7),
    "one constant column": lambda x: torch.cat([x[:, 1:], torch.full_like(x[:, :1], 1e4)], 1),
    "duplicate columns": lambda x: x[:, [0, 0, 1, 1, 1]],
    "duplicate samples": lambda x: x[torch.arange(len(x)) // 4],
    "two samples": lambda x: x[:2],
    "four samples": lambda x: x[:4],
    "wide": lambda x: x.repeat(1, 12) * normal(60, seed=5),
    "tiny": lambda x: 1e-6 * x,
    "large": lambda x: x * (6e3 if x.dtype == torch.float16 else 1e6),
    "far off": lambda x: x + 100,
    "one column": lambda x: x[:, :1],
    "binary": lambda x: (x > 0).to(x.dtype),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("hard", HARD)
@pytest.mark.parametrize("name", NAMES)
def test_hard_inputs_have_a_value_or_a_reason(name: str, hard: str, dtype: torch.dtype) -> None:
    x, y = (HARD[hard](z.to(dtype)).to(dtype) for z in related())
    made, other = find(name), related()[0][: len(x)].to(dtype)
    # Directions that are rounding do not count as explained; those of 1e-8 are turned at random by rounding.
    near = {"r2": max(1e-12, torch.finfo(dtype).eps ** 2), "orthogonal_procrustes": 1e-7}.get(name, 1e-12)
    for first, second in ((x, y), (x, x), (other, y), (y, other)):
        found = made(first, second)
        assert isfinite(found.value) == (found.degenerate is None)
        assert found.degenerate is None or len(found.degenerate) > 20
        if found.degenerate is None:
            assert made.range[0] - 1e-12 <= found.value <= made.range[1] + 1e-12
            if first is second:
                assert found.value == pytest.approx(1, abs=near)
    if hard == "constant":
        assert "constant" in (made(x, x).degenerate or "")


@pytest.mark.parametrize("name", NAMES)
def test_inputs_are_left_as_they_are(name: str) -> None:
    x, y = related()
    before = x.clone(), y.clone()
    measure(x, y, name)
    assert torch.equal(x, before[0])
    assert torch.equal(y, before[1])


# -- RSA ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", RSA_METRICS)
def test_rsa_is_scipys(metric: Any) -> None:
    x, y = related(30, 6, 4)
    a, b = pdist(x.numpy(), metric), pdist(y.numpy(), metric)
    assert measure(x, y, "rsa", metric=metric).value == pytest.approx(spearmanr(a, b).statistic, abs=1e-12)
    pearson = measure(x, y, "rsa", metric=metric, method="pearson").value
    assert pearson == pytest.approx(pearsonr(a, b).statistic, abs=1e-10)


def test_rsa_ranks_share_ties() -> None:
    values = torch.randint(0, 6, (50,), generator=torch.Generator().manual_seed(0)).double()
    assert ranks(values).tolist() == rankdata(values.numpy()).tolist()


def test_rsa_with_ties_is_scipys() -> None:
    """Whole numbers with a common offset: distances that are equal stay equal."""
    x, y = (normal(30, 4, seed=i).mul(2).round() for i in (0, 1))
    a, b = pdist(x.numpy(), "sqeuclidean"), pdist(y.numpy(), "sqeuclidean")
    assert len(np.unique(a)) < 100
    wanted = spearmanr(a, b).statistic
    assert measure(x, y, "rsa").value == pytest.approx(wanted, abs=1e-12)
    assert measure((x + 100).float(), (1e6 * y), "rsa").value == pytest.approx(wanted, abs=1e-12)


def test_rsa_reasons() -> None:
    simplex, x = torch.eye(5).double(), normal(5, 5)
    assert "y is without structure" in (measure(x, simplex, "rsa").degenerate or "")
    assert "both representations are without structure" in (measure(simplex, simplex, "rsa").degenerate or "")
    x[2] = 0
    assert "x is without cosine distances" in (measure(x, normal(5, 5), "rsa", metric="cosine").degenerate or "")
    x[2] = 0.3
    found = measure(x, normal(5, 5), "rsa", metric="correlation")
    assert found.degenerate == "x is without correlation distances: a sample has the same value in all features"
    assert "at least 3 samples" in (measure(x[:2], x[:2], "rsa").degenerate or "")
    with pytest.raises(InputError, match="euclidean"):
        find("rsa", metric="manhattan")
    with pytest.raises(InputError, match="spearman"):
        find("rsa", method="kendall")


# -- mutual neighbours -------------------------------------------------------------------------------------------------


def neighbours(x: Array, k: int, metric: Any = "euclidean") -> list[set[int]]:
    """The k nearest of each, for data without ties."""
    apart = squareform(pdist(x, metric))
    np.fill_diagonal(apart, np.inf)
    return [set(row.argsort()[:k].tolist()) for row in apart]


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
@pytest.mark.parametrize("k", [1, 5, 20])
def test_mutual_knn_counts(metric: str, k: int) -> None:
    x, y = related(60, 6, 4)
    pairs = zip(neighbours(x.numpy(), k, metric), neighbours(y.numpy(), k, metric), strict=True)
    wanted = np.mean([len(a & b) / k for a, b in pairs])
    assert measure(x, y, "mutual_knn", k=k, metric=metric).value == pytest.approx(wanted, abs=1e-12)
    assert measure(x + 1000, y, "mutual_knn", k=k).value == measure(x, y, "mutual_knn", k=k).value


def shared_out(apart: Array, k: int) -> Array:
    """The weight of each sample among the k nearest, averaged over every order in which a sort could break ties."""
    total = np.zeros(len(apart))
    orders = list(permutations(range(len(apart))))
    for order in orders:
        chosen = sorted(order, key=lambda i: apart[i])[:k]
        total[chosen] += 1
    return total / len(orders)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_ties_share_their_places(k: int) -> None:
    x = torch.tensor([[0.0], [1.0], [2.0], [2.0], [3.0], [7.0]]).double() + 0.1
    weights = nearest(x, k).toarray()
    for i in range(6):
        others = [j for j in range(6) if j != i]
        apart = np.abs(x[others, 0].numpy() - x[i, 0].numpy()).round(9)
        if len(set(apart.tolist())) == len(set(np.abs(x[others, 0].numpy() - x[i, 0].numpy()).tolist())):
            assert weights[i, others].tolist() == pytest.approx(shared_out(apart, k).tolist(), abs=1e-12)
        assert weights[i, i] == 0
        assert weights[i].sum() == pytest.approx(k)


@pytest.mark.parametrize("k", [1, 3])
def test_ties_do_not_depend_on_the_order_of_samples(k: int) -> None:
    x, y = (normal(40, 3, seed=i).round() for i in (0, 1))
    value = measure(x, y, "mutual_knn", k=k).value
    for seed in range(5):
        order = torch.randperm(40, generator=torch.Generator().manual_seed(seed))
        assert measure(x[order], y[order], "mutual_knn", k=k).value == pytest.approx(value, abs=1e-12)
    assert measure(x, x, "mutual_knn", k=k).value == pytest.approx(1, abs=1e-12)
    assert measure(x, 3 * x - 100, "mutual_knn", k=k).value == pytest.approx(1, abs=1e-12)


def test_copies_of_a_sample_are_its_neighbours_and_it_is_not() -> None:
    """Every sample twice: the nearest is the copy, whichever representation."""
    x, y = (z.repeat(2, 1) for z in related(20))
    assert measure(x, y, "mutual_knn", k=1).value == 1
    assert nearest(x, 1).toarray().nonzero()[1].tolist() == [(i + 20) % 40 for i in range(40)]


def test_blocks_of_samples_make_no_difference() -> None:
    x = normal(50, 3).mul(2).round()
    assert np.array_equal(nearest(x, 4, block=7).toarray(), nearest(x, 4).toarray())


def test_mutual_knn_reasons_and_notes() -> None:
    x, y = related(12)
    assert measure(x, y, "mutual_knn", k=10).notes == ("few samples: unrelated features would share 0.909",)
    assert "only 11 others" in (measure(x, y, "mutual_knn", k=11).degenerate or "")
    assert measure(*related(60), "mutual_knn").notes == ()
    x[3] = 0
    assert "no cosine" in (measure(x, y, "mutual_knn", k=3, metric="cosine").degenerate or "")
    with pytest.raises(InputError, match="k of mutual_knn must be at least 1, but is 0"):
        find("mutual_knn", k=0)
    with pytest.raises(InputError, match="Unknown metric of mutual_knn 'cityblock'"):
        find("mutual_knn", metric="cityblock")


def test_unrelated_features_share_by_chance() -> None:
    values = [measure(normal(101, 5, seed=s), normal(101, 5, seed=s + 50), "mutual_knn").value for s in range(10)]
    assert np.mean(values) == pytest.approx(0.1, abs=0.02)
