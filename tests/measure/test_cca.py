"""CCA, SVCCA, PWCCA and R² against scikit-learn and definitions in numpy."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.linalg import null_space
from sklearn.cross_decomposition import CCA
from sklearn.linear_model import LinearRegression
from torch import Tensor

from intertwine.errors import InputError, MismatchError
from intertwine.measure.measure import Result, find
from intertwine.measure.streaming import StreamingMoments

CORRELATIONS = ("cca", "svcca", "pwcca")
Array = np.ndarray


def measure(x: Tensor, y: Tensor, name: str, **options: Any) -> Result:
    return find(name, **options)(x, y)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def related(n: int = 100, p: int = 5, q: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two representations with something in common, each off centre."""
    base = normal(n, 3, seed=seed)
    x, y = (base @ normal(3, k, seed=seed + i + 1) + normal(n, k, seed=seed + i + 3) for i, k in enumerate((p, q)))
    return x + 1.5, y - 0.5


def whitened(a: Array) -> Array:
    """a (aᵀa)^(-1/2), by eigenvectors: another way than the library's."""
    values, vectors = np.linalg.eigh(a.T @ a)
    return a @ vectors @ np.diag(values**-0.5) @ vectors.T


def correlations(x: Array, y: Array) -> Array:
    x, y = (whitened(z - z.mean(0)) for z in (x, y))
    return np.linalg.svd(x.T @ y, compute_uv=False)


# -- CCA ---------------------------------------------------------------------------------------------------------------


def test_001_C21_cca_is_scikit_learns() -> None:
    x, y = related()
    model = CCA(n_components=4, tol=1e-14, max_iter=100_000)
    a: Any = x.numpy()
    b: Any = y.numpy()
    u, v = model.fit_transform(a, b)
    rho = np.array([np.corrcoef(u[:, i], v[:, i])[0, 1] for i in range(4)])
    assert measure(x, y, "cca").value == pytest.approx(rho.mean(), abs=1e-7)
    assert measure(x, y, "cca", statistic="mean_squared").value == pytest.approx((rho**2).mean(), abs=1e-7)


@pytest.mark.parametrize(("p", "q"), [(5, 5), (3, 7), (8, 2), (1, 1)])
def test_001_C21_definition(p: int, q: int) -> None:
    x, y = related(80, p, q)
    rho = correlations(x.numpy(), y.numpy())[: min(p, q)]
    assert measure(x, y, "cca").value == pytest.approx(rho.mean(), abs=1e-10)
    assert measure(x, y, "cca", statistic="mean_squared").value == pytest.approx((rho**2).mean(), abs=1e-10)


def test_001_C21_blind_to_a_stitching_layer_in_training() -> None:
    """Any invertible layer between the two leaves CCA as it is, from the first step to the last."""
    x, y = related(200, 4, 4)
    layer = torch.eye(4, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([layer], lr=0.05)
    values, losses = [], []
    for _ in range(20):
        values.append(measure(x @ layer.detach(), y, "cca").value)
        loss = (x @ layer - y).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]
    assert max(values) - min(values) < 1e-12


def test_001_C21_the_papers_code_does_not_centre() -> None:
    """‖Q₂ᵀQ₁‖²/p on features as they are sees common means as similarity."""
    x, y = normal(500, 5) + 10, normal(500, 5, seed=1) + 10
    q = [torch.linalg.qr(z).Q for z in (x, y)]
    uncentred = float((q[1].T @ q[0]).square().sum()) / 5
    assert uncentred > 0.2
    assert measure(x, y, "cca", statistic="mean_squared").value < 0.05


