"""Direct fits of stitching maps from moments, against NumPy, SciPy, scikit-learn and brute force on the rows.

Rows of the papers: 001-C04, C07, C08, C09, C10, decisions D18 and D19, and the direct fit of G_ReLU.
"""

import itertools
import re

import numpy as np
import pytest
import torch
from scipy.linalg import orthogonal_procrustes
from scipy.stats import ortho_group
from sklearn.linear_model import Lasso as SklearnLasso
from stitch_similarity import r2_map
from torch import Tensor

import intertwine as it
from intertwine.errors import InputError, MismatchError
from intertwine.stitch.direct import LinearMap, PairMoments, least_squares
from intertwine.stitch.families.base import FLOOR, best_assignment
from intertwine.stitch.families.linear import LowRank, Orthogonal, Sparse, lasso
from intertwine.stitch.families.names import find_family, fit_direct


def r2_fit(moments: PairMoments) -> float:
    """R² of the best affine map."""
    return r2_map(moments, least_squares(moments, bias=True))


def rows(n: int, p: int, q: int, seed: int = 0, mean: float = 1.0) -> tuple[Tensor, Tensor]:
    """Two related sets of rows in float64, neither around zero."""
    g = torch.Generator().manual_seed(seed)
    a, w, noise = (torch.randn(*size, generator=g, dtype=torch.float64) for size in ((n, p), (p, q), (n, q)))
    return a + mean, a @ w / p**0.5 + 0.5 * noise - 2 * mean


def moments_of(a: Tensor, b: Tensor, batch: int = 37) -> PairMoments:
    found = PairMoments()
    for x, y in zip(a.split(batch), b.split(batch), strict=True):
        found.update(x, y)
    return found


def distance(a: Tensor, b: Tensor, found: LinearMap) -> float:
    return float((found(a) - b).norm())


# -- moments -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_moments_are_the_plain_sums_whatever_the_batches(dtype: torch.dtype) -> None:
    a, b = (x.to(dtype) for x in rows(5000, 6, 4, mean=3.0))
    found = moments_of(a, b, batch=4100)  # runs that are full, short, and of several batches
    a, b = a.double(), b.double()
    assert (found.count, found.inputs, found.outputs) == (5000, 6, 4)
    expected = (a.sum(0), b.sum(0), a.T @ a, a.T @ b, b.T @ b)
    plain, n = found.products(centred=False), found.count
    values = (n * found.a_mean, n * found.b_mean, plain.aa, plain.ab, plain.bb)
    for value, oracle in zip(values, expected, strict=True):
        assert value.dtype == torch.float64
        torch.testing.assert_close(value, oracle, rtol=1e-11, atol=1e-8)
    centred = found.products(centred=True)
    torch.testing.assert_close(centred.aa, (5000 - 1) * torch.cov(a.T), rtol=1e-11, atol=1e-9)


def test_positions_count_as_rows() -> None:
    a, b = rows(60, 3, 2)
    found = PairMoments()
    found.update(a.reshape(4, 15, 3), b.reshape(4, 15, 2))
    torch.testing.assert_close(found.products(centred=False).ab, a.T @ b)


def test_a_mean_far_from_zero_does_not_cancel() -> None:
    a, b = rows(400, 3, 3)
    far = least_squares(moments_of(a + 1e6, b), bias=True)
    torch.testing.assert_close(far.matrix, least_squares(moments_of(a, b), bias=True).matrix, rtol=1e-6, atol=1e-8)


def test_a_constant_that_wavers_by_rounding_is_no_feature_and_a_small_one_is() -> None:
    g = torch.Generator().manual_seed(0)
    small, last_bit = torch.randn(300, 1, generator=g).double(), torch.randint(0, 2, (300, 1), generator=g).double()
    a = torch.cat([1e6 * (1 + 2.3e-16 * last_bit), 1 + 1e-10 * small], 1)
    found = fit_direct("affine", moments_of(a, small + last_bit))
    assert float(found.matrix[0, 0]) == 0
    assert float(found.matrix[0, 1]) == pytest.approx(1e10, rel=0.1)


