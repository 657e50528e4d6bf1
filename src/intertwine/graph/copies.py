"""Copies of modules, also of those that hold what an earlier forward left behind in their attributes."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from intertwine.errors import InputError

Module = TypeVar("Module", bound=nn.Module)


def copied(model: Module, shared: tuple[Tensor, ...] = ()) -> Module:
    """A deep copy of a module.

    Tensors that hang on an autograd graph (cached activations, the weight that an old-style weight_norm computes, a
    state that was not detached) are copied as plain numbers; `copy.deepcopy` alone refuses them.

    Args:
        model: the module. shared: tensors that the copy holds too, rather than copies of them.

    Raises:
        InputError: it holds something that cannot be copied.

    Example:
        >>> import torch
        >>> from intertwine.graph.copies import copied
        >>> model = torch.nn.Linear(3, 2)
        >>> model.last = model(torch.ones(1, 3))
        >>> torch.equal(copied(model).last, model.last)
        True
    """
    memo: dict[int, Any] = {id(t): t for t in shared}
    for tensor in (t for module in model.modules() for t in tree_leaves(list(vars(module).values()))):
        if isinstance(tensor, Tensor) and not tensor.is_leaf:
            memo.setdefault(id(tensor), tensor.detach().clone())
    try:
        found = copy.deepcopy(model, memo)
    except (RuntimeError, TypeError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {first}). Take what an earlier forward "
            f"left in its attributes out of it, or build it anew and load its state dict."
        ) from error
    if not shared:
        _part(found)
    return found


def _part(model: nn.Module) -> None:
    """Let tensors that lie in each other's memory have memory of their own, so that each can be written by itself."""
    ends: dict[int, list[tuple[int, int, Tensor]]] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        if is_lazy(tensor) or tensor.is_meta or tensor.layout != torch.strided:
            continue
        if tensor.numel():
            reach = 1 + sum((int(n) - 1) * int(step) for n, step in zip(tensor.shape, tensor.stride(), strict=True))
            start = int(tensor.storage_offset()) * tensor.element_size()
            at = ends.setdefault(tensor.untyped_storage().data_ptr(), [])
            at.append((start, start + reach * tensor.element_size(), tensor))
    for at in ends.values():
        for i, (start, end, tensor) in enumerate(at):
            folded = end - start < tensor.numel() * tensor.element_size()  # an expanded tensor
            if folded or any(start < e and s < end for s, e, _ in at[:i]):
                tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
