"""Function transforms: whether a forward runs torch.vmap or its kin, and at which line.

An export that fails over one says no more than that it met a fake tensor; the forward itself, run once, knows better.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves


class Transforms(TorchFunctionMode):
    """Notes the first line at which an op is given a tensor that a function transform has wrapped.

    Example:
        >>> import torch
        >>> from intertwine.graph.transforms import Transforms
        >>> with Transforms() as transforms:
        ...     _ = torch.relu(torch.ones(3))
        >>> transforms.line is None
        True
    """

    def __init__(self) -> None:
        super().__init__()
        self.line: str | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if self.line is None and any(map(_wrapped, tree_leaves((args, kwargs)))):
            self.line = user_line(traceback.extract_stack())
        return func(*args, **(kwargs or {}))


def _wrapped(value: object) -> bool:
    return isinstance(value, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value)


def user_line(frames: Iterable[traceback.FrameSummary]) -> str:
    """The deepest of some frames that is not torch's own, as `file.py:12`."""
    home = os.path.dirname(torch.__file__)
    own = [f for f in frames if not f.filename.startswith((home, "<"))]
    own = [f for f in own if os.path.dirname(f.filename) != os.path.dirname(__file__)]
    return f"{os.path.basename(own[-1].filename)}:{own[-1].lineno}" if own else "a line of torch's own"
