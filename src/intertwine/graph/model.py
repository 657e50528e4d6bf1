"""Preparing a model to be traced or run: checks, copies, cleared caches, tied names, a forward without fast paths."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from intertwine.errors import InputError

Module = TypeVar("Module", bound=nn.Module)


def copy_module(model: Module, shared: tuple[Tensor, ...] = ()) -> Module:
    """A deep copy of a module.

    Tensors with an autograd graph (cached activations, the weight that an old-style weight_norm computes, a state that
    is not detached) are detached in the copy; `copy.deepcopy` alone refuses them.

    Args:
        model: the module. shared: tensors that the copy holds too, rather than copies of them.

    Raises:
        InputError: it holds something that cannot be copied.

    Example:
        >>> import torch
        >>> from intertwine.graph.model import copy_module
        >>> model = torch.nn.Linear(3, 2)
        >>> model.last = model(torch.ones(1, 3))
        >>> torch.equal(copy_module(model).last, model.last)
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
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {first}). Remove what an earlier "
            "forward left in its attributes, or build the model again and load its state dict."
        ) from error
    if not shared:
        _separate_storages(found)
    return found


def _separate_storages(model: nn.Module) -> None:
    """Give tensors that overlap in memory a memory of their own, so that each can be written alone."""
    ends: dict[int, list[tuple[int, int, Tensor]]] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        if not (is_lazy(tensor) or tensor.is_meta or tensor.layout != torch.strided) and tensor.numel():
            reach = 1 + sum((int(n) - 1) * int(step) for n, step in zip(tensor.shape, tensor.stride(), strict=True))
            start = int(tensor.storage_offset()) * tensor.element_size()
            at = ends.setdefault(tensor.untyped_storage().data_ptr(), [])
            at.append((start, start + reach * tensor.element_size(), tensor))
    for at in ends.values():
        for i, (start, end, tensor) in enumerate(at):
            folded = end - start < tensor.numel() * tensor.element_size()  # an expanded tensor
            if folded or any(start < e and s < end for s, e, _ in at[:i]):
                tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)


def fresh_copy(model: nn.Module) -> nn.Module:
    """A copy of the modules around the same tensors, with the caches that some layers keep between forwards emptied.

    Tracing may write to a module's attributes, and a cached function of the weights would hide them; neither must touch
    the user's model. Layers that cache drop it when they change to training mode, so the copy goes there and back.
    """
    fresh = copy_module(model, (*model.parameters(), *model.buffers()))
    empty_caches(fresh)
    return fresh


def empty_caches(model: nn.Module) -> None:
    """Make layers drop what they computed from their weights in an earlier forward; modes are left as they were."""
    modes = {name: module.training for name, module in model.named_modules()}
    top = model.training
    model.train(True)
    model.train(top)
    for name, module in model.named_modules():
        module.training = modes.get(name, top)


def check_model(model: nn.Module) -> None:
    """Raise `InputError` for models without a symmetry to find: not a module, meta, quantised, complex or integer."""
    if not isinstance(model, nn.Module):
        raise InputError(
            f"The model must be a torch.nn.Module, but is a {type(model).__name__}. "
            "Pass the model object itself; load a checkpoint into its module first (model.load_state_dict)."
        )
    refuse_scripted(model)
    quantised = ("torch.ao.nn.quantized", "torch.nn.quantized", "torch.ao.nn.intrinsic.quantized")
    for module in model.modules():
        if type(module).__module__.startswith(quantised):
            raise InputError(
                f"The model holds a quantised layer ({type(module).__name__}); its integer weights have no continuous "
                "symmetry and cannot be moved. Analyse the float model before it is quantised."
            )
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise InputError(
                f"Parameter {name!r} lies on the meta device and has no values. Materialise the model first, for "
                "example model.to_empty(device='cpu') and load a state dict."
            )
        if parameter.is_quantized or not parameter.dtype.is_floating_point:
            kind = "complex" if parameter.dtype.is_complex else "not floating point"
            raise InputError(
                f"Parameter {name!r} is {kind} ({parameter.dtype}); only real floating-point parameters are supported. "
                "Store complex weights as two real tensors, and integer tables as buffers."
            )


def refuse_scripted(model: nn.Module, path: str = "") -> None:
    """Refuse scripted and traced modules inside a network, or inside the part of it at `path`.

    Inside them no hook is called, layers are of no known class, and no op can be read.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            full = ".".join(filter(None, (path, name)))
            which = repr(full) if full else "The model"
            raise InputError(
                f"{which} is a scripted or traced module ({type(module).__name__}), which cannot be "
                "read op by op or watched while it runs. Pass the module it was made from, with its weights loaded."
            )


@contextmanager
def quiet_forward() -> Iterator[None]:
    """Run a forward without fused attention (one opaque op would hide the heads) and without warnings."""
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)


def tied_names(model: nn.Module) -> dict[str, str]:
    """Every parameter and buffer name → the first name of the same tensor."""
    first: dict[int, str] = {}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors}
