"""Godfrey et al. 2022, rows 000-G22 to G26: what the paper says of its similarity measures, with both versions.

The measures are written down here in a few lines of float64 numpy, as the paper defines them and as they should be.
"""

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist

Array = np.ndarray
Measure = Callable[[Array, Array], float]


def centred(x: Array) -> Array:
    return x - x.mean(0)


def centred_as_printed(x: Array) -> Array:
    """X − (1/d)·11ᵀX, with the number of features d where the number of samples should stand."""
    return x - x.sum(0) / x.shape[1]


def unit_columns(x: Array) -> Array:
    return x / np.linalg.norm(x, axis=0)


def permutation_procrustes(x: Array, y: Array) -> float:
    """Definition 5.2: 1 − δ/(2√d), the best permutation by linear assignment on columns of unit length."""
    x, y = unit_columns(x), unit_columns(y)
    rows, columns = linear_sum_assignment(x.T @ y, maximize=True)
    return 1 - float(np.linalg.norm(x[:, rows] - y[:, columns])) / (2 * np.sqrt(x.shape[1]))


def orthogonal_procrustes(x: Array, y: Array) -> float:
    x, y = centred(x), centred(y)
    x, y = x / np.linalg.norm(x), y / np.linalg.norm(y)
    return 1 - float(np.sqrt(max(0.0, 2 - 2 * np.linalg.svd(x.T @ y, compute_uv=False).sum()))) / 2


def hsic(k: Array, l: Array) -> float:  # noqa: E741
    """The unbiased estimator HSIC₁: zero diagonals, and the sums over distinct indices written out."""
    n = len(k)
    k, l = k - np.diag(np.diag(k)), l - np.diag(np.diag(l))  # noqa: E741
    total = np.trace(k @ l) + k.sum() * l.sum() / ((n - 1) * (n - 2)) - 2 / (n - 2) * (k @ l).sum()
    return float(total / (n * (n - 3)))


def cka(k: Array, l: Array) -> float:  # noqa: E741
    return hsic(k, l) / float(np.sqrt(hsic(k, k) * hsic(l, l)))


def max_kernel(x: Array) -> Array:
    return (x[:, None] * x[None, :]).max(-1)


def relu_cka(x: Array, y: Array) -> float:
    """Definition 5.3, with the means taken over the samples."""
    return cka(max_kernel(unit_columns(centred(x))), max_kernel(unit_columns(centred(y))))


def linear_cka(x: Array, y: Array) -> float:
    return cka(centred(x) @ centred(x).T, centred(y) @ centred(y).T)


def with_centring(measure: Measure) -> Measure:
    return lambda x, y: measure(centred(x), centred(y))


def permuted(rng: np.random.Generator, n: int) -> Array:
    return np.eye(n)[rng.permutation(n)]


def diagonal(rng: np.random.Generator, n: int) -> Array:
    return np.diag(np.exp(rng.normal(size=n)))


def features(seed: int, samples: int = 40, width: int = 6) -> tuple[Array, Array, np.random.Generator]:
    """Two related sets of features like those after a ReLU."""
    rng = np.random.default_rng(seed)
    x = np.maximum(rng.normal(size=(samples, width)), 0)
    return x, np.maximum(x @ rng.normal(size=(width, width)) + 0.3, 0), rng


MEASURES: dict[str, Measure] = {
    "permutation Procrustes as printed": permutation_procrustes,
    "permutation Procrustes, centred": with_centring(permutation_procrustes),
    "ReLU CKA": relu_cka,
    "orthogonal Procrustes": orthogonal_procrustes,
    "linear CKA": linear_cka,
}
#: Invariant to positive diagonal matrices and to permutations: the hypothesis of Lemma 5.1.
SCALE_FREE = ["permutation Procrustes as printed", "permutation Procrustes, centred", "ReLU CKA"]


def unchanged(measure: Measure, change: Callable[[Array, np.random.Generator], Array]) -> bool:
    """Whether a measure stays the same when both sides are changed, each in its own way."""
    for seed in range(5):
        x, y, rng = features(seed)
        if abs(measure(change(x, rng), change(y, rng)) - measure(x, y)) > 1e-9:
            return False
    return True


