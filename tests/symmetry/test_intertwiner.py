"""Membership of matrices, φ, random and nearest members, and the homogeneity defect: edges, errors and oracles."""

import math
from collections.abc import Callable
from itertools import pairwise, permutations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import integrate, stats
from torch import Tensor

import intertwine as it
from intertwine.symmetry.intertwiner import (
    TOLERANCE,
    homogeneity_defect,
    identity_spectrum,
    intertwines,
    nearest_member,
    phi,
    random_member,
)

Function = Callable[[Tensor], Tensor]


def turning(x: Tensor) -> Tensor:
    """Passes −2 and its powers, and nothing else."""
    return x * (2 + x.sign() * torch.sin(math.pi * x.abs().log2()))


# -- membership --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 3), (0, 0)])
def test_only_square_matrices(shape: tuple[int, int]) -> None:
    for ask in (intertwines, phi):
        with pytest.raises(Exception, match=r"matrix must be square, but has shape|Type-check error"):
            ask(torch.relu, torch.zeros(shape))


def test_only_invertible_matrices() -> None:
    with pytest.raises(
        it.InputError, match=r"matrix must be invertible, but its singular values reach from \d\.\de[+-]\d+ to 2\.0"
    ):
        intertwines(torch.relu, torch.ones(2, 2))


def test_only_activations() -> None:
    for ask in (intertwines, phi):
        with pytest.raises(it.InputError, match="not elementwise"):
            ask(lambda x: x.softmax(-1), torch.eye(2))


def test_a_function_of_one_sign() -> None:
    with pytest.raises(
        it.InputError, match=r"Membership cannot be decided: .*sqrt is finite at only \d+ of 192 samples"
    ):
        intertwines(torch.sqrt, torch.eye(6))


def test_the_verdict_reads_well() -> None:
    verdict = intertwines(F.gelu, torch.diag(torch.tensor([1.0, 1.001])))
    assert not verdict.ok, "a thousandth is seen"
    assert TOLERANCE < verdict.residual < 1e-2
    assert verdict.margin == pytest.approx(math.log10(verdict.residual / TOLERANCE))
    assert "not a member on 2 units" in repr(verdict)


def test_degenerate_functions_pass_everything() -> None:
    a = torch.randn(3, 3)
    for function in (torch.zeros_like, torch.ones_like):
        verdict = intertwines(function, a)
        assert verdict.ok
        assert torch.allclose(verdict.output, torch.eye(3, dtype=torch.float64)), (
            "of many B the nearest to the identity"
        )


def test_a_dead_zone_counts() -> None:
    """Where σ is zero and σ∘A is not, no B helps: −1 on a ReLU."""
    assert intertwines(torch.relu, -torch.eye(1)).residual > 0.5
    assert not intertwines(F.hardshrink, 2 * torch.eye(2)).ok


def test_large_powers_stay_exact() -> None:
    a = random_member(torch.square, 5)
    verdict = intertwines(lambda x: x**20, a)
    assert verdict.ok
    assert torch.allclose(verdict.output, a**20, rtol=1e-9, atol=0) or verdict.residual < 1e-12
    assert not intertwines(lambda x: x**20, torch.linalg.qr(torch.randn(5, 5)).Q).ok


def test_other_devices_types_and_seeds() -> None:
    a = torch.tensor([[0.0, 2.0], [0.5, 0.0]], dtype=torch.float32)
    assert {intertwines(torch.relu, a, seed=s).ok for s in range(5)} == {True}
    assert intertwines(torch.relu, a).output.dtype == torch.float64


def test_phi_of_functions_that_are_not_finite() -> None:
    with pytest.raises(it.InputError, match=r"log has σ\(0\) = -inf and σ\(1\) = 0\.0.*intertwines"):
        phi(torch.log, torch.eye(2))


def test_no_units() -> None:
    with pytest.raises(it.InputError, match=r"n must be at least 1, but is 0\."):
        identity_spectrum(torch.relu, 0)
    with pytest.raises(it.InputError, match=r"n must be at least 1, but is 0\."):
        random_member(torch.relu, 0)


# -- members -----------------------------------------------------------------------------------------------------------

GROUPS: dict[str, Function] = {
    "identity": lambda x: x,
    "ReLU": torch.relu,
    "tanh": torch.tanh,
    "square": torch.square,
    "sigmoid": torch.sigmoid,
    "power of π": lambda x: x.abs() ** math.pi,
    "−2": turning,
}


@pytest.mark.parametrize("n", [1, 2, 6])
@pytest.mark.parametrize("name", GROUPS)
def test_random_members_are_members(name: str, n: int) -> None:
    sigma = GROUPS[name]
    drawn = [random_member(sigma, n, seed) for seed in range(8)]
    assert all(intertwines(sigma, a).ok for a in drawn)
    assert torch.equal(drawn[0], random_member(sigma, n, 0))
    if n == 6:
        assert all(not torch.equal(drawn[0], other) for other in drawn[1:])


