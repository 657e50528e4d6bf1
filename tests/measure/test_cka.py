"""HSIC, CKA with Gaussian and Laplace kernels, and CKA by channels, against plain float64 formulas written here.

Rows 000-G22 to G26 and G44 to G47 of Godfrey et al. 2022, 001-C19 and C20 of Csiszárik et al. 2021; decisions D7, D8.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from max_gram_check import CASES, OTHERS
from scipy.spatial.distance import pdist, squareform
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import intertwine as it
from intertwine.errors import InputError, MismatchError
from intertwine.measure.cka import _gram_product, centred_alignment, centred_gram
from intertwine.measure.kernel_cka import (
    channel_cka,
    laplace_cka,
    max_gram,
    median_gram,
    median_power,
    powers,
    rbf_cka,
    relu_cka,
)
from intertwine.measure.measure import CHANGES, Measure, every, find
from intertwine.testing.measure import check_measure

Array = np.ndarray
MEASURES = ("rbf_cka", "laplace_cka", "relu_cka", "channel_cka")


# -- oracles -----------------------------------------------------------------------------------------------------------


def song(k: Array, l: Array) -> float:  # noqa: E741
    """HSIC₁ with its three terms, as Song et al. print it."""
    n = len(k)
    k, l = k - np.diag(np.diag(k)), l - np.diag(np.diag(l))  # noqa: E741
    total = np.trace(k @ l) + k.sum() * l.sum() / ((n - 1) * (n - 2)) - 2 / (n - 2) * (k @ l).sum()
    return float(total / (n * (n - 3)))


def hsic(k: Tensor, l: Tensor, biased: bool = False) -> float:  # noqa: E741
    """HSIC of two Gram matrices from their centred forms, which are what every CKA is computed from."""
    n = len(k)
    a, b = (centred_gram(gram.to(torch.float64, copy=True), biased) for gram in (k, l))
    if a.entries is None or b.entries is None:
        return 0.0
    return _gram_product(a.entries, b.entries) * a.scale * b.scale / ((n - 1) ** 2 if biased else n * (n - 3))


def gretton(k: Array, l: Array) -> float:  # noqa: E741
    """The biased estimator tr(KHLH)/(n − 1)²."""
    n = len(k)
    h = np.eye(n) - 1 / n
    return float(np.trace(k @ h @ l @ h)) / (n - 1) ** 2


def cka(k: Array, l: Array, estimate: Callable[[Array, Array], float] = song) -> float:  # noqa: E741
    return estimate(k, l) / float(np.sqrt(estimate(k, k) * estimate(l, l)))


def gaussian(x: Array, factor: float) -> Array:
    d = pdist(x)
    return np.exp(-(squareform(d) ** 2) / (2 * (factor * np.median(d[d > 0])) ** 2))


def laplace(x: Array, factor: float, p: float) -> Array:
    d = pdist(x, "minkowski", p=p)
    return np.exp(-((squareform(d) / (factor * np.median(d[d > 0]))) ** p))


def unit(x: Array) -> Array:
    """Channels of (samples, channels, positions), centred over samples and positions and of length one."""
    x = x - x.mean((0, 2), keepdims=True)
    return x / np.sqrt((x**2).sum((0, 2), keepdims=True))


def over_channels(x: Array, choose: Callable[[list[float]], float]) -> Array:
    """The paper's kernel, entry by entry."""
    x = unit(x)
    n, channels, _ = x.shape
    k = np.zeros((n, n))
    for i, j in product(range(n), repeat=2):
        k[i, j] = choose([float(x[i, c] @ x[j, c]) for c in range(channels)])
    return k


def related(
    samples: int = 40, shape: tuple[int, ...] = (6,), other: tuple[int, ...] | None = None
) -> tuple[Tensor, ...]:
    """Two sets of features that have to do with each other."""
    x = torch.randn(samples, *shape, dtype=torch.float64).relu()
    width, target = x[0].numel(), other or shape
    y = x.flatten(1) @ torch.randn(width, int(np.prod(target)), dtype=torch.float64) / width**0.5 + 0.3
    return x, y.relu().reshape(samples, *target)