# -- ranks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CORRELATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dead_and_duplicate_columns_are_no_directions(name: str, dtype: torch.dtype) -> None:
    x, y = (z.to(dtype) for z in related())
    value = measure(x, y, name).value
    dead = torch.cat([torch.full((100, 2), 0.1, dtype=dtype), y], 1)
    assert measure(x, dead, name).value == pytest.approx(value, abs=1e-6 if dtype == torch.float32 else 1e-10)
    if name != "svcca":  # a copy is more variance
        again = torch.cat([y, y[:, :2], 3 * y[:, :1]], 1)
        assert measure(x, again, name).value == pytest.approx(value, abs=1e-6 if dtype == torch.float32 else 1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_rank_is_that_of_what_was_given_before_rounding(dtype: torch.dtype, offset: float) -> None:
    """12 features of rank 3, rounded: the other 9 directions are rounding and would bring the mean down."""
    base = normal(300, 3)
    x, y = ((base @ normal(3, 12, seed=i) + offset).to(dtype) for i in (1, 2))
    found = measure(x, y, "cca")
    if offset and dtype is torch.bfloat16:
        assert found.degenerate is not None
    else:
        assert found.value == pytest.approx(1, abs=0.02 if dtype.itemsize == 2 else 1e-4)


def test_rank_in_double_precision() -> None:
    """The other singular values are not zero but the rounding of products and of the decomposition."""
    for seed in range(3):
        base, y = normal(2000, 3, seed=seed), normal(2000, 10, seed=seed + 100)
        value = measure(base @ normal(3, 50, seed=seed + 50), y, "cca").value
        assert value == pytest.approx(measure(base, y, "cca").value, abs=1e-9)


def test_features_far_apart_in_size_all_count() -> None:
    """A tolerance of samples × precision would lose these directions in float32."""
    x, y = related(5000, 4, 4)
    wide = (x * torch.tensor([1.0, 1e-2, 1e-3, 1e-4])).float()
    assert measure(wide, y, "cca").value == pytest.approx(measure(x, y, "cca").value, abs=1e-4)


# -- SVCCA -------------------------------------------------------------------------------------------------------------


def leading(a: Array, fraction: float) -> Array:
    a = a - a.mean(0)
    u, s, _ = np.linalg.svd(a, full_matrices=False)
    held = np.cumsum(s**2) / np.sum(s**2)
    return u[:, : int(np.argmax(held >= fraction)) + 1]


@pytest.mark.parametrize("variance", [0.5, 0.9, 0.99])
def test_001_C22_definition(variance: float) -> None:
    decay = torch.logspace(0, -2, 20, dtype=torch.float64)
    base = normal(400, 20)
    x, y = base * decay * 30, (base + normal(400, 20, seed=1)) * decay
    u, v = leading(x.numpy(), variance), leading(y.numpy(), variance)
    rho = np.linalg.svd(u.T @ v, compute_uv=False)
    assert 1 < len(rho) < 20
    assert measure(x, y, "svcca", variance=variance).value == pytest.approx(rho.mean(), abs=1e-12)
    squared = measure(x, y, "svcca", variance=variance, statistic="mean_squared")
    assert squared.value == pytest.approx((rho**2).mean(), abs=1e-12)


def test_001_C22_all_of_the_variance_is_cca() -> None:
    x, y = related()
    assert measure(x, y, "svcca", variance=1.0).value == pytest.approx(measure(x, y, "cca").value, abs=1e-12)


def test_001_C22_works_with_fewer_samples_than_features_where_few_directions_count() -> None:
    base = normal(40, 3)
    x = base @ normal(3, 100, seed=1) + 1e-3 * normal(40, 100, seed=2)
    y = base @ normal(3, 100, seed=3) + 1e-3 * normal(40, 100, seed=4)
    assert measure(x, y, "svcca").value == pytest.approx(1, abs=1e-3)
    assert measure(x, y, "cca").degenerate is not None


# -- PWCCA -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "q"), [(5, 4), (4, 6), (5, 5)])
@pytest.mark.parametrize("side", ["x", "y"])
def test_001_C23_definition(p: int, q: int, side: str) -> None:
    x, y = (z.numpy() - z.numpy().mean(0) for z in related(90, p, q))
    u, rho, vt = np.linalg.svd(whitened(x).T @ whitened(y), full_matrices=False)
    variates, features = (whitened(x) @ u, x) if side == "x" else (whitened(y) @ vt.T, y)
    weights = np.abs(variates.T @ features).sum(1)
    found = measure(*related(90, p, q), "pwcca", side=side)
    assert found.value == pytest.approx(float(weights @ rho / weights.sum()), abs=1e-10)


def test_001_C23_the_side_matters_and_a_shift_does_not() -> None:
    x, y = related()
    assert measure(x, y, "pwcca").value == pytest.approx(measure(y, x, "pwcca", side="y").value, abs=1e-12)
    assert abs(measure(x, y, "pwcca").value - measure(x, y, "pwcca", side="y").value) > 1e-3
    assert measure(x + 50, y - 9, "pwcca").value == pytest.approx(measure(x, y, "pwcca").value, abs=1e-10)


def by_parts(x: Array, y: Array, common: Array) -> float:
    """PWCCA where x and y share a subspace and nothing else coincides: the shared part by itself, then the rest."""
    x, y = x - x.mean(0), y - y.mean(0)
    q = np.linalg.qr(common - common.mean(0))[0]
    _, s, vt = np.linalg.svd(q.T @ x, full_matrices=False)
    shared = np.abs(s[:, None] * vt).sum(1)
    rest = []
    for z in (x, y):
        u, s, _ = np.linalg.svd(z - q @ (q.T @ z), full_matrices=False)
        rest.append(u[:, s > 1e-9 * s[0]])
    u, rho, _ = np.linalg.svd(rest[0].T @ rest[1], full_matrices=False)
    weights = np.abs((rest[0] @ u).T @ x).sum(1)
    return float((shared.sum() + weights @ rho) / (shared.sum() + weights.sum()))


def shared_part() -> tuple[Tensor, Tensor, Array]:
    """Four directions in common, and others."""
    z = normal(300, 4)
    x = torch.cat([z, normal(300, 3, seed=1)], 1) @ normal(7, 7, seed=2)
    return x, torch.cat([z, normal(300, 2, seed=3)], 1) @ normal(6, 6, seed=4), z.numpy()


def few() -> tuple[Tensor, Tensor, Array]:
    """20 samples of 12 and 11 features: centred, they lie in 19 dimensions, so that four are in common by necessity."""
    x, y = normal(20, 12), normal(20, 11, seed=1)
    a, b = (z - z.mean(0) for z in (x, y))
    return x, y, a.numpy() @ null_space(torch.cat([a, b], 1).numpy())[:12]


@pytest.mark.parametrize("make", [shared_part, few])
def test_001_C23_correlations_that_coincide(make: Callable[[], tuple[Tensor, Tensor, Array]]) -> None:
    """The value is that of the parts, whatever the basis of y, the order of samples and the way they are read."""
    x, y, common = make()
    wanted = by_parts(x.numpy(), y.numpy(), common)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    moved = y @ normal(y.shape[1], y.shape[1], seed=9)
    stream = StreamingMoments([("x", "y")])
    for rows in order.split(7):
        stream.update({"x": x[rows]}, {"y": y[rows]})
    found = [measure(x, y, "pwcca"), measure(x, moved, "pwcca"), measure(x[order], y[order], "pwcca")]
    found += [measure(y, x, "pwcca", side="y"), *stream.results([find("pwcca")], "x", "y")]
    assert [one.value for one in found] == pytest.approx([wanted] * 5, abs=1e-9)
    assert not any("choice" in note for one in found for note in one.notes)


def test_001_C23_directions_that_meet_nothing() -> None:
    """x has four more of them than there are pairs; the pair without correlation weighs as the largest of them."""
    q = torch.linalg.qr(normal(60, 9) - normal(60, 9).mean(0)).Q
    x, y = q[:, :5] @ normal(5, 5, seed=1), q[:, [0, 7]]
    first, largest = x.numpy().T @ q[:, 0].numpy(), np.linalg.svd((x - q[:, :1] @ (q[:, :1].T @ x)).numpy())
    weights = np.abs(first).sum(), largest[1][0] * np.abs(largest[2][0]).sum()
    for a, b in ((x, y), (x, y @ normal(2, 2, seed=3)), (x.flip(0), y.flip(0))):
        assert measure(a, b, "pwcca").value == pytest.approx(weights[0] / sum(weights), abs=1e-9)


def test_001_C23_a_choice_that_remains_is_noted() -> None:
    """Features of length 1, all at right angles: what they hold has no principal directions."""
    q = torch.linalg.qr(normal(60, 9) - normal(60, 9).mean(0)).Q
    x = q[:, :4]
    (note,) = measure(x, torch.cat([q[:, :2], q[:, 2:3] + q[:, 7:8]], 1), "pwcca").notes
    assert note.startswith("2 pairs have one correlation, and x holds as much of one as of another: their weights")
    assert measure(x, q[:, :2], "pwcca").notes == ()  # all are 1, whatever they weigh
    assert measure(x, x, "pwcca").notes == ()
    assert measure(*related(), "pwcca").notes == ()


# -- R² ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("center", [True, False])
def test_001_C17_r2_is_scikit_learns(center: bool) -> None:
    x, y = related(100, 5, 3)
    a: Any = x.numpy()
    b: Any = y.numpy()
    fitted = LinearRegression(fit_intercept=center).fit(a, b).predict(a)
    wanted = 1 - ((b - fitted) ** 2).sum() / ((b - b.mean(0) * center) ** 2).sum()
    assert measure(x, y, "r2", center=center).value == pytest.approx(wanted, abs=1e-12)


def test_001_C17_mean_squared_cca_is_r2_of_whitened_features() -> None:
    x, y = related(100, 5, 3)
    white = torch.from_numpy(whitened((y - y.mean(0)).numpy()))
    squared = measure(x, y, "cca", statistic="mean_squared").value
    assert measure(x, white, "r2").value == pytest.approx(squared, abs=1e-12)


def test_001_D19_a_fit_cannot_follow_a_map_and_the_given_map_can() -> None:
    x, y = related(100, 4, 4)
    best = torch.linalg.lstsq(x - x.mean(0), y - y.mean(0)).solution
    fit = measure(x, y, "r2").value
    assert measure(x, y, "r2", matrix=best).value == pytest.approx(fit, abs=1e-12)
    values = []
    for step in (0.0, 0.5, 1.0, 2.0):
        layer = best + step * normal(4, 4, seed=9)
        assert measure(x @ layer, y, "r2").value == pytest.approx(fit, abs=1e-10)
        values.append(measure(x, y, "r2", matrix=layer).value)
        wanted = 1 - ((x - x.mean(0)) @ layer - (y - y.mean(0))).square().sum() / (y - y.mean(0)).square().sum()
        assert values[-1] == pytest.approx(float(wanted), abs=1e-12)
    assert values == sorted(values, reverse=True)
    assert values[-1] < 0


def test_001_D19_the_given_map_without_centring() -> None:
    x, y, layer = *related(50, 4, 3), normal(4, 3)
    wanted = 1 - float((x @ layer - y).square().sum() / y.square().sum())
    assert measure(x, y, "r2", center=False, matrix=layer).value == pytest.approx(wanted, abs=1e-12)
    assert measure(1e6 * x, 1e6 * y, "r2", center=False, matrix=layer).value == pytest.approx(wanted, abs=1e-12)
    with pytest.raises(MismatchError, match=r"\(4, 3\)"):
        measure(x, y, "r2", matrix=layer.T)
    with pytest.raises(InputError, match="finite"):
        find("r2", matrix=layer / 0)


# -- few samples and other hard inputs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cca", "pwcca", "r2"])
@pytest.mark.parametrize("n", [3, 10, 20, 21])
def test_values_that_few_samples_force_are_not_given(name: str, n: int) -> None:
    """21 centred samples of 20 features still span all they can."""
    found = measure(normal(n, 20), normal(n, 5, seed=1), name)
    assert np.isnan(found.value)
    assert f"{n} samples are too few: x spans all" in (found.degenerate or "")


def test_few_samples_are_noted_with_the_value_of_unrelated_features() -> None:
    values, fits = [], []
    for seed in range(30):
        x, y = normal(41, 20, seed=seed), normal(41, 10, seed=seed + 100)
        found = measure(x, y, "cca", statistic="mean_squared")
        assert found.notes == ("few samples for 20 directions: unrelated features would score 0.500 (mean square)",)
        values.append(found.value)
        fits.append(measure(x, y, "r2").value)
    assert np.mean(values) == pytest.approx(0.5, abs=0.02)
    assert np.mean(fits) == pytest.approx(0.5, abs=0.02)
    assert measure(normal(200, 20), normal(200, 10, seed=1), "cca").notes == ()


@pytest.mark.parametrize("name", [*CORRELATIONS, "r2"])
def test_constants_have_no_value(name: str) -> None:
    x, flat = normal(40, 3), torch.full((40, 3), 0.1).double()
    for a, b, which in ((x, flat, "y is"), (flat, x, "x is"), (flat, flat, "both representations are")):
        found = measure(a, b, name)
        assert np.isnan(found.value)
        assert found.degenerate == f"{which} constant: no feature varies over the samples"


@pytest.mark.parametrize("name", [*CORRELATIONS, "r2"])
def test_scales_offsets_and_precisions(name: str) -> None:
    x, y = related()
    value = measure(x, y, name).value
    for scale in (1e-200, 1e-6, 1e6, 1e200):
        assert measure(x, scale * y, name).value == pytest.approx(value, abs=1e-10)
        assert measure(scale * x, y, name).value == pytest.approx(value, abs=1e-10)
    assert measure(x.float() + 100, y.float() - 100, name).value == pytest.approx(value, abs=1e-5)
    for dtype, near in ((torch.float32, 1e-6), (torch.float16, 1e-3), (torch.bfloat16, 1e-2)):
        assert measure(x.to(dtype), y.to(dtype), name).value == pytest.approx(value, abs=near)
        assert measure(x.to(dtype), x.to(dtype), name).value == pytest.approx(1, abs=1e-12)


def test_options_that_do_not_exist() -> None:
    for name, options, match in (
        ("cca", {"statistic": "median"}, "Choose one of: mean, mean_squared"),
        ("svcca", {"statistic": "median"}, "Choose one of: mean, mean_squared"),
        ("svcca", {"variance": 99.0}, r"\(0, 1\]"),
        ("pwcca", {"side": "left"}, "Choose one of: x, y"),
    ):
        with pytest.raises(InputError, match=match):
            find(name, **options)
