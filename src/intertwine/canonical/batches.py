"""Data in the forms users hold it: one batch, the arguments of one call, or many batches with targets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from intertwine.errors import InputError

Inputs = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments of one call of a model


def batches(data: Any) -> Iterator[Inputs]:
    """The arguments of each call that some data stands for; targets are left out.

    A tensor is one batch. A tuple is the positional arguments of one call, a mapping its keyword arguments. Anything
    else that can be iterated (a list, a DataLoader) holds batches: each a tensor, a mapping, or `(inputs, targets)`
    where the inputs are again a tensor, a tuple of arguments or a mapping.

    Example:
        >>> import torch
        >>> from intertwine.canonical.batches import batches
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
            "The data holds no batch. Pass at least one batch of inputs; a generator can be used only once."
        )


def _each(data: Any) -> Iterable[Any]:
    if isinstance(data, (str, bytes)) or not isinstance(data, Iterable):
        raise InputError(
            f"Data was expected, a {type(data).__name__} was given. Pass a tensor, a tuple of the model's arguments, "
            "or an iterable of (inputs, targets) batches."
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
        f"A batch is a {found}, and which part of it the model takes is not clear. Make every batch a tensor, a "
        "mapping of keyword arguments, or a pair (inputs, targets)."
    )


def _call(inputs: Any) -> Inputs:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, (tuple, list)) else ((inputs,), {})