# -- HSIC --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [4, 5, 17, 60])
def test_000_G44_hsic_is_the_three_term_formula(samples: int) -> None:
    k, l = (a + a.T for a in torch.randn(2, samples, samples, dtype=torch.float64))  # noqa: E741
    before = k.clone()
    assert hsic(k, l) == pytest.approx(song(k.numpy(), l.numpy()), rel=1e-11, abs=1e-13)
    assert hsic(k, l, biased=True) == pytest.approx(gretton(k.numpy(), l.numpy()), rel=1e-11, abs=1e-13)
    assert torch.equal(k, before)


def test_000_G44_hsic_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    k, l = (a + a.T for a in torch.randn(2, 50, 50, dtype=torch.float64))  # noqa: E741
    whole = hsic(k, l)
    monkeypatch.setattr(import_module("intertwine.measure.cka"), "HELD", 7 * 50)  # seven rows, and one at the end
    assert hsic(k, l) == pytest.approx(whole, rel=1e-12)


def test_000_G44_u_centred_rows_sum_to_zero() -> None:
    x = torch.randn(20, 3, dtype=torch.float64)
    gram = centred_gram(x @ x.T)
    assert gram.entries is not None
    assert gram.entries.sum(1).abs().max() < 1e-13
    assert gram.entries.diagonal().eq(0).all()
    assert gram.entries.abs().max() == 1
    assert gram.own * gram.scale**2 == pytest.approx(song(*[(x @ x.T).numpy()] * 2) * 20 * 17)


def test_000_G44_hsic_is_unbiased() -> None:
    """Of independent samples the mean is zero within three standard errors; of the biased estimator it is not."""
    values: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(500):
        x, y = torch.randn(12, 3, dtype=torch.float64), torch.rand(12, 2, dtype=torch.float64)
        for biased, found in values.items():
            found.append(hsic(x @ x.T, y @ y.T, biased))
    errors = {biased: np.mean(v) / (np.std(v) / np.sqrt(len(v))) for biased, v in values.items()}
    assert abs(errors[False]) < 3
    assert errors[True] > 10


def test_000_D8_of_a_matrix_with_itself_hsic_is_never_negative() -> None:
    """The kernel is not positive definite, and yet no square root of a negative number is ever taken."""
    smallest = []
    for _ in range(50):
        k = max_gram(torch.randn(4, 12, 1, dtype=torch.float64))
        smallest.append(float(torch.linalg.eigvalsh(k)[0]))
        assert hsic(k, k) > 0
    assert min(smallest) < -0.1


def test_000_D8_values_can_be_negative() -> None:
    values = [float(relu_cka()(torch.randn(12, 4), torch.randn(12, 4))) for _ in range(50)]
    assert min(values) < -0.2
    assert max(map(abs, values)) <= 1


def test_hsic_of_too_few_other_or_equal_samples() -> None:
    assert find("linear_cka")(torch.eye(3), torch.eye(3)).degenerate == "it needs at least 4 samples, and there are 3"
    with pytest.raises(MismatchError, match="x has 4 and y 5"):
        find("linear_cka")(torch.eye(4), torch.eye(5))
    assert hsic(torch.ones(5, 5), torch.randn(5, 5)) == 0


def test_001_C19_C20_biased_gram_form_is_rv() -> None:
    x, y = related(30, (5,), (8,))
    grams = [centred_gram(a @ a.T, biased=True) for a in (x, y)]
    assert float(centred_alignment("rv", *grams)) == pytest.approx(float(find("rv")(x, y)), abs=1e-12)
    assert float(centred_alignment("rv", *grams)) == pytest.approx(
        cka((x @ x.T).numpy(), (y @ y.T).numpy(), gretton), abs=1e-12
    )


# -- Gaussian and Laplace kernels --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "p", "q"), [(60, 5, 8), (9, 30, 20), (30, 40, 3)])
def test_001_C18_kernel_alignment_is_the_cosine_of_gram_matrices(n: int, p: int, q: int) -> None:
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randn(n, width, generator=g, dtype=torch.float64) + 0.5 for width in (p, q))
    k, l = x @ x.T, y @ y.T  # noqa: E741
    expected = float((k * l).sum() / ((k * k).sum() * (l * l).sum()).sqrt())
    assert float(it.measure(x, y, "kernel_alignment")) == pytest.approx(expected, abs=1e-12)
    centred = it.measure(x - x.mean(0), y - y.mean(0), "kernel_alignment")
    assert float(it.measure(x, y, "rv")) == pytest.approx(centred.value, abs=1e-12)
    assert abs(expected - centred.value) > 1e-3


