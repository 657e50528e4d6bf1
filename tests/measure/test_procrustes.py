"""Procrustes similarities and soft matching against brute force, scipy and the paper's numbers."""

import pickle
from itertools import permutations, product
from math import inf
from typing import Any

import numpy as np
import pytest
import torch
from scipy import linalg
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from intertwine.errors import InputError, MismatchError
from intertwine.measure import procrustes as soft
from intertwine.measure.measure import Result, derangement, find

PROCRUSTES = ("orthogonal_procrustes", "permutation_procrustes", "relu_procrustes")
MATCHED = (*PROCRUSTES[1:], "soft_matching")
Array = np.ndarray


def measure(x: Tensor, y: Tensor, name: str, **options: Any) -> Result:
    return find(name, **options)(x, y)


def part(found: Result, name: str) -> Tensor:
    """One part of the alignment, which must be there."""
    value = getattr(found.alignment, name)
    assert isinstance(value, Tensor)
    return value


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def related(n: int = 40, p: int = 6, q: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two representations with something in common, each off centre."""
    base = normal(n, 5, seed=seed)
    x, y = (base @ normal(5, k, seed=seed + i + 1) + normal(n, k, seed=seed + i + 3) for i, k in enumerate((p, q)))
    return x + 1.5, y - 0.5


def units(z: Tensor, center: bool, each: bool) -> Array:
    a = z.numpy()
    a = a - a.mean(0) if center else a
    return a / (np.linalg.norm(a, axis=0) if each else np.linalg.norm(a))


def padded(a: Array, width: int) -> Array:
    return np.pad(a, ((0, 0), (0, width - a.shape[1])))


def g_relu(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """A permutation and positive scales."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed)), normal(n, seed=seed).exp()


# -- definitions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "q"), [(5, 5), (6, 4), (3, 6)])
@pytest.mark.parametrize("center", [True, False])
def test_000_G42_brute_force_over_all_permutations(p: int, q: int, center: bool) -> None:
    x, y = related(20, p, q)
    width = max(p, q)
    for name, each in (("relu_procrustes", True), ("permutation_procrustes", False)):
        a, b = (padded(units(z, center, each), width) for z in (x, y))
        left = min(float(np.linalg.norm(a - b[:, list(order)])) for order in permutations(range(width)))
        bound = np.sqrt(2 * (p + q)) if each else 2
        assert measure(x, y, name, center=center).value == pytest.approx(1 - left / bound, abs=1e-12)


def test_000_G42_paper_divisor_for_equal_widths() -> None:
    x, y = related(60, 20, 20)
    a, b = (units(z, False, True) for z in (x, y))
    cost = ((a[:, :, None] - b[:, None, :]) ** 2).sum(0)
    left = np.sqrt(cost[linear_sum_assignment(cost)].sum())
    for dead in ("drop", "paper"):
        value = measure(x, y, "relu_procrustes", center=False, dead=dead).value
        assert value == pytest.approx(1 - left / (2 * np.sqrt(20)), abs=1e-12)


@pytest.mark.parametrize("center", [True, False])
def test_000_G43_scipy_orthogonal_procrustes(center: bool) -> None:
    x, y = related(50, 8, 8)
    a, b = (units(z, center, False) for z in (x, y))
    rotation, nuclear = linalg.orthogonal_procrustes(b, a)
    found = measure(x, y, "orthogonal_procrustes", center=center)
    assert found.value == pytest.approx(1 - np.sqrt(2 - 2 * nuclear) / 2, abs=1e-12)
    ratio = np.linalg.norm(x - x.mean(0) * center) / np.linalg.norm(y - y.mean(0) * center)
    assert np.allclose(part(found, "matrix").numpy(), rotation * ratio, atol=1e-12)


@pytest.mark.parametrize(("n", "p", "q"), [(20, 7, 4), (20, 4, 7), (10, 30, 30), (10, 30, 4), (10, 4, 30), (9, 20, 25)])
def test_000_G43_any_widths_and_few_samples(n: int, p: int, q: int) -> None:
    """The d × d form with columns of zeros is the oracle; what the matrix leaves is what the value says."""
    x, y = related(n, p, q)
    a, b = (padded(units(z, True, False), max(p, q)) for z in (x, y))
    nuclear = np.linalg.svd(b.T @ a, compute_uv=False).sum()
    found = measure(x, y, "orthogonal_procrustes")
    assert found.value == pytest.approx(1 - np.sqrt(2 - 2 * nuclear) / 2, abs=1e-12)
    matrix = part(found, "matrix").numpy() * np.linalg.norm(y - y.mean(0)) / np.linalg.norm(x - x.mean(0))
    assert np.trace(a[:, :p].T @ b[:, :q] @ matrix) == pytest.approx(nuclear, abs=1e-12)
    assert np.linalg.svd(matrix, compute_uv=False).max() == pytest.approx(1)


def test_000_G43_the_map_is_written_when_it_is_asked_for_and_travels_with_the_result() -> None:
    x, y = related(10, 300, 200)
    found = measure(x, y, "orthogonal_procrustes", baseline=False)
    assert len(pickle.dumps(found)) < 8 * 300 * 200 / 4, "what the value took is far smaller than the map"
    copy = pickle.loads(pickle.dumps(found))
    assert part(found, "matrix") is part(found, "matrix")
    assert torch.equal(part(copy, "matrix"), part(found, "matrix"))


def test_000_G43_rotation_on_unit_columns_is_never_further_than_a_permutation() -> None:
    for seed in range(5):
        x, y = (z / z.norm(dim=0) for z in related(60, 10, 10, seed))
        values = [measure(x, y, name, center=False).value for name in PROCRUSTES]
        assert values[0] >= values[1] - 1e-12
        assert values[1] == pytest.approx(values[2], abs=1e-12)


def test_range_is_attained() -> None:
    x = normal(30, 1)
    assert measure(x, -x, "relu_procrustes").value == pytest.approx(0, abs=1e-12)
    assert measure(x, -x, "permutation_procrustes").value == pytest.approx(0, abs=1e-12)
    assert measure(x, -x, "soft_matching").value == pytest.approx(-1, abs=1e-12)
    q = torch.linalg.qr(normal(30, 6) - normal(30, 6).mean(0)).Q
    low = find("orthogonal_procrustes").range[0]
    assert measure(q[:, :3], q[:, 3:], "orthogonal_procrustes").value == pytest.approx(low, abs=1e-12)


# -- what the paper says of them ---------------------------------------------------------------------------------------


def test_000_G22_D4_translations_need_centring() -> None:
    for seed in range(5):
        x = normal(200, 12, seed=seed).relu()
        order, scales = g_relu(12, seed)
        y = (x * scales)[:, order] + normal(12, seed=seed + 50)
        assert measure(x, y, "relu_procrustes").value == pytest.approx(1, abs=1e-12)
        assert measure(x, y, "relu_procrustes", center=False).value < 0.95
        assert measure(x, (x * scales)[:, order], "relu_procrustes", center=False).value == pytest.approx(1, abs=1e-12)


def test_000_G26_one_only_for_elements_of_the_group() -> None:
    x = normal(200, 12)
    rotation = torch.linalg.qr(normal(12, 12, seed=1)).Q
    assert measure(x, x @ rotation, "orthogonal_procrustes").value == pytest.approx(1, abs=1e-12)
    assert measure(x, x @ rotation, "relu_procrustes").value < 0.9
    assert measure(x, x * normal(12).exp(), "orthogonal_procrustes").value < 0.99


def test_001_C27_cka_cannot_see_a_rotation() -> None:
    x = normal(200, 12).relu()
    y = x @ torch.linalg.qr(normal(12, 12, seed=1)).Q
    for name in ("linear_cka", "orthogonal_procrustes", "cca", "r2"):
        assert measure(x, y, name).value == pytest.approx(1, abs=1e-9)
    assert measure(x, y, "relu_procrustes").value < 0.9


def relu_gaussians(seed: int) -> tuple[Tensor, Tensor]:
    return normal(512, 64, seed=2 * seed).relu(), normal(512, 64, seed=2 * seed + 1).relu()


def test_000_D5_independent_features() -> None:
    for seed in range(3):
        x, y = relu_gaussians(seed)
        assert measure(x, y, "relu_procrustes", center=False).value == pytest.approx(0.446, abs=0.003)
        assert measure(x, y, "relu_procrustes").value == pytest.approx(0.329, abs=0.003)


def test_000_D5_features_that_are_not_negative_never_score_below() -> None:
    low = 1 - np.sqrt(0.5)
    x = torch.eye(6, dtype=torch.float64).repeat(3, 1)
    assert measure(x[:, :3], x[:, 3:], "relu_procrustes", center=False).value == pytest.approx(low)
    for seed in range(20):
        x, y = (normal(8, 5, seed=seed + i).relu() ** 4 for i in (0, 100))
        if not find("relu_procrustes", center=False)(x, y).degenerate:
            assert measure(x, y, "relu_procrustes", center=False).value >= low - 1e-12


@pytest.mark.parametrize(("center", "value"), [(False, 0.446), (True, 0.329)])
def test_000_D5_every_value_comes_with_that_of_unrelated_features(center: bool, value: float) -> None:
    """The baseline of two equal representations is what an independent pair would score."""
    x = normal(512, 64).relu()
    found = measure(x, 3 * x.flip(1), "relu_procrustes", center=center)
    assert found.value == pytest.approx(1)
    assert found.baseline == pytest.approx(value, abs=0.004)
    assert f"{found.value:.6f}, unrelated {found.baseline:.4f})" in repr(found)
    assert found.to_dict()["baseline"] == found.baseline


@pytest.mark.parametrize("name", PROCRUSTES)
@pytest.mark.parametrize(("n", "p"), [(40, 6), (10, 30)])
def test_000_D5_the_baseline_is_the_value_with_samples_in_another_order(name: str, n: int, p: int) -> None:
    x, y = related(n, p, p)
    order = derangement(n)
    assert sorted(order.tolist()) == list(range(n))
    assert not (order == torch.arange(n)).any()
    assert measure(x, y, name).baseline == pytest.approx(measure(x, y[order], name, baseline=False).value, abs=1e-9)
    assert measure(x, y, name, baseline=False).baseline is None
    a, b = (t.reshape(n // 2, 2, p).movedim(1, 2) for t in (x, y))  # channels with two positions, which stay together
    expected = measure(a, b[derangement(n // 2)], name).value
    assert measure(a, b, name).baseline == pytest.approx(expected, abs=1e-9)


def test_000_D5_no_baseline_without_a_value() -> None:
    assert measure(normal(10, 3), torch.zeros(10, 3), "relu_procrustes").baseline is None
    assert measure(normal(10, 3), normal(10, 3), "soft_matching").baseline is None


@pytest.mark.parametrize(("dead", "paper"), [(16, 0.519), (60, 0.857)])
def test_000_D6_dead_features(dead: int, paper: float) -> None:
    """As the paper's code has it, dead features raise the similarity; dropped, they change nothing."""
    x, y = relu_gaussians(0)
    live = measure(x[:, dead:], y[:, dead:], "relu_procrustes", center=False)
    x, y = x.clone(), y.clone()
    x[:, :dead], y[:, :dead] = 0, 0
    found = measure(x, y, "relu_procrustes", center=False, dead="paper")
    assert found.value == pytest.approx(paper, abs=0.004)
    assert "kept as zeros" in found.notes[0]
    found = measure(x, y, "relu_procrustes", center=False)
    assert found.value == pytest.approx(live.value, abs=1e-12)
    assert found.notes == (f"dead features left out: {dead} of x and {dead} of y",)
    assert live.notes == ()


@pytest.mark.parametrize("dead", ["drop", "paper"])
def test_000_D6_dead_on_one_side_by_brute_force(dead: str) -> None:
    x, y = related(20, 5, 5)
    x[:, 2] = 7.0
    a, b = units(torch.cat([x[:, :2], x[:, 3:]], 1), True, True), units(y, True, True)
    left = min(np.linalg.norm(padded(a, 5) - b[:, list(order)]) for order in permutations(range(5)))
    bound = np.sqrt(18) if dead == "drop" else np.sqrt(20)
    assert measure(x, y, "relu_procrustes", dead=dead).value == pytest.approx(1 - left / bound, abs=1e-12)


def test_000_D6_the_papers_divisor_is_the_wider_width() -> None:
    x, y = related(20, 5, 3)
    a, b = units(x, True, True), padded(units(y, True, True), 5)
    left = min(np.linalg.norm(a - b[:, list(order)]) for order in permutations(range(5)))
    found = measure(x, y, "relu_procrustes", dead="paper")
    assert found.value == pytest.approx(1 - left / (2 * np.sqrt(5)), abs=1e-12)


# -- the alignment -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "q"), [(6, 6), (6, 4), (4, 6)])
def test_alignment_takes_y_onto_x(p: int, q: int) -> None:
    """Widths differ where y lacks features of x, or has more of them; dead features are among both."""
    full = normal(40, 6)
    full[:, 1] = 0
    x = full[:, :p]
    order, scales = g_relu(6, 3)
    if q == 6:
        y = (full[:, torch.arange(6)] * (torch.arange(6) < p) * scales)[:, order]
    else:
        y = (full * scales)[:, :q]
        order = torch.arange(6)
    found = measure(x, y, "relu_procrustes")
    assert sorted(part(found, "permutation").tolist()) == list(range(6))
    assert (part(found, "scales") > 0).all()
    moved = torch.from_numpy(padded(y.numpy(), 6)) * part(found, "scales")
    moved, wanted = moved[:, part(found, "permutation")][:, :p], x.clone()
    wanted[:, q:] = 0 if p > q else wanted[:, q:]
    assert torch.allclose(moved - moved.mean(0), wanted - wanted.mean(0), atol=1e-12)


def test_alignment_leaves_dead_features_as_they_are() -> None:
    x = 5 * normal(30, 4)
    y = x.clone()
    y[:, 2] = 1.0
    for dead in ("drop", "paper"):
        found = measure(x, y, "relu_procrustes", dead=dead)
        assert part(found, "permutation").tolist() == [0, 1, 2, 3]
        assert torch.allclose(part(found, "scales"), torch.ones(4).double())


def test_alignment_of_a_permutation() -> None:
    x = normal(30, 7) + 3
    order, _ = g_relu(7, 1)
    found = measure(x, 5 * x[:, order], "permutation_procrustes")
    assert torch.allclose((5 * x[:, order] * part(found, "scales"))[:, part(found, "permutation")], x)


def test_alignment_of_a_rotation_with_few_samples() -> None:
    x = normal(10, 30) + 1
    y = 3 * x @ torch.linalg.qr(normal(30, 30, seed=1)).Q + 2
    found = measure(x, y, "orthogonal_procrustes")
    assert found.value == pytest.approx(1, abs=1e-12)
    assert torch.allclose((y - y.mean(0)) @ part(found, "matrix"), x - x.mean(0))


# -- soft matching -----------------------------------------------------------------------------------------------------


def vertices(n: int, m: int) -> list[Array]:
    """Every plan of whole masses between n and m features by repeating them: all corners are among these."""
    width = int(np.lcm(n, m))
    plans = {}
    for order in permutations(range(width)):
        plan = np.zeros((n, m))
        for i, j in enumerate(order):
            plan[i * n // width, j * m // width] += 1 / width
        plans[plan.tobytes()] = plan
    return list(plans.values())


@pytest.mark.parametrize(("p", "q"), [(2, 3), (3, 2), (2, 4), (6, 3), (4, 4)])
def test_soft_matching_brute_force(p: int, q: int) -> None:
    x, y = related(20, p, q)
    a, b = (units(z, True, True) for z in (x, y))
    best = max(float((plan * (a.T @ b)).sum()) for plan in vertices(p, q))
    found = measure(x, y, "soft_matching")
    assert found.value == pytest.approx(best, abs=1e-12)
    assert float((part(found, "plan").numpy() * (a.T @ b)).sum()) == pytest.approx(best, abs=1e-12)
    raw = (x - x.mean(0)).numpy(), (y - y.mean(0)).numpy()
    cost = ((raw[0][:, :, None] - raw[1][:, None]) ** 2).sum(0)
    least = min(float((plan * cost).sum()) for plan in vertices(p, q))
    assert measure(x, y, "soft_matching", score="distance").value == pytest.approx(np.sqrt(least), abs=1e-12)


@pytest.mark.parametrize(("p", "q"), [(17, 13), (12, 20), (30, 31)])
def test_soft_matching_both_solvers_agree(p: int, q: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gain = normal(p, q)
    repeated = soft.transport(gain)
    monkeypatch.setattr(soft, "COPIES", 0)
    monkeypatch.setattr(soft, "FEW", 1)
    program = soft.transport(gain)
    for plan in (repeated, program):
        assert torch.allclose(plan.sum(0), torch.full((q,), 1 / q).double(), atol=1e-14)
        assert torch.allclose(plan.sum(1), torch.full((p,), 1 / p).double(), atol=1e-14)
        assert (plan >= 0).all()
    assert float((repeated * gain).sum()) == pytest.approx(float((program * gain).sum()), abs=1e-12)


def test_soft_matching_equal_widths_is_the_assignment() -> None:
    x, y = related(40, 9, 9)
    a, b = (units(z, True, True) for z in (x, y))
    i, j = linear_sum_assignment(a.T @ b, maximize=True)
    assert measure(x, y, "soft_matching").value == pytest.approx((a.T @ b)[i, j].mean(), abs=1e-12)


def test_soft_matching_does_not_see_copies_of_all_features_and_drops_dead_ones() -> None:
    x, y = related(40, 4, 6)
    value = measure(x, y, "soft_matching").value
    assert measure(x, torch.cat([y, 3 * y], 1), "soft_matching").value == pytest.approx(value, abs=1e-12)
    found = measure(x, torch.cat([torch.ones(40, 1).double(), y], 1), "soft_matching")
    assert found.value == pytest.approx(value, abs=1e-12)
    assert found.notes == ("dead features left out: 1 of y",)
    assert part(found, "plan").shape == (4, 7)
    assert not part(found, "plan")[:, 0].any()


def test_soft_matching_distance_is_a_metric() -> None:
    x, y, z = normal(30, 4), normal(30, 6, seed=1), normal(30, 5, seed=2)

    def distance(a: Tensor, b: Tensor) -> float:
        return measure(a, b, "soft_matching", score="distance").value

    assert distance(x, x) == 0
    assert distance(x, y) == pytest.approx(distance(y, x))
    assert distance(x, z) <= distance(x, y) + distance(y, z)
    assert distance(1e-170 * x, 1e-170 * y) == pytest.approx(1e-170 * distance(x, y))
    assert distance(1e170 * x, 1e170 * y) == pytest.approx(1e170 * distance(x, y))
    assert find("soft_matching", score="distance").range == (0.0, inf)


# -- positions, options, hard inputs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*PROCRUSTES, "soft_matching"])
def test_channels_are_matched_over_samples_and_positions(name: str) -> None:
    x, y = normal(10, 4, 6), normal(10, 4, 6, seed=1)
    rows = [z.movedim(1, 2).reshape(60, 4) for z in (x, y)]
    assert measure(x, y, name).value == pytest.approx(measure(rows[0], rows[1], name).value, abs=1e-12)
    assert find(name).positions
    assert find(name).meets
    with pytest.raises(MismatchError, match="60 of these and y 50"):
        measure(x, y[:, :, :5], name)


@pytest.mark.parametrize("name", [*PROCRUSTES, "soft_matching"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_representation_and_itself_in_any_precision(name: str, dtype: torch.dtype) -> None:
    for seed, offset in product(range(10), (0.0, 100.0)):
        x = (normal(30, 8, seed=seed) + offset).to(dtype)
        if offset and dtype is torch.bfloat16:  # steps of 1/2 between 64 and 128: rounding is all that is left
            assert (measure(x, x, name).degenerate or "").startswith("both representations are constant")
            continue
        assert measure(x, x, name).value == pytest.approx(1, abs=1e-13)
        assert measure(x, x.flip(1), name).value == pytest.approx(1, abs=1e-13)


@pytest.mark.parametrize("name", [*PROCRUSTES, "soft_matching"])
def test_scales_and_offsets(name: str) -> None:
    x, y = related(40, 6, 6)
    value = measure(x, y, name).value
    for scale in (1e-200, 1e-6, 1e6, 1e200):
        assert measure(x, scale * y, name).value == pytest.approx(value, abs=1e-12)
        assert measure(scale * x, y, name).value == pytest.approx(value, abs=1e-12)
    assert measure(x.float() + 100, y.float() - 100, name).value == pytest.approx(value, abs=1e-5)


@pytest.mark.parametrize("name", MATCHED)
def test_duplicate_columns(name: str) -> None:
    x = normal(40, 3).repeat(1, 2)
    assert measure(x, x[:, [3, 1, 5, 0, 4, 2]], name).value == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("name", [*PROCRUSTES, "soft_matching"])
def test_constants_have_no_value(name: str) -> None:
    x, flat = normal(40, 3), torch.full((40, 3), 0.1).double()
    for a, b, which in ((x, flat, "y is"), (flat, x, "x is"), (flat, flat, "both representations are")):
        found = measure(a, b, name)
        assert np.isnan(found.value)
        assert found.degenerate == f"{which} constant: no feature varies over the samples"


@pytest.mark.parametrize("name", PROCRUSTES)
def test_zeros_have_no_value_without_centring(name: str) -> None:
    x, none = normal(40, 3), torch.zeros(40, 3).double()
    assert measure(x, none, name, center=False).degenerate == "y is zero everywhere"
    assert measure(x, none + 1, name, center=False).degenerate is None


def test_options_that_do_not_exist() -> None:
    with pytest.raises(InputError, match=r"Unknown dead of relu_procrustes 'alive'.*drop, paper"):
        find("relu_procrustes", dead="alive")
    with pytest.raises(InputError, match=r"Unknown score of soft_matching 'cost'.*correlation, distance"):
        find("soft_matching", score="cost")


class Decomposed(TorchDispatchMode):
    """The numbers in the largest matrix whose singular values, eigenvalues and the like are asked for."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "linalg" in str(func):
            self.largest = max(self.largest, args[0].numel())
        return func(*args, **(kwargs or {}))


def test_few_samples_are_fast() -> None:
    """The N × N form: no d × d matrix is decomposed, which would take most of the time."""
    x, y = normal(100, 1000), normal(100, 1000, seed=1)
    with Decomposed() as own:
        value = measure(x, y, "orthogonal_procrustes").value
    a, b = (torch.from_numpy(units(z, True, False)) for z in (x, y))
    with Decomposed() as other:
        nuclear = float(torch.linalg.svdvals(b.T @ a).sum())
    assert 0 < own.largest <= 100 * 1000 < other.largest
    assert value == pytest.approx(1 - np.sqrt(2 - 2 * nuclear) / 2, abs=1e-10)


def test_nearly_equal_widths_take_no_assignment_of_thousands_of_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 features against 63, as one dead unit leaves them: 10 seconds as an assignment of 4,032 copies."""
    gain = torch.randn(64, 63, dtype=torch.float64)
    asked: list[int] = []
    real = soft._repeated
    monkeypatch.setattr(soft, "_repeated", lambda values, width: (asked.append(width), real(values, width))[1])
    plan = soft.transport(gain)
    assert not asked
    torch.testing.assert_close(plan.sum(1), torch.full((64,), 1 / 64, dtype=torch.float64))
    torch.testing.assert_close(plan.sum(0), torch.full((63,), 1 / 63, dtype=torch.float64))
    small = torch.randn(6, 4, dtype=torch.float64)
    soft.transport(small), soft.transport(gain[:, :32])
    assert asked == [12, 64]
    program = torch.from_numpy(soft._program(small.numpy()) / 12)
    assert float((soft.transport(small) * small).sum()) == pytest.approx(float((program * small).sum()), abs=1e-12)