@pytest.mark.parametrize("name", GROUPS)
def test_nearest_members_against_all_permutations(name: str) -> None:
    """An oracle without assignment: every permutation, and for each entry a fine search over the allowed factors."""
    sigma, group = GROUPS[name], it.activation_group(GROUPS[name])
    a = 2 * torch.randn(4, 4, dtype=torch.float64)
    nearest = nearest_member(sigma, a)
    if group.kind == "all":
        assert torch.equal(nearest, a)
        return
    powers = np.arange(-20, 21, dtype=float)
    factors = {
        "ReLU": np.geomspace(1e-6, 50, 20001),
        "tanh": np.array([-1.0, 1.0]),
        "square": np.concatenate([np.geomspace(1e-6, 50, 20001), -np.geomspace(1e-6, 50, 20001)]),
        "sigmoid": np.array([1.0]),
        "power of π": np.concatenate([np.geomspace(1e-6, 50, 20001), -np.geomspace(1e-6, 50, 20001)]),
        "−2": (-2.0) ** powers,
    }[name]
    table = a.numpy()
    cost = ((table[..., None] - factors) ** 2).min(-1) - table**2
    best = min(sum(cost[i, p[i]] for i in range(4)) for p in permutations(range(4)))
    assert float(((nearest - a) ** 2).sum()) == pytest.approx(float((a**2).sum()) + best, rel=1e-5)
    assert intertwines(sigma, nearest).ok


def test_a_nearest_member_stays_invertible() -> None:
    nearest = nearest_member(torch.relu, -torch.eye(2))
    assert (nearest.max(1).values > 0).all()


def test_nearest_member_refuses() -> None:
    with pytest.raises(it.InputError, match="entries that are not finite"):
        nearest_member(torch.relu, torch.full((2, 2), torch.nan))


# -- homogeneity -------------------------------------------------------------------------------------------------------


def oracle(function: Callable[[float], float], scale: float, breaks: tuple[float, ...]) -> float:
    """√E[…] by scipy, told where the kinks are."""

    def inside(x: float) -> float:
        return (function(scale * x) - scale * function(x)) ** 2 * float(stats.norm.pdf(x))

    ends = [-12.0, *breaks, 12.0]
    parts = [integrate.quad(inside, a, b, epsabs=1e-14, limit=300)[0] for a, b in pairwise(ends)]
    return math.sqrt(sum(parts))


def test_the_defect_of_kinked_functions() -> None:
    for scale in (0.5, 3.0):
        expected = oracle(lambda x: min(max(x, -1.0), 1.0), scale, tuple(sorted((-1, -1 / scale, 0, 1 / scale, 1))))
        assert homogeneity_defect(F.hardtanh, scale) == pytest.approx(expected, abs=1e-10)
    jump = oracle(lambda x: float(x > 0.5), 2.0, (0.25, 0.5))
    assert homogeneity_defect(lambda x: (x > 0.5).double(), 2.0) == pytest.approx(jump, abs=1e-9)


def test_the_defect_of_a_fast_wave() -> None:
    """E[(sin 2kX − 2 sin kX)²] = 5/2 for large k, up to terms like e^(−k²/2)."""
    assert homogeneity_defect(lambda x: torch.sin(100 * x), 2.0) == pytest.approx(math.sqrt(2.5), rel=1e-12)


def test_the_defect_of_the_exponential_in_closed_form() -> None:
    exact = math.sqrt(math.exp(8) - 4 * math.exp(4.5) + 4 * math.exp(2))
    assert homogeneity_defect(torch.exp, 2.0) == pytest.approx(exact, rel=1e-12)


def test_no_defect_where_scales_pass() -> None:
    for function in (torch.relu, torch.abs, lambda x: F.leaky_relu(x, 0.3)):
        assert homogeneity_defect(function, 0.37) < 1e-13
    assert homogeneity_defect(torch.relu, -1.0) == pytest.approx(1.0), "a negative scale does not pass a ReLU"


def test_a_random_looking_function_ends() -> None:
    """Noise has no integral to converge to; the answer comes in time and has the right size."""
    found = homogeneity_defect(lambda x: torch.frac(1e9 * torch.sin(1e9 * x)), 2.0)
    assert 0.1 < found < 3


def test_where_there_is_no_defect_to_be_had() -> None:
    with pytest.raises(it.InputError, match=r"scale must be finite, but is nan\."):
        homogeneity_defect(torch.relu, math.nan)
    with pytest.raises(it.InputError, match=r"log at the scale 2\.0 is not finite: .*moderate growth"):
        homogeneity_defect(torch.log, 2.0)
    with pytest.raises(it.InputError, match=r"fn at the scale 2\.0 is not finite"):
        homogeneity_defect(lambda x: torch.exp(x**2), 2.0)