def test_moments_refuse_what_does_not_belong_together() -> None:
    found = moments_of(*rows(10, 3, 2))
    with pytest.raises(MismatchError, match="There are 5 rows of the front, but 6 of the back"):
        found.update(torch.zeros(5, 3), torch.zeros(6, 2))
    with pytest.raises(
        MismatchError, match=re.escape("have 3 features of the front and 2 of the back, but this one has 4")
    ):
        found.update(torch.zeros(5, 4), torch.zeros(5, 2))
    with pytest.raises(InputError, match="hold no rows"):
        PairMoments().products(centred=False)
    with pytest.raises(InputError, match="hold NaN or infinity"):
        fit_direct("linear", moments_of(torch.full((4, 2), float("nan")), torch.zeros(4, 2)))


# -- least squares: C04, C07, D18 --------------------------------------------------------------------------------------


def test_001_c07_least_squares_is_numpys() -> None:
    a, b = rows(300, 7, 5)
    oracle = np.linalg.lstsq(a.numpy(), b.numpy(), rcond=None)[0]
    found = fit_direct("linear", moments_of(a, b))
    assert found.bias is None
    np.testing.assert_allclose(found.matrix.T, oracle, rtol=1e-9)
    residual = found(a) - b
    torch.testing.assert_close(a.T @ residual, torch.zeros(7, 5, dtype=torch.float64), rtol=0, atol=1e-9)


def test_d18_affine_has_a_column_of_ones_and_linear_has_none() -> None:
    a, b = rows(300, 7, 5)
    ones = np.concatenate([a.numpy(), np.ones((300, 1))], axis=1)
    oracle = np.linalg.lstsq(ones, b.numpy(), rcond=None)[0]
    found = fit_direct("affine", moments_of(a, b))
    assert found.bias is not None
    np.testing.assert_allclose(torch.cat([found.matrix.T, found.bias[None]]), oracle, rtol=1e-8)
    assert distance(a, b, found) < distance(a, b, fit_direct("linear", moments_of(a, b))) - 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
def test_missing_directions_have_no_part_in_the_answer_as_with_a_pseudo_inverse(bias: bool, dtype: torch.dtype) -> None:
    a, b = (x.to(dtype).double() for x in rows(200, 5, 3))
    scales = torch.tensor([1.0, 64, 0.125, 8, 1]).double()
    # a copy of three columns, one of them scaled, a dead one and a constant one
    a = torch.cat([a * scales, a[:, :2] * scales[:2], 4 * a[:, :1], torch.zeros(200, 1), torch.full((200, 1), 0.1)], 1)
    a = a[:, :-1] if not bias else a
    x = a - a.mean(0) if bias else a
    y = b - b.mean(0) if bias else b
    oracle = np.linalg.pinv(x.numpy(), rcond=1e-12) @ y.numpy()
    found = least_squares(moments_of(a.to(dtype), b.to(dtype)), bias=bias)
    np.testing.assert_allclose(found.matrix.T, oracle, rtol=1e-6, atol=1e-9)


def test_001_c04_a_planted_affine_map_comes_back_also_between_widths() -> None:
    a, _ = rows(500, 6, 1)
    matrix, bias = torch.randn(9, 6).double(), torch.randn(9).double()
    found = fit_direct("affine", moments_of(a, a @ matrix.T + bias))
    torch.testing.assert_close(found.matrix, matrix)
    torch.testing.assert_close(found.bias, bias)


# -- orthogonal, low rank: C08, C09 ------------------------------------------------------------------------------------


def test_001_c08_orthogonal_is_scipys() -> None:
    a, b = rows(300, 6, 6)
    found = fit_direct("orthogonal", moments_of(a, b)).matrix
    np.testing.assert_allclose(found.T, orthogonal_procrustes(a.numpy(), b.numpy())[0], atol=1e-9)
    best = float((a @ found.T - b).norm())
    for _ in range(50):
        turn = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64))[0]
        assert float((a @ turn - b).norm()) > best
    plain = Orthogonal(bias=True).direct(moments_of(a, b))
    np.testing.assert_allclose(
        plain.matrix.T, orthogonal_procrustes((a - a.mean(0)).numpy(), (b - b.mean(0)).numpy())[0], atol=1e-9
    )
    assert distance(a, b, plain) < best


