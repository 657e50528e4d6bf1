"""Running a captured program call by call, or a whole model, in float64 whatever casts it contains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from intertwine.graph.model import copy_module, empty_caches, quiet_forward
from intertwine.graph.program import Program, Ref, replaced

#: Types of lower precision → the type that takes their place.
FLOAT64_TYPES = {
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
        if kwargs.get("dtype") in FLOAT64_TYPES:
            exact = FLOAT64_TYPES[kwargs["dtype"]]
            kwargs["dtype"] = exact
            # a cast to what the tensor is already returns the tensor itself, and so it must here
            if func is torch.ops.aten._to_copy.default and args[0].dtype == exact and len(kwargs) == 1:
                return args[0]
        met = {v.dtype for v in tree_leaves((args, kwargs)) if isinstance(v, Tensor)}
        if len(met) > 1 and not met.isdisjoint(FLOAT64_TYPES.values()) and not met.isdisjoint(FLOAT64_TYPES):
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
    return tree_map(lambda v: v.to(FLOAT64_TYPES.get(v.dtype, v.dtype)) if isinstance(v, Tensor) else v, tree)


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
        return v.to(torch.float64) if v.is_floating_point() else v.to(FLOAT64_TYPES.get(v.dtype, v.dtype))

    return tree_map(lambda v: wide(v.detach()).clone() if isinstance(v, Tensor) else v, tree)


def generic_copy(model: nn.Module, seed: int) -> nn.Module:
    """A float64 copy whose uninformative tensors are drawn anew, so that no wrong rule can hide behind them.

    Constant tensors (zero-initialised or all-ones parameters, fresh batch statistics, tiny layer scales) get random
    values around 1 or 0; everything else keeps its values.
    """
    model = copy_module(model).double()  # complex buffers stay complex
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


def max_abs(x: Any) -> float:
    """Largest finite entry of a floating-point tensor; 0 for anything else."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.numel() == 0:
        return 0.0
    return float(x.nan_to_num(0.0, 0.0, 0.0).abs().max())


class ProgramRunner:
    """Runs a program call by call and forgets a tensor after its last use.

    `values` holds what every name stands for at the moment: parameters and inputs at first, then results. Run it inside
    `float64_forward`, on a model in float64; with exact=False it runs in the precision of the model and its inputs.

    Example:
        >>> import torch
        >>> from intertwine.graph.capture import capture
        >>> from intertwine.graph.runner import float64_forward
        >>> model, x = torch.nn.Linear(3, 2).double(), torch.ones(1, 3, dtype=torch.float64)
        >>> program = capture(model, (x,))
        >>> runner = ProgramRunner(program, model, ((x,), {}))
        >>> with float64_forward():
        ...     results = [runner.step(position) for position in range(len(program))]
        >>> torch.equal(results[-1], model(x))
        True
    """

    def __init__(self, program: Program, model: nn.Module, inputs: Any, exact: bool = True) -> None:
        tensors = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])

        def ready(tree: Any) -> Any:  # copied, because a program may write to its inputs
            copied: Callable[[Any], Any] = lambda v: v.detach().clone() if isinstance(v, Tensor) else v  # noqa: E731
            return to_float64(tree) if exact else tree_map(copied, tree)

        given = iter([v for v in tree_leaves(ready(inputs)) if isinstance(v, Tensor)])
        written = program.written_inputs()
        self.program, self.exact = program, exact
        self.values: dict[str, Any] = {}
        for source in program.inputs:
            if source.target is not None:
                tensor = tensors[source.target].detach()
                self.values[source.name] = tensor.clone() if source.name in written else tensor
            elif source.kind == "input":
                self.values[source.name] = next(given)
            else:
                self.values[source.name] = ready(source.tensor)
        self.last = {ref: i for i, call in enumerate(program.calls) for ref in call.reads}

    def size_of_inputs(self, position: int) -> float:
        """Largest entry of the floating-point tensors a call is about to read."""
        call = self.program.calls[position]
        return max((max_abs(self.values[name]) for name in call.reads), default=0.0)

    def step(self, position: int) -> Any:
        """Run one call on the values at hand and keep its result."""
        result = self.evaluate(position, self.values)
        self.values[self.program.calls[position].name] = result
        self.forget(position)
        return result

    def evaluate(self, position: int, values: Mapping[str, Any]) -> Any:
        """The result of one call on given values of the names it reads; a call in place writes to them."""
        call = self.program.calls[position]
        args, kwargs = replaced((call.args, dict(call.kwargs)), Ref, lambda ref: values[ref.name])
        if self.exact:
            args, kwargs = replaced((args, kwargs), torch.dtype, lambda dtype: FLOAT64_TYPES.get(dtype, dtype))
        return None if "_assert" in call.op else call.target(*args, **kwargs)

    def forget(self, position: int) -> None:
        """Drop the values that no call after this one reads."""
        for name in self.program.calls[position].reads:
            if self.last[name] == position:
                self.values.pop(name, None)
