"""The weights of networks of one architecture: whether they can be mixed, their mean, and points of the line between
two of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

from intertwine.errors import InputError, MismatchError
from intertwine.graph.model import copy_module, empty_caches

T = TypeVar("T")

ARCHITECTURE_ADVICE = "Only networks of one architecture can be mixed weight by weight."
#: Whether numbers are complex → the dtype of their sums.
WIDER = {True: torch.complex128, False: torch.float64}


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer under every name it has; buffers that checkpoints leave out are included.

    >>> sorted(tensors_of(nn.Linear(2, 2)))
    ['bias', 'weight']
    """
    named = _named_tensors(model)
    if lazy := [name for name, tensor in named if is_lazy(tensor)]:
        raise InputError(f"{lazy[0]!r} belongs to a lazy layer without weights. Call the network on a batch first.")
    return {name: tensor.detach() if tensor.requires_grad else tensor for name, tensor in named}


def _named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def names_by_tensor(model: nn.Module) -> list[list[str]]:
    """The names of every tensor, those of tied weights together."""
    groups: dict[int, list[str]] = {}
    for name, tensor in _named_tensors(model):
        groups.setdefault(id(tensor), []).append(name)
    return list(groups.values())


# -- One architecture --------------------------------------------------------------------------------------------------


def check_same_architecture(a: nn.Module, b: nn.Module) -> None:
    """Refuse two networks that cannot be mixed, and name the first difference."""
    for model in (a, b):
        if not isinstance(model, nn.Module):
            raise InputError(f"A network must be a torch.nn.Module; found {type(model).__name__}.")
    first, second = tensors_of(a), tensors_of(b)
    if found := first_difference(first, second, lambda x: f"is {str(x.dtype)[6:]} of shape {tuple(x.shape)}"):
        name, one, other = found
        raise MismatchError(
            f"The two networks differ: {name!r} {one} in the first and {other} in the second. {ARCHITECTURE_ADVICE}"
        )
    if found := first_difference(dict(a.named_modules()), dict(b.named_modules()), _settings, "missing"):
        name, one, other = found
        raise MismatchError(
            f"The two networks have the same weights but compute different functions: {name or 'the network'} is {one} "
            f"in the first and {other} in the second. {ARCHITECTURE_ADVICE}"
        )
    for name, *tied in names_by_tensor(a):  # one tensor in the first network, so one value in the mix
        for other in tied:
            if not torch.equal(second[name], second[other]):
                raise MismatchError(
                    f"{name!r} and {other!r} are one tied weight in the first network and two different ones in the "
                    "second, so a mix cannot be tied. Tie them in both networks, or in neither."
                )


def first_difference(
    a: Mapping[str, T], b: Mapping[str, T], describe: Callable[[T], str], missing: str = "does not exist"
) -> tuple[str, str, str] | None:
    """The first name under which two mappings differ, with a description of both values.

    >>> first_difference({"x": 1, "y": 2}, {"x": 1}, str)
    ('y', '2', 'does not exist')
    """
    for name in dict.fromkeys([*a, *b]):
        words = [describe(values[name]) if name in values else missing for values in (a, b)]
        if words[0] != words[1]:
            return name, words[0], words[1]
    return None


def _settings(module: nn.Module) -> str:
    """The kind of a layer with the settings that change what it computes in evaluation mode."""
    kind = type(module).__name__
    if isinstance(module, _DropoutNd) or not type(module).__module__.startswith("torch.nn"):
        return kind
    return f"{kind}(eps={module.eps})" if isinstance(module, _BatchNorm) else f"{kind}({module.extra_repr()})"


# -- Means -------------------------------------------------------------------------------------------------------------