@pytest.mark.parametrize("determinant", [1, -1])
def test_001_c08_planted_rotations_and_reflections_come_back(determinant: int) -> None:
    a, _ = rows(100, 5, 1)
    turn = torch.from_numpy(ortho_group.rvs(5, random_state=0))
    turn[0] *= determinant * torch.det(turn).sign()
    assert float(torch.det(turn)) == pytest.approx(determinant)
    torch.testing.assert_close(fit_direct("orthogonal", moments_of(a, a @ turn.T)).matrix, turn)


@pytest.mark.parametrize(("p", "q"), [(6, 4), (4, 6)])
def test_001_c08_widths_that_differ_give_orthonormal_rows_or_columns(p: int, q: int) -> None:
    found = fit_direct("orthogonal", moments_of(*rows(100, p, q))).matrix
    gram = found @ found.T if q < p else found.T @ found
    torch.testing.assert_close(gram, torch.eye(min(p, q)).double())


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_001_c09_reduced_rank_is_the_formula_on_the_rows(rank: int) -> None:
    a, b = rows(300, 7, 5)
    best = np.linalg.lstsq(a.numpy(), b.numpy(), rcond=None)[0]
    v = np.linalg.svd(a.numpy() @ best)[2][:rank].T
    found = LowRank(rank).direct(moments_of(a, b))
    np.testing.assert_allclose(found.matrix.T, best @ v @ v.T, rtol=1e-7, atol=1e-9)
    assert int(torch.linalg.matrix_rank(found.matrix)) == rank


def test_001_c09_it_beats_cutting_the_matrix_itself_and_full_rank_is_least_squares() -> None:
    a, b = rows(300, 7, 5)
    a = a * torch.tensor([100.0, 1, 1, 1, 1, 1, 0.01]).double()
    moments = moments_of(a, b)
    whole = fit_direct("linear", moments).matrix
    torch.testing.assert_close(LowRank(5).direct(moments).matrix, whole)
    u, s, vh = torch.linalg.svd(whole)
    point = LinearMap((u[:, :2] * s[:2]) @ vh[:2])
    assert distance(a, b, LowRank(2).direct(moments)) < distance(a, b, point) - 0.1


# -- sparse: C10 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strength", [0.003, 0.05, 0.4])
@pytest.mark.parametrize("bias", [False, True])
def test_001_c10_squared_is_scikit_learns_lasso(strength: float, bias: bool) -> None:
    a, b = rows(300, 8, 4)
    oracle = SklearnLasso(alpha=strength, fit_intercept=bias, tol=1e-12, max_iter=100000).fit(a.numpy(), b.numpy())
    found = Sparse(strength, bias=bias).direct(moments_of(a, b))
    np.testing.assert_allclose(found.matrix, oracle.coef_, atol=1e-3)
    if found.bias is not None:
        np.testing.assert_allclose(found.bias, oracle.intercept_, atol=2e-3)
    value = float((found(a) - b).square().sum() / 600 + strength * found.matrix.abs().sum())
    predicted = oracle.predict(a.numpy())
    least = ((predicted - b.numpy()) ** 2).sum() / 600 + strength * np.abs(oracle.coef_).sum()
    assert value <= least + 1e-6


