"""Running a captured program call by call, in float64 or as it is, on the weights of any model of its architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from intertwine.graph.program import Program, Ref
from intertwine.symmetry.exact import EXACT, to_float64


def largest(x: Any) -> float:
    """Largest finite entry of a floating-point tensor; 0 for anything else."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.numel() == 0:
        return 0.0
    return float(x.nan_to_num(0.0, 0.0, 0.0).abs().max())


def _copied(tree: Any) -> Any:
    """The same with its tensors copied: a program may write to what enters it."""
    return tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, tree)


class ProgramRunner:
    """Runs a program call by call and forgets a tensor after its last use.

    `values` holds what every name stands for at the moment: parameters and inputs at first, then results. Run it inside
    `float64_forward`, on a model in float64; with exact=False it runs in the precision of the model and its inputs.

    Example:
        >>> import torch
        >>> from intertwine.graph.capture import capture
        >>> from intertwine.symmetry.exact import float64_forward
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
        ready: Callable[[Any], Any] = to_float64 if exact else _copied
        given = iter([v for v in tree_leaves(ready(inputs)) if isinstance(v, Tensor)])
        written = program.written_sources()
        self.program = program
        self.exact = exact
        self.values: dict[str, Any] = {}
        for source in program.sources:
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
        return max((largest(self.values[name]) for name in call.reads), default=0.0)

    def step(self, position: int) -> Any:
        """Run one call on the values at hand and keep its result."""
        result = self.evaluate(position, self.values)
        self.values[self.program.calls[position].name] = result
        self.forget(position)
        return result

    def evaluate(self, position: int, values: Mapping[str, Any]) -> Any:
        """The result of one call on given values of the names it reads; a call in place writes to them."""
        call = self.program.calls[position]
        fill: Callable[[Any], Any] = lambda v: values[v.name] if isinstance(v, Ref) else v  # noqa: E731
        args, kwargs = tree_map(fill, (list(call.args), dict(call.kwargs)), is_leaf=lambda v: isinstance(v, Ref))
        if self.exact:
            args = [EXACT.get(v, v) if isinstance(v, torch.dtype) else v for v in args]
            kwargs = {k: EXACT.get(v, v) if isinstance(v, torch.dtype) else v for k, v in kwargs.items()}
        return None if "_assert" in call.op else call.target(*args, **kwargs)

    def forget(self, position: int) -> None:
        """Let go of what no call after this one reads."""
        for name in self.program.calls[position].reads:
            if self.last[name] == position:
                self.values.pop(name, None)
