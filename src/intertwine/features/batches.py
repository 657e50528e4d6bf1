"""Batches: any iterable of (inputs, targets) as calls of a model, on its device and in its precision."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from intertwine.errors import InputError

Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments of one call of a model
ADVICE = "Pass an iterable of (inputs, targets) batches, such as a DataLoader; one batch is [(inputs, targets)]."


def calls(data: Any) -> Iterator[Call]:
    """The arguments of the call that each (inputs, targets) batch stands for; targets are left out.

    >>> import torch
    >>> x, y = torch.zeros(4, 3), torch.zeros(4)
    >>> [len(args[0]) for args, _ in calls([(x, y), (x[:2], y[:2])])]
    [4, 2]
    """
    check_batches(data)
    return (_call(batch) for batch in data)


def check_batches(data: Any) -> None:
    """Refuse what no batches can be read from.

    >>> check_batches([])
    >>> check_batches("digits")
    Traceback (most recent call last):
    intertwine.errors.InputError: data must be an iterable of (inputs, targets) batches; found str. Pass an iterable ...
    """
    if not isinstance(data, (str, bytes, Tensor, Mapping)) and isinstance(data, Iterable):
        return
    whole = callable(getattr(data, "batches", None))  # a data set of the zoo, with a training and a test part
    advice = 'Pass one part of it: data.batches("test"), or data.batches("train").' if whole else ADVICE
    raise InputError(f"data must be an iterable of (inputs, targets) batches; found {kind_of(data)}. {advice}")


def check_readable_again(data: Any, reading: str = "The data is read twice") -> None:
    """Refuse data that is gone after one pass, where it is needed again.

    >>> check_readable_again(batch for batch in [])
    Traceback (most recent call last):
    intertwine.errors.InputError: The data is read twice, but a generator can be read only once. Pass a list or a ...
    """
    if isinstance(data, Iterator):
        raise InputError(f"{reading}, but a generator can be read only once. Pass a list or a DataLoader.")


def _call(batch: Any) -> Call:
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise InputError(f"A batch of the data must be a pair (inputs, targets); found {kind_of(batch)}. {ADVICE}")
    inputs = batch[0]
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, Tensor) or (isinstance(inputs, (tuple, list)) and inputs):
        return ((inputs,) if isinstance(inputs, Tensor) else tuple(inputs)), {}
    raise InputError(
        f"The inputs of a batch must be a tensor, a tuple of tensors or a mapping of keyword arguments; found "
        f"{kind_of(inputs)}. {ADVICE}"
    )


def kind_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)}"
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, (tuple, list)) else type(value).__name__


def fresh(given: Any) -> Any:
    """Arguments or other values with their tensors copied: a forward that works in place writes over what it is given.

    >>> import torch
    >>> x = torch.ones(2)
    >>> (y,), _ = fresh(((x,), {}))
    >>> torch.equal(x, y), x is y
    (True, False)
    """
    return tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, given)


def placed(call: Call, model: nn.Module) -> Call:
    """The arguments on the model's device; numbers in its precision, where all of its weights share one."""
    tensors = [*model.parameters(), *model.buffers()]
    if not tensors:
        return call
    if any(tensor.is_meta for tensor in tensors):
        raise InputError(
            f"{type(model).__name__} was to be run on data, but weights of it are on the meta device and hold no "
            "numbers. Load them first: model.load_state_dict(state, assign=True)."
        )
    kinds = {tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()}
    dtype = next(iter(kinds)) if len(kinds) == 1 else None

    def place(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(tensors[0].device, dtype if value.is_floating_point() else None)

    return tree_map(place, call)
