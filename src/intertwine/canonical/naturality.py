"""Naturality: how far two networks are from having functionally equivalent features, arrow by arrow.

Chen, Zhou and Yan (2024), Definition 3.1, read a network as a functor: arrows (layers) become functions with weights.
Two networks have equivalent features if invertible maps τ of their features commute with every arrow. Here τ is the
action of a group element on every tensor of the captured program, so that any architecture has its squares.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from intertwine.canonical.batches import Inputs, batches
from intertwine.canonical.squares import Gap, Squares
from intertwine.errors import MismatchError
from intertwine.graph.capture import capture, check_model, empty_caches
from intertwine.graph.copies import copied
from intertwine.graph.program import Program
from intertwine.symmetry.certificate import TOLERANCE
from intertwine.symmetry.element import Element
from intertwine.symmetry.exact import float64_forward
from intertwine.symmetry.symmetry import Symmetry, from_program

#: Weights of a twin were rounded a few times; so many steps of their precision are no difference.
ROUNDINGS = 8


@dataclass(frozen=True)
class Arrow:
    """One arrow: a call of the program, where it stands, the weights it reads, and how far its square is from closing.

    `from_input` says that it reads the network's input; Definition 3.1 as printed leaves those arrows out.
    """

    name: str
    op: str
    place: str
    weights: tuple[str, ...]
    from_input: bool
    residual: float


@dataclass(frozen=True)
class Naturality:
    """The squares of all arrows. See `naturality`."""

    arrows: tuple[Arrow, ...] = field(repr=False)
    batches: int
    tolerance: float

    @property
    def max(self) -> float:
        """The largest residual."""
        return max((a.residual for a in self.arrows), default=0.0)

    @property
    def max_without_input(self) -> float:
        """The largest residual of the arrows that do not read the network's input: Definition 3.1 as printed."""
        return max((a.residual for a in self.arrows if not a.from_input), default=0.0)

    @property
    def ok(self) -> bool:
        """Whether every square closes within the tolerance."""
        return self.max <= self.tolerance

    @property
    def worst(self) -> Arrow | None:
        """The arrow with the largest residual."""
        return max(self.arrows, key=lambda a: a.residual, default=None)

    def to_dict(self) -> dict[str, Any]:
        head = {"ok": self.ok, "max": self.max, "batches": self.batches, "tolerance": self.tolerance}
        return head | {"arrows": [asdict(a) for a in self.arrows]}

    def __repr__(self) -> str:
        verdict = "natural" if self.ok else "not natural"
        worst = f", largest residual {self.max:.1e} at {self.worst.op} ({self.worst.place})" if self.worst else ""
        return f"Naturality({verdict}: {len(self.arrows)} arrows, {self.batches} batches{worst})"


def naturality(
    a: nn.Module,
    b: nn.Module,
    element: Element | None,
    data: Any,
    *,
    symmetry: Symmetry | None = None,
    tolerance: float | None = None,
) -> Naturality:
    """Measure, arrow by arrow, whether the element that takes b to a is a natural transformation between them.

    For every call f of the captured program, in float64: with Z the tensors that b computes on the data, τ Z_out is
    compared with f(weights of a, τ Z_in), where τ is how the element moves each tensor; on the network's inputs and
    outputs it is the identity, and their arrows count too. A residual is ‖difference‖ / max(‖left‖, ‖right‖) over all
    data: rounding alone for exact twins, and for trained pairs a score from 0 to 2 of how much one arrow differs.

    Args:
        a, b: two models of one architecture; neither is changed. element: takes b to a (a ≈ act(element, b)), for
            example from `align` or `equivalent`; None compares the two as they are.
        data: a tensor (one batch), a tuple (the positional arguments of one call), a mapping (its keyword arguments),
            or an iterable of batches: tensors, mappings, or pairs (inputs, targets), of which the targets are ignored.
        symmetry: the symmetry of the architecture; found from a and the first batch if not given. With matrices
            (continuous=True) norm weights of both models are folded first, as `act` does.
        tolerance: what `.ok` allows; by default what the coarser of the two models' numbers can hold.

    Returns:
        A `Naturality` with one `Arrow` per call, `.max`, `.ok` and `.worst`.

    Raises:
        InputError: the data is not usable. MismatchError: models or element are of another architecture.

    Example:
        >>> import torch, intertwine
        >>> from intertwine.canonical.naturality import naturality
        >>> b = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> x = torch.randn(5, 3)
        >>> sym = intertwine.symmetry(b, x)
        >>> g = sym.random(seed=0)
        >>> naturality(sym.act(g, b.double()), b, g, x).ok
        True

    Reference: Chen, Zhou and Yan, Going Beyond Neural Network Feature Similarity, 2024, Definition 3.1, Eq. 4. The
    printed text declares τ from a to b and uses it from b to a, and leaves out the arrow from the input, without which
    their Theorem 3.3 fails; here it is included (see `max_without_input`).
    """
    check_model(a)
    check_model(b)
    known = _Shapes(a, symmetry, element is not None and any(s.matrix for s in element.strands))
    gaps: dict[int, Gap] = defaultdict(Gap)
    exact: list[nn.Module] = []
    count = 0
    for inputs in batches(data):
        count += 1
        sym = known.at(inputs)
        g = sym.identity() if element is None else element
        exact = exact or [_exact(sym, g, model) for model in (a, b)]
        with float64_forward():
            for position, gap in Squares(sym, g, exact[0], exact[1], inputs):
                gaps[position] = gaps[position] + gap
    return Naturality(tuple(_arrows(known.program, gaps)), count, _allowed(a, b) if tolerance is None else tolerance)


