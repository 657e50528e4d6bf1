"""Form: the canonical form of one set of weights with all that comparing it needs, made once per network."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import floor, log, sqrt

import torch
from torch import Tensor

from intertwine.canonical.blocks import moved
from intertwine.canonical.canonicalize import canonical_element
from intertwine.canonical.ranks import sign_bytes
from intertwine.symmetry.element import Element
from intertwine.symmetry.layout import Layout, Leaf, Plus, Times
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

    def fingerprint(self, precision: float = 0.01) -> str:
        """See `intertwine.fingerprint`."""
        digest = hashlib.sha256(f"{self.symmetry.signature} {precision}".encode())
        for name in sorted(self.tensors):
            x, layout = self.tensors[name], self.symmetry.layouts.get(name)
            digest.update(f"{name} {tuple(x.shape)}".encode())
            if layout is not None and _is_scaled(layout) and x.is_floating_point():
                digest.update(_coarse(x.double() + layout.shift, max(precision, COARSEST * torch.finfo(x.dtype).eps)))
            else:  # adding zero makes the two zeros one
                digest.update((x + 0).contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:32]


def make_form(symmetry: Symmetry, weights: Mapping[str, Tensor]) -> Form:
    """The canonical form of weights."""
    element, doubts = canonical_element(symmetry, weights)
    return Form(symmetry, weights, element, doubts)


def _is_scaled(layout: Layout) -> bool:
    def walk(tree: object) -> bool:
        if isinstance(tree, Leaf):
            return any(tree.powers)
        return isinstance(tree, (Times, Plus)) and any(walk(p) for p in tree.parts)

    return any(walk(axis) for axis in layout.axes)


def _coarse(x: Tensor, precision: float) -> bytes:
    """The sign of every entry, the length, and the cosine with a fixed vector, both in steps of the precision.

    A length hardly changes with one entry of many, and not at all where it was made one; a cosine does.
    """
    length = _length(x)
    if length == 0:
        return b"zero"
    cosine = float(_wave(x.numel()) @ x.flatten().double().cpu()) / length
    steps = f"{floor(log(length) / precision + 0.5)} {floor(cosine / precision + 0.5)} "
    return steps.encode() + sign_bytes(x).cpu().numpy().tobytes()


def _wave(n: int) -> Tensor:
    """A fixed vector with entries of size one, on average."""
    return _longest_wave()[:n] if n <= KEPT else torch.arange(1, n + 1, dtype=torch.float64).cos() * sqrt(2)


@cache
def _longest_wave() -> Tensor:
    return torch.arange(1, KEPT + 1, dtype=torch.float64).cos() * sqrt(2)


def _length(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x.nan_to_num(0.0, 0.0, 0.0), dtype=torch.float64))
