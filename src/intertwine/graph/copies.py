"""Copies of modules, also of those that hold what an earlier forward left behind in their attributes."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from torch import Tensor, nn
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
        return copy.deepcopy(model, memo)
    except (RuntimeError, TypeError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {first}). Take what an earlier forward "
            f"left in its attributes out of it, or build it anew and load its state dict."
        ) from error
