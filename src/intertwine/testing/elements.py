"""The laws of a group, on elements alone: identity, inverses, associativity, single wires, files."""

from __future__ import annotations

import tempfile
from functools import reduce
from operator import matmul
from pathlib import Path

import torch
from torch import Tensor

from intertwine.symmetry.element import Element
from intertwine.symmetry.symmetry import Symmetry
from intertwine.testing.laws import Ledger


def check_elements(symmetry: Symmetry, f: Element, g: Element, h: Element, ledger: Ledger) -> None:
    """Check the laws that elements obey among themselves."""
    e = symmetry.identity()
    same(ledger, "identity", "g @ e", g @ e, g)
    same(ledger, "identity", "e @ g", e @ g, g)
    same(ledger, "inverse", "g @ g⁻¹", g @ g.inverse(), e)
    same(ledger, "inverse", "g⁻¹ @ g", g.inverse() @ g, e)
    same(ledger, "inverse", "(g⁻¹)⁻¹", g.inverse().inverse(), g)
    same(ledger, "associativity", "(f @ g) @ h", (f @ g) @ h, f @ (g @ h))
    same(ledger, "inverse", "(g @ h)⁻¹", (g @ h).inverse(), h.inverse() @ g.inverse())
    _check_only(symmetry, g, ledger)
    _check_storage(g, ledger)


def _check_only(symmetry: Symmetry, g: Element, ledger: Ledger) -> None:
    same(ledger, "only", "g on all wires", g.only(*g.wires), g)
    same(ledger, "only", "g on no wire", g.only(), symmetry.identity())
    # a fibre is read in the coordinates its base still has, so the parts of fibres act before those of their bases
    order = sorted(g.moves, key=g.depth)
    parts = [g.only(g.strands[i].name) for i in order]
    same(ledger, "only", "the product of the wires", reduce(matmul, parts, symmetry.identity()), g)


def _check_storage(g: Element, ledger: Ledger) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "element.safetensors"
        g.save(file)
        loaded = Element.load(file)
    alike = loaded.strands == g.strands and loaded.signature == g.signature
    ledger.note("storage", 0.0 if alike else 1.0, "the description of the group", tolerance=0.0)
    error, wire = apart(loaded, g)
    ledger.note("storage", error, "the element", wire, tolerance=0.0)


def same(ledger: Ledger, law: str, what: str, a: Element, b: Element) -> None:
    """Two elements must agree; if they do not, the wire on which they differ most is named."""
    error, wire = apart(a, b)
    ledger.note(law, error, what, wire)


def apart(a: Element, b: Element) -> tuple[float, tuple[str, ...]]:
    """Largest difference between two elements, and the wire it is on; an absent part is infinitely far."""
    worst, wire = 0.0, ()
    for i, move in a.moves.items():
        left, right = dict(move.items()), dict(b.moves[i].items()) if i in b.moves else {}
        for name in left.keys() | right.keys():
            gap = _gap(left.get(name), right.get(name))
            if not gap <= worst:
                worst, wire = gap, (a.strands[i].name,)
    return worst, wire


def _gap(a: Tensor | None, b: Tensor | None) -> float:
    if a is None or b is None or a.shape != b.shape:
        return float("inf")
    if a.numel() == 0:
        return 0.0
    a, b = a.to(torch.float64), b.to(torch.float64)
    return float((a - b).abs().max() / a.abs().max().clamp(min=1.0))
