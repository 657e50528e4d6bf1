"""Exact arithmetic: run a model's forward in float64 throughout, whatever casts it contains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from intertwine.graph.capture import empty_caches, quiet_forward
from intertwine.graph.copies import copied

#: Types of lower precision → the type that takes their place.
EXACT = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}


class _Float64(TorchDispatchMode):
    """Casts and new tensors of lower precision become float64, so that `x.float()` inside a model loses nothing.

    Tensors of lower precision that meet float64 are raised to it: a constant that a model holds as a plain attribute.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in EXACT:
            exact = EXACT[kwargs["dtype"]]
            kwargs["dtype"] = exact
            # a cast to what the tensor is already returns the tensor itself, and so it must here
            if func is torch.ops.aten._to_copy.default and args[0].dtype == exact and len(kwargs) == 1:
                return args[0]
        met = {v.dtype for v in tree_leaves((args, kwargs)) if isinstance(v, Tensor)}
        if len(met) > 1 and not met.isdisjoint(EXACT.values()) and not met.isdisjoint(EXACT):
            args, kwargs = _raised(func, args, kwargs)
        return func(*args, **kwargs)


def _raised(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of an op in float64, but for those that it writes to."""
    written = {a.name for a in func._schema.arguments if a.is_write}
    names = [a.name for a in func._schema.arguments]
    given = [v if name in written else _exact(v) for name, v in zip(names, args, strict=False)]
    return given, {name: v if name in written else _exact(v) for name, v in kwargs.items()}


def _exact(tree: Any) -> Any:
    """Tensors of lower precision in float64, or in complex128."""
    return tree_map(lambda v: v.to(EXACT.get(v.dtype, v.dtype)) if isinstance(v, Tensor) else v, tree)


@contextmanager
def float64_forward() -> Iterator[None]:
    """Inside, forwards run without gradients, without warnings and in float64."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with quiet_forward(), torch.no_grad(), _Float64():
            yield
    finally:
        torch.set_default_dtype(default)


def to_float64(tree: Any) -> Any:
    """The tensors of a nested structure in float64, complex ones in complex128, copied; everything else as it is."""

    def wide(v: Tensor) -> Tensor:
        return v.to(torch.float64) if v.is_floating_point() else v.to(EXACT.get(v.dtype, v.dtype))

    return tree_map(lambda v: wide(v.detach()).clone() if isinstance(v, Tensor) else v, tree)


def generic_copy(model: nn.Module, seed: int) -> nn.Module:
    """A float64 copy whose uninformative tensors are drawn anew, so that no wrong rule can hide behind them.

    Constant tensors (zero-initialised or all-ones parameters, fresh batch statistics, tiny layer scales) get random
    values around 1 or 0; everything else keeps its values.
    """
    model = copied(model).double()  # complex buffers stay complex
    empty_caches(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            positive = name.endswith("running_var")
            fresh = tensor.is_floating_point() and tensor.numel() > 1 and bool((tensor == tensor.flatten()[0]).all())
            if not fresh or (name not in dict(model.named_parameters()) and "running_" not in name):
                continue
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.device)
            start = tensor if float(tensor.flatten()[0].abs()) > 0.01 else torch.zeros_like(tensor)
            tensor.copy_((0.3 * noise).exp() if positive else start + 0.3 * noise)
    return model
