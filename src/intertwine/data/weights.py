"""The weights of networks of one architecture: whether two networks can be mixed, and the points of the straight line
between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

from intertwine.errors import InputError, MismatchError
from intertwine.graph.model import copy_module, empty_caches

# ----------------------------------------------------------------------------------------------------
# Whether two networks can be mixed weight by weight: the same layers, names, shapes, types and ties.


ARCHITECTURE_ADVICE = "Only networks of one architecture can be mixed weight by weight."


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer under every name it has; buffers that checkpoints leave out are included.

    >>> sorted(tensors_of(nn.Linear(2, 2)))
    ['bias', 'weight']
    """
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    if lazy := [name for name, tensor in named if is_lazy(tensor)]:
        raise InputError(f"{lazy[0]!r} belongs to a lazy layer without weights. Call the network on a batch first.")
    return {name: tensor.detach() if tensor.requires_grad else tensor for name, tensor in named}


def names_by_tensor(model: nn.Module) -> list[list[str]]:
    """The names of every tensor, those of tied weights together."""
    groups: dict[int, list[str]] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        groups.setdefault(id(tensor), []).append(name)
    return list(groups.values())


def check_same_architecture(a: nn.Module, b: nn.Module) -> None:
    """Refuse two networks that cannot be mixed, and say where they part."""
    for model in (a, b):
        if not isinstance(model, nn.Module):
            raise InputError(f"A torch.nn.Module was expected, a {type(model).__name__} was given.")
    _check_tensors(tensors_of(a), tensors_of(b))
    _check_layers(a, b)
    _check_ties(names_by_tensor(a), tensors_of(b))


