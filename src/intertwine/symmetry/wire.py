"""Wires: the index sets of a network that a group acts on, the group of each, and where it acts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from fractions import Fraction
from math import lgamma, prod
from typing import Any

_SUPERSCRIPT = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class WireGroup:
    """The group of one wire: on `size` indices, one independent copy for each index of the wires it depends on.

    `permutes`: all permutations of the indices. `scales`, `signs`: how many independent positive scales (±1 signs) each
    index carries. `matrix`: None, "GL" (any invertible matrix), "O" (orthogonal) or "O1" (orthogonal, fixing the
    all-ones vector); a matrix group contains the permutations and stands alone.
    """

    size: int
    copies: tuple[int, ...] = ()
    permutes: bool = False
    scales: int = 0
    signs: int = 0
    matrix: str | None = None

    @property
    def trivial(self) -> bool:
        return not (self.permutes or self.scales or self.signs or self.matrix)

    @property
    def log_order(self) -> float:
        """ln of the number of permutations."""
        return prod(self.copies) * lgamma(self.size + 1) if self.permutes else 0.0

    @property
    def log_signs(self) -> float:
        """ln of the number of sign patterns."""
        return prod(self.copies) * self.size * self.signs * 0.6931471805599453

    @property
    def dimension(self) -> int:
        """Dimension of the continuous part."""
        n = self.size
        own = {"GL": n * n, "O": n * (n - 1) // 2, "O1": (n - 1) * (n - 2) // 2}.get(self.matrix or "", n * self.scales)
        return prod(self.copies) * own

    def __str__(self) -> str:
        n = self.size
        if self.matrix == "O1":
            parts = [f"O({n}) fixing 1"]
        elif self.matrix:
            parts = [f"{self.matrix}({n})"]
        else:
            both, plus, minus = min(self.scales, self.signs), self.scales, self.signs
            powers = [("(R*)", both), ("(R₊)", plus - both), ("{±1}", minus - both)]
            parts = [f"S_{n}"] if self.permutes else []
            parts += [
                f"{base}{n if k == 1 else f'{k}·{n}'}".replace(")", ")^").replace("}", "}^") for base, k in powers if k
            ]
        text = " ⋉ ".join(parts) or "1"
        if not self.copies:
            return text
        return f"({text}){str(prod(self.copies)).translate(_SUPERSCRIPT)}"


@dataclass(frozen=True)
class Slot:
    """One place where a wire acts: an axis of a parameter or buffer, or a block of it.

    The wire's index i sits at positions `offset + stride · i (+ what lies inside a stride)` of the axis. `powers` are
    the exponents with which each scale of the wire enters there, `flips` the same for signs; `role` names the kind.
    """

    parameter: str
    axis: int
    role: str
    offset: int
    stride: int
    powers: tuple[Fraction, ...] = ()
    flips: tuple[int, ...] = ()

    def __str__(self) -> str:
        block = "" if self.offset == 0 and self.stride == 1 else f" from {self.offset} step {self.stride}"
        return f"{self.parameter}[axis {self.axis}{block}] {self.role}"


@dataclass(frozen=True)
class Wire:
    """An index set of the network (the channels of a layer, the heads of an attention) with its group and its slots."""

    name: str
    size: int
    group: WireGroup
    slots: tuple[Slot, ...]
    over: tuple[str, ...] = ()  # the wires it depends on: its element differs for each of their indices
    pinned: str | None = None  # why its indices keep their order, where only scales or signs act

    def __repr__(self) -> str:
        over = f", one per index of {', '.join(self.over)}" if self.over else ""
        return f"Wire({self.name}: {self.size}, {self.group}, {len(self.slots)} slots{over})"

    def to_dict(self) -> dict[str, Any]:
        slots = [asdict(s) | {"powers": [str(p) for p in s.powers]} for s in self.slots]
        return {"name": self.name, "size": self.size, "group": str(self.group), "over": list(self.over), "slots": slots}


@dataclass(frozen=True)
class Frozen:
    """An axis, or a block of one, on which only the identity acts, and why. Unpacks as `what, reason`.

    `parameter`, `axis`: where it is, for code; `what` says it in words.
    """

    what: str
    reason: str
    parameter: str = field(default="", repr=False)
    axis: int = field(default=-1, repr=False)

    def __iter__(self):
        return iter((self.what, self.reason))