@pytest.mark.parametrize("name", MEASURES)
def test_000_G22_lemma_5_1(name: str) -> None:
    """Invariant to diagonals and to permutations: then to both together, A = P·D on one side and B on the other."""
    measure = MEASURES[name]
    diagonals = unchanged(measure, lambda x, rng: x @ diagonal(rng, x.shape[1]))
    orders = unchanged(measure, lambda x, rng: x @ permuted(rng, x.shape[1]))
    both = unchanged(measure, lambda x, rng: x @ permuted(rng, x.shape[1]) @ diagonal(rng, x.shape[1]))
    assert orders
    assert diagonals == both == (name in SCALE_FREE)


def test_000_G22_lemma_5_1_says_nothing_of_translations() -> None:
    """Printed: then (i) holds, which has XA + 1vᵀ. Corrected: its linear part does; centring brings the rest."""
    assert unchanged(permutation_procrustes, lambda x, rng: x @ diagonal(rng, 6) @ permuted(rng, 6))
    assert not unchanged(permutation_procrustes, lambda x, rng: x + rng.normal(size=6))
    assert unchanged(with_centring(permutation_procrustes), lambda x, rng: x + rng.normal(size=6))


def keeps_max(a: Array, rng: np.random.Generator) -> bool:
    pairs = rng.normal(size=(200, 2, len(a)))
    return all(np.isclose((a @ x * (a @ y)).max(), (x * y).max(), atol=1e-12) for x, y in pairs)


def test_000_G23_lemma_E46() -> None:
    """max(Ax ⊙ Ay) = max(x ⊙ y) for all x, y: signed permutations, and (not printed, the converse) all of them."""
    rng = np.random.default_rng(0)
    for _ in range(10):
        assert keeps_max(permuted(rng, 5) @ np.diag(rng.choice([-1.0, 1.0], 5)), rng)
    q, _ = np.linalg.qr(rng.normal(size=(5, 5)))
    strangers = [
        q,
        rng.normal(size=(5, 5)),
        1.01 * np.eye(5),
        permuted(rng, 5) @ diagonal(rng, 5),
        np.eye(5)[[0, 0, 2, 3, 4]],
    ]
    assert not any(keeps_max(a, rng) for a in strangers)
    # the step of the proof: on the diagonal it is the square of the largest entry, whose isometries these are
    x = rng.normal(size=5)
    assert (x * x).max() == pytest.approx(np.abs(x).max() ** 2)


def test_000_G24_example_E44_the_max_kernel_is_not_positive() -> None:
    points, c = np.array([[1.0, 1], [10, 1], [0, 5]]), np.array([10.0, -1, -1])
    kernel = max_kernel(points)
    assert kernel.tolist() == [[1, 10, 5], [10, 100, 5], [5, 5, 25]]
    assert c @ kernel @ c == -65
    assert np.linalg.eigvalsh(kernel).min() < 0


def exponential_kernel(points: Array, order: float, rate: float) -> Array:
    """exp(−c·‖x − y‖_p)."""
    return np.exp(-rate * cdist(points, points, "minkowski", p=order))


def test_000_G25_laplace_kernel() -> None:
    """Equation 5.6 is positive semi-definite and blind to signed permutations, and to no other rotation."""
    rng = np.random.default_rng(0)
    for width, rate in product((1, 3, 8), (0.1, 1.0, 10.0)):
        points = rng.normal(size=(60, width))
        kernel = exponential_kernel(points, 1, rate)
        assert np.linalg.eigvalsh(kernel).min() > -1e-10
        turn = permuted(rng, width) @ np.diag(rng.choice([-1.0, 1.0], width))
        assert np.allclose(exponential_kernel(points @ turn, 1, rate), kernel)
    points, (q, _) = rng.normal(size=(20, 4)), np.linalg.qr(rng.normal(size=(4, 4)))
    assert not np.allclose(exponential_kernel(points @ q, 1, 1.0), exponential_kernel(points, 1, 1.0), atol=0.01)
    assert np.allclose(exponential_kernel(points @ q, 2, 1.0), exponential_kernel(points, 2, 1.0))


@pytest.mark.parametrize("order", [1.0, 1.25, 1.5, 1.75, 2.0, 3.0, 4.0, 8.0])
def test_000_G25_other_norms(order: float) -> None:
    """Printed as a guess: positive for any p ≠ 2. Corrected: for 1 ≤ p ≤ 2, and not for p > 2 from dimension 3 on."""
    grid = np.array(list(product((-1.0, 0.0, 1.0), repeat=3)))
    rng = np.random.default_rng(0)
    sets = [grid, rng.normal(size=(60, 3)), rng.normal(size=(60, 6))]
    lowest = min(
        float(np.linalg.eigvalsh(exponential_kernel(p, order, c)).min()) for p in sets for c in (0.01, 0.1, 1.0)
    )
    assert (lowest > -1e-10) == (order <= 2)
    if order > 2:
        assert lowest < -1e-5