def test_001_C18_zeros_have_no_alignment() -> None:
    found = it.measure(torch.randn(9, 3), torch.zeros(9, 2), "kernel_alignment")
    assert found.degenerate == "y is zero everywhere"
    assert float(it.measure(torch.ones(9, 3), torch.ones(9, 2), "kernel_alignment")) == pytest.approx(1)


@pytest.mark.parametrize("name", ["linear_cka", "rv"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("n", "d"), [(1000, 64), (600, 512), (100, 2000)])
def test_many_samples_in_half_precision_have_a_value(name: str, dtype: torch.dtype, n: int, d: int) -> None:
    """Rounding of entries averages out over features; it is no reason to refuse a value."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, d, generator=g)
    y = x + torch.randn(n, d, generator=g)
    assert it.measure(x.to(dtype), y.to(dtype), name).value == pytest.approx(it.measure(x, y, name).value, abs=1e-3)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("factor", [0.2, 0.4, 0.8, 1.0, 3.0])
def test_000_G46_rbf_cka(factor: float, biased: bool) -> None:
    x, y = related(41, (6,), (9,))
    expected = cka(gaussian(x.numpy(), factor), gaussian(y.numpy(), factor), gretton if biased else song)
    assert float(rbf_cka(factor, biased)(x, y)) == pytest.approx(expected, abs=1e-10)
    assert float(rbf_cka(factor, biased)(x.float(), y.float())) == pytest.approx(expected, abs=1e-5)


def test_000_G46_rbf_cka_with_a_narrow_kernel() -> None:
    """Only the nearest samples see each other; their small entries must not be lost next to 1."""
    x, y = related(41, (6,), (9,))
    expected = cka(gaussian(x.numpy(), 0.015), gaussian(y.numpy(), 0.015))
    assert float(rbf_cka(0.015)(x, y)) == pytest.approx(expected, abs=1e-11)


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0])
@pytest.mark.parametrize("factor", [0.4, 1.0])
def test_000_G25_laplace_cka(factor: float, p: float) -> None:
    x, y = related(40, (6,), (9,))
    expected = cka(laplace(x.numpy(), factor, p), laplace(y.numpy(), factor, p))
    assert float(laplace_cka(factor, p)(x, y)) == pytest.approx(expected, abs=1e-10)


def test_rbf_cka_with_a_wide_kernel_is_linear_cka() -> None:
    """In the limit the kernel is a squared distance; digits of 1 − K that are too small for 1 must not be lost."""
    x, y = related(50)
    assert float(rbf_cka(factor=1e6)(x, y)) == pytest.approx(float(find("linear_cka")(x, y)), abs=1e-9)


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0])
@pytest.mark.parametrize("block", [5, 512])
def test_distances(p: float, block: int) -> None:
    x = torch.randn(23, 4, dtype=torch.float64)
    expected = squareform(pdist(x.numpy(), "minkowski", p=p)) ** p
    found = powers(x, p, block)
    assert (found - torch.from_numpy(expected)).abs().max() < 1e-12
    assert torch.equal(found, found.T)


def test_distances_of_near_samples_far_from_the_rest() -> None:
    """One sample is so far away that the product of the others leaves no digit of their distances."""
    x = torch.randn(30, 4, dtype=torch.float64)
    x[0] = 1e10
    x[5] = x[6]
    x = x - x.mean(0)
    expected = torch.from_numpy(squareform(pdist(x.numpy())) ** 2)
    assert ((powers(x, 2.0) - expected).abs() / expected.clamp_min(1e-300)).max() < 1e-12
    assert powers(x, 2.0)[5, 6] == 0


@pytest.mark.parametrize("samples", [4, 5, 20, 21])
def test_median_over_pairs_that_differ(samples: int) -> None:
    x = torch.randn(samples, 3, dtype=torch.float64)
    x[: samples // 2 + 1] = x[0]
    d = pdist(x.numpy())
    assert median_power(powers(x, 2.0), 2.0) ** 0.5 == pytest.approx(np.median(d[d > 0]), rel=1e-12)


@pytest.mark.parametrize("p", [1.0, 1.3, 1.7, 2.0])
def test_000_G25_laplace_gram_is_positive_definite(p: float) -> None:
    grid = torch.tensor(list(product((-1.0, 0.0, 1.0), repeat=3)))
    for x in (torch.randn(60, 5), torch.randn(60, 1), grid, torch.linspace(-2, 2, 9)[:, None]):
        for c in (0.1, 1.0, 3.0):
            assert torch.linalg.eigvalsh((-c * powers(x, p)).exp())[0] >= -1e-10


def test_000_G25_no_kernel_beyond_two() -> None:
    """Printed: any p other than 2. Corrected: p in [1, 2], with or without the power behind the norm."""
    line, grid = torch.linspace(-2, 2, 9)[:, None], torch.tensor(list(product((-1.0, 0.0, 1.0), repeat=3)))
    assert torch.linalg.eigvalsh((-powers(line, 2.5)).exp())[0] < -0.05
    assert torch.linalg.eigvalsh((-0.1 * powers(grid, 4.0) ** 0.25).exp())[0] < -0.01
    for p in (0.5, 2.5):
        with pytest.raises(InputError, match="is not positive definite"):
            laplace_cka(p=p)


@pytest.mark.parametrize("name", ["rbf_cka", "laplace_cka"])
@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_factors_that_make_no_kernel(name: str, factor: float) -> None:
    with pytest.raises(InputError, match="between 1e-6 and 1e6"):
        find(name, factor=factor)


@pytest.mark.parametrize("name", ["rbf_cka", "laplace_cka"])
def test_a_kernel_too_narrow_to_see_another_sample(name: str) -> None:
    result = find(name, factor=1e-5)(*related())
    assert result.degenerate == "x has no similarity between different samples to align: it is the same for all pairs"


# -- by channels -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "other"), [((6,), (6,)), ((5, 3), (5, 3)), ((4, 9), (7, 4)), ((8,), (3, 4))])
def test_000_G45_G47_relu_cka(shape: tuple[int, ...], other: tuple[int, ...]) -> None:
    """Against the paper's kernel in plain loops; neither channels nor positions need to be the same in number."""
    x, y = related(21, shape, other)
    k, l = (over_channels(a.reshape(21, len(a[0]), -1).numpy(), max) for a in (x, y))  # noqa: E741
    assert float(relu_cka()(x, y)) == pytest.approx(cka(k, l), abs=1e-12)
    assert float(relu_cka(biased=True)(x, y)) == pytest.approx(cka(k, l, gretton), abs=1e-12)
    assert float(relu_cka()(x.float(), y.float())) == pytest.approx(cka(k, l), abs=1e-5)


@pytest.mark.parametrize("shape", [(7,), (7, 3), (5, 4)])
def test_000_G45_median_estimator(shape: tuple[int, ...]) -> None:
    x, y = related(20, shape)
    k, l = (over_channels(a.reshape(20, len(a[0]), -1).numpy(), np.median) for a in (x, y))  # noqa: E741
    assert float(relu_cka(estimator="median")(x, y)) == pytest.approx(cka(k, l), abs=1e-12)


@pytest.mark.parametrize(("gram", "choose"), [(max_gram, torch.amax), (median_gram, lambda x, d: x.median(d).values)])
@pytest.mark.parametrize("shape", [(6, 30, 4), (1, 30, 4), (6, 30, 1), (5, 7, 2)])
def test_000_G45_gram_by_tiles(gram: Any, choose: Any, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("intertwine.measure.kernel_cka")
    monkeypatch.setattr(module, "TILE", 7)
    monkeypatch.setattr(module, "HELD", 7 * 7 * shape[0])
    x = torch.randn(shape, dtype=torch.float64)
    expected = choose(torch.einsum("cip,cjp->cij", x, x), 0)
    assert (gram(x) - expected).abs().max() < 1e-13


class Largest(TorchDispatchMode):
    """Remembers the number of entries of the largest tensor that any op makes."""

    entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.entries = max(self.entries, out.numel())
        return out


def test_000_G45_no_gram_matrix_per_channel() -> None:
    x = torch.randn(100, 64, 2)
    with Largest() as largest:
        relu_cka()(x, x)
    assert largest.entries <= max(100 * 100, x.numel())


def test_000_G46_D7_channel_cka() -> None:
    """Linear CKA of channels of length one; positions are summed over."""
    for shape, other in (((6,), (9,)), ((5, 4), (3, 9))):
        x, y = related(25, shape, other)
        k, l = (  # noqa: E741
            np.einsum("icp,jcp->ij", u, u) for u in (unit(a.reshape(25, len(a[0]), -1).numpy()) for a in (x, y))
        )
        assert float(channel_cka()(x, y)) == pytest.approx(cka(k, l), abs=1e-12)


def test_000_D7_channel_cka_is_not_orthogonal() -> None:
    """The paper's baseline is called orthogonal; the lengths of channels make it change under rotations."""
    x = torch.randn(40, 6, dtype=torch.float64).relu() * torch.tensor([1.0, 1.0, 2.0, 4.0, 8.0, 20.0])
    turned = x @ torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64)).Q
    assert float(find("linear_cka")(x, turned)) == pytest.approx(1, abs=1e-12)
    assert float(channel_cka()(x, turned)) < 0.9