def _allowed(*models: nn.Module) -> float:
    """What the rounding of the weights leaves between exact twins."""
    kinds = {w.dtype for model in models for w in model.parameters() if w.is_floating_point()}
    return max([TOLERANCE, *(ROUNDINGS * torch.finfo(kind).eps for kind in kinds)])


class _Shapes:
    """The symmetry of one architecture for batches of several shapes: a program is captured for one shape alone."""

    def __init__(self, model: nn.Module, given: Symmetry | None, continuous: bool) -> None:
        self.model, self.continuous = model, continuous if given is None else given.continuous
        self.distrusted = frozenset[str]() if given is None else given._distrusted
        self.found: dict[Any, Symmetry] = {}
        if given is not None:
            sources = [s for s in given._discovery.graph.program.sources if s.kind == "input"]
            self.found[tuple((s.shape, s.dtype.is_floating_point) for s in sources)] = given

    @property
    def program(self) -> Program:
        return next(iter(self.found.values()))._discovery.graph.program

    def at(self, inputs: Inputs) -> Symmetry:
        """The symmetry for the arguments of one call."""
        tensors = [v for v in tree_leaves(inputs) if isinstance(v, Tensor)]
        key = tuple((tuple(v.shape), v.is_floating_point()) for v in tensors)
        if key not in self.found:
            sym = from_program(capture(self.model, *inputs), self.continuous, self.distrusted)
            first = next(iter(self.found.values()), sym)
            ops = [[call.op for call in x._discovery.graph.program.calls] for x in (first, sym)]
            if first.signature != sym.signature or ops[0] != ops[1]:
                raise MismatchError(
                    f"On inputs of shapes {[shape for shape, _ in key]} the model runs another program than on the "
                    "first ones, so its arrows cannot be added up. Measure batches of that shape on their own."
                )
            self.found[key] = sym
        return self.found[key]


def _exact(symmetry: Symmetry, g: Element, model: nn.Module) -> nn.Module:
    """A float64 copy of a model of this architecture, with what a matrix must pass folded."""
    symmetry._check_element(g)
    symmetry._check_model(model)
    exact = copied(model).to(torch.float64)
    empty_caches(exact)
    return symmetry.folded(exact)


def _arrows(program: Program, gaps: Mapping[int, Gap]) -> Iterator[Arrow]:
    """A row for each call that was compared, with the weights it reads, directly or through others made of weights."""
    weights: dict[str, tuple[str, ...]] = {s.name: (s.target,) if s.target else () for s in program.sources}
    inputs = {s.name for s in program.sources if s.kind == "input"}
    fluid, plain = set(inputs), set(inputs)  # what depends on the inputs; what is an input but for views of it
    for position, call in enumerate(program.calls):
        reads = sorted(call.reads)
        own = tuple(dict.fromkeys(w for name in reads for w in weights.get(name, ())))
        data = call.reads & fluid
        if data:
            fluid.add(call.name)
            plain |= {call.name} if data <= plain and not own else set()
        else:
            weights[call.name] = own
        if position in gaps:
            yield Arrow(call.name, call.op, call.place, own, data <= plain, gaps[position].residual)
