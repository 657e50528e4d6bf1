"""`naturality`: how far a symmetry element is from commuting with every call of a program (Chen, Zhou and Yan 2024).

Definition 3.1 reads a network as a functor: arrows (layers) become functions with weights. Two networks have equivalent
features if invertible maps τ of their features commute with every arrow. Here τ is the action of a group element on
every tensor of the captured program, so that the definition applies to any architecture.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from intertwine.errors import InputError, MismatchError
from intertwine.graph.capture import capture
from intertwine.graph.constraints import Value
from intertwine.graph.model import check_model, copy_module, empty_caches
from intertwine.graph.program import Call, Program, Ref
from intertwine.graph.runner import ProgramRunner, float64_forward
from intertwine.symmetry.element import Element
from intertwine.symmetry.symmetry import TOLERANCE, Symmetry, from_program

Inputs = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments of one call of a model


def batches(data: Any) -> Iterator[Inputs]:
    """The arguments of each call in some data, without targets.

    A tensor is one batch. A tuple is the positional arguments of one call, a mapping its keyword arguments. Anything
    else that can be iterated (a list, a DataLoader) holds batches: each a tensor, a mapping, or `(inputs, targets)`
    where the inputs are again a tensor, a tuple of arguments or a mapping.

    Example:
        >>> import torch
        >>> from intertwine.lab.papers.naturality import batches
        >>> x, y = torch.zeros(4, 3), torch.zeros(4)
        >>> [args[0].shape for args, _ in batches([(x, y), (x[:2], y[:2])])]
        [torch.Size([4, 3]), torch.Size([2, 3])]
    """
    count = 0
    for inputs in [data] if isinstance(data, (Tensor, tuple, Mapping)) else map(_inputs, _each(data)):
        count += 1
        yield _call(inputs)
    if count == 0:
        raise InputError(
            "The data has no batches. Pass at least one batch of inputs; a generator can be used only once."
        )


def _each(data: Any) -> Iterable[Any]:
    if isinstance(data, (str, bytes)) or not isinstance(data, Iterable):
        raise InputError(
            f"The data is a {type(data).__name__}. Pass a tensor, a tuple of the model's arguments, or an iterable of "
            "(inputs, targets) batches."
        )
    return data


def _inputs(batch: Any) -> Any:
    """A batch without its targets."""
    if isinstance(batch, (Tensor, Mapping)):
        return batch
    if isinstance(batch, (tuple, list)) and len(batch) in (1, 2):
        return batch[0]
    found = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, (tuple, list)) else type(batch).__name__
    raise InputError(
        f"A batch is a {found}, so its inputs are not clear. Make every batch a tensor, a mapping of keyword "
        "arguments, or a pair (inputs, targets)."
    )


def _call(inputs: Any) -> Inputs:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, (tuple, list)) else ((inputs,), {})


MASK = 1e30  # larger numbers stand for "minus infinity"
LARGEST_REACH = 1e6  # larger inputs are masks, which do not determine rounding
CANCELLED = 1e-6  # a result this much smaller than its inputs is compared with the size of the inputs


@dataclass(frozen=True)
class Gap:
    """The distance of two tensors as sums of squares, which add up over batches; `least` is the size of rounding."""

    apart: float = 0.0
    left: float = 0.0
    right: float = 0.0
    least: float = 0.0

    @staticmethod
    def between(a: Tensor, b: Tensor, around: float) -> Gap:
        finite = a.isfinite()
        if a.shape != b.shape or not torch.equal(finite, b.isfinite()):
            return Gap(apart=float("inf"))
        kept = finite & ~((a.abs() > MASK) & (b.abs() > MASK))
        a, b = a[kept], b[kept]
        least = (CANCELLED * min(around, LARGEST_REACH)) ** 2 * a.numel()
        apart, left, right = (float(t.square().sum()) for t in (a - b, a, b))
        return Gap(apart, left, right, least)

    def __add__(self, other: Gap) -> Gap:
        return Gap(self.apart + other.apart, self.left + other.left, self.right + other.right, self.least + other.least)

    @property
    def residual(self) -> float:
        """The distance relative to the larger of the two; between 0 and 2, infinite where infinities disagree."""
        size = max(self.left, self.right, self.least)
        return (self.apart / size) ** 0.5 if size else self.apart


class Squares:
    """One run of a program; iterating yields (position of the call, gap) for every compared tensor.

    The network b runs unchanged. Before each call its inputs are moved by τ, and the call runs on them with the weights
    of a; the result should be b's own result, moved. Errors are not passed on to the next call, so that each square is
    independent. Results that depend on weights alone belong to the weights.
    """

    def __init__(self, symmetry: Symmetry, g: Element, a: nn.Module, b: nn.Module, inputs: Inputs) -> None:
        self.symmetry, self.g, self.graph = symmetry, g, symmetry.geometry.graph
        self.program = self.graph.program
        self.a, self.b = (ProgramRunner(self.program, m, inputs) for m in (a, b))
        self.fluid = {s.name for s in self.program.inputs if s.kind == "input"}  # names that depend on the inputs
        self.inner: dict[str, Any] = {}  # results without a known τ, passed on unchanged
        self.held: dict[str, Value] = dict(self.graph.values)  # current value of a name; calls in place change it
        self.family: dict[str, set[str]] = {}  # names of one storage
        self.raw: set[str] = set()  # uninitialised memory
        self.maker: dict[str, int] = {}  # name → the call that made it

    def __iter__(self) -> Iterator[tuple[int, Gap]]:
        for position, call in enumerate(self.program.calls):
            self.maker[call.name] = position
            if not call.reads & self.fluid:
                self.a.step(position)
                self.b.step(position)
                self._track(call)
                continue
            around = self.b.size_of_inputs(position)
            moved = self.b.evaluate(position, {name: self._moved(name) for name in call.reads})
            own = self.b.step(position)
            self.a.forget(position)
            self.fluid.add(call.name)
            self._track(call)
            if self._is_raw(call):
                continue
            if self._has_move(call, own):
                yield self._position(call), Gap.between(self._act(call.name, own), moved, around)
            else:
                self.inner[call.name] = moved
                if call.inplace and isinstance(call.args[0], Ref) and call.args[0].name in self.inner:
                    self.inner[call.args[0].name] = moved

    def _moved(self, name: str) -> Any:
        """The input of a call of a under a name: a's own weights, or the result of b, moved."""
        if name in self.inner:
            return _copied(self.inner[name])
        if name not in self.fluid:
            return _copied(self.a.values[name])
        return _copied(self._act(name, self.b.values[name]))

    def _act(self, name: str, x: Any) -> Any:
        value = self.held.get(name)
        if not isinstance(x, Tensor) or not x.is_floating_point() or value is None:
            return x
        return self.symmetry.act_on_value(self.g, name, value, x)

    def _has_move(self, call: Call, own: Any) -> bool:
        """Whether a result is a tensor with a τ: integers, tuples and the squares inside a norm have none."""
        value = self.graph.values.get(call.name)
        if value is None or not isinstance(own, Tensor) or not own.is_floating_point():
            return False
        return tuple(own.shape) == value.shape and (value.lazy or self.symmetry.geometry.predicts(value))

    def _position(self, call: Call) -> int:
        """The call itself, or the one that returned the tuple from which it takes its result."""
        taken = call.target is operator.getitem and isinstance(call.args[0], Ref)
        return self.maker.get(call.args[0].name, self.maker[call.name]) if taken else self.maker[call.name]

    def _is_raw(self, call: Call) -> bool:
        first = call.args[0] if call.args else None
        seen = isinstance(first, Ref) and first.name in self.raw and call.aliases and not call.inplace
        if "empty" in call.op or seen:
            self.raw.add(call.name)
        return call.name in self.raw

    def _track(self, call: Call) -> None:
        """Follow storages: after a call in place, all names of the tensor that it wrote to have the new value."""
        first = call.args[0] if call.args and isinstance(call.args[0], Ref) else None
        if first is None or not (call.aliases or first.name in self.family):
            return
        family = self.family.setdefault(first.name, {first.name})
        if call.aliases:
            family.add(call.name)
            self.family[call.name] = family
        if call.inplace and call.name in self.held and first.name in self.held:
            old, new = self.held[first.name], self.held[call.name]
            self.held |= {name: new for name in family if self.held.get(name) is old}
            self.fluid |= family if call.name in self.fluid else set()