def test_001_c10_unsquared_is_a_least_value_and_both_scalings_name_the_same_matrix() -> None:
    a, b = rows(300, 8, 4)
    products = moments_of(a, b).products(centred=False)
    found = lasso(products, 2.0, squared=False)
    assert found.unsquared == pytest.approx(2.0, rel=1e-6)

    def value(matrix: Tensor) -> float:
        return float((a @ matrix.T - b).norm() + 2.0 * matrix.abs().sum())

    best = value(found.matrix)
    assert 0 < int(found.matrix.count_nonzero()) < 32
    for _ in range(200):
        assert value(found.matrix + 0.01 * torch.randn(4, 8)) > best - 1e-9
        assert value(found.matrix * (1 + 0.1 * torch.rand(4, 8))) > best - 1e-9
    again = lasso(products, found.squared)
    torch.testing.assert_close(again.matrix, found.matrix, rtol=1e-3, atol=1e-4)
    assert again.unsquared == pytest.approx(2.0, rel=1e-4)


@pytest.mark.parametrize("bias", [False, True])
def test_001_c10_a_family_asked_for_the_unsquared_distance_meets_the_conditions_of_its_least_value(bias: bool) -> None:
    """The slope of ‖AM − B‖ is −λ·sign(M) where M is not zero, and no larger than λ elsewhere."""
    a, b = rows(300, 8, 4)
    found = Sparse(3.0, squared=False, bias=bias).direct(moments_of(a, b))
    left = found(a) - b
    slope = (a.T @ left).T / left.norm()
    there = found.matrix != 0
    assert 0 < int(there.sum()) < 32
    torch.testing.assert_close(slope[there], -3.0 * found.matrix[there].sign(), rtol=0, atol=2e-2)
    assert float(slope.abs().max()) < 3.02
    if bias:
        torch.testing.assert_close(left.sum(0), torch.zeros(4).double(), rtol=0, atol=1e-8)


@pytest.mark.parametrize("squared", [True, False])
def test_001_c10_nothing_to_fit_is_fitted_by_nothing(squared: bool) -> None:
    """Where B is zero the residual is too, so any strength without the square names the same matrix."""
    a, _ = rows(20, 3, 2)
    found = lasso(moments_of(a, torch.zeros(20, 2).double()).products(centred=False), 0.5, squared=squared)
    assert found.matrix.tolist() == [[0.0] * 3] * 2
    assert found.unsquared == float("inf")
    assert found.gap == 0.0


@pytest.mark.parametrize("strength", [0.01, 0.3])
def test_001_c10_the_gap_is_that_of_the_dual_problem(strength: float) -> None:
    """On the rows: the value minus that of the residual, shrunk until no slope is too large, as a share of zero's."""
    a, b = rows(300, 8, 4)
    found = lasso(moments_of(a, b).products(centred=False), strength)
    left, alpha = b - a @ found.matrix.T, 300 * strength
    dual = left * (alpha / (a.T @ left).abs().amax(0)).clamp(max=1)
    value = left.square().sum() / 2 + alpha * found.matrix.abs().sum()
    bound = b.square().sum() / 2 - (b - dual).square().sum() / 2
    assert found.gap == pytest.approx(float((value - bound) / (b.square().sum() / 2)), abs=1e-11)
    assert -1e-12 < found.gap <= 1e-7


def test_001_c10_the_mean_divides_the_strength_by_the_number_of_entries() -> None:
    moments = moments_of(*rows(300, 8, 4))
    of_mean, of_sum = Sparse(0.32, mean=True).direct(moments), Sparse(0.01).direct(moments)
    torch.testing.assert_close(of_mean.matrix, of_sum.matrix)
    none = Sparse(0.0).direct(moments)
    torch.testing.assert_close(none.matrix, fit_direct("linear", moments).matrix)
    assert not Sparse(1e3).direct(moments).matrix.any()


# -- permutations and their kin ----------------------------------------------------------------------------------------


def brute_force(a: Tensor, b: Tensor, factors: str) -> float:
    """The least squared distance over every choice of inputs, with the best factors of each."""
    best = float("inf")
    for order in itertools.permutations(range(a.shape[1]), b.shape[1]):
        x = a[:, list(order)]
        d = (x * b).sum(0) / x.square().sum(0)
        d = {
            "permutation": torch.ones_like(d), "signed": torch.where(d < 0, -1.0, 1.0).double(),
            "relu": d.clamp(min=0), "nonzero": d,
        }[factors]  # fmt: skip
        best = min(best, float((x * d - b).square().sum()))
    return best


