"""Rotations of a feature basis: Haar SO(n), true powers Q^α, and what the published reading of angles gets wrong."""

from typing import Any

import jaxtyping
import numpy as np
import pytest
import scipy.linalg
import scipy.stats
import torch
from torch import Tensor

from intertwine.errors import InputError
from intertwine.inspect.rotation import check_rotation, haar, planes, rotation

pytestmark = pytest.mark.usefixtures("one_thread")


def off(a: Tensor, b: Tensor) -> float:
    """The largest difference."""
    return (a - b).abs().max().item()


def published_power(q: Tensor, alpha: float) -> Tensor:
    """Row 000-G48, the published code: angles are the arccos of every second entry on the diagonal of a Schur form."""
    both: Any = scipy.linalg.schur(q.numpy(), output="real")
    angles = alpha * np.arccos(np.clip(np.diag(both[0])[::2], -1, 1))
    block = scipy.linalg.block_diag(*([[np.cos(a), -np.sin(a)], [np.sin(a), np.cos(a)]] for a in angles))
    return torch.from_numpy(both[1] @ block @ both[1].T)


@pytest.mark.parametrize("n", [1, 2, 3, 8, 31, 64])
def test_000_g48_powers_are_those_of_the_matrix_exponential(n: int) -> None:
    q = haar(n, seed=n)
    turn = planes(q)
    logarithm = scipy.linalg.logm(q.numpy()).real  # pyrefly: ignore
    for alpha in (-0.5, 0.1, 0.5, 0.9, 1.7):
        dense = torch.from_numpy(scipy.linalg.expm(alpha * logarithm))
        assert off(turn.power(alpha), dense) < 1e-11


@pytest.mark.parametrize("n", [2, 7, 128, 301])
def test_000_g48_ends_group_law_and_so_n(n: int) -> None:
    q = rotation(n, 1, seed=3)
    same, third, rest = rotation(n, [0, 1 / 3, 2 / 3], seed=3)
    identity = torch.eye(n, dtype=torch.float64)
    assert torch.equal(q, haar(n, seed=3))  # Q¹ is Q, bit by bit
    assert torch.equal(same, identity)
    assert off(third @ rest, q) < 1e-12
    assert off(planes(q).power(1 - 1e-15), q) < 1e-12  # the decomposition, not the shortcut
    for power in (third, rest):
        assert off(power @ power.T, identity) < 1e-12
        assert torch.linalg.det(power).item() == pytest.approx(1, abs=1e-9)


def test_000_g48_angles_are_linear_in_alpha() -> None:
    whole = np.sort(np.abs(np.angle(np.linalg.eigvals(rotation(40, 1, seed=1).numpy()))))
    for alpha in (0.25, 0.5, 0.75):
        part = np.sort(np.abs(np.angle(np.linalg.eigvals(rotation(40, alpha, seed=1).numpy()))))
        np.testing.assert_allclose(part, alpha * whole, atol=1e-11)


def test_000_g48_the_published_reading_of_angles_loses_signs() -> None:
    q = haar(256, seed=0)
    lost = torch.linalg.norm(published_power(q, 1.0) - q).item()
    assert 10 < lost < 32  # 16 of at most 32 in the table of rows
    assert torch.linalg.norm(planes(q).power(1 - 1e-15) - q).item() < 1e-11


@pytest.mark.parametrize(
    "angles",
    [
        (0.0, 0.0),
        (np.pi, np.pi),
        (np.pi, 0.3),
        (1e-7, -1e-7),
        (0.4, 0.4),
        (0.4, -0.4),
        (0.4, -0.4 - 1e-9),
        (0.4, 0.4 + 1e-9),
        (3.1415, -3.1414),
    ],
)
def test_repeated_and_real_eigenvalues(angles: tuple[float, ...]) -> None:
    blocks = [[[np.cos(a), -np.sin(a)], [np.sin(a), np.cos(a)]] for a in angles]
    basis = haar(5, seed=2)
    q = basis @ torch.from_numpy(scipy.linalg.block_diag(*blocks, [[1.0]])) @ basis.T
    half = planes(q).power(0.5)
    assert off(half @ half, q) < 1e-11
    assert off(half @ half.T, torch.eye(5, dtype=torch.float64)) < 1e-12
    assert torch.linalg.det(half).item() > 0


def test_a_permutation_and_four_flips_have_powers() -> None:
    cycle = torch.eye(9, dtype=torch.float64)[[1, 2, 0, 4, 5, 3, 7, 8, 6]]  # three equal angles
    flips = torch.diag(torch.tensor([-1.0, -1, 1, -1, 1, -1], dtype=torch.float64))
    for q in (cycle, flips):
        half = planes(q).power(0.5)
        assert off(half @ half, q) < 1e-12


def test_draws_are_uniform_over_the_group() -> None:
    draws = torch.stack([haar(3, seed) for seed in range(400)])
    trace = draws.diagonal(dim1=1, dim2=2).sum(1)
    angle = torch.arccos(((trace - 1) / 2).clamp(-1, 1)).numpy()
    # In SO(3) the angle has the density (1 − cos θ)/π, and every entry is uniform over −1 to 1.
    assert scipy.stats.kstest(angle, lambda t: (t - np.sin(t)) / np.pi).pvalue > 1e-3
    for row, column in ((0, 0), (2, 0), (1, 2)):
        assert scipy.stats.kstest(draws[:, row, column].numpy(), scipy.stats.uniform(-1, 2).cdf).pvalue > 1e-3
    assert (torch.linalg.det(draws) > 0).all()


def test_seed_and_precision() -> None:
    assert torch.equal(rotation(6, 0.5, seed=4), rotation(6, [0.5, 1], seed=4)[0])
    assert not torch.equal(rotation(6, 1, seed=4), rotation(6, 1, seed=5))
    single = rotation(6, 0.5, seed=4, dtype=torch.float32)
    assert single.dtype == torch.float32
    assert off(single.double(), rotation(6, 0.5, seed=4)) < 1e-7


def test_bad_input_of_rotations() -> None:
    with pytest.raises(InputError, match=r"n must be an integer of at least 1, but is 0"):
        rotation(0, 1, seed=0)
    with pytest.raises(InputError, match="alpha is empty"):
        rotation(3, [], seed=0)
    with pytest.raises(InputError, match="alpha must be a finite number, but is nan"):
        rotation(3, float("nan"), seed=0)
    with pytest.raises(InputError, match=r"differs from the identity by 3\. Give a rotation"):
        planes(2 * torch.eye(3))
    with pytest.raises(InputError, match="determinant −1: it is a reflection"):
        planes(torch.diag(torch.tensor([1.0, -1.0])))
    with pytest.raises(InputError, match=r"square matrix, but is \(2, 3\)"):
        check_rotation(torch.zeros(2, 3))


@pytest.mark.parametrize(("n", "alpha"), [(3, "a"), (3, [0, "a"]), ("3", 1)])
def test_what_is_no_number(n: Any, alpha: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as a user runs it
    with pytest.raises(InputError, match=r"alpha must be a finite number, but is 'a'|at least 1, but is '3'"):
        rotation(n, alpha, 0)
