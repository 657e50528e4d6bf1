"""Godfrey et al. 2022, rows 000-G02 to G13 and G17: intertwiner groups, proved; where the paper errs, both versions.

"Printed" is the statement as it stands in the paper, "corrected" what holds; a test shows the first fail.
"""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import integrate, optimize, special, stats
from torch import Tensor

import intertwine as it
from intertwine.symmetry.intertwiner import (
    homogeneity_defect,
    identity_spectrum,
    intertwines,
    nearest_member,
    phi,
    random_member,
)

Function = Callable[[Tensor], Tensor]


def rbf(x: Tensor) -> Tensor:
    return torch.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)


def leaky(x: Tensor) -> Tensor:
    return F.leaky_relu(x, 0.1)


def positive(n: int, seed: int = 0) -> Tensor:
    """A permutation times a positive diagonal matrix."""
    return random_member(torch.relu, n, seed)


def permutation(n: int, seed: int = 0) -> Tensor:
    return random_member(torch.sigmoid, n, seed)


def signed(n: int, seed: int = 0) -> Tensor:
    return random_member(torch.tanh, n, seed)


def nonzero(n: int, seed: int = 0) -> Tensor:
    return random_member(torch.square, n, seed)


def general(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def orthogonal(n: int, seed: int = 0) -> Tensor:
    return torch.linalg.qr(general(n, seed)).Q


def close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> bool:
    return bool(torch.allclose(a, b, rtol=tolerance, atol=tolerance * float(b.abs().max())))


Draw = Callable[[int, int], Tensor]
#: activation → (σ, a draw from the group of Table 1, a draw just outside it, φ in closed form)
TABLE: dict[str, tuple[Function, Draw, Draw, Function]] = {
    "identity": (lambda x: x, general, lambda n, s: general(n, s), lambda a: a),
    "sigmoid": (torch.sigmoid, permutation, lambda n, s: 1.1 * permutation(n, s), lambda a: a),
    "ReLU": (torch.relu, positive, signed, lambda a: a),
    "LeakyReLU": (leaky, positive, signed, lambda a: a),
    "Gaussian RBF": (rbf, signed, lambda n, s: 1.1 * signed(n, s), torch.abs),
    "square": (lambda x: x**2, nonzero, orthogonal, lambda a: a**2),
    "cube": (lambda x: x**3, nonzero, orthogonal, lambda a: a**3),
    # rows the paper does not have
    "tanh": (torch.tanh, signed, positive, lambda a: a),
    "abs": (torch.abs, nonzero, orthogonal, torch.abs),
    "squared ReLU": (lambda x: torch.relu(x) ** 2, positive, signed, lambda a: a**2),
    "step": (lambda x: (x > 0).double(), positive, signed, lambda a: (a > 0).double()),
    "GELU": (F.gelu, permutation, positive, lambda a: a),
}
KINDS = {
    "identity": "all", "sigmoid": "trivial", "ReLU": "positive", "LeakyReLU": "positive", "Gaussian RBF": "sign",
    "square": "nonzero", "cube": "nonzero", "tanh": "sign", "abs": "nonzero", "squared ReLU": "positive",
    "step": "positive", "GELU": "trivial",
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_000_G02_membership_by_sampling(name: str) -> None:
    """Members are accepted, random orthogonal and general matrices rejected, both far from the line between them."""
    sigma, inside, outside, _ = TABLE[name]
    for n, seed in ((1, 0), (3, 1), (6, 2)):
        member = intertwines(sigma, inside(n, seed))
        assert member.ok
        assert member.residual < 1e-12
        assert member.margin > 3
    if name != "identity":
        for stranger in (orthogonal(4), general(4), outside(4, 0)):
            verdict = intertwines(sigma, stranger)
            assert not verdict.ok
            assert verdict.residual > 1e-3
            assert verdict.margin > 6


def test_000_G02_samples_of_one_sign_accept_too_much() -> None:
    """On x > 0 alone every matrix with positive entries passes ReLU; with both signs it does not."""
    a = general(4).abs()
    x = torch.rand(50, 4, dtype=torch.float64)
    fitted = torch.linalg.lstsq(torch.relu(x), torch.relu(x @ a.T)).solution
    assert (torch.relu(x) @ fitted - torch.relu(x @ a.T)).abs().max() < 1e-10
    assert intertwines(torch.relu, a).residual > 1e-2


@pytest.mark.parametrize("name", TABLE)
def test_000_G03_phi_is_a_homomorphism_on_the_group(name: str) -> None:
    sigma, inside, _, _ = TABLE[name]
    a, b = inside(4, 1), inside(4, 2)
    x = 3 * torch.randn(4, 200, dtype=torch.float64)
    assert close(sigma(a @ x), phi(sigma, a) @ sigma(x))
    assert intertwines(sigma, a @ b).ok
    assert intertwines(sigma, torch.linalg.inv(a)).ok
    assert close(phi(sigma, a @ b), phi(sigma, a) @ phi(sigma, b))
    assert close(phi(sigma, torch.linalg.inv(a)), torch.linalg.inv(phi(sigma, a)), 1e-8)
    assert close(phi(sigma, a), intertwines(sigma, a).output, 1e-9)


@pytest.mark.parametrize("name", ["Gaussian RBF", "square", "cube", "ReLU", "abs"])
def test_000_G03_phi_is_no_homomorphism_on_all_matrices(name: str) -> None:
    sigma = TABLE[name][0]
    a, b = general(4, 1), general(4, 2)
    assert (phi(sigma, a @ b) - phi(sigma, a) @ phi(sigma, b)).abs().max() > 0.1


@pytest.mark.parametrize("name", TABLE)
def test_000_G04_table_1(name: str) -> None:
    """The group, φ in closed form, a sampler and a projector."""
    sigma, inside, _, formula = TABLE[name]
    assert it.activation_group(sigma).kind == KINDS[name]
    member = inside(5, 3)
    assert close(phi(sigma, member), formula(member))
    drawn = [random_member(sigma, 5, seed) for seed in range(20)]
    assert all(intertwines(sigma, a).ok for a in drawn)
    assert close(nearest_member(sigma, member), member)
    target = general(5, 7)
    nearest = nearest_member(sigma, target)
    assert intertwines(sigma, nearest).ok
    best = (nearest - target).norm()
    assert all(best <= (a - target).norm() for a in drawn)


def test_000_G04_the_projector_finds_the_best_assignment() -> None:
    """Against all permutations by hand, for ReLU: entry a gains max(a, 0)²."""
    from itertools import permutations

    a = general(5, 4)
    gain = max(sum(max(float(a[i, p[i]]), 0.0) ** 2 for i in range(5)) for p in permutations(range(5)))
    distance = float((nearest_member(torch.relu, a) - a).norm()) ** 2
    assert distance == pytest.approx(float(a.norm()) ** 2 - gain, rel=1e-6)


@pytest.mark.parametrize("slope", [-3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0])
def test_000_G04_leaky_relu_corrected(slope: float) -> None:
    """Printed: the group of ReLU for every slope but 1. Corrected: but 1 and −1, where it is |x| and signs pass too."""

    def sigma(x: Tensor) -> Tensor:
        return torch.where(x < 0, slope * x, x)

    printed = "all" if slope == 1 else "positive"
    corrected = {1.0: "all", -1.0: "nonzero"}.get(slope, "positive")
    found = it.activation_group(sigma)
    assert found.kind == corrected
    assert (found.kind == printed) == (slope != -1)
    # the proof ends in a = a·s², which holds for s = −1 as well
    assert intertwines(sigma, torch.tensor([[-2.0]])).ok == (slope**2 == 1)
    if slope == -1:
        assert close(phi(sigma, nonzero(4)), nonzero(4).abs())


@pytest.mark.parametrize("degree", [1, 2, 3, 4, 5])
def test_000_G04_polynomial_corrected(degree: int) -> None:
    """Printed: P·D with D ≠ 0 for x^d. Corrected: for d ≥ 2; x¹ is the identity and passes every matrix."""
    assert intertwines(lambda x: x**degree, general(4)).ok == (degree == 1)
    assert intertwines(lambda x: x**degree, nonzero(4)).ok


def test_000_G04_both_sigmoids_have_one_group() -> None:
    """Table 1 has e^x/(1 + e^x), appendix E.2 has 1/(1 + e^x): mirror images, not equal, and both pass permutations."""
    x = torch.linspace(-3, 3, 7, dtype=torch.float64)
    assert not torch.allclose(1 / (1 + x.exp()), torch.sigmoid(x))
    for sigma in (torch.sigmoid, lambda x: torch.sigmoid(-x)):
        assert it.activation_group(sigma).kind == "trivial"
        assert close(phi(sigma, permutation(4)), permutation(4))


@pytest.mark.parametrize("n", [1, 2, 3, 7])
@pytest.mark.parametrize("name", TABLE)
def test_000_G05_lemma_E7_eigenvalues(name: str, n: int) -> None:
    sigma = TABLE[name][0]
    values = np.linalg.eigvalsh(sigma(torch.eye(n, dtype=torch.float64)).numpy())
    once, often = identity_spectrum(sigma, n)
    assert np.allclose(values, sorted([once, *[often] * (n - 1)]), atol=1e-12)


def test_000_G05_lemma_E7_is_an_equivalence() -> None:
    """Printed as sufficient; the proof gives both directions for n ≥ 2. On one unit only σ(1) ≠ 0 is needed."""

    def line(x: Tensor) -> Tensor:  # σ(0) = 1, σ(1) = −2
        return 1 - 3 * x

    assert abs(torch.linalg.det(line(torch.eye(3, dtype=torch.float64)))) < 1e-12
    with pytest.raises(it.InputError, match=r"σ\(I\) is singular because σ\(1\) = −\(n − 1\)·σ\(0\), .*intertwines"):
        phi(line, torch.eye(3))
    assert phi(line, torch.eye(4)).shape == (4, 4)

    def equal(x: Tensor) -> Tensor:  # σ(0) = σ(1)
        return torch.cos(2 * math.pi * x)

    with pytest.raises(it.InputError, match=r"on 2 units: σ\(I\) is singular because σ\(1\) = σ\(0\), with σ\(0\) = 1"):
        phi(equal, torch.eye(2))
    assert close(phi(equal, torch.eye(1)), torch.eye(1, dtype=torch.float64))
    assert intertwines(equal, permutation(3)).ok, "the group is there all the same"


@pytest.mark.parametrize("name", ["ReLU", "LeakyReLU", "square", "cube", "abs", "squared ReLU", "step"])
def test_000_G06_remark_E9(name: str) -> None:
    """σ(0) = 0 and σ(1) = 1: φ_σ is σ, entry by entry, on every matrix; and so it is nowhere negative if σ is not."""
    sigma, a = TABLE[name][0], general(5)
    assert close(phi(sigma, a), sigma(a))
    if name not in ("LeakyReLU", "cube"):
        assert phi(sigma, a).min() >= 0
    assert not close(phi(torch.tanh, a), torch.tanh(a)), "tanh 1 ≠ 1"


ANY: dict[str, Function] = {
    "sigmoid": torch.sigmoid,
    "sine": torch.sin,
    "staircase": torch.floor,
    "bump": lambda x: x + torch.exp(-((x - 3) ** 2)),
    "wild": lambda x: torch.where(x > 0.3, 2 * x**3, torch.cos(x)),
    "GELU": F.gelu,
    "constant": torch.ones_like,
}


@pytest.mark.parametrize("name", ANY)
def test_000_G07_permutations_always_pass(name: str) -> None:
    p = permutation(5, 1)
    verdict = intertwines(ANY[name], p)
    assert verdict.ok
    if name != "constant":
        assert close(verdict.output, p)
    if name not in ("constant",):
        assert close(phi(ANY[name], p), p)


@pytest.mark.parametrize("name", ["ReLU", "Gaussian RBF", "cube", "sigmoid"])
def test_000_G07_corollary_E11(name: str) -> None:
    """A is a member exactly if A·P is, exactly if P·A is."""
    sigma, inside, outside, _ = TABLE[name]
    p = permutation(4, 5)
    for a in (inside(4, 1), outside(4, 1), general(4, 1)):
        assert intertwines(sigma, a).ok == intertwines(sigma, a @ p).ok == intertwines(sigma, p @ a).ok


def derivative(sigma: Function, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(sigma(x).sum(), x)[0]


def differential_form(sigma: Function, a: Tensor) -> tuple[Tensor, float]:
    """The best b in σ'(Σ a_ik x_k)·a_ij = b_ij·σ'(x_j) over generic points, and the error that is left."""
    points = torch.randn(60, len(a), dtype=torch.float64)
    left = torch.stack([derivative(sigma, a @ x)[:, None] * a for x in points])
    right = torch.stack([derivative(sigma, x)[None, :].expand_as(a) for x in points])
    b = (left * right).sum(0) / (right**2).sum(0)
    return b, float((left - b * right).abs().max() / left.abs().max())


@pytest.mark.parametrize("name", ["identity", "sigmoid", "ReLU", "LeakyReLU", "Gaussian RBF", "cube", "tanh", "abs"])
def test_000_G08_lemma_E12_differential_form(name: str) -> None:
    """It holds with b = φ(A) for a member; for a matrix outside no b will do."""
    sigma, inside, outside, _ = TABLE[name]
    member = inside(4, 2)
    b, error = differential_form(sigma, member)
    assert error < 1e-9
    assert close(b, phi(sigma, member), 1e-9)
    if name != "identity":
        assert differential_form(sigma, outside(4, 2))[1] > 1e-2


REDUCED = ["sigmoid", "ReLU", "LeakyReLU", "Gaussian RBF", "square", "cube", "tanh", "abs", "squared ReLU", "GELU"]
OTHERS: dict[str, Function] = {"Softplus": F.softplus, "ELU": F.elu, "SiLU": F.silu, "Mish": F.mish, "SELU": F.selu}


@pytest.mark.parametrize("name", [*REDUCED, *OTHERS])
def test_000_G09_theorem_E14_reduction_to_one_unit(name: str) -> None:
    """Factors found on one unit are exactly the diagonal entries that pass on three; nothing but P·D passes."""
    sigma = TABLE[name][0] if name in TABLE else OTHERS[name]
    group = it.activation_group(sigma)
    for a in (1.0, -1.0, 0.5, 3.0, -0.5, -2.0):
        alone = intertwines(sigma, torch.tensor([[a]]))
        among = intertwines(sigma, torch.diag(torch.tensor([1.0, a, 1.0])))
        member = group.kind == "nonzero" or a == 1 or (a > 0 and group.kind == "positive")
        member = member or (a == -1 and group.kind == "sign")
        assert alone.ok == among.ok == member
        if member:
            expected = torch.diag(torch.tensor([1.0, group.phi(a), 1.0], dtype=torch.float64))
            assert close(among.output, expected)
    shear = torch.eye(3, dtype=torch.float64)
    shear[0, 1] = 0.2
    assert not intertwines(sigma, shear).ok
    if name in OTHERS:
        assert group.kind == "trivial"


def test_000_G09_theorem_E14_needs_more_than_non_linear() -> None:
    """Printed: non-constant and non-linear. The proof needs σ' non-constant: x + 1 passes every A with A·1 = 1."""

    def shifted(x: Tensor) -> Tensor:
        return x + 1

    a = general(4)
    a = a / a.sum(1, keepdim=True)
    assert intertwines(shifted, a).ok
    assert int((a.abs() > 1e-3).sum()) > 4, "no permutation times diagonal"
    assert not intertwines(shifted, general(4)).ok
    assert intertwines(torch.ones_like, general(4)).ok, "constants pass everything"


@pytest.mark.parametrize("name", ["ReLU", "LeakyReLU", "sigmoid", "Gaussian RBF", "square", "cube"])
def test_000_G10_case_calculations(name: str) -> None:
    """min over b of the error of σ(a·x) = b·σ(x), over a grid of factors of both signs."""
    sigma = TABLE[name][0]
    allowed: dict[str, Callable[[float], bool]] = {
        "ReLU": lambda a: a > 0,
        "LeakyReLU": lambda a: a > 0,
        "sigmoid": lambda a: a == 1,
        "Gaussian RBF": lambda a: abs(a) == 1,
    }
    for a in (-4.0, -1.5, -1.0, -0.5, -0.1, 0.1, 0.5, 0.9, 1.0, 1.1, 3.0):
        verdict = intertwines(sigma, torch.tensor([[a]]))
        assert verdict.ok == allowed.get(name, lambda a: True)(a)
        assert verdict.margin > 3


def test_000_G10_sigmoid_with_a_negative_factor() -> None:
    """The printed proof integrates from −∞ and says nothing for a < 0; x = 0 forces b = 1, and σ(a·x) falls."""
    assert not any(intertwines(torch.sigmoid, torch.tensor([[-a]])).ok for a in (0.2, 1.0, 5.0))
    x = torch.tensor([0.0, 2.0], dtype=torch.float64)
    at_zero, later = (torch.sigmoid(-x) / torch.sigmoid(x)).tolist()
    assert at_zero == 1
    assert later < 0.2


@pytest.mark.parametrize("a", [0.5, 2.0, 3.0])
def test_000_G10_scaled_densities(a: float) -> None:
    """Printed: σ'(a·x) of the sigmoid and σ(a·x) of the RBF are densities. Corrected: a times them is (a > 0)."""

    def slope(x: float) -> float:
        return float(special.expit(x) * special.expit(-x))

    for density in (slope, stats.norm.pdf):
        total = integrate.quad(lambda x, f=density: f(a * x), -np.inf, np.inf)[0]
        assert total == pytest.approx(1 / a, rel=1e-8)
        assert abs(total - 1) > 0.3


def xi(scale: float) -> float:
    """ξ(λ) of GELU by an integrator that shares nothing with the library's."""

    def inside(x: float) -> float:
        first, second = scale * x * special.ndtr(scale * x), scale * x * special.ndtr(x)
        return (first - second) ** 2 * float(stats.norm.pdf(x))

    halves = [integrate.quad(inside, *ends, epsabs=1e-14, limit=400)[0] for ends in ((-9, -1), (-1, 0), (0, 1), (1, 9))]
    return math.sqrt(sum(halves))


def test_000_G11_gelu_defect() -> None:
    for scale, expected in ((0.5, 0.0687), (2.0, 0.1767), (10.0, 1.261)):
        found = homogeneity_defect(F.gelu, scale)
        assert found == pytest.approx(expected, abs=5e-4 if scale == 10 else 5e-5)
        assert found == pytest.approx(xi(scale), abs=1e-8)
    assert homogeneity_defect(F.gelu, 1.0) == 0
    top = optimize.minimize_scalar(
        lambda s: -homogeneity_defect(F.gelu, float(s)), bounds=(0.05, 0.95), method="bounded"
    )
    assert float(top.x) == pytest.approx(0.39, abs=0.01)
    assert -float(top.fun) == pytest.approx(0.0726, abs=5e-5)
    slope = math.sqrt(integrate.quad(lambda x: (x * special.ndtr(-abs(x))) ** 2 * stats.norm.pdf(x), -12, 12)[0])
    assert slope == pytest.approx(0.12675, abs=5e-6)
    assert homogeneity_defect(F.gelu, 1e6) / 1e6 == pytest.approx(slope, rel=1e-6)


def test_000_G11_gelu_by_sampling_and_its_group() -> None:
    """The paper's own estimate, 10⁵ samples; and the exact statement: permutations only."""
    x = np.random.default_rng(0).standard_normal(100_000)
    for scale in (0.3, 2.0, 5.0):
        sampled = np.sqrt(np.mean((scale * x * special.ndtr(scale * x) - scale * x * special.ndtr(x)) ** 2))
        assert homogeneity_defect(F.gelu, scale) == pytest.approx(float(sampled), rel=0.02)
        assert not intertwines(F.gelu, torch.tensor([[scale]])).ok
    assert it.activation_group(F.gelu).kind == "trivial"


def test_000_G11_the_second_form_needs_a_positive_scale() -> None:
    """λ·√E[(X(Φ(λX) − Φ(X)))²] is ξ for λ > 0; for λ < 0 it is negative, and ξ is no such thing."""

    def second(scale: float) -> float:
        inside = lambda x: (x * (special.ndtr(scale * x) - special.ndtr(x))) ** 2 * stats.norm.pdf(x)  # noqa: E731
        return scale * math.sqrt(integrate.quad(inside, -10, 0)[0] + integrate.quad(inside, 0, 10)[0])

    assert second(1.7) == pytest.approx(homogeneity_defect(F.gelu, 1.7), abs=1e-8)
    assert second(-1.7) == pytest.approx(-homogeneity_defect(F.gelu, -1.7), abs=1e-8)
    assert second(-1.7) < 0 < homogeneity_defect(F.gelu, -1.7)


@pytest.mark.parametrize("name", TABLE)
def test_000_G12_the_abstract_stabiliser(name: str) -> None:
    """A is a member exactly if it carries V = span{σ(x_1), …, σ(x_n)} into itself."""
    sigma, inside, outside, _ = TABLE[name]
    x = torch.randn(40, 3, dtype=torch.float64)
    for a in (inside(3, 1), outside(3, 1), general(3, 1)):
        v, moved = sigma(x), sigma(x @ a.T)
        stays = int(torch.linalg.matrix_rank(torch.cat([v, moved], 1), rtol=1e-10)) == 3
        assert stays == intertwines(sigma, a).ok


def test_000_G12_a_stabiliser_of_an_infinite_space_is_no_group() -> None:
    """Printed: {g : V·g ⊆ V} is always a subgroup. True for the finite V in use, false for half-sequences."""

    def inside(f: dict[int, float]) -> bool:
        return all(n >= 0 for n in f)

    def shifted(f: dict[int, float], by: int) -> dict[int, float]:
        return {n + by: value for n, value in f.items()}

    samples = [{0: 1.0}, {3: 2.0, 5: -1.0}, {0: 1.0, 7: 1.0}]
    assert all(inside(shifted(f, 1)) for f in samples)
    assert not all(inside(shifted(f, -1)) for f in samples), "the inverse of a member is none"


def rays(a: Tensor) -> set[tuple[int, int]]:
    """Where a matrix sends the rays of ±e_i, as (axis, sign); an image on no axis is (−1, 0)."""
    found = set()
    for image in torch.cat([a.T, -a.T]):
        places = (image.abs() > 1e-12).nonzero().flatten().tolist()
        found.add((places[0], int(image[places[0]].sign())) if len(places) == 1 else (-1, 0))
    return found


def test_000_G13_theorem_3_3_rays() -> None:
    """G_ReLU is the stabiliser of the rays of e_1 … e_n, and the only finite sets of rays it keeps are of ±e_j."""
    axes = {(i, sign) for i in range(5) for sign in (1, -1)}
    for seed in range(10):
        a = positive(5, seed)
        assert rays(a) == axes
        assert {(int(c.argmax()), 1) for c in a.T} == {(i, 1) for i in range(5)}, "the positive rays stay positive"
        assert (a.T.max(1).values > 0).all()
    for stranger in (orthogonal(5), general(5)):
        assert (-1, 0) in rays(stranger)
        assert not intertwines(torch.relu, stranger).ok
    assert not intertwines(torch.relu, -torch.eye(5)).ok, "it keeps the lines, not the rays"


def test_000_G13_other_rays_have_endless_orbits() -> None:
    v = torch.tensor([0.0, 1.5, 0.0, -2.0], dtype=torch.float64)
    images = []
    for t in (0.25, 0.5, 2.0, 3.0, 7.0):
        d = torch.diag(torch.tensor([1.0, t, 1.0, 1.0], dtype=torch.float64))
        assert intertwines(torch.relu, d).ok
        minor = torch.stack([v, d @ v], 1)[[1, 3]]
        assert float(torch.linalg.det(minor)) == pytest.approx((1 - t) * 1.5 * -2.0)
        images.append((d @ v) / (d @ v).norm())
    gaps = torch.pdist(torch.stack([*images, v / v.norm()]))
    assert gaps.min() > 1e-2, "a new ray for each t"


def test_000_G13_t_must_be_positive() -> None:
    """Printed: t ≥ 0. For t = 0 the matrix is singular and in no group."""
    with pytest.raises(it.InputError, match="matrix must be invertible"):
        intertwines(torch.relu, torch.diag(torch.tensor([1.0, 0.0, 1.0])))


def test_000_G17_the_example_of_phi() -> None:
    a = torch.tensor([[0.0, 1.0], [2.0, 0.0]], dtype=torch.float64)
    x = torch.randn(2, 100, dtype=torch.float64)
    assert torch.equal(torch.relu(a @ x), a @ torch.relu(x))
    assert torch.equal(phi(torch.relu, a), a)
    assert close(intertwines(torch.relu, a).output, a)
