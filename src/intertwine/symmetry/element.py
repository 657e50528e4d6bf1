"""Elements of a network's symmetry group: validate, compose, invert, save, load, and act on tensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from intertwine.argument_types import Float, Int
from intertwine.errors import InputError, MismatchError
from intertwine.files import write_tensors
from intertwine.symmetry.geometry import Dim, WireAxis, base_dims, spread

#: How far a matrix may be from orthogonal.
ORTHOGONALITY_TOLERANCE = 1e-6


def invalid_reason(found: Mapping[str, Tensor], neutral: Mapping[str, Tensor], matrix: str | None = None) -> str | None:
    """Why tensors read from a file are not a move of a wire; None if they are one.

    Args:
        found: permutation, scale, sign, matrix → tensor. neutral: the same of the move that does nothing.
        matrix: the group of the matrices, "GL", "O" or "O1".

    >>> invalid_reason({"permutation": torch.zeros(3).long()}, {"permutation": torch.arange(3)})
    'its permutation names some unit twice'
    """

    def form(tensor: Tensor) -> str:
        return f"{str(tensor.dtype).removeprefix('torch.')}{tuple(tensor.shape)}"

    if found.keys() != neutral.keys():
        return f"it has {', '.join(sorted(found)) or 'no parts'} instead of {', '.join(sorted(neutral))}"
    for name, part in found.items():
        if (part.shape, part.dtype) != (neutral[name].shape, neutral[name].dtype):
            return f"its {name} is {form(part)} instead of {form(neutral[name])}"
        if wrong := _wrong(name, part, neutral[name], matrix):
            return f"its {name} {wrong}"
    return None


def _wrong(name: str, part: Tensor, neutral: Tensor, matrix: str | None) -> str | None:
    if name == "permutation":
        return None if torch.equal(part.sort(-1).values, neutral) else "names some unit twice"
    if not bool(part.isfinite().all()):
        return "holds NaN or infinity"
    if name == "scale":
        return None if bool((part > 0).all()) else "holds numbers that are not positive"
    if name == "sign":
        return None if bool((part.abs() == 1).all()) else "holds numbers other than 1 and -1"
    if matrix == "GL":
        return None if bool((torch.linalg.matrix_rank(part) == part.shape[-1]).all()) else "has no inverse"
    straight = bool((part @ part.mT - neutral).abs().max() < ORTHOGONALITY_TOLERANCE)
    keeps_ones = matrix != "O1" or bool((part.sum(-1) - 1).abs().max() < ORTHOGONALITY_TOLERANCE)
    return None if straight and keeps_ones else "is not orthogonal" if not straight else "moves the all-ones direction"


@dataclass(frozen=True)
class WireSpec:
    """The form of a wire for elements: its size and which group acts.

    `bases` are positions of other wires, on which this one depends: it has one copy for every index of all of them.
    """

    name: str
    size: int
    bases: tuple[int, ...] = ()
    permutes: bool = False
    scales: int = 0
    signs: int = 0
    matrix: str | None = None


@dataclass(frozen=True)
class Move:
    """The part of an element that acts on one wire. `copies` in a shape: one axis per base."""

    permutation: Int[Tensor, "*copies n"] | None = None
    scale: Float[Tensor, "scales *copies n"] | None = None
    sign: Float[Tensor, "signs *copies n"] | None = None
    matrix: Float[Tensor, "*copies n n"] | None = None

    def items(self) -> list[tuple[str, Tensor]]:
        named = {"permutation": self.permutation, "scale": self.scale, "sign": self.sign, "matrix": self.matrix}
        return [(name, t) for name, t in named.items() if t is not None]


@dataclass(frozen=True, eq=False)
class Element:
    """An element of a symmetry group. `g @ h` acts as h first, then g; `g.inverse()` undoes g.

    Example:
        >>> import torch, intertwine
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> symmetry = intertwine.symmetry(model, torch.zeros(1, 3))
        >>> g = symmetry.random(seed=0)
        >>> (g @ g.inverse()).distance(symmetry.identity()) < 1e-12
        True
    """

    wire_specs: tuple[WireSpec, ...]
    moves: Mapping[int, Move]
    signature: str

    # -- group law -------------------------------------------------------------------------------------------------

    def __matmul__(self, other: Element) -> Element:
        if not isinstance(other, Element):
            return NotImplemented
        self._check_same(other)
        undo = other.inverse()
        return replace(self, moves={i: self._compose(i, other, undo) for i in self.moves})

    def _compose(self, i: int, first: Element, undo: Element) -> Move:
        """self after `first` on wire i; self's move is first read in the coordinates before `first`."""
        a, b, bases = self.moves[i], first.moves[i], self.wire_specs[i].bases
        permutation = scale = sign = matrix = None
        if a.permutation is not None and b.permutation is not None:
            permutation = torch.take_along_dim(b.permutation, undo.carry(a.permutation, bases), -1)
        if a.scale is not None and b.scale is not None:
            scale = b.scale * undo.carry(a.scale, (*bases, i), lead=1)
        if a.sign is not None and b.sign is not None:
            sign = b.sign * undo.carry(a.sign, (*bases, i), lead=1)
        if a.matrix is not None and b.matrix is not None:
            matrix = undo.carry(a.matrix, bases) @ b.matrix
        return Move(permutation, scale, sign, matrix)

    def inverse(self) -> Element:
        """The element that undoes this one."""
        moves = {}
        for i, move in self.moves.items():
            bases = self.wire_specs[i].bases
            inverted = {
                "permutation": lambda t, b=bases: self.carry(t.argsort(-1), b),
                "scale": lambda t, b=bases, i=i: 1 / self.carry(t, (*b, i), lead=1),
                "sign": lambda t, b=bases, i=i: self.carry(t, (*b, i), lead=1),
                "matrix": lambda t, b=bases: self.carry(torch.linalg.inv(t), b),
            }
            moves[i] = Move(**{name: inverted[name](t) for name, t in move.items()})
        return replace(self, moves=moves)

    def carry(self, x: Tensor, wires: Sequence[int], lead: int = 0) -> Tensor:
        """Move an array with one axis per wire (after `lead` others) by the permutations of this element alone."""
        for k, wire in sorted(enumerate(wires), key=lambda pair: -self.depth(pair[1])):
            move = self.moves.get(wire)
            if move is not None and move.permutation is not None:
                bases = [lead + wires.index(b) for b in self.wire_specs[wire].bases]
                x = torch.take_along_dim(x, spread(move.permutation, [*bases, lead + k], x.ndim), lead + k)
        return x

    def depth(self, wire: int) -> int:
        """On how many wires a wire depends; it acts before these."""
        return len(self.wire_specs[wire].bases)

    # -- acting ----------------------------------------------------------------------------------------------------

    def act_on_axis(self, x: Tensor, dim: int, dims: Sequence[Dim], degree: int = 1) -> Tensor:
        """Act on one exposed dimension of a tensor (see `geometry.act`)."""
        wire_axis = dims[dim].tree
        assert isinstance(wire_axis, WireAxis)
        move = self.moves.get(wire_axis.wire)
        if move is None:
            return x
        bases = self.wire_specs[wire_axis.wire].bases
        places = [*base_dims(dims, dim, bases), dim]
        if move.matrix is not None:
            return self._multiply(x, move.matrix, places, wire_axis, degree)
        factor = self._factor(move, wire_axis, degree)
        if factor is not None:
            x = x * spread(factor, places, x.ndim).to(x.device, x.dtype)
        if move.permutation is None:
            return x
        if not bases:
            return x.index_select(dim, move.permutation.to(x.device))
        return torch.take_along_dim(x, spread(move.permutation, places, x.ndim).to(x.device), dim)

    @staticmethod
    def _factor(move: Move, wire_axis: WireAxis, degree: int) -> Tensor | None:
        """The number each index is multiplied by: Π scale^power · Π sign^flip."""
        factor: Tensor | None = None
        for k, power in enumerate(wire_axis.powers):
            if power and move.scale is not None:
                part = move.scale[k] ** float(power * degree)
                factor = part if factor is None else factor * part
        for k, flip in enumerate(wire_axis.flips):
            if flip and degree % 2 and move.sign is not None:
                factor = move.sign[k] if factor is None else factor * move.sign[k]
        return factor

    @staticmethod
    def _multiply(x: Tensor, matrix: Tensor, places: list[int], wire_axis: WireAxis, degree: int) -> Tensor:
        if degree not in (1, -1):
            raise InputError(
                "A squared gradient cannot be moved by a general matrix. Move optimizer states with "
                "permutations, scales and signs only."
            )
        power = wire_axis.powers[0] * degree
        matrix = matrix if power == 1 else torch.linalg.inv(matrix).mT
        *bases, dim = places
        moved = x.movedim(dim, -1).unsqueeze(-2)
        at = [b if b < dim else b - 1 for b in bases]
        lead = spread(matrix.flatten(-2), [*at, moved.ndim - 2], moved.ndim - 1).unflatten(-1, matrix.shape[-2:])
        return (moved @ lead.mT.to(x.device, x.dtype)).squeeze(-2).movedim(-1, dim)

    # -- reading, comparing, storing -------------------------------------------------------------------------------

    def __getitem__(self, wire: str) -> Move:
        for i, move in self.moves.items():
            if self.wire_specs[i].name == wire:
                return move
        raise InputError(f"There is no wire {wire!r} in this element. Its wires: {', '.join(self.wires[:20])} …")

    @cached_property
    def wires(self) -> tuple[str, ...]:
        return tuple(self.wire_specs[i].name for i in self.moves)

    def only(self, *wires: str) -> Element:
        """The element that does what this one does on some wires and nothing elsewhere."""
        for wire in wires:
            self[wire]
        kept = {
            i: m if self.wire_specs[i].name in wires else identity_move(self.wire_specs, i)
            for i, m in self.moves.items()
        }
        return replace(self, moves=kept)

    def without_identities(self) -> Element:
        """The same element without the moves that do nothing, so that these cost nothing.

        Example:
            >>> import torch, intertwine
            >>> model = torch.nn.Sequential(torch.nn.Linear(2, 5), torch.nn.ReLU(), torch.nn.Linear(5, 1))
            >>> symmetry = intertwine.symmetry(model, torch.zeros(1, 2))
            >>> symmetry.identity().without_identities().wires, len(symmetry.random(seed=0).without_identities().wires)
            ((), 1)
        """
        kept = {i: m for i, m in self.moves.items() if not _is_identity(m, identity_move(self.wire_specs, i))}
        return replace(self, moves=kept)

    def distance(self, other: Element) -> float:
        """Largest difference between the two elements' entries; 0 for equal elements."""
        self._check_same(other)
        pairs = [(a, dict(other.moves[i].items())[name]) for i, m in self.moves.items() for name, a in m.items()]
        return max((float((a - b).abs().max()) for a, b in pairs if a.numel()), default=0.0)

    def save(self, path: str | Path) -> None:
        """Write the element to a safetensors file, atomically."""
        tensors = {f"{i}.{name}": t.contiguous() for i, move in self.moves.items() for name, t in move.items()}
        about = {"signature": self.signature, "strands": [asdict(s) for s in self.wire_specs]}
        about["sha256"] = _digest(about, tensors)
        # one entry, because several are written in an order that changes from run to run
        write_tensors(Path(path), tensors, {"about": json.dumps(about)})

    @classmethod
    def load(cls, path: str | Path) -> Element:
        """Read an element written by `save`.

        Raises:
            InputError: the file is missing or damaged, or holds no element of the group that it names.
        """
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {}).get("about", "{}"))
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  (no dict)
            if "strands" not in about:
                raise InputError(f"{path} holds tensors but no symmetry element. Pass a file written by Element.save.")
            specs = tuple(WireSpec(**(s | {"bases": tuple(s["bases"])})) for s in about["strands"])
            moves = _moves(specs, tensors)
            if about.pop("sha256", None) != _digest(about, tensors):
                raise ValueError("its checksum is wrong")
            return cls(specs, moves, about["signature"])
        except InputError:
            raise
        except (OSError, SafetensorError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise InputError(
                f"The element {path} could not be read ({type(error).__name__}: {error}). Pass a complete file written "
                "by Element.save; copy it again if it was damaged."
            ) from error

    def _check_same(self, other: Element) -> None:
        if self.signature != other.signature:
            raise MismatchError(
                "These are elements of two different symmetries. Take both from the symmetry of one architecture "
                "(sym.random, sym.identity, align)."
            )

    def __repr__(self) -> str:
        moved = sum(1 for i, m in self.moves.items() if not _is_identity(m, identity_move(self.wire_specs, i)))
        return f"Element({moved} of {len(self.moves)} wires moved)"


def _digest(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Checksum of an element: a scale with a wrong digit is still a valid scale."""
    seen = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name in sorted(tensors):
        seen.update(name.encode() + tensors[name].cpu().contiguous().numpy().tobytes())
    return seen.hexdigest()


def _moves(specs: Sequence[WireSpec], tensors: Mapping[str, Tensor]) -> dict[int, Move]:
    """The moves in a file, by wire; raises `ValueError` for one that is not of its group."""
    parts: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        i, name = key.split(".")
        parts.setdefault(int(i), {})[name] = tensor
    for i, found in parts.items():
        if wrong := invalid_reason(found, dict(identity_move(specs, i).items()), specs[i].matrix):
            raise ValueError(f"wire {specs[i].name!r}: {wrong}")
    return {i: Move(**parts[i]) for i in sorted(parts)}


def _is_identity(move: Move, identity: Move) -> bool:
    return all(torch.equal(a, b) for (_, a), (_, b) in zip(move.items(), identity.items(), strict=True))


def copies(specs: Sequence[WireSpec], i: int) -> tuple[int, ...]:
    """One size per base of a wire."""
    return tuple(specs[b].size for b in specs[i].bases)


def identity_move(specs: Sequence[WireSpec], i: int) -> Move:
    """The move that does nothing."""
    s, many = specs[i], copies(specs, i)
    return Move(
        permutation=torch.arange(s.size).expand(*many, s.size).contiguous() if s.permutes else None,
        scale=torch.ones(s.scales, *many, s.size, dtype=torch.float64) if s.scales else None,
        sign=torch.ones(s.signs, *many, s.size, dtype=torch.float64) if s.signs else None,
        matrix=torch.eye(s.size, dtype=torch.float64).expand(*many, s.size, s.size).contiguous() if s.matrix else None,
    )


def random_move(specs: Sequence[WireSpec], i: int, generator: torch.Generator, spread_of_scales: float) -> Move:
    """A random move: uniform permutations and signs, log-normal scales, Haar orthogonal or mild general matrices."""
    s, many = specs[i], copies(specs, i)
    noise = torch.rand(*many, s.size, generator=generator)
    scale = torch.randn(s.scales, *many, s.size, generator=generator, dtype=torch.float64)
    sign = torch.randint(0, 2, (s.signs, *many, s.size), generator=generator)
    matrix = _random_matrix(s.matrix, s.size, prod(many), generator, spread_of_scales) if s.matrix else None
    return Move(
        permutation=noise.argsort(-1) if s.permutes else None,
        scale=(spread_of_scales * scale).exp() if s.scales else None,
        sign=(2 * sign - 1).to(torch.float64) if s.signs else None,
        matrix=None if matrix is None else matrix.reshape(*many, s.size, s.size),
    )


def _random_matrix(
    kind: str, n: int, count: int, generator: torch.Generator, spread_of_scales: float
) -> Float[Tensor, "count n n"]:
    fixed = 1 if kind == "O1" else 0
    q, r = torch.linalg.qr(torch.randn(count, n - fixed, n - fixed, generator=generator, dtype=torch.float64))
    q = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)  # the sign fix makes it Haar
    if kind == "GL":
        stretch = (spread_of_scales * torch.randn(count, n, 1, generator=generator, dtype=torch.float64)).exp()
        return q @ (stretch * q.roll(1, 0))
    if kind == "O":
        return q
    basis = ones_first_basis(n)
    block = torch.eye(n, dtype=torch.float64).repeat(count, 1, 1)
    block[:, 1:, 1:] = q
    return basis @ block @ basis.mT


def ones_first_basis(n: int) -> Float[Tensor, "n n"]:
    """An orthogonal matrix whose first column is the all-ones direction."""
    start = torch.eye(n, dtype=torch.float64)
    start[:, 0] = 1
    q, _ = torch.linalg.qr(start)
    return q * q[:, :1].sum().sign()