def _check_tensors(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    for name in [*a, *b]:
        words = [_words(tensors.get(name)) for tensors in (a, b)]
        if words[0] != words[1]:
            raise MismatchError(
                f"The two networks differ: {name!r} {words[0]} in the first and {words[1]} in the second. {ARCHITECTURE_ADVICE}"
            )


def _words(tensor: Tensor | None) -> str:
    if tensor is None:
        return "does not exist"
    return f"is {str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def _check_layers(a: nn.Module, b: nn.Module) -> None:
    first, second = (dict(model.named_modules()) for model in (a, b))
    for name in _both(first, second):
        words = [_layer(modules.get(name)) for modules in (first, second)]
        if words[0] != words[1]:
            raise MismatchError(
                f"The two networks hold the same weights but differ in what they do with them: {name or 'the network'} "
                f"is {words[0]} in the first and {words[1]} in the second. {ARCHITECTURE_ADVICE}"
            )


def _both(first: Iterable[str], second: Iterable[str]) -> list[str]:
    return list(dict.fromkeys([*first, *second]))


def _layer(module: nn.Module | None) -> str:
    """The kind of a layer with the settings that change what it computes in evaluation mode."""
    if module is None:
        return "missing"
    kind = type(module).__name__
    if isinstance(module, _DropoutNd) or not type(module).__module__.startswith("torch.nn"):
        return kind
    if isinstance(module, _BatchNorm):
        return f"{kind}(eps={module.eps})"
    return f"{kind}({module.extra_repr()})"


def _check_ties(tied: list[list[str]], other: dict[str, Tensor]) -> None:
    """Weights that are one tensor in the first network get one value, so they must have one value in the second."""
    for first, *rest in tied:
        for name in rest:
            if not torch.equal(other[first], other[name]):
                raise MismatchError(
                    f"{first!r} and {name!r} are one tied weight in the first network and two different ones in the "
                    "second, so a mix could not be tied. Tie them in both networks, or in neither."
                )


# ----------------------------------------------------------------------------------------------------
# The entrywise mean of networks of one architecture: (1/n) Σᵢ θᵢ, or Σᵢ wᵢ θᵢ with weights that add up to one.


WIDER = {True: torch.complex128, False: torch.float64}


def entrywise_mean(
    states: Iterable[Mapping[str, Tensor]], weights: Sequence[float | int] | None = None
) -> dict[str, Tensor]:
    """The mean of every entry over some states, read one after the other: two states are held at a time.

    Sums are kept in double precision. Entries on which all agree stay to the last bit, infinite ones too. Whole numbers
    and masks come from the first state.

    >>> entrywise_mean([{"w": torch.tensor([1.0, 7.0])}, {"w": torch.tensor([3.0, 7.0])}])
    {'w': tensor([2., 7.])}
    """
    shares = repeat(1.0) if weights is None else iter(weights)
    first: dict[str, Tensor] = {}
    sums: dict[str, Tensor] = {}
    same: dict[str, Tensor] = {}
    total = 0.0
    for state, share in zip(states, shares, strict=False):
        if not first:
            first = dict(state)
            averaged = [n for n, t in first.items() if t.is_floating_point() or t.is_complex()]
            sums = {n: torch.zeros_like(first[n], dtype=WIDER[first[n].is_complex()]) for n in averaged}
            same = {n: torch.ones_like(first[n], dtype=torch.bool) for n in averaged}
        _check_alike(first, state)
        total += share
        for name, summed in sums.items():
            x = state[name].to(summed.device)
            same[name] &= x == first[name]
            summed += share * x.to(summed.dtype)
    if not first:
        raise InputError("There is nothing to average: no state was given. Pass at least one.")
    return {
        n: torch.where(same[n], t, (sums[n] / total).to(t.dtype)) if n in sums else t.clone() for n, t in first.items()
    }


def _check_alike(first: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    for name in [*first, *state]:
        shapes = [tuple(s[name].shape) if name in s else None for s in (first, state)]
        if shapes[0] != shapes[1]:
            words = ["does not exist" if s is None else f"has shape {s}" for s in shapes]
            raise MismatchError(
                f"States that are averaged must hold the same tensors, but {name!r} {words[0]} in the first and "
                f"{words[1]} in another. Average networks of one architecture."
            )


def mean_network(models: Iterable[nn.Module], weights: Sequence[float | int] | None = None) -> nn.Module:
    """A new network whose weights are the entrywise mean; buffers that checkpoints leave out are averaged too.

    >>> a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> torch.allclose(mean_network([a, b]).weight, (a.weight + b.weight) / 2)
    True
    """
    made: list[nn.Module] = []

    def states() -> Iterable[dict[str, Tensor]]:
        for model in models:
            if not made:
                made.append(copy_module(model))
            yield _tensors(model)

    mean = entrywise_mean(states(), weights)
    with torch.no_grad():
        for name, tensor in _tensors(made[0]).items():
            tensor.copy_(mean[name])
    empty_caches(made[0])
    return made[0]


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer once, under its first name; tied weights stay tied."""
    return {name: t.detach() for name, t in [*model.named_parameters(), *model.named_buffers()]}


# ----------------------------------------------------------------------------------------------------
# `interpolate`: the network on the straight line between two; and `Path`: many points of that line.


@dataclass(frozen=True, eq=False)
class LinearPath:
    """Points of the line between two networks. Only the two ends are kept; a point is made when it is asked for.

    Attributes:
        ts: where the points lie. first, second: the weights of the ends, tied ones under one name.
        own: tensors that belong to single points (points first), such as statistics that were estimated again.
        scratch: the network into which points are written.
    """

    ts: tuple[float, ...]
    first: Mapping[str, Tensor] = field(repr=False)
    second: Mapping[str, Tensor] = field(repr=False)
    scratch: nn.Module = field(repr=False)
    own: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    _latest: dict[tuple[int, ...], dict[str, Tensor]] = field(default_factory=dict, repr=False)

    def state(self, points: Sequence[int]) -> dict[str, Tensor]:
        """The weights of some points, stacked along a new first axis; the latest answer is kept for the next batch."""
        wanted = tuple(points)
        if wanted not in self._latest:
            self._latest.clear()  # before the new one is made: memory holds one group of points
            self._latest[wanted] = self._stacked(wanted)
        return self._latest[wanted]

    def _stacked(self, points: tuple[int, ...]) -> dict[str, Tensor]:
        mixed = {
            name: torch.stack([mix(a, self.second[name], self.ts[point]) for point in points])
            for name, a in self.first.items()
            if name not in self.own
        }
        return mixed | {name: stacked[list(points)] for name, stacked in self.own.items()}

    def network(self, point: int) -> nn.Module:
        """The network at a point: the scratch network, so it holds until the next one is asked for."""
        tensors = tensors_of(self.scratch)
        with torch.no_grad():
            for name, a in self.first.items():
                own = self.own[name][point] if name in self.own else None
                tensors[name].copy_(mix(a, self.second[name], self.ts[point]) if own is None else own)
        return self.scratch

    def with_own(self, own: Mapping[str, Tensor]) -> LinearPath:
        """The same path, some tensors of its points replaced."""
        return replace(self, own={**self.own, **own}, _latest={})


def path_between(a: nn.Module, b: nn.Module, ts: Sequence[float | int]) -> LinearPath:
    """The path from a to b with points at `ts`; later changes of a and b would show, so use it at once."""
    check_same_architecture(a, b)
    names = [group[0] for group in names_by_tensor(a)]
    first, second = tensors_of(a), tensors_of(b)
    near = {name: second[name].to(first[name].device) for name in names}
    return LinearPath(tuple(float(t) for t in ts), {name: first[name] for name in names}, near, copy_module(a))


def mix(a: Tensor, b: Tensor, t: float | int) -> Tensor:
    """(1 − t)·a + t·b, exact at both ends; entries on which both agree, infinite ones too, stay as they are.

    Half precision is rounded once, at the end, as `merge` does: products and sums there would round three times, or
    overflow on the way to a number that fits.

    >>> mix(torch.tensor([0.0, -torch.inf]), torch.tensor([4.0, -torch.inf]), 0.25)
    tensor([1., -inf])
    """
    if t == 0 or not (a.is_floating_point() or a.is_complex()):
        return a
    if t == 1:
        return b
    if torch.finfo(a.dtype).bits >= torch.finfo(torch.float32).bits:
        return torch.where(a == b, a, (1 - t) * a + t * b)
    mixed = a.detach().to(WIDER[a.is_complex()]).mul_(1 - t).add_(b.detach(), alpha=t)
    return torch.where(a == b, a, mixed.to(a.dtype))