def alike(x: Array, rng: np.random.Generator) -> Array:
    """Condition (*): Y = XA + 1vᵀ with A in G_ReLU."""
    n = x.shape[1]
    return x @ permuted(rng, n) @ diagonal(rng, n) + rng.normal(size=n)


#: measure → which of (0) values in [0, 1], (i) invariance, (ii) 1 where (*) holds, it has
EXPECTED = {
    "permutation Procrustes as printed": (True, False, False),
    "permutation Procrustes, centred": (True, True, True),
    "ReLU CKA": (False, True, True),
    "orthogonal Procrustes": (True, False, False),
    "linear CKA": (False, False, False),
}


def in_range(measure: Measure) -> bool:
    for seed in range(400):
        rng = np.random.default_rng(seed)
        if not -1e-12 <= measure(rng.normal(size=(12, 4)), rng.normal(size=(12, 4))) <= 1 + 1e-12:
            return False
    return True


@pytest.mark.parametrize("name", MEASURES)
def test_000_G26_properties_of_a_dissimilarity(name: str) -> None:
    measure = MEASURES[name]
    invariant = unchanged(measure, alike)
    x, _, rng = features(0)
    aligned = all(abs(measure(x, alike(x, rng)) - 1) < 1e-9 for _ in range(5))
    assert (in_range(measure), invariant, aligned) == EXPECTED[name]
    y = features(1)[0]
    assert measure(x, x) == pytest.approx(1)
    assert measure(x, y) < 0.9
    assert measure(x, y) == pytest.approx(measure(y, x))


def test_000_G26_one_only_if_aligned_needs_centring() -> None:
    """Printed: Procrustes is 1 if and only if (*). "If" fails without centring; "only if" holds with it."""
    x, _, rng = features(2)
    assert permutation_procrustes(x, x + rng.normal(size=6)) < 0.95
    measure = with_centring(permutation_procrustes)
    y = alike(x, rng)
    assert measure(x, y) == pytest.approx(1, abs=1e-9)
    for change in (np.maximum(y, np.median(y, 0)), y + 0.01 * rng.normal(size=y.shape), y @ rng.normal(size=(6, 6))):
        assert measure(x, change) < 1 - 1e-4


def test_000_G26_the_printed_centring_is_none() -> None:
    """Definition 5.3 prints 1/d, which leaves a mean behind unless there are as many features as samples."""
    x, _, rng = features(3)
    v = rng.normal(size=6)
    assert not np.allclose(centred_as_printed(x + v), centred_as_printed(x), atol=0.1)
    assert np.allclose(centred(x + v), centred(x))
    assert np.abs(centred_as_printed(x).mean(0)).max() > 1
    square = features(3, samples=6)[0]
    assert np.allclose(centred_as_printed(square), centred(square))


def test_000_G26_the_range_of_cka() -> None:
    """Printed: in [0, 1], and K, L ≥ 0. The estimator is an inner product, so [−1, 1], and K has any sign."""
    values, signs = [], 0
    for seed in range(400):
        rng = np.random.default_rng(seed)
        x, y = rng.normal(size=(12, 4)), rng.normal(size=(12, 4))
        values.append(relu_cka(x, y))
        signs += int(max_kernel(unit_columns(centred(x))).min() < 0)
    assert -1 <= min(values) < -0.2
    assert max(values) <= 1
    assert signs > 380

    def double_centred(k: Array) -> Array:
        """U-centring: row and column means over distinct indices taken out, zero diagonal."""
        n = len(k)
        k = k - np.diag(np.diag(k))
        k = k - k.sum(0) / (n - 2) - k.sum(1)[:, None] / (n - 2) + k.sum() / ((n - 1) * (n - 2))
        return k - np.diag(np.diag(k))

    k, other = (max_kernel(np.random.default_rng(s).normal(size=(12, 4))) for s in (0, 1))
    inner = float((double_centred(k) * double_centred(other)).sum()) / (12 * 9)
    assert hsic(k, other) == pytest.approx(inner)