def test_000_G24_example_E_44() -> None:
    """The max kernel is not positive definite: cᵀKc = −65."""
    x, c = torch.tensor([[1.0, 1.0], [10.0, 1.0], [0.0, 5.0]]), torch.tensor([10.0, -1.0, -1.0])
    assert float(c @ max_gram(x.T[..., None].contiguous()) @ c) == -65


def preserves(a: Tensor, x: Tensor) -> bool:
    """Whether the map keeps max(x ⊙ y) for all pairs of samples."""
    before, after = (max_gram(z.T[..., None].contiguous()) for z in (x, x @ a))
    return bool((before - after).abs().max() < 1e-9)


def test_000_G23_lemma_E_46() -> None:
    """Signed permutations keep max(x ⊙ y); nothing else that is tried does, however near to one."""
    x = torch.randn(80, 4, dtype=torch.float64)
    for order in ([0, 1, 2, 3], [2, 0, 3, 1]):
        for signs in product((-1.0, 1.0), repeat=4):
            signed = torch.eye(4, dtype=torch.float64)[order] * torch.tensor(signs, dtype=torch.float64)
            assert preserves(signed, x)
            assert not preserves(signed * torch.tensor([1.0, 1.0, 1.0, 1.01], dtype=torch.float64), x)
            assert not preserves(signed + 0.01 * torch.randn(4, 4, dtype=torch.float64), x)
    assert not preserves(torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64)).Q, x)
    assert not preserves(torch.tensor([[0.0, 0, 0, 1], [0, 1, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0]]).double(), x)


