"""Families of stitching maps: how they start, run, stay what they are and end, against formulas written out here.

Rows of the papers: 000-G28 to G33, G35, G37 (with D9), G38, 001-C28, 001-C35.
"""

import itertools
import re
import warnings

import numpy as np
import pytest
import torch
from scipy.linalg import polar
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from intertwine.errors import InputError, MismatchError
from intertwine.stitch.direct import LinearMap, PairMoments
from intertwine.stitch.families.base import FLOOR, MapFamily, Parameters, best_assignment
from intertwine.stitch.families.linear import Linear, LowRank, Sparse
from intertwine.stitch.families.names import families, family_of, find_family, fit_direct
from intertwine.stitch.families.permutations import Birkhoff, Masked, Monomial, SoftSort, doubly_stochastic, soft_sort

N = 8


def sum_error(matrix: Tensor) -> float:
    """The largest distance of a row's or column's sum from one."""
    return float(torch.stack([(matrix.sum(axis) - 1).abs().max() for axis in (0, 1)]).max())


SQUARE = (
    "identity linear affine orthogonal orthogonal+bias permutation signed nonzero relu relu:annealed relu:birkhoff "
    "softsort lowrank:3 lowrank:3+bias sparse:0.01 sparse:0.01+bias masked:semi-match masked:random-permutation+bias"
).split()
ONE_A_ROW = {"permutation", "signed", "nonzero", "relu", "relu:annealed", "relu:birkhoff", "softsort"}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def features(p: int = N, q: int = N, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Features after a ReLU, the second a noisy mixture of the first."""
    g = generator(seed)
    a = torch.randn(400, p, generator=g).relu()
    b = a[:, torch.randperm(p, generator=g)[:q]] * (torch.rand(q, generator=g) + 0.5)
    return a, (b + 0.2 * torch.randn(400, q, generator=g)).relu()


def moments_of(a: Tensor, b: Tensor) -> PairMoments:
    found = PairMoments()
    found.update(a, b)
    return found


def trained(parameters: Parameters) -> list[Tensor]:
    return [x for x in parameters.values() if x.requires_grad]


def train(family: MapFamily, parameters: Parameters, a: Tensor, b: Tensor, epochs: int = 10, lr: float = 0.01) -> None:
    """Mean squared error by Adam, with everything a trainer calls."""
    optimizer = torch.optim.Adam(trained(parameters), lr=lr)
    for epoch in range(epochs):
        family.refresh_(parameters, epoch / epochs)
        for x, y in zip(a.split(40), b.split(40), strict=True):
            loss = (family.map(parameters)(x) - y).square().mean() + family.penalty(parameters)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            family.project_(parameters)


def check_member(name: str, found: LinearMap) -> None:
    """That a map is in its family."""
    matrix = found.matrix
    assert not matrix.requires_grad
    if name in ONE_A_ROW:
        assert torch.equal(matrix.count_nonzero(1), torch.ones(len(matrix)).long())
        assert int(matrix.count_nonzero(0).max()) == 1
        entries = matrix[matrix != 0]
        if name == "permutation":
            assert bool((entries == 1).all())
        if name == "signed":
            assert bool((entries.abs() == 1).all())
        if name.startswith("relu") or name == "softsort":
            assert bool((entries > 0).all())
    if name.startswith("orthogonal"):
        torch.testing.assert_close(matrix @ matrix.T, torch.eye(len(matrix)), rtol=0, atol=2e-6)
    if name.startswith("lowrank"):
        assert int(torch.linalg.matrix_rank(matrix, rtol=1e-5)) <= 3
    if name.startswith("masked"):
        assert int(matrix.count_nonzero(1).max()) == 1
    if name == "identity":
        assert torch.equal(matrix, torch.eye(len(matrix)))
    assert (found.bias is not None) == (name == "affine" or name.endswith("+bias"))


# -- every family ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SQUARE)
def test_every_family_starts_trains_and_ends_inside_itself(name: str) -> None:
    a, b = features()
    family, moments = find_family(name), moments_of(a, b)
    assert family.name == str(family) == name
    for how in family.starts:
        parameters = family.start(N, N, how, moments, generator())
        assert all(x.dtype == torch.float32 and x.is_leaf for x in parameters.values())
        assert family.decayed() <= set(parameters)
        check_member(name, family.final(parameters))
        if name == "identity":
            assert not trained(parameters)
            continue
        loss = (family.map(parameters)(a) - b).square().mean()
        slopes = torch.autograd.grad(loss, trained(parameters), allow_unused=True)
        assert all(s is not None and bool(s.isfinite().all()) for s in slopes)
        train(family, parameters, a, b, epochs=4)
        check_member(name, family.final(parameters))


@pytest.mark.parametrize("name", SQUARE)
def test_a_direct_start_ends_at_the_direct_fit_and_training_makes_it_no_worse(name: str) -> None:
    a, b = features()
    family, moments = find_family(name), moments_of(a, b)
    parameters = family.start(N, N, "direct", moments, generator())
    direct, start = fit_direct(name, moments), family.final(parameters)
    check_member(name, direct.to(torch.float32))
    threshold = 1e-3 if name.startswith("sparse") else 0  # entries below are dropped in the end only
    torch.testing.assert_close(start.matrix, direct.matrix.float(), rtol=1e-5, atol=1e-6 + threshold)
    if start.bias is not None and direct.bias is not None:
        torch.testing.assert_close(start.bias, direct.bias.float(), rtol=1e-5, atol=1e-6)
    if name == "identity" or family.penalty(parameters).any():
        return  # nothing to train, or trained for something else besides
    train(family, parameters, a, b)
    errors = [float((found(a) - b).square().mean()) for found in (direct, family.final(parameters))]
    assert errors[1] < errors[0] * 1.1


def test_weight_decay_applies_to_matrices_and_scales_and_to_nothing_else() -> None:
    """Biases, rotations, orders and logarithms stay; a sparse map has a penalty of its own."""
    decayed = {
        "linear": {"weight"}, "affine": {"weight"}, "lowrank:3": {"up", "down"}, "lowrank:3+bias": {"up", "down"},
        "masked:semi-match": {"weight"}, "masked:random-permutation+bias": {"weight"}, "relu:birkhoff": {"scales"},
    }  # fmt: skip
    for name in SQUARE:
        assert find_family(name).decayed() == decayed.get(name, set()), name


@pytest.mark.parametrize("name", [n for n in SQUARE if "identity" in find_family(n).starts and "lowrank" not in n])
def test_an_identity_start_is_the_identity_in_the_end(name: str) -> None:
    family = find_family(name)
    found = family.final(family.start(N, N, "identity", None, generator()))
    assert torch.equal(found.matrix, torch.eye(N))


@pytest.mark.parametrize("name", ["linear", "affine", "orthogonal", "permutation", "relu", "lowrank:2", "sparse:0.1"])
def test_fewer_outputs_than_inputs(name: str) -> None:
    a, b = features(N, 5)
    family, moments = find_family(name), moments_of(a, b)
    parameters = family.start(N, 5, "direct", moments, generator())
    assert family.map(parameters)(a).shape == (400, 5)
    train(family, parameters, a, b, epochs=4)
    check_member(name, family.final(parameters))


def test_the_same_seed_starts_at_the_same_place_and_another_elsewhere() -> None:
    for name in ("linear", "orthogonal", "relu:annealed", "relu:birkhoff", "softsort", "lowrank:2"):
        family = find_family(name)
        one, same, other = (family.start(N, N, "random", None, generator(seed)) for seed in (1, 1, 2))
        assert all(torch.equal(one[k], same[k]) for k in one)
        assert any(not torch.equal(one[k], other[k]) for k in one)


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["permutation", "relu", "signed", "masked:random-permutation"])
def test_more_outputs_than_inputs_are_refused_where_each_output_is_one_input(name: str) -> None:
    with pytest.raises(MismatchError, match=r"map is 3 → 5, with more outputs than inputs\. Use \"linear\""):
        find_family(name).check(3, 5)


@pytest.mark.parametrize("name", ["relu:birkhoff", "softsort"])
def test_square_families_refuse_other_shapes(name: str) -> None:
    with pytest.raises(MismatchError, match="needs as many outputs as inputs"):
        find_family(name).start(5, 4, "random", None, generator())
    with pytest.raises(MismatchError, match="'identity' needs as many outputs as inputs, but the map is 5 → 4"):
        find_family("identity").check(5, 4)


def test_bad_ranks_and_names_say_what_to_write() -> None:
    with pytest.raises(MismatchError, match=r'no such map has a rank above 5\. Use "lowrank:5" or less'):
        find_family("lowrank:6").check(5, 9)
    with pytest.raises(InputError, match=r"rank must be at least 1, but is 0"):
        find_family("lowrank:0")
    with pytest.raises(InputError, match=re.escape("Invalid family 'lowrank:x'. lowrank takes one number, as in")):
        find_family("lowrank:x")
    with pytest.raises(InputError, match="Did you mean 'orthogonal"):
        find_family("ortogonal")
    with pytest.raises(InputError, match=r"strength is -1\.0"):
        find_family("sparse:-1")
    with pytest.raises(InputError, match="Did you mean 'semi-match"):
        Masked("semimatch")
    with pytest.raises(InputError, match=r"neither torch\.nn.functional nor torch has a function"):
        find_family("group:nosuch")
    with pytest.raises(InputError, match=r"from 'ones'\. Choose one of: direct, identity\."):
        find_family("relu").start(4, 4, "ones", None, generator())
    with pytest.raises(InputError, match="needs moments of the features"):
        find_family("linear").start(4, 4, "direct", None, generator())
    with pytest.raises(InputError, match="but the moments are of 8 → 8 features"):
        find_family("linear").start(4, 4, "direct", moments_of(*features()), generator())
    with pytest.raises(MismatchError, match="The map is 3 → 2, but the rows have 4"):
        LinearMap(torch.zeros(2, 3))(torch.zeros(5, 4))
    assert {"identity", "relu:birkhoff", "softsort", "lowrank:K", "sparse:λ"} <= set(families())


# -- linear, low rank, sparse ------------------------------------------------------------------------------------------


def test_000_g28_linear_has_no_bias_and_starts_as_a_pytorch_layer_does() -> None:
    parameters = Linear().start(64, 64, "random", None, generator())
    assert set(parameters) == {"weight"}
    weight = parameters["weight"].detach()
    bound = 1 / 64**0.5  # nn.Conv2d(64, 64, 1) draws evenly in ±1/√inputs
    assert 0.99 * bound < float(weight.abs().max()) <= bound
    assert float(weight.var()) == pytest.approx(bound**2 / 3, rel=0.05)
    bias = Linear(bias=True).start(64, 400, "random", None, generator())["bias"].detach()
    assert 0.9 * bound < float(bias.abs().max()) <= bound


def test_000_g29_001_c28_two_factors_that_start_orthogonal() -> None:
    parameters = LowRank(3).start(7, 5, "random", None, generator())
    up, down = parameters["up"], parameters["down"]
    assert (up.shape, down.shape) == ((5, 3), (3, 7))
    torch.testing.assert_close(up.T @ up, torch.eye(3))
    torch.testing.assert_close(down @ down.T, torch.eye(3))
    torch.testing.assert_close(LowRank(3).map(parameters).matrix, up @ down)
    begun = LowRank(3).map(LowRank(3).start(7, 5, "identity", None, generator())).matrix
    assert torch.equal(begun, torch.eye(5, 7) * (torch.arange(7) < 3))  # as much of the identity as the rank allows


def test_000_g38_the_penalty_is_the_sum_or_the_mean_and_small_entries_end_at_zero() -> None:
    weight = torch.tensor([[0.5, -0.0009], [0.0011, -2.0]], requires_grad=True)
    parameters = {"weight": weight}
    assert Sparse(0.1).penalty(parameters).item() == pytest.approx(0.1 * 2.502)
    assert Sparse(0.1, mean=True).penalty(parameters).item() == pytest.approx(0.1 * 2.502 / 4)
    kept = torch.tensor([[0.5, 0.0], [0.0011, -2.0]])
    assert torch.equal(Sparse(0.1).final(parameters).matrix, kept)
    assert torch.equal(Sparse(0.1, threshold=1e-4).final(parameters).matrix, weight.detach())
    assert torch.equal(Sparse(0.1).map(parameters).matrix, weight)


# -- orthogonal --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("outputs", "inputs"), [(6, 6), (4, 6), (6, 4)])
@pytest.mark.parametrize("size", [1.0, 3.0])
def test_every_step_ends_at_the_nearest_rotation_also_from_far_and_the_end_is_exact(
    outputs: int, inputs: int, size: float
) -> None:
    """Newton and Schulz alone would run away from singular values above √3."""
    family = find_family("orthogonal")
    parameters = family.start(inputs, outputs, "random", None, generator())
    weight = parameters["weight"]
    weight.data.mul_(size).add_(0.1 * torch.randn(outputs, inputs, generator=generator(1)))
    nearest = torch.from_numpy(polar(weight.detach().double().numpy())[0])
    torch.testing.assert_close(family.final(parameters).matrix.double(), nearest, rtol=0, atol=1e-6)
    family.project_(parameters)
    torch.testing.assert_close(weight.detach().double(), nearest, rtol=0, atol=2e-3)


# -- Birkhoff: G30 to G35 ----------------------------------------------------------------------------------------------


def test_000_g31_sinkhorn_is_columns_then_rows_with_a_guard_for_zeros() -> None:
    x = torch.rand(5, 5, generator=generator()).double()
    once = x / x.sum(0)
    once = once / once.sum(1, keepdim=True)
    torch.testing.assert_close(doubly_stochastic(x, rounds=1), once)
    large = torch.rand(512, 512, generator=generator()).double()
    assert sum_error(large) > 1
    assert sum_error(doubly_stochastic(large)) < 1e-14  # row 000-G31: 1e-15 after 16 rounds
    x[2] = 0
    assert bool(doubly_stochastic(x).isfinite().all())
    assert torch.equal(doubly_stochastic(x)[2], torch.zeros(5).double())


def test_000_g30_the_start_and_every_step_are_in_the_polytope_and_scales_stay_positive() -> None:
    family = Birkhoff(head_start=0.0)
    parameters = family.start(N, N, "random", None, generator())
    mixture = parameters["mixture"].detach()
    assert sum_error(mixture) < 1e-6
    assert 0 < float(mixture.min()) < float(mixture.max()) < 0.5
    assert torch.equal(parameters["scales"], torch.ones(N))
    matrix = family.map(parameters).matrix
    torch.testing.assert_close(matrix, parameters["mixture"] @ parameters["scales"].diag())  # P·D: D scales inputs
    for _ in range(5):
        parameters["mixture"].data += 0.1 * torch.randn(N, N)
        parameters["scales"].data -= 0.5
        below = parameters["mixture"].detach() < 0
        family.project_(parameters)
        assert float(mixture.min()) >= 0
        assert bool(below.any())
        assert not mixture[below].any()  # cut, not turned around
        assert sum_error(mixture) < 0.1
    assert torch.equal(parameters["scales"], torch.full((N,), FLOOR))


def test_000_g32_the_penalty_is_the_frobenius_norm_and_least_at_permutations() -> None:
    family = Birkhoff(alpha=0.3)
    values = [
        float(family.penalty(family.start(N, N, how, None, generator())).detach()) for how in ("identity", "random")
    ]
    assert values[0] == pytest.approx(-0.3 * N**0.5)
    assert values[0] < values[1] < -0.3
    x = torch.full((N, N), 1 / N)
    assert float(family.penalty({"mixture": x})) == pytest.approx(-0.3)
    assert Birkhoff().alpha == 0.1


def test_000_g33_rounding_is_the_permutation_with_the_largest_share() -> None:
    x = torch.rand(6, 6, generator=generator())
    best = max(itertools.permutations(range(6)), key=lambda p: float(sum(x[i, j] for i, j in enumerate(p))))
    assert best_assignment(x).tolist() == list(best)
    family = Birkhoff(head_start=0.0)
    parameters = family.start(6, 6, "identity", None, generator())
    parameters["mixture"].data.copy_(x)
    parameters["scales"].data.copy_(torch.arange(1.0, 7))
    found = family.final(parameters).matrix
    assert found.argmax(1).tolist() == list(best)
    assert found.amax(1).tolist() == [j + 1.0 for j in best]  # the scale of the input


def test_000_g35_scales_stand_still_for_the_head_start() -> None:
    a, b = features()
    family = Birkhoff()
    parameters = family.start(N, N, "random", None, generator())
    for done, moves in ((0.0, False), (0.49, False), (0.5, True), (0.95, True)):
        family.refresh_(parameters, done)
        (slope,) = torch.autograd.grad((family.map(parameters)(a) - b).square().mean(), [parameters["scales"]])
        assert bool(slope.any()) == moves
        parameters["scales"].data.fill_(0.7)  # as weight decay would
        family.project_(parameters)
        assert torch.equal(parameters["scales"], torch.full((N,), 0.7 if moves else 1.0))
    assert family.decayed() == {"scales"}


# -- SoftSort: G37, D9 -------------------------------------------------------------------------------------------------


def test_d9_without_the_absolute_value_every_row_is_the_same() -> None:
    keys = torch.rand(N, generator=generator())
    ordered = keys.sort(descending=True).values
    printed = torch.softmax(-(ordered[:, None] - keys) * N, dim=1)
    torch.testing.assert_close(printed, printed[:1].expand(N, N))
    assert len(printed.argmax(1).unique()) == 1
    repaired = soft_sort(keys)
    torch.testing.assert_close(repaired, torch.softmax(-(ordered[:, None] - keys).abs() / (1 / N), dim=1))
    assert torch.equal(repaired.argmax(1), keys.argsort(descending=True))


def test_000_g37_scales_are_exponentials_of_inputs_and_ties_fall_back_on_assignment() -> None:
    family = SoftSort()
    parameters = family.start(N, N, "random", None, generator())
    assert torch.equal(parameters["log_scales"], torch.zeros(N))
    many = family.start(600, 600, "random", None, generator())["keys"].detach()
    assert float(many.abs().max()) <= 1
    assert float(many.mean()) == pytest.approx(0.0, abs=0.1)  # even in ±1
    assert float(many.var()) == pytest.approx(1 / 3, rel=0.1)
    parameters["log_scales"].data.copy_(torch.arange(N) / 10)
    torch.testing.assert_close(
        family.map(parameters).matrix, soft_sort(parameters["keys"]) @ torch.diag(torch.exp(torch.arange(N) / 10))
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_member("softsort", family.final(parameters))
    parameters["keys"].data[3] = parameters["keys"].data[5]
    with pytest.warns(UserWarning, match="keys are equal.* The best assignment is used"):
        found = family.final(parameters)
    check_member("softsort", found)


# -- permutations, G_ReLU and other groups -----------------------------------------------------------------------------


def test_relu_runs_on_shares_first_and_on_a_true_member_once_settled() -> None:
    a, b = features()
    family = Monomial(annealed=True, settle=0.5, contrast=1.0)
    parameters = family.start(N, N, "direct", moments_of(a, b), generator())
    peaks = []
    for done in (0.0, 0.2, 0.4):
        family.refresh_(parameters, done)
        share = family.map(parameters).matrix / (parameters["table"] * parameters["log_scales"].exp()[:, None])
        torch.testing.assert_close(share.sum(1), torch.ones(N))
        peaks.append(float(share.amax(1).mean().detach()))
    assert peaks[0] < peaks[1] < peaks[2]
    family.refresh_(parameters, 0.5)
    check_member("relu", family.map(parameters).detach())
    assert torch.equal(family.map(parameters).matrix, family.final(parameters).matrix)
    before = parameters["held"].clone()
    parameters["scores"].data.normal_()
    family.refresh_(parameters, 0.9)
    assert torch.equal(parameters["held"], before)  # it is settled


def test_relu_finds_an_order_that_the_features_hide_and_the_loss_shows() -> None:
    g = generator(3)
    a = torch.randn(400, N, generator=g).relu()
    order = torch.randperm(N, generator=g)
    b = a[:, order] * (torch.rand(N, generator=g) + 0.5)
    misled = PairMoments()
    misled.update(a, b[:, torch.tensor([1, 0, 3, 2, 4, 5, 6, 7])] + 0.5 * a[:, order])
    for family in (Monomial(annealed=True), Monomial()):
        parameters = family.start(N, N, "direct", misled, generator())
        train(family, parameters, a, b, epochs=30, lr=0.02)
        found = family.final(parameters).matrix.argmax(1)
        assert torch.equal(found, order) == (not family.fixed)


def test_relu_keeps_the_direct_order_and_a_factor_of_the_direct_fit_is_a_fraction_of_the_usual_one() -> None:
    a, b = features()
    moments = moments_of(a, b)
    family = Monomial()
    parameters = family.start(N, N, "direct", moments, generator())
    assert len(trained(parameters)) == 1
    train(family, parameters, a, b, epochs=3)
    assert torch.equal(family.final(parameters).matrix.argmax(1), fit_direct("relu", moments).matrix.argmax(1))


def logs_of_shares(family: Monomial, parameters: Parameters) -> Tensor:
    """Logarithms of the shares that the map is made of; rows and columns of them have mean zero."""
    fixed = parameters["table"].abs()
    fixed = fixed * parameters["log_scales"].exp()[:, None] if "log_scales" in parameters else fixed
    found = (family.map(parameters).matrix.detach().abs() / fixed).double().log()
    return found - found.mean(0) - found.mean(1, keepdim=True) + found.mean()


@pytest.mark.parametrize("factors", ["one", "sign", "positive", "nonzero"])
def test_shares_begin_at_correlations_and_grow_sharper_up_to_the_end_of_the_search(factors: str) -> None:
    """Rows and columns are scaled, which leaves the logarithms around their means: contrast · correlation."""
    a, b = features()
    if factors in ("sign", "nonzero"):
        b = b * torch.tensor([1.0, -1.0]).repeat(N // 2)
    family = Monomial(factors, annealed=True, contrast=3.0, sharper=4.0, settle=0.8)
    parameters = family.start(N, N, "direct", moments_of(a + 5, b - 5), generator())
    table = torch.corrcoef(torch.cat([b, a], 1).double().T)[:N, N:]
    wanted = table.abs() if factors in ("sign", "nonzero") else table
    wanted = 3.0 * (wanted - wanted.mean(0) - wanted.mean(1, keepdim=True) + wanted.mean())
    torch.testing.assert_close(logs_of_shares(family, parameters), wanted, rtol=0, atol=1e-4)
    for done in (0.2, 0.6):
        family.refresh_(parameters, done)
        sharper = 4.0 ** (done / 0.8)
        torch.testing.assert_close(logs_of_shares(family, parameters), sharper * wanted, rtol=0, atol=1e-3)


def test_a_random_order_is_the_best_by_the_shares_and_hardly_ahead_of_the_others() -> None:
    for seed in range(5):
        family = find_family("permutation")
        parameters = family.start(N, N, "random", None, generator(seed))
        share = family.map(parameters).matrix.detach()
        order = linear_sum_assignment(-share.numpy())[1].tolist()
        assert family.final(parameters).matrix.argmax(1).tolist() == order
        assert 1.5 / N < float(share[range(N), order].mean()) < 0.5


@pytest.mark.parametrize("factors", ["positive", "nonzero"])
def test_shares_mix_inputs_that_were_brought_to_the_length_of_their_output(factors: str) -> None:
    """At the direct order the factor is ⟨b, a⟩/‖a‖²; elsewhere in a row lengths are made up for."""
    a, b = features()
    a = a * torch.logspace(-1, 1, N)
    b = b * torch.tensor([1.0, -1.0]).repeat(N // 2) if factors == "nonzero" else b
    family, moments = Monomial(factors, annealed=True, contrast=1.0), moments_of(a, b)
    found = family.map(family.start(N, N, "direct", moments, generator())).matrix.detach().double()
    a, b = a.double(), b.double()
    order = fit_direct(family, moments).matrix.abs().argmax(1)
    chosen = a[:, order]
    best = (chosen * b).sum(0) / chosen.square().sum(0)
    usual = b.norm(dim=0)[:, None] / a.norm(dim=0)
    usual = torch.where(b.T @ a < 0, -usual, usual)
    share = found / (usual * (best / usual[range(N), order])[:, None])
    torch.testing.assert_close(share.sum(1), torch.ones(N).double(), rtol=0, atol=1e-5)
    assert float(share.min()) > 0
    torch.testing.assert_close(share.sum(0), torch.ones(N).double(), rtol=0, atol=0.05)


def test_an_order_that_no_step_has_touched_is_the_direct_one_though_correlations_prefer_another() -> None:
    (a, _), (b, _) = features(), features(seed=1)  # nothing in common, so that both are free to choose
    a, b = a * torch.logspace(-1, 1, N), b * torch.logspace(1, -1, N)
    moments, family = moments_of(a, b), find_family("permutation")
    pairs = a.double().T @ b.double()
    distances = a.double().square().sum(0)[None] - 2 * pairs.T
    nearest = linear_sum_assignment(distances.numpy())[1].tolist()
    correlated = np.corrcoef(torch.cat([b, a], 1).double().numpy().T)[:N, N:]
    assert nearest != linear_sum_assignment(-correlated)[1].tolist()
    parameters = family.start(N, N, "direct", moments, generator())
    family.refresh_(parameters, 0.0)
    assert family.final(parameters).matrix.argmax(1).tolist() == nearest


@pytest.mark.parametrize("sharper", [1.0, 10.0])
@pytest.mark.parametrize("epochs", [1, 2])
def test_a_training_that_ends_before_it_settles_ends_at_the_best_order_by_its_scores(
    epochs: int, sharper: float
) -> None:
    """Also after a single epoch, and where nothing is made sharper."""
    a, _ = features()
    order = torch.randperm(N, generator=generator(5))
    family = Monomial("one", sharper=sharper, settle=1.0)
    parameters = family.start(N, N, "identity", None, generator())
    train(family, parameters, a, a[:, order], epochs=epochs, lr=0.1)
    best = linear_sum_assignment(-parameters["scores"].detach().double().numpy())[1].tolist()
    assert best != list(range(N))
    assert family.final(parameters).matrix.argmax(1).tolist() == best


@pytest.mark.parametrize(
    ("name", "after", "before"),
    [
        ("gelu", "permutation", "permutation"), ("tanh", "signed", "signed"), ("relu", "relu", "relu"),
        ("abs", "relu", "nonzero"), ("square", "relu", "nonzero"), ("cos", "permutation", "signed"),
        ("sign", "signed", "nonzero"), ("neg", "linear", "linear"),
    ],
)  # fmt: skip
def test_the_group_of_an_activation_gives_the_family_on_either_side(name: str, after: str, before: str) -> None:
    assert find_family(f"group:{name}").name == after
    assert find_family(f"group:{name}:before").name == before


def test_a_cube_passes_every_factor_but_zero() -> None:
    assert family_of(lambda x: x**3).name == "nonzero"
    with pytest.raises(InputError, match='"after" or "before"'):
        family_of(torch.relu, "beside")


# -- starts and masks: C35 ---------------------------------------------------------------------------------------------


def test_001_c35_starts_of_a_matrix() -> None:
    family = Linear(bias=True)
    ones = family.start(5, 3, "ones", None, generator())
    assert torch.equal(ones["weight"], torch.ones(3, 5))
    assert torch.equal(ones["bias"], torch.zeros(3))
    assert torch.equal(family.start(5, 3, "identity", None, generator())["weight"], torch.eye(3, 5))
    for seed in range(20):
        weight = family.start(5, 3, "permutation", None, generator(seed))["weight"]
        assert torch.equal(weight.sum(1), torch.ones(3))
        assert int(weight.sum(0).max()) == 1
    with pytest.raises(MismatchError, match="with more outputs than inputs"):
        family.start(3, 5, "permutation", None, generator())


def test_001_c35_masks_are_the_best_correlation_by_sign_or_size_and_true_permutations() -> None:
    a, b = features(N, 5)
    b = torch.cat([b, 10 - 3 * a[:, :1]], 1)  # one output that an input opposes
    table = torch.corrcoef(torch.cat([b, a], 1).T)[:6, 6:]
    moments = moments_of(a, b)
    assert torch.equal(Masked("semi-match").places(moments).argmax(1), table.argmax(1))
    by_size = Masked("abs-semi-match").places(moments)
    assert torch.equal(by_size.argmax(1), table.abs().argmax(1))
    assert int(by_size[5].argmax()) == 0
    assert int(Masked("semi-match").places(moments)[5].argmax()) != 0
    seen = set()
    for seed in range(30):  # the published mask took the largest entry of each row, and repeated some
        places = Masked("random-permutation", seed=seed).places(moments)
        assert torch.equal(places.sum(1), torch.ones(6))
        assert int(places.sum(0).max()) == 1
        seen.add(tuple(places.argmax(1).tolist()))
    assert len(seen) > 20


@pytest.mark.parametrize("bias", [False, True])
def test_001_c35_a_masked_map_is_fitted_entry_by_entry_and_trained_in_its_places_only(bias: bool) -> None:
    a, b = features(N, 5)
    moments, family = moments_of(a, b), Masked("abs-semi-match", bias=bias)
    found = family.direct(moments)
    for i, j in enumerate(family.places(moments).argmax(1).tolist()):
        columns = [a[:, j], torch.ones(400)] if bias else [a[:, j]]
        oracle = torch.linalg.lstsq(torch.stack(columns, 1).double(), b[:, i : i + 1].double()).solution[:, 0]
        assert float(found.matrix[i, j]) == pytest.approx(float(oracle[0]), rel=1e-9)
    parameters = family.start(N, 5, "random", moments, generator())
    train(family, parameters, a, b, epochs=2)
    assert torch.equal(family.final(parameters).matrix != 0, family.places(moments) != 0)
    weight = Masked("random-permutation").start(600, 600, "random", None, generator())["weight"].detach()
    assert float(weight.mean()) == pytest.approx(0.0, abs=0.1)  # even in ±1
    assert 0.9 < float(weight.abs().max()) <= 1
