"""The entrywise mean of networks of one architecture: (1/n) Σᵢ θᵢ, or Σᵢ wᵢ θᵢ with weights that add up to one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat

import torch
from torch import Tensor, nn

from intertwine.errors import InputError, MismatchError
from intertwine.graph.capture import empty_caches
from intertwine.graph.copies import copied

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
                made.append(copied(model))
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
