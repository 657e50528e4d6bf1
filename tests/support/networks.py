"""What the tests of the engine share: tiny networks, the proof of a symmetry, and moves made by hand.

A symmetry is written down as one line per wire, its group and then every place where it acts:

    S_5 ⋉ (R₊)^5 on conv.weight[0], conv.bias[0], head.weight[1 ×12]

`[0]` is axis 0 of a parameter, `[1 ×12]` axis 1 in steps of 12, `[0 +5]` the block of axis 0 that begins at 5.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import intertwine as it
from intertwine.symmetry.element import Element
from intertwine.symmetry.symmetry import Symmetry
from intertwine.symmetry.wire import Slot, Wire


class Net(nn.Module):
    """Named parts and a forward written as a function of them: `Net(lambda m, x: m.a(x).relu(), a=nn.Linear(3, 5))`."""

    def __init__(self, forward: Callable[..., Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self._forward = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(self, *args, **kwargs)

    if TYPE_CHECKING:  # any part by its name

        def __getattr__(self, name: str) -> Any: ...


def parameter(*shape: int) -> nn.Parameter:
    """A random parameter."""
    return nn.Parameter(torch.randn(*shape))


# -- what was found ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class Line:
    """One wire as the tests write it."""

    group: str
    places: tuple[str, ...]

    @staticmethod
    def read(text: str) -> "Line":
        group, _, places = text.partition(" on ")
        return Line(group, tuple(sorted(p.strip() for p in places.split(","))))

    @staticmethod
    def of(wire: Wire) -> "Line":
        return Line(str(wire.group), tuple(sorted(place(slot) for slot in wire.slots)))

    def __repr__(self) -> str:
        return f"{self.group} on {', '.join(self.places)}"


def place(slot: Slot) -> str:
    """`head.weight[1 ×12]`: the axis of the parameter, where the wire begins on it and in which steps it goes on."""
    begin = f" +{slot.offset}" if slot.offset else ""
    step = f" ×{slot.stride}" if slot.stride > 1 else ""
    return f"{slot.parameter}[{slot.axis}{begin}{step}]"


def certified(sym: Symmetry, model: nn.Module, *args: Any, **kwargs: Any) -> Symmetry:
    """The symmetry itself, once its certificate is without a stain."""
    certificate = sym.certify(model, *args, **kwargs)
    assert certificate.broken == (), f"the symmetry as found is wrong: {certificate.broken}"
    assert certificate.ok, certificate
    assert certificate.max_error <= 1e-9, certificate
    assert not certificate.vacuous, "the outputs do not depend on the weights"
    return sym


def prove(model: nn.Module, *args: Any, wires: Sequence[str], **kwargs: Any) -> Symmetry:
    """Find the symmetry, prove it, and compare it with the wires it must have: no more, no fewer, no other places."""
    sym = certified(it.symmetry(model, *args, **kwargs), model, *args, **kwargs)
    assert sym.unsupported == (), f"there is no rule for {sym.unsupported}"
    found, expected = sorted(map(Line.of, sym.wires)), sorted(map(Line.read, wires))
    assert found == expected, "\n".join(["the wires are", *map(repr, found), "and should be", *map(repr, expected)])
    return sym


def wire_at(sym: Symmetry, where: str) -> Wire:
    """The one wire that acts at a place, written as in `prove`."""
    found = [w for w in sym.wires if where in map(place, w.slots)]
    assert len(found) == 1, f"{len(found)} wires act on {where}: {found}"
    return found[0]


def reasons(sym: Symmetry, parameter: str) -> str:
    """Why the axes of a parameter are frozen, in one text."""
    return "\n".join(reason for what, reason in sym.frozen if what.split(" ")[0] == parameter)


# -- moves -------------------------------------------------------------------------------------------------------------


def element(sym: Symmetry, where: str, **move: Tensor) -> Element:
    """The element that does `move` (permutation, scale, sign) on the wire at a place and nothing anywhere else."""
    identity = sym.identity()
    index = sym.wires.index(wire_at(sym, where))
    own = replace(identity.moves[index], **move)
    return replace(identity, moves={**identity.moves, index: own})


def moved_by(g: Element, sym: Symmetry, net: Net) -> Net:
    """`sym.act(g, net)`, with its parts by their names."""
    return cast(Net, sym.act(g, net))


def permutation(n: int, *copies: int) -> Tensor:
    """A permutation without a fixed point (a shift by one and more), another one for each of `copies`."""
    shift = 1 + torch.arange(prod(copies)) % (n - 1)
    return ((torch.arange(n) + shift.unsqueeze(-1)) % n).reshape(*copies, n)


def edited(model: nn.Module, **changes: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of a model with some tensors replaced: `edited(net, conv__weight=lambda w: w[order])`."""
    other = copy.deepcopy(model)
    tensors = other.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, change in changes.items():
            tensor = tensors[name.replace("__", ".")]
            tensor.copy_(change(tensor.detach().clone()))
    return other


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    """Whether two models hold the same numbers, to the last digits of float64."""
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.allclose(left[k], right[k], rtol=1e-12, atol=1e-12) for k in left)


def outputs(model: nn.Module, *args: Any, **kwargs: Any) -> list[Tensor]:
    """Every tensor a model returns."""
    with torch.no_grad():
        return [v for v in tree_leaves(model(*args, **kwargs)) if isinstance(v, Tensor)]


def gap(a: nn.Module, b: nn.Module, *args: Any, **kwargs: Any) -> float:
    """Largest difference between the outputs of two models, relative to their largest entry."""
    inputs = copy.deepcopy(args)  # a forward may write into its inputs
    pairs = list(zip(outputs(a, *args, **kwargs), outputs(b, *inputs, **kwargs), strict=True))
    return max(float((x - y).abs().max() / x.abs().max()) for x, y in pairs)
