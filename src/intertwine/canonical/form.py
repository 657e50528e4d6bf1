"""Form: the canonical form of one set of weights with all that comparing it needs, made once per network."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import cos, log, sqrt

import torch
from torch import Tensor

from intertwine.canonical.blocks import moved
from intertwine.canonical.canonicalize import canonical_element
from intertwine.canonical.ranks import sign_bytes
from intertwine.errors import InputError
from intertwine.reals import real
from intertwine.shapes import Float
from intertwine.symmetry.element import Element
from intertwine.symmetry.symmetry import Symmetry

#: Steps of a fingerprint are at least this many units of the precision wide.
COARSEST = 64.0
KEPT = 65536  # entries of the fixed vector that are kept for the next fingerprint


@dataclass(frozen=True, eq=False)
class Form:
    """Weights, the element that takes them to their canonical form, and that form."""

    symmetry: Symmetry = field(repr=False)
    weights: Mapping[str, Tensor] = field(repr=False)
    element: Element
    doubts: tuple[str, ...]

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The canonical form."""
        return moved(self.symmetry, self.element, self.weights)

    @cached_property
    def lengths(self) -> Tensor:
        """The length of every tensor of the form: no order changes them, and noise hardly does."""
        tensors = [t for t in self.tensors.values() if t.is_floating_point()]
        return torch.tensor([_length(t) for t in tensors], dtype=torch.float64)

    def fingerprint(self, precision: float | int = 3e-3) -> str:
        """See `intertwine.fingerprint`."""
        if not real(precision) or precision < 0:
            raise InputError(
                f"A fingerprint was asked for to a precision of {precision!r}. It is a step that two sums are rounded "
                "to: a finite number above 0, such as 3e-3, the default."
            )
        digest = hashlib.sha256(f"{self.symmetry.signature} {precision}".encode())
        total = torch.zeros(2, dtype=torch.float64)
        for i, name in enumerate(sorted(self.tensors)):
            x, layout = self.tensors[name], self.symmetry.layouts.get(name)
            digest.update(f"{name} {tuple(x.shape)}".encode())
            if layout is not None and x.is_floating_point() and any(any(leaf.powers) for leaf in layout.leaves()):
                precision = max(precision, COARSEST * torch.finfo(x.dtype).eps)
                digest.update(sign_bytes(x + layout.shift).cpu().numpy().tobytes())
                total += (1 + cos(i) / 2) * _summary(x.double() + layout.shift)
            else:  # adding zero makes the two zeros one
                digest.update((x + 0).contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes())
        # rounded once: every number that is rounded by itself is one more that may lie at an edge
        digest.update(str((total / precision + 0.5).floor().to(torch.int64).tolist()).encode())
        return digest.hexdigest()[:32]


def make_form(symmetry: Symmetry, weights: Mapping[str, Tensor]) -> Form:
    """The canonical form of weights."""
    element, doubts = canonical_element(symmetry, weights)
    return Form(symmetry, weights, element, doubts)


def _summary(x: Tensor) -> Float[Tensor, 2]:
    """The logarithm of the length, and the cosine with a fixed vector.

    A length hardly changes with one entry of many, and not at all where it was made one; a cosine does.
    """
    length = _length(x)
    if length == 0:
        return torch.zeros(2, dtype=torch.float64)
    cosine = float(_wave(x.numel()) @ x.flatten().cpu()) / length
    return torch.tensor([log(length), cosine], dtype=torch.float64)


def _wave(n: int) -> Tensor:
    """A fixed vector with entries of size one, on average."""
    return _longest_wave()[:n] if n <= KEPT else torch.arange(1, n + 1, dtype=torch.float64).cos() * sqrt(2)


@cache
def _longest_wave() -> Tensor:
    return torch.arange(1, KEPT + 1, dtype=torch.float64).cos() * sqrt(2)


def _length(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x.nan_to_num(0.0, 0.0, 0.0), dtype=torch.float64))
