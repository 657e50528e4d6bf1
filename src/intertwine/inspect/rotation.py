"""Rotations of a feature basis: Q drawn uniformly from SO(n), and its powers Q^α along the shortest path from I to Q.

Every rotation turns a set of planes, each by an angle between −π and π: Q = V R(θ) Vᵀ. Its power Q^α = V R(αθ) Vᵀ turns
the same planes by α times the angle. Planes and angles come from the symmetric part (Q + Qᵀ)/2, whose eigenspaces are
the planes, and a real Schur form inside each group of eigenvalues too close to separate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import pi
from numbers import Integral
from typing import Any, SupportsFloat

import numpy as np
import scipy.linalg
import torch
from torch import Tensor

from intertwine.argument_types import Float, Int, finite_float
from intertwine.errors import InputError


@dataclass(frozen=True, eq=False)
class Planes:
    """The decomposition of a rotation.

    Attributes:
        matrix: the rotation itself. vectors: an orthonormal basis, one column each; the columns 2i and 2i + 1 span the
            plane turned by `angles[i]`, and the columns after the last plane are fixed.
    """

    matrix: Float[Tensor, "n n"]
    vectors: Float[Tensor, "n n"]
    angles: Float[Tensor, " planes"]

    def power(self, alpha: SupportsFloat) -> Float[Tensor, "n n"]:
        """The rotation by `alpha` times every angle: I at 0 and the matrix itself at 1, both without rounding.

        >>> turn = planes(torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64))
        >>> turn.power(0.5)
        tensor([[ 0.7071, -0.7071],
                [ 0.7071,  0.7071]], dtype=torch.float64)
        """
        times = finite_float(alpha)
        if times is None:
            raise InputError(f"alpha must be a finite number, but is {alpha!r}.")
        if times == 0:
            return torch.eye(len(self.matrix), dtype=self.matrix.dtype, device=self.matrix.device)
        if times == 1:
            return self.matrix.clone()
        count = 2 * len(self.angles)
        first, second = self.vectors[:, 0:count:2], self.vectors[:, 1:count:2]
        cos, sin = torch.cos(times * self.angles), torch.sin(times * self.angles)
        turned = self.vectors.clone()
        turned[:, 0:count:2] = first * cos + second * sin
        turned[:, 1:count:2] = second * cos - first * sin
        return turned @ self.vectors.T


def rotation(
    n: int, alpha: SupportsFloat | Iterable[SupportsFloat], seed: int, dtype: torch.dtype = torch.float64
) -> Float[Tensor, "... n n"]:
    """Q^α for a rotation Q drawn uniformly (by the Haar measure) from SO(n).

    Args:
        n: the number of features. seed: determines Q, independently of α.
        alpha: 0 gives the identity, 1 gives Q, and the angle of every plane is proportional to it. Several numbers give
            one matrix each, with a single decomposition.
        dtype: of the result; the work is done in float64.

    >>> q = rotation(5, 1, seed=0)
    >>> torch.dist(q @ q.T, torch.eye(5, dtype=q.dtype)).item() < 1e-12, round(torch.det(q).item(), 9)
    (True, 1.0)
    >>> half = rotation(5, 0.5, seed=0)
    >>> torch.allclose(half @ half, q), tuple(rotation(5, [0, 0.5, 1], seed=0).shape)
    (True, (3, 5, 5))
    """
    if not isinstance(n, Integral) or n < 1:
        raise InputError(f"The number of features n must be an integer of at least 1, but is {n!r}.")
    if not dtype.is_floating_point:
        raise InputError(f"dtype must be a floating-point dtype, but is {dtype}.")
    one = isinstance(alpha, str) or not isinstance(alpha, Iterable) or getattr(alpha, "ndim", 1) == 0
    powers: list[Any] = [alpha] if one else list(alpha)
    if not powers:
        raise InputError("alpha is empty. Give at least one number.")
    turn = planes(haar(n, seed))
    found = [turn.power(a).to(dtype) for a in powers]
    return found[0] if one else torch.stack(found)


def haar_orthogonal(n: int, seed: int = 0) -> Float[Tensor, "n n"]:
    """An orthogonal matrix drawn uniformly (Haar measure) from O(n), reflections included.

    It is the Q of a QR decomposition of normal numbers, which is uniform only if R has a positive diagonal (Mezzadri
    2007).

    >>> q = haar_orthogonal(5)
    >>> torch.allclose(q @ q.T, torch.eye(5, dtype=torch.float64))
    True
    """
    if n < 1:
        raise InputError(f"The number of features must be at least 1, but is {n}.")
    normal = torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    q, r = torch.linalg.qr(normal)
    return q * torch.where(r.diagonal() < 0, -1.0, 1.0)


def haar(n: int, seed: int) -> Float[Tensor, "n n"]:
    """A rotation drawn uniformly from SO(n), in float64.

    If the determinant of a uniform orthogonal matrix is −1, the first column changes sign, which maps the uniform
    distribution on one half of O(n) to the other half.
    """
    q = haar_orthogonal(n, seed)
    if torch.linalg.slogdet(q).sign < 0:
        q[:, 0] = -q[:, 0]
    return q


def planes(matrix: Float[Tensor, "n n"]) -> Planes:
    """The planes and angles of a rotation, in float64.

    >>> angles = planes(torch.tensor([[0.6, -0.8, 0.0], [0.8, 0.6, 0.0], [0.0, 0.0, 1.0]])).angles
    >>> [round(abs(angle), 4) for angle in angles.tolist()]
    [0.9273]
    """
    q = matrix.detach().double().cpu()
    check_rotation(q)
    size = len(q)
    with _one_thread():
        values, basis = torch.linalg.eigh((q + q.T) / 2)  # eigenvalues cos θ, each twice
    image = q @ basis
    found = list(eigenvalue_groups(values.tolist(), min(1e-3, 0.2 / size)))
    alone = torch.tensor([start for start, stop in found if stop - start == 2], dtype=torch.long)
    columns, angles = (
        [torch.stack([basis[:, alone], basis[:, alone + 1]], 2).flatten(1)],
        [_angles(basis, image, alone)],
    )
    flipped, fixed = basis[:, :0], basis[:, :0]  # columns with eigenvalues −1 and 1
    for start, stop in found:
        if stop - start != 2:
            vectors, inside, real = _schur(basis[:, start:stop], image[:, start:stop])
            count = 2 * len(inside)
            columns, angles = [*columns, vectors[:, :count]], [*angles, inside]
            flipped = torch.cat([flipped, vectors[:, count:][:, real < 0]], 1)
            fixed = torch.cat([fixed, vectors[:, count:][:, real > 0]], 1)
    angles.append(torch.full((flipped.shape[1] // 2,), pi, dtype=q.dtype))  # an even number, as the determinant is 1
    return Planes(q, torch.cat([*columns, flipped, fixed], 1), torch.cat(angles))


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread for many short sequential steps: a second one gains little, and costs tenfold on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _angles(basis: Float[Tensor, "n n"], image: Float[Tensor, "n n"], at: Int[Tensor, " pairs"]) -> Tensor:
    """The angles by which Q turns the planes of the columns `at` and `at + 1`, with their signs."""
    first, second = basis[:, at], basis[:, at + 1]
    cosine = (first * image[:, at] + second * image[:, at + 1]).sum(0)
    sine = (second * image[:, at] - first * image[:, at + 1]).sum(0)
    return torch.atan2(sine, cosine)


def _schur(basis: Float[Tensor, "n some"], image: Float[Tensor, "n some"]) -> tuple[Tensor, Tensor, Tensor]:
    """An invariant space of Q: its basis, planes first, the angles of the planes, and the real eigenvalues."""
    both: Any = scipy.linalg.schur((basis.T @ image).numpy(), output="real")
    form, inner = both
    planar = [at for at, width in schur_blocks(form) if width == 2]
    single = [at for at, width in schur_blocks(form) if width == 1]
    angles = [np.arctan2(form[at + 1, at] - form[at, at + 1], form[at, at] + form[at + 1, at + 1]) for at in planar]
    order = [*(column for at in planar for column in (at, at + 1)), *single]
    real = torch.tensor([form[at, at] for at in single], dtype=basis.dtype)
    return basis @ torch.from_numpy(inner[:, order].copy()), torch.tensor(angles, dtype=basis.dtype), real


def eigenvalue_groups(values: Sequence[float], gap: float) -> Iterator[tuple[int, int]]:
    """Where runs of sorted values without a gap begin and end.

    >>> list(eigenvalue_groups([0.0, 0.01, 0.5, 0.9, 0.9], 0.1))
    [(0, 2), (2, 3), (3, 5)]
    """
    breaks = [at for at in range(1, len(values)) if values[at] - values[at - 1] > gap]
    return zip([0, *breaks], [*breaks, len(values)], strict=True)


def schur_blocks(form: np.ndarray) -> Iterator[tuple[int, int]]:
    """Where the 2×2 and 1×1 blocks on the diagonal of a real Schur form begin, and how wide they are.

    >>> list(schur_blocks(np.array([[1.0, 0, 0], [0, 0.6, -0.8], [0, 0.8, 0.6]])))
    [(0, 1), (1, 2)]
    """
    at = 0
    while at < len(form):
        width = 2 if at + 1 < len(form) and form[at + 1, at] != 0 else 1
        yield at, width
        at += width


def check_rotation(matrix: Float[Tensor, "rows columns"], tolerance: float = 1e-4) -> None:
    """Refuse a matrix that is not a rotation: not square, not orthogonal, or a reflection."""
    shape = tuple(matrix.shape)
    if shape[0] != shape[1]:
        raise InputError(f"A rotation must be a square matrix, but is {shape}.")
    wide = matrix.detach().double()
    off = (wide @ wide.T - torch.eye(shape[0], dtype=wide.dtype, device=wide.device)).abs().max().item()
    if not off < tolerance:
        raise InputError(
            f"The matrix {shape} is not orthogonal: Q Qᵀ differs from the identity by {off:.2g}. Give a rotation, "
            "such as one of intertwine.rotation(n, alpha, seed)."
        )
    if torch.linalg.slogdet(wide).sign < 0:
        raise InputError(
            f"The matrix {shape} has determinant −1: it is a reflection, which no path of rotations reaches. Change "
            "the sign of one column."
        )
