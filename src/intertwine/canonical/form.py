"""`canonicalize`: one representative of all networks that differ only by a symmetry, and `CanonicalForm`, the
canonical form of one set of weights with its hash and tensor norms.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import cos, log, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from intertwine.argument_types import Float, finite_float
from intertwine.canonical.order import NodeSort, Ordering, printed_permutations, sign_bytes
from intertwine.canonical.scales import ScaleNormaliser
from intertwine.errors import InputError, unknown_name
from intertwine.symmetry.blocks import ROUNDING, BlockedWeights, block_weights, transform_weights, weights_of
from intertwine.symmetry.element import Element
from intertwine.symmetry.symmetry import Symmetry
from intertwine.symmetry.symmetry import symmetry as find_symmetry

#: p of the NodeSort orders, where none is given.
BASE = 1.1
ORDERS = ("lexicographic", "nodesort", "nodesort-printed")
#: Steps of a fingerprint are at least this many units of the precision.
COARSEST = 64.0
KEPT = 65536  # entries of the fixed vector that are cached


@dataclass(frozen=True)
class Canonical:
    """A network in canonical form: `model`, and the `element` that takes the given model to it.

    `doubts`: reasons why another network of the orbit may have another form; empty for all but contrived networks (and
    never empty for NodeSort as printed).
    """

    model: nn.Module = field(repr=False)
    element: Element
    order: str
    doubts: tuple[str, ...]
    symmetry: Symmetry = field(repr=False)

    @property
    def unique(self) -> bool:
        """Whether every network of the orbit has this canonical form."""
        return not self.doubts

    def to_dict(self) -> dict[str, Any]:
        return {"order": self.order, "unique": self.unique, "doubts": list(self.doubts)}


def canonicalize(
    model: nn.Module,
    *example_args: Any,
    order: str = "lexicographic",
    base: float | int | None = None,
    symmetry: Symmetry | None = None,
    **example_kwargs: Any,
) -> Canonical:
    """The canonical form of a network: the same for all networks that differ by a symmetry only.

    Scales are normalised first (every unit's weights get length one), then signs (the first weight is positive), and
    units are sorted. With permutations and signs alone two networks of one orbit agree to the last bit, with scales up
    to rounding (1e-6 relative in single precision).

    Args:
        model: any network; it is not changed. *example_args, **example_kwargs: inputs, as for `intertwine.symmetry`.
        order: how units are sorted. "lexicographic": by their weights, entry by entry, signs before values.
            "nodesort": by the inner product of their outgoing weights with powers of `base`, sequentially from the
            output. "nodesort-printed": as in the thesis that proposed it, which is canonical for one hidden layer only.
        base: p of the NodeSort orders, 1.1 by default; the lexicographic order has none.
        symmetry: the symmetry of the model if it is known (it does not depend on the weights).

    Returns:
        A `Canonical` with `.model`, `.element` and `.doubts`.

    Raises:
        InputError: weights that are not finite, an unknown order, a base that overflows, a symmetry with matrices.

    Example:
        >>> import torch, intertwine
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        >>> x = torch.zeros(1, 3)
        >>> twin = intertwine.symmetry(model, x).act(intertwine.symmetry(model, x).random(seed=0), model)
        >>> a, b = intertwine.canonicalize(model, x).model, intertwine.canonicalize(twin, x).model
        >>> all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters()))
        True
    """
    found = symmetry if symmetry is not None else find_symmetry(model, *example_args, **example_kwargs)
    element, doubts = canonical_element(found, weights_of(found, model), order, base)
    return Canonical(found.act(element, model), element, order, doubts, found)


def canonical_element(
    symmetry: Symmetry, weights: Mapping[str, Tensor], order: str = "lexicographic", base: float | int | None = None
) -> tuple[Element, tuple[str, ...]]:
    """The element that takes weights to their canonical form, and the doubts about it."""
    base = _checked_base(symmetry, order, base)
    if order == "nodesort-printed":
        doubt = "as printed, NodeSort depends on the order of the units it sorts wherever two hidden layers meet"
        return _element(symmetry, {}, printed_permutations(block_weights(symmetry, weights), base), {}), (doubt,)
    cut = block_weights(symmetry, weights, copy=any(s.scales or s.signs for s in symmetry.wire_specs))
    scales = ScaleNormaliser(cut).run()
    ordering = sort(cut, order, base)
    element = _ordered_element(symmetry, scales, ordering)
    doubts = []
    if ordering.choices and not _same_from_elsewhere(symmetry, weights, element, order, base):
        doubts.append("some units look the same from all sides but cannot be exchanged, so their order is arbitrary")
    coarse = [b.parameter for b in cut.blocks if b.scaled and b.precision > torch.finfo(torch.float32).eps]
    if coarse:
        doubts.append(f"scales act on {coarse[0]!r} in half precision, where rounding may change the order of units")
    return element, tuple(doubts)


def sort(cut: BlockedWeights, order: str, base: float) -> Ordering:
    """Sort weights whose scales are normalised."""
    return (NodeSort(cut, base) if order == "nodesort" else Ordering(cut)).run()


def _ordered_element(symmetry: Symmetry, scales: Mapping[int, Tensor], ordering: Ordering) -> Element:
    order = {w: ordering.permutation(w) for w, spec in enumerate(symmetry.wire_specs) if spec.permutes}
    return _element(symmetry, scales, order, ordering.signs)


def _element(
    symmetry: Symmetry, scales: Mapping[int, Tensor], order: Mapping[int, Tensor], signs: Mapping[int, Tensor]
) -> Element:
    identity = symmetry.identity()
    moves = {}
    for i, move in identity.moves.items():
        parts = {"permutation": order, "scale": scales, "sign": signs}
        moves[i] = replace(move, **{name: part[i] for name, part in parts.items() if i in part})
    return replace(identity, moves=moves)


def _same_from_elsewhere(
    symmetry: Symmetry, weights: Mapping[str, Tensor], element: Element, order: str, base: float
) -> bool:
    """Whether the form with all units shuffled has the same form, so that arbitrary choices made no difference."""
    form = transform_weights(symmetry, element, weights)
    scaled = any(s.scales for s in symmetry.wire_specs)
    for seed in range(2):
        shuffled = symmetry.random(seed)
        order_of = {i: m.permutation for i, m in shuffled.moves.items() if m.permutation is not None}
        shuffle = _element(symmetry, {}, order_of, {i: m.sign for i, m in shuffled.moves.items() if m.sign is not None})
        start = transform_weights(symmetry, shuffle, form)
        cut = block_weights(symmetry, start, copy=True)
        again = transform_weights(symmetry, _ordered_element(symmetry, {}, sort(cut, order, base)), start)
        for name in symmetry.layouts:
            if name in form:  # equal up to rounding where there are scales
                x = form[name]
                noise = ROUNDING * torch.finfo(x.dtype).eps if scaled and x.is_floating_point() else 0.0
                if not torch.allclose(x, again[name], rtol=noise, atol=0.0):
                    return False
    return True


def _checked_base(symmetry: Symmetry, order: str, base: float | int | None) -> float:
    """The base of the order; invalid arguments raise an error."""
    if order not in ORDERS:
        raise InputError(unknown_name("order", order, ORDERS))
    if order == "lexicographic" and base is not None:
        raise InputError(
            f"The lexicographic order has no base, but base is {base!r}. Pass order='nodesort', or leave the base out."
        )
    if base is not None and not (finite_float(base) or 0.0) > 1:
        raise InputError(f"NodeSort needs a base above 1, but base is {base!r}. Try 1.1; the thesis's example uses 10.")
    matrices = [s.name for s in symmetry.wire_specs if s.matrix]
    if matrices:
        raise InputError(
            f"The symmetry contains matrices (on {matrices[0]!r}), but canonical forms support permutations, scales "
            "and signs only. Pass the symmetry without continuous=True."
        )
    return BASE if base is None else float(base)


@dataclass(frozen=True, eq=False)
class CanonicalForm:
    """Weights, the element that takes them to their canonical form, and that form."""

    symmetry: Symmetry = field(repr=False)
    weights: Mapping[str, Tensor] = field(repr=False)
    element: Element
    doubts: tuple[str, ...]

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The canonical form."""
        return transform_weights(self.symmetry, self.element, self.weights)

    @cached_property
    def lengths(self) -> Tensor:
        """The length of every tensor of the form, which no order changes, and noise hardly does."""
        tensors = [t for t in self.tensors.values() if t.is_floating_point()]
        return torch.tensor([_length(t) for t in tensors], dtype=torch.float64)

    def fingerprint(self, precision: float | int = 3e-3) -> str:
        """See `intertwine.fingerprint`."""
        if not finite_float(precision) or precision < 0:
            raise InputError(
                f"precision must be a finite number above 0, such as 3e-3, the default, but is {precision!r}. Two sums "
                "are rounded to it."
            )
        digest = hashlib.sha256(f"{self.symmetry.signature} {precision}".encode())
        total = torch.zeros(2, dtype=torch.float64)
        for i, name in enumerate(sorted(self.tensors)):
            x, layout = self.tensors[name], self.symmetry.layouts.get(name)
            digest.update(f"{name} {tuple(x.shape)}".encode())
            if layout is not None and x.is_floating_point() and any(any(leaf.powers) for leaf in layout.wire_axes()):
                precision = max(precision, COARSEST * torch.finfo(x.dtype).eps)
                digest.update(sign_bytes(x + layout.shift).cpu().numpy().tobytes())
                total += (1 + cos(i) / 2) * _summary(x.double() + layout.shift)
            else:  # adding zero makes both zeros equal
                digest.update((x + 0).contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes())
        # only the totals are rounded: every rounded number may lie at the edge of a step
        digest.update(str((total / precision + 0.5).floor().to(torch.int64).tolist()).encode())
        return digest.hexdigest()[:32]


def canonical_form(symmetry: Symmetry, weights: Mapping[str, Tensor]) -> CanonicalForm:
    """The canonical form of weights."""
    element, doubts = canonical_element(symmetry, weights)
    return CanonicalForm(symmetry, weights, element, doubts)


def _summary(x: Tensor) -> Float[Tensor, 2]:
    """The logarithm of the length, and the cosine with a fixed vector.

    A length hardly changes with one entry of many, and not at all if it is normalised; a cosine does.
    """
    length = _length(x)
    if length == 0:
        return torch.zeros(2, dtype=torch.float64)
    n = x.numel()
    wave = _kept_wave()[:n] if n <= KEPT else _wave(n)
    return torch.tensor([log(length), float(wave @ x.flatten().cpu()) / length], dtype=torch.float64)


def _wave(n: int) -> Tensor:
    """A fixed vector with entries of mean square one."""
    return torch.arange(1, n + 1, dtype=torch.float64).cos() * sqrt(2)


@cache
def _kept_wave() -> Tensor:
    return _wave(KEPT)


def _length(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x.nan_to_num(0.0, 0.0, 0.0), dtype=torch.float64))