def _copied(x: Any) -> Any:
    """A contiguous copy: calls may write to their inputs, and views must fit."""
    return tree_map(lambda t: t.clone(memory_format=torch.contiguous_format) if isinstance(t, Tensor) else t, x)


#: Weights of a twin are rounded a few times; this many steps of their precision count as equal.
ROUNDINGS = 8


@dataclass(frozen=True)
class Arrow:
    """One arrow: a call of the program, its module, the weights it reads, and the residual of its square.

    `from_input`: whether it reads the network's input; definition 3.1 as printed leaves these arrows out.
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
        tolerance: of `.ok`; by default the precision of the coarser of the two models.

    Returns:
        A `Naturality` with one `Arrow` per call, `.max`, `.ok` and `.worst`.

    Raises:
        InputError: the data is not usable. MismatchError: models or element are of another architecture.

    Example:
        >>> import torch, intertwine
        >>> from intertwine.lab.papers.naturality import naturality
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
    known = _Shapes(a, symmetry, element is not None and any(s.matrix for s in element.wire_specs))
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
    """The tolerance for exact twins, given the rounding of their weights."""
    kinds = {w.dtype for model in models for w in model.parameters() if w.is_floating_point()}
    return max([TOLERANCE, *(ROUNDINGS * torch.finfo(kind).eps for kind in kinds)])


class _Shapes:
    """The symmetry of one architecture for batches of several shapes; a program is captured for one shape."""

    def __init__(self, model: nn.Module, given: Symmetry | None, continuous: bool) -> None:
        self.model, self.continuous = model, continuous if given is None else given.continuous
        self.distrusted = frozenset[str]() if given is None else given.distrusted
        self.found: dict[Any, Symmetry] = {}
        if given is not None:
            sources = [s for s in given.geometry.graph.program.inputs if s.kind == "input"]
            self.found[tuple((s.shape, s.dtype.is_floating_point) for s in sources)] = given

    @property
    def program(self) -> Program:
        return next(iter(self.found.values())).geometry.graph.program

    def at(self, inputs: Inputs) -> Symmetry:
        """The symmetry for the arguments of one call."""
        tensors = [v for v in tree_leaves(inputs) if isinstance(v, Tensor)]
        key = tuple((tuple(v.shape), v.is_floating_point()) for v in tensors)
        if key not in self.found:
            sym = from_program(capture(self.model, *inputs), self.continuous, self.distrusted)
            first = next(iter(self.found.values()), sym)
            ops = [[call.op for call in x.geometry.graph.program.calls] for x in (first, sym)]
            if first.signature != sym.signature or ops[0] != ops[1]:
                raise MismatchError(
                    f"On inputs of shapes {[shape for shape, _ in key]} the model runs a different program than on the "
                    "first batch, so its arrows cannot be combined. Measure batches of that shape separately."
                )
            self.found[key] = sym
        return self.found[key]


def _exact(symmetry: Symmetry, g: Element, model: nn.Module) -> nn.Module:
    """A float64 copy of a model of this architecture, folded as the matrices of the symmetry need it."""
    symmetry.check_element(g)
    symmetry.check_model(model)
    exact = copy_module(model).to(torch.float64)
    empty_caches(exact)
    return symmetry.folded(exact)


def _arrows(program: Program, gaps: Mapping[int, Gap]) -> Iterator[Arrow]:
    """An arrow for each compared call, with the weights it reads directly or through results of weights alone."""
    weights: dict[str, tuple[str, ...]] = {s.name: (s.target,) if s.target else () for s in program.inputs}
    inputs = {s.name for s in program.inputs if s.kind == "input"}
    fluid, plain = set(inputs), set(inputs)  # names that depend on the inputs; inputs and their views
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