@pytest.mark.parametrize("factors", ["permutation", "signed", "relu", "nonzero"])
@pytest.mark.parametrize(("p", "q"), [(5, 5), (6, 3)])
def test_one_assignment_finds_the_best_of_all(factors: str, p: int, q: int) -> None:
    for seed in range(5):
        a, b = rows(40, p, q, seed, mean=0.2)
        a = a * torch.logspace(-1, 1, p).double()
        found = fit_direct(factors, moments_of(a, b))
        assert float((found(a) - b).square().sum()) == pytest.approx(brute_force(a, b, factors), rel=1e-6)


@pytest.mark.parametrize("n", [4, 128])
@pytest.mark.parametrize("factors", ["permutation", "signed", "relu", "nonzero"])
def test_a_planted_element_comes_back(factors: str, n: int) -> None:
    g = torch.Generator().manual_seed(n)
    a = torch.randn(600, n, generator=g).relu() if factors in ("permutation", "relu") else torch.randn(600, n)
    order = torch.randperm(n, generator=g)
    signs = torch.randint(0, 2, (n,), generator=g) * 2.0 - 1
    sizes = torch.exp(2 * torch.randn(n, generator=g))
    scales = {"permutation": signs.abs(), "signed": signs, "relu": sizes, "nonzero": signs * sizes}[factors]
    found = fit_direct(factors, moments_of(a, a[:, order] * scales)).matrix
    assert torch.equal(found.abs().argmax(1), order)
    assert torch.equal(found.count_nonzero(1), torch.ones(n).long())
    torch.testing.assert_close(found.gather(1, order[:, None])[:, 0], scales.double(), rtol=1e-6, atol=0)


def test_dead_units_follow_the_named_rules() -> None:
    a = torch.rand(50, 3).double()
    a[:, 1] = 0
    b = torch.stack([2 * a[:, 2], torch.zeros(50).double(), -3 * a[:, 0]], 1)
    found = fit_direct("relu", moments_of(a, b)).matrix
    assert torch.equal((found > 0).sum(1), torch.ones(3).long())
    assert bool((found >= 0).all())
    assert float(found[0, 2]) == pytest.approx(2.0)
    left = {int(found[1].argmax()), int(found[2].argmax())}
    assert left == {0, 1}
    on_dead = found[:, 1].max()
    opposed = [float(found[i, 0]) for i in (1, 2) if found[i, 0] > 0]
    assert float(on_dead) == 1.0
    assert opposed == [pytest.approx(FLOOR * (3 if found[2, 0] > 0 else 1))]


@pytest.mark.parametrize("opposed", [False, True])
def test_a_factor_that_is_almost_zero_keeps_its_sign_and_the_smallest_size(opposed: bool) -> None:
    """Relative to the ratio of lengths, here five; its logarithm can be trained from there."""
    a = torch.tensor([1.0, 1.0, -1.0, -1.0]).double()[:, None]
    b = 5 * torch.tensor([1.0, -1.0, 1.0, -1.0]).double()[:, None] + (-1e-9 if opposed else 1e-9) * a
    moments = moments_of(a, b)
    assert float(fit_direct("nonzero", moments).matrix) == pytest.approx((-5 if opposed else 5) * FLOOR)
    assert float(fit_direct("relu", moments).matrix) == pytest.approx(5 * FLOOR)
    for name in ("nonzero", "relu"):
        family = find_family(name)
        start = family.final(family.start(1, 1, "direct", moments, torch.Generator()))
        assert float(start.matrix) == pytest.approx(float(fit_direct(name, moments).matrix), rel=1e-5)


def test_a_thousand_units_are_matched_at_once() -> None:
    gains = torch.rand(1024, 1024)
    order = best_assignment(gains)
    assert torch.equal(order.sort().values, torch.arange(1024))


# -- R²: D19 -----------------------------------------------------------------------------------------------------------


