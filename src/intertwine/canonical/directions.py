"""Directions: the vectors of exponents with which the scales or signs of a strand enter its blocks, and their algebra.

The same few vectors come back for every checkpoint of an architecture, so what was worked out is kept.
"""

from __future__ import annotations

from functools import cache, lru_cache

import numpy as np

Direction = tuple[float, ...]


class Directions:
    """The directions of one strand, over the reals for scales and modulo 2 for signs."""

    def __init__(self, vectors: tuple[Direction, ...], generators: int, modulus: int) -> None:
        self.index = {d: i for i, d in enumerate(vectors)}
        self.matrix = np.array(vectors, dtype=np.float64).reshape(len(vectors), generators)
        self.modulus = modulus
        self.spanned = cache(self._spanned)
        self.right_inverse = cache(self._right_inverse)

    def _spanned(self, chosen: tuple[int, ...]) -> np.ndarray:
        """Which directions are combinations of some of them."""
        if self.modulus:
            return np.logical_not(_reduced(self.matrix.astype(np.int64) % 2, chosen).any(1))
        return np.logical_not(self.perpendicular(self.matrix, chosen).any(-1))

    def _right_inverse(self, chosen: tuple[int, ...]) -> np.ndarray:
        """R with rows @ R = 1 (modulo 2 for signs), for independent rows."""
        rows = self.matrix[list(chosen)]
        if not self.modulus:
            return np.linalg.pinv(rows)
        count, width = rows.shape
        work = np.concatenate([rows.astype(np.int64) % 2, np.eye(count, dtype=np.int64)], 1)
        work = _reduced(work, tuple(range(count)), keep=True, width=width)
        result = np.zeros((width, count))
        for row in work:  # the pivot of each row stands alone in its column
            result[int(row[:width].argmax())] = row[width:]
        return result

    def perpendicular(self, vectors: np.ndarray, chosen: tuple[int, ...]) -> np.ndarray:
        """What is left of vectors without their parts along independent chosen directions; zero where nothing is."""
        basis = np.linalg.qr(self.matrix[list(chosen)].T)[0]
        left = vectors - vectors @ basis @ basis.T
        return np.where(np.abs(left).max(-1, keepdims=True) < 1e-9, 0.0, left)


@lru_cache(maxsize=4096)
def directions_of(vectors: tuple[Direction, ...], generators: int, modulus: int) -> Directions:
    """The algebra of some directions, made once."""
    return Directions(vectors, generators, modulus)


def _reduced(rows: np.ndarray, chosen: tuple[int, ...], keep: bool = False, width: int | None = None) -> np.ndarray:
    """Rows modulo 2 with the pivots of the chosen rows cleared from all others (and from each other with `keep`)."""
    work = rows.copy()
    basis = rows[list(chosen)].copy()
    for i in range(len(basis)):
        pivot = int(basis[i, :width].argmax())
        clear = basis[:, pivot].astype(bool)
        clear[i] = False
        basis[clear] ^= basis[i]
        work[work[:, pivot].astype(bool)] ^= basis[i]
    return basis if keep else work