def entrywise_mean(
    states: Iterable[Mapping[str, Tensor]], weights: Sequence[float | int] | None = None
) -> dict[str, Tensor]:
    """The weighted mean of every entry over some states, read one after the other: two states are held at a time.

    Sums are kept in double precision. Entries on which all agree stay to the last bit, infinite ones too. Integers and
    masks come from the first state.

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
        if found := first_difference(first, state, lambda x: f"has shape {tuple(x.shape)}"):
            name, one, other = found
            raise MismatchError(
                f"States that are averaged must hold the same tensors, but {name!r} {one} in the first and {other} in "
                "another. Average networks of one architecture."
            )
        total += share
        for name, summed in sums.items():
            x = state[name].to(summed.device)
            same[name] &= x == first[name]
            summed += share * x.to(summed.dtype)
    if not first:
        raise InputError("There is nothing to average: no state is given. Pass at least one.")
    return {
        n: torch.where(same[n], t, (sums[n] / total).to(t.dtype)) if n in sums else t.clone() for n, t in first.items()
    }


def mean_network(models: Iterable[nn.Module], weights: Sequence[float | int] | None = None) -> nn.Module:
    """A new network whose weights are the entrywise mean; buffers that checkpoints leave out are averaged too.

    >>> a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> torch.allclose(mean_network([a, b]).weight, (a.weight + b.weight) / 2)
    True
    """
    copies: list[nn.Module] = []

    def states() -> Iterable[dict[str, Tensor]]:
        for model in models:
            if not copies:
                copies.append(copy_module(model))
            yield distinct_tensors(model)

    def distinct_tensors(model: nn.Module) -> dict[str, Tensor]:  # once each, so tied weights stay tied
        return {name: t.detach() for name, t in [*model.named_parameters(), *model.named_buffers()]}

    mean = entrywise_mean(states(), weights)
    with torch.no_grad():
        for name, tensor in distinct_tensors(copies[0]).items():
            tensor.copy_(mean[name])
    empty_caches(copies[0])
    return copies[0]


# -- The straight line between two networks ----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LinearPath:
    """Points of the line between two networks. Only the two ends are kept; a point is computed on request.

    Attributes:
        ts: where the points lie. first, second: the weights of the ends, tied ones under one name.
        own: tensors of single points (points first), such as re-estimated statistics.
        scratch: the network into which points are written.
    """

    ts: tuple[float, ...]
    first: Mapping[str, Tensor] = field(repr=False)
    second: Mapping[str, Tensor] = field(repr=False)
    scratch: nn.Module = field(repr=False)
    own: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    _latest: dict[tuple[int, ...], dict[str, Tensor]] = field(default_factory=dict, repr=False)

    def state(self, points: Sequence[int]) -> dict[str, Tensor]:
        """The weights of some points, stacked along a new first axis; the latest group is cached for the next batch."""
        key = tuple(points)
        if key not in self._latest:
            self._latest.clear()  # before the new one is computed: memory holds one group of points
            self._latest[key] = {
                name: torch.stack([mix(a, self.second[name], self.ts[point]) for point in key])
                for name, a in self.first.items()
                if name not in self.own
            } | {name: stacked[list(key)] for name, stacked in self.own.items()}
        return self._latest[key]

    def network(self, point: int) -> nn.Module:
        """The network at a point: the scratch network, which the next call overwrites."""
        tensors = tensors_of(self.scratch)
        with torch.no_grad():
            for name, a in self.first.items():
                own = self.own[name][point] if name in self.own else None
                tensors[name].copy_(mix(a, self.second[name], self.ts[point]) if own is None else own)
        return self.scratch

    def with_own(self, own: Mapping[str, Tensor]) -> LinearPath:
        """The same path with some tensors of its points replaced."""
        return replace(self, own={**self.own, **own}, _latest={})


def path_between(a: nn.Module, b: nn.Module, ts: Sequence[float | int]) -> LinearPath:
    """The path from a to b with points at `ts`. It shares memory with a and b, so later changes of them change it."""
    check_same_architecture(a, b)
    names = [group[0] for group in names_by_tensor(a)]
    first, second = tensors_of(a), tensors_of(b)
    near = {name: second[name].to(first[name].device) for name in names}
    return LinearPath(tuple(float(t) for t in ts), {name: first[name] for name in names}, near, copy_module(a))


def mix(a: Tensor, b: Tensor, t: float | int) -> Tensor:
    """(1 − t)·a + t·b, exact at both ends; entries on which both agree, infinite ones too, stay unchanged.

    Half precision is rounded once, at the end, as in `merge`: otherwise it would round three times, or overflow on the
    way to a number that fits.

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