def test_constant_channels_are_left_out_and_noted() -> None:
    """A channel that never varies has no direction; counted as zero, as in the paper's code, it lifts the maximum."""
    x, y = related(30, (4,))
    with_dead = torch.cat([x, torch.full((30, 2), 7.0, dtype=torch.float64)], 1)
    plain, dropped, zero = relu_cka()(x, y), relu_cka()(with_dead, y), relu_cka(dead="zero")(with_dead, y)
    assert float(dropped) == pytest.approx(float(plain), abs=1e-13)
    assert dropped.notes == ("x: 2 of 6 channels are constant and are left out",)
    k, l = (over_channels(a[..., None].numpy(), max) for a in (x, y))  # noqa: E741
    assert float(zero) == pytest.approx(cka(np.maximum(k, 0), l), abs=1e-12)
    assert abs(float(zero) - float(plain)) > 1e-3
    assert float(channel_cka()(with_dead, y)) == pytest.approx(float(channel_cka()(x, y)), abs=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_channels_of_which_only_rounding_is_left_are_constant(dtype: torch.dtype) -> None:
    x = torch.randn(30, 4).to(dtype)
    x[:, 1] = 1 + torch.arange(30, dtype=dtype).remainder(2) * torch.finfo(dtype).eps
    result = relu_cka()(x, x)
    assert x[:, 1].unique().numel() == 2
    assert result.notes[0] == "x: 1 of 4 channels are constant and are left out"


@pytest.mark.parametrize("option", ["estimator", "dead", "precision"])
def test_options_that_do_not_exist(option: str) -> None:
    with pytest.raises(InputError, match=f"Unknown {option} of relu_cka 'other'"):
        find("relu_cka", **{option: "other"})


# -- what all four declare ---------------------------------------------------------------------------------------------

CHANGE: dict[str, Callable[[Tensor], Tensor]] = {
    "permutation": lambda x: x[:, torch.randperm(x.shape[1])],
    "positive scales": lambda x: x * torch.linspace(0.2, 5, x.shape[1], dtype=x.dtype),
    "signs": lambda x: x * torch.tensor([-1.0, 1.0], dtype=x.dtype).repeat(x.shape[1])[: x.shape[1]],
    "orthogonal": lambda x: x @ torch.linalg.qr(torch.randn(x.shape[1], x.shape[1], dtype=x.dtype)).Q,
    "invertible": lambda x: x @ torch.randn(x.shape[1], x.shape[1], dtype=x.dtype),
    "isotropic scale": lambda x: x * 37.0,
    "translation": lambda x: x + torch.randn(x.shape[1], dtype=x.dtype),
}


def test_every_change_is_tried() -> None:
    assert set(CHANGE) == set(CHANGES)


VARIANTS: dict[str, Measure] = {
    **{name: find(name) for name in MEASURES},
    "laplace_cka, p=2": laplace_cka(p=2.0),
    "laplace_cka, p=1.5": laplace_cka(p=1.5),
    "rbf_cka, biased": rbf_cka(0.4, biased=True),
    "relu_cka, median": relu_cka(estimator="median"),
    "relu_cka, biased": relu_cka(biased=True),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", VARIANTS)
def test_000_G22_G26_declared_invariances_and_no_others(name: str, change: str) -> None:
    """Lemma 5.1 and properties (0) and (i): one side or the other can be changed, and nothing else is invariant."""
    measure = VARIANTS[name]
    gaps = []
    for _ in range(3):
        x, y = related(30, (6,), (7,))
        gaps += [abs(float(measure(x, CHANGE[change](y))) - float(measure(x, y))) for x, y in ((x, y), (y, x))]
    assert (max(gaps) < 1e-9) is (change in measure.invariances), gaps


@pytest.mark.parametrize("name", ["relu_cka", "channel_cka"])
def test_000_G45_invariances_with_positions(name: str) -> None:
    """1 under P·D with any signs, and a translation per channel; not where positions are shuffled per channel."""
    x = torch.randn(30, 6, 4, dtype=torch.float64).relu()
    scales = torch.tensor([0.1, 3.0, -2.0, 1e3, -1e-3, 1.0], dtype=torch.float64)
    moved = x[:, torch.randperm(6)] * scales[:, None] + torch.randn(6, 1, dtype=torch.float64)
    assert float(find(name)(x, moved)) == pytest.approx(1, abs=1e-9)
    assert float(find(name)(x, x[:, :, torch.randperm(4)])) == pytest.approx(1, abs=1e-12)
    assert float(find(name)(x, x * torch.rand(4, dtype=torch.float64))) < 0.99


@pytest.mark.parametrize("name", VARIANTS)
def test_000_G26_symmetric_one_for_itself_and_in_range(name: str) -> None:
    measure = VARIANTS[name]
    x, y = related(20, (6,), (7,))
    assert float(measure(x, y)) == pytest.approx(float(measure(y, x)), abs=1e-13)
    assert float(measure(x, x)) == pytest.approx(measure.at_identity, abs=1e-13)
    assert measure.range[0] <= float(measure(x, y)) < 0.999
    prepared = measure.prepare(x)
    assert float(measure.compare(prepared, prepared)) == pytest.approx(1, abs=1e-15)


@pytest.mark.parametrize("name", VARIANTS)
def test_what_is_declared_holds(name: str) -> None:
    check_measure(VARIANTS[name])


@pytest.mark.parametrize("name", VARIANTS)
def test_samples_in_another_order(name: str) -> None:
    measure, order = VARIANTS[name], torch.randperm(20)
    x, y = related(20, (6,), (7,))
    a, b = measure.prepare(x), measure.prepare(y)
    found, expected = measure.compare(a, measure.permuted(b, order)), measure(x, y[order])
    assert float(found) == pytest.approx(float(expected), abs=1e-12)
    assert float(found) != pytest.approx(float(measure(x, y)), abs=1e-3)
    dead = measure.prepare(torch.ones(20, 3))
    assert measure.compare(a, measure.permuted(dead, order)).degenerate


def test_all_are_registered() -> None:
    known = {measure.name: measure for measure in every()}
    assert set(MEASURES) <= set(known)
    assert {name for name in MEASURES if known[name].positions} == {"relu_cka", "channel_cka"}


@pytest.mark.parametrize("name", MEASURES)
@pytest.mark.parametrize(
    ("dtype", "scale", "offset"),
    [
        (torch.float16, 1.0, 0.0),
        (torch.bfloat16, 1.0, 0.0),
        (torch.bfloat16, 1e6, 0.0),
        *product([torch.float64, torch.float32], [1.0, 1e-6, 1e6], [0.0, 100.0]),
    ],
)
def test_the_same_value_in_every_precision(name: str, dtype: torch.dtype, scale: float, offset: float) -> None:
    """What is expected is the value, in float64, of the numbers that the precision can hold."""
    x, y = related(60, (20,))
    given = (x * scale + offset * scale).to(dtype)
    held, exact = find(name)(given, y.to(dtype)), find(name)(given.double(), y.to(dtype).double())
    assert held.degenerate is None
    assert float(held) == pytest.approx(float(exact), abs=1e-12 if dtype == torch.float64 else 1e-5)
    if dtype == torch.float64:
        assert float(held) == pytest.approx(float(find(name)(x, y)), abs=1e-9)


@pytest.mark.parametrize("name", MEASURES)
@pytest.mark.parametrize("scale", [1e-35, 1e35])
def test_no_square_overflows(name: str, scale: float) -> None:
    x, y = (z.float() for z in related(20))
    assert float(find(name)(x * scale, y)) == pytest.approx(float(find(name)(x, y)), abs=1e-5)
    x, y = related(20)
    assert float(find(name)(x * scale**6, y)) == pytest.approx(float(find(name)(x, y)), abs=1e-11)


@pytest.mark.parametrize("name", MEASURES)
def test_fewer_samples_than_features_and_samples_that_repeat(name: str) -> None:
    x, y = related(12, (50,))
    assert -1 <= float(find(name)(x, y)) <= 1
    x, y = x.repeat(2, 1), y.repeat(2, 1)
    x[3:9] = x[3]
    assert -1 <= float(find(name)(x, y)) <= 1
    assert float(find(name)(x, x.clone())) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("name", MEASURES)
@pytest.mark.parametrize(
    ("which", "reason"),
    [
        ("x", "x is constant: no"),
        ("y", "y is constant: no"),
        ("both", "constant: no"),
        ("few", "it needs at least 4 samples, and there are 3"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_degenerate(name: str, which: str, reason: str, dtype: torch.dtype) -> None:
    x, y = (z.to(dtype) for z in related(10, (5,)))
    if which in ("x", "both"):
        x = torch.full_like(x, 0.1)
    if which in ("y", "both"):
        y = torch.full_like(y, 1 / 3)
    if which == "few":
        x, y = x[:3], y[:3]
    result = find(name)(x, y)
    assert result.degenerate is not None
    assert reason in result.degenerate
    assert isnan(result.value)


@pytest.mark.parametrize("name", MEASURES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_kernel_that_is_the_same_for_all_pairs(name: str, dtype: torch.dtype) -> None:
    """One sample in each channel: all are equally far apart, and agree equally little."""
    for n in (*range(4, 24), 64, 300):
        result = find(name)(torch.eye(n, dtype=dtype), torch.randn(n, 3, dtype=dtype))
        assert result.degenerate is not None
        assert result.degenerate.startswith("x has no similarity between different samples to align")


# -- the kernel for GPUs -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    """The error of every case; triton reads the variable when it is imported, so this takes a process of its own."""
    script = Path(__file__).parents[1] / "support" / "max_gram_check.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("case", [*CASES, *OTHERS])
def test_000_G45_max_gram_kernel(errors: dict[str, float], case: str) -> None:
    assert errors[case] <= (1e-6 if case in CASES else 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("positions", [1, 9, 64])
def test_000_G45_on_a_gpu(positions: int) -> None:
    x, y = related(300, (16, positions))
    held, exact = relu_cka()(x.float().cuda(), y.float().cuda()), relu_cka()(x, y)
    assert float(held) == pytest.approx(float(exact), abs=1e-5)
