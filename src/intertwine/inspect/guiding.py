"""Guiding: while it is on, ReLU-like activations pass back positive gradients only, however a forward calls them.

Calls are seen where torch hands them out, so `nn.ReLU`, `functional.relu`, `torch.relu` and `x.relu_()` are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from intertwine.features.places import modules_of

#: Activations that pass values from some point on and never turn their sign: gradients through them can be guided.
GUIDED = {"relu", "relu6", "leaky_relu", "prelu", "rrelu"}
#: Activations that guided backpropagation does not speak of; gradients pass them as they are.
UNGUIDED = {
    "gelu", "silu", "sigmoid", "tanh", "elu", "selu", "celu", "softplus", "mish", "hardswish", "hardsigmoid",
    "logsigmoid", "log_sigmoid", "softsign", "tanhshrink", "softshrink", "hardshrink", "threshold", "glu",
    "erf", "maximum", "rnn_relu", "rnn_tanh", "lstm", "gru",
}  # fmt: skip
#: Functions that are a ReLU where they cut at zero and nowhere else; `nn.ReLU6` calls the last.
CLAMPS = {"clamp", "clip", "clamp_min", "hardtanh"}


class Guiding(TorchFunctionMode):
    """Guides every activation called inside, and remembers which were guided and which could not be.

    Attributes:
        guided, unguided: "path: name of the function" of every call that gradients go through, in their order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.guided: list[str] = []
        self.unguided: list[str] = []
        self._inside: list[str] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        output = func(*args, **given)
        name = getattr(func, "__name__", "").rstrip("_")
        if name not in GUIDED | UNGUIDED | CLAMPS:
            return output
        tensor = output[0] if isinstance(output, tuple) else output
        if not tensor.requires_grad:
            return output
        if name in GUIDED or (name in CLAMPS and _cuts_at_zero(args, given)):
            tensor.register_hook(_positive)
            self.guided.append(self._called(name))
        else:
            self.unguided.append(self._called(name))
        return output

    def _called(self, name: str) -> str:
        path = self._inside[-1] if self._inside else ""
        return f"{path}: {name}" if path else name

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Guiding on, and the path of the module that runs known; every hook is taken off behind."""
        with ExitStack() as stack:
            for path, module in modules_of(model).items():
                stack.callback(module.register_forward_pre_hook(self._enter(path)).remove)
                stack.callback(module.register_forward_hook(self._leave).remove)
            stack.enter_context(self)
            yield

    def _enter(self, path: str) -> Callable[..., None]:
        return lambda *_: self._inside.append(path)

    def _leave(self, *_: Any) -> None:
        self._inside.pop()


def _positive(gradient: Tensor) -> Tensor:
    return gradient.clamp(min=0)


def _cuts_at_zero(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    low = kwargs.get("min", kwargs.get("min_val", args[1] if len(args) > 1 else None))
    return isinstance(low, (int, float)) and low == 0
