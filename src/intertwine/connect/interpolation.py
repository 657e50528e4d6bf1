"""`interpolate`: the network on the straight line between two; and `Path`: many points of that line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import SupportsFloat

import torch
from torch import Tensor, nn

from intertwine.align.mean import WIDER
from intertwine.connect.agreement import check_same, names_by_tensor, tensors_of
from intertwine.errors import InputError
from intertwine.graph.copies import copied
from intertwine.reals import real


def interpolate(a: nn.Module, b: nn.Module, t: SupportsFloat) -> nn.Module:
    """A new network with the weights (1 − t)·a + t·b.

    Parameters and buffers that are real or complex numbers are mixed, running statistics of BatchNorm included: the
    mixed running variance is not the variance of the mixed network, see `intertwine.connect.statistics`. Whole numbers
    and masks come from a. Weights that are tied in a stay tied.

    Args:
        a, b: two networks of one architecture; neither is changed. t: where on the line; 0 is a, 1 is b.

    Raises:
        MismatchError: the networks differ in more than the values of their weights. InputError: t is not a number.

    Example:
        >>> import torch, intertwine
        >>> a, b = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
        >>> middle = intertwine.interpolate(a, b, 0.5)
        >>> torch.allclose(middle.weight, (a.weight + b.weight) / 2)
        True
    """
    point = real(t)
    if point is None:
        raise InputError(f"t must be a finite number: 0 is the first network, 1 the second; found {t!r}.")
    return path_between(a, b, [point]).network(0)


@dataclass(frozen=True, eq=False)
class Path:
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

    def with_own(self, own: Mapping[str, Tensor]) -> Path:
        """The same path, some tensors of its points replaced."""
        return replace(self, own={**self.own, **own}, _latest={})


def path_between(a: nn.Module, b: nn.Module, ts: Sequence[float | int]) -> Path:
    """The path from a to b with points at `ts`; later changes of a and b would show, so use it at once."""
    check_same(a, b)
    names = [group[0] for group in names_by_tensor(a)]
    first, second = tensors_of(a), tensors_of(b)
    near = {name: second[name].to(first[name].device) for name in names}
    return Path(tuple(float(t) for t in ts), {name: first[name] for name in names}, near, copied(a))


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
