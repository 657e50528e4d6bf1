"""`average`: the mean of checkpoints of one run, which share their basis and need no alignment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, overload

from torch import Tensor, nn

from intertwine.align.mean import entrywise_mean, mean_network
from intertwine.connect.statistics import reset_statistics
from intertwine.errors import InputError


@overload
def average(models: Iterable[nn.Module], data: Any = None) -> nn.Module: ...


@overload
def average(models: Iterable[Mapping[str, Tensor]], data: None = None) -> dict[str, Tensor]: ...


def average(
    models: Iterable[nn.Module] | Iterable[Mapping[str, Tensor]], data: Any = None
) -> nn.Module | dict[str, Tensor]:
    """The entrywise mean (1/n) Σᵢ θᵢ of checkpoints of one run, as stochastic weight averaging takes it.

    Nothing is aligned: checkpoints of one run share their basis. They are read one after the other, so a generator that
    loads one at a time will do.

    Args:
        models: networks, or state dicts. data: batches of (inputs, targets) on which BatchNorm statistics are estimated
            again, for networks; without, the statistics are averaged like everything else, which misleads.

    Returns:
        A new network, or a state dict where state dicts were given.

    Example:
        >>> import torch
        >>> from intertwine.connect.averaging import average
        >>> steps = [{"w": torch.tensor([0.0, 2.0])}, {"w": torch.tensor([4.0, 6.0])}]
        >>> average(steps)
        {'w': tensor([2., 4.])}
    """
    given = iter(models)
    first = next(given, None)
    if first is None:
        raise InputError("There is nothing to average: no network was given. Pass at least one.")
    everything: Iterator[Any] = chain([first], given)
    if not isinstance(first, nn.Module):
        if data is not None:
            raise InputError(
                "Statistics were to be estimated on data, but state dicts cannot be run. Pass networks instead."
            )
        return entrywise_mean(everything)
    mean = mean_network(everything)
    return mean if data is None else reset_statistics(mean, data)