def test_d19_r2_fit_is_blind_to_an_invertible_stitch_and_r2_map_is_not() -> None:
    a, b = rows(300, 5, 4)
    moments = moments_of(a, b)
    turned = moments_of(a @ torch.randn(5, 5).double() + 1, b)
    assert r2_fit(turned) == pytest.approx(r2_fit(moments), abs=1e-9)
    assert r2_fit(moments) == pytest.approx(it.measure(a, b, "r2").value, abs=1e-9)
    best = fit_direct("affine", moments)
    assert r2_map(moments, best) == pytest.approx(r2_fit(moments), abs=1e-12)
    other = LinearMap(best.matrix + 0.1, best.bias)
    total = (b - b.mean(0)).square().sum()
    assert r2_map(moments, other) == pytest.approx(float(1 - (other(a) - b).square().sum() / total), abs=1e-9)
    assert r2_map(moments, other) < r2_fit(moments)


def test_r2_refuses_features_that_do_not_vary_and_maps_of_other_widths() -> None:
    constant = moments_of(torch.rand(20, 3), torch.full((20, 2), 0.1))
    with pytest.raises(InputError, match="the features of the back do not vary over 20 rows"):
        r2_fit(constant)
    with pytest.raises(MismatchError, match="of a map 4 → 2, and the moments are of 3 → 2"):
        r2_map(constant, LinearMap(torch.zeros(2, 4)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_001_C07_columns_of_zeros_change_nothing_for_the_others(dtype: torch.dtype) -> None:
    """Dead units behind a ReLU are common; the other columns are fitted as if they were not there."""
    chance = torch.Generator().manual_seed(0)
    a = torch.randn(300, 12, generator=chance, dtype=dtype).relu()
    b = torch.randn(300, 5, generator=chance, dtype=dtype)
    a[:, [3, 7]] = 0
    moments = PairMoments()
    moments.update(a, b)
    for bias in (False, True):
        found = least_squares(moments, bias=bias)
        rows = np.c_[a.double().numpy(), np.ones(300)] if bias else a.double().numpy()
        wanted = np.linalg.lstsq(rows, b.double().numpy(), rcond=None)[0][:12].T
        np.testing.assert_allclose(found.matrix.double().numpy(), wanted, atol=1e-6)


def test_moments_do_not_depend_on_how_features_lie_in_memory() -> None:
    """Views of channels before positions, as convolutions leave them, and rows that lie one behind the other."""
    chance = torch.Generator().manual_seed(0)
    maps = [torch.randn(700, channels, 9, generator=chance) + 3 for channels in (4, 6)]
    plain, views = PairMoments(), PairMoments()
    for x, y in zip(*(one.split(300) for one in maps), strict=True):
        views.update(x.mT, y.mT)
        plain.update(x.mT.reshape(-1, 4), y.mT.reshape(-1, 6))
    joint = torch.cat([one.mT.reshape(-1, one.shape[1]).double() for one in maps], 1)
    wanted = joint.T @ joint
    for moments in (plain, views):
        assert moments.count == 6300
        found = moments.products(centred=False)
        torch.testing.assert_close(found.aa, wanted[:4, :4], rtol=1e-12, atol=0)
        torch.testing.assert_close(found.ab, wanted[:4, 4:], rtol=1e-12, atol=0)
        torch.testing.assert_close(found.bb, wanted[4:, 4:], rtol=1e-12, atol=0)


def test_rows_that_lie_in_different_batches_of_positions_are_still_rows() -> None:
    """Two images of nine positions meet three of six: eighteen rows each, one after another."""
    chance = torch.Generator().manual_seed(0)
    a, b = (torch.randn(n, channels, p, generator=chance).mT for n, channels, p in ((2, 4, 9), (3, 5, 6)))
    found = PairMoments()
    found.update(a, b)
    assert found.count == 18
    torch.testing.assert_close(
        found.products(centred=False).ab, a.reshape(18, 4).double().T @ b.reshape(18, 5).double()
    )
