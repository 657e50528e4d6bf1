"""`fingerprint`: a short text that two networks share when they differ by a symmetry only."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from math import floor, log
from typing import Any

import torch
from torch import Tensor, nn

from intertwine.canonical.blocks import moved, weights_of
from intertwine.canonical.canonicalize import canonical_element
from intertwine.canonical.ranks import sign_bytes
from intertwine.symmetry.layout import Layout, Leaf, Plus, Times
from intertwine.symmetry.symmetry import Symmetry
from intertwine.symmetry.symmetry import symmetry as find_symmetry


def fingerprint(
    model: nn.Module,
    *example_args: Any,
    precision: float = 0.01,
    symmetry: Symmetry | None = None,
    **example_kwargs: Any,
) -> str:
    """A hash of the canonical form: equal for two networks of one orbit, different for other networks.

    Where only permutations and signs act, canonical forms agree to the last bit and every bit enters. Where scales act,
    the last digits are rounding noise; what enters then is the sign of every weight, in canonical order, and the
    length of every tensor to `precision`. Two networks of one orbit in single precision get different fingerprints
    with a chance of about 1e-7 / precision per tensor; `intertwine.equivalent` has the last word.

    Args:
        model: any network. *example_args, **example_kwargs: inputs, as for `intertwine.symmetry`.
        precision: relative precision of the lengths. symmetry: the model's symmetry where it is already known.

    Example:
        >>> import torch, intertwine
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> x = torch.zeros(1, 3)
        >>> sym = intertwine.symmetry(model, x)
        >>> twin = sym.act(sym.random(seed=0), model)
        >>> intertwine.fingerprint(model, x) == intertwine.fingerprint(twin, x)
        True
    """
    found = symmetry if symmetry is not None else find_symmetry(model, *example_args, **example_kwargs)
    return fingerprint_weights(found, weights_of(found, model), precision)


def fingerprint_weights(symmetry: Symmetry, weights: Mapping[str, Tensor], precision: float = 0.01) -> str:
    """The same on weights without a model around them."""
    element, _ = canonical_element(symmetry, weights)
    form = moved(symmetry, element, weights)
    digest = hashlib.sha256(f"{symmetry.signature} {precision}".encode())
    for name in sorted(form):
        layout = symmetry.layouts.get(name)
        digest.update(f"{name} {tuple(form[name].shape)}".encode())
        if layout is not None and _is_scaled(layout) and form[name].is_floating_point():
            digest.update(_coarse(form[name] + layout.shift, precision))
        else:
            digest.update((form[name] + 0).contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def _is_scaled(layout: Layout) -> bool:
    def walk(tree: object) -> bool:
        if isinstance(tree, Leaf):
            return any(tree.powers)
        return isinstance(tree, (Times, Plus)) and any(walk(p) for p in tree.parts)

    return any(walk(axis) for axis in layout.axes)


def _coarse(x: Tensor, precision: float) -> bytes:
    """The sign of every entry, and the length in steps of the precision."""
    length = float(torch.linalg.vector_norm(x, dtype=torch.float64))
    step = floor(log(length) / precision + 0.5) if length else "zero"
    return str(step).encode() + sign_bytes(x).cpu().numpy().tobytes()
