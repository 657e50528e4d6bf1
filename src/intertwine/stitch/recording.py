"""A training step on a GPU: recorded, so that its many small kernels are started at once, and parts of it side by side.

On other devices a step just runs, one part after another.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

BEFORE = 3  # steps that run plainly before one is recorded: libraries choose their kernels in them


class Recording:
    """Runs a step; on a GPU the step is recorded for batches of the usual shape and then replayed.

    Args:
        step: of (call, targets); it must read nothing from the host that changes between steps. plain: it may do so,
            and is never recorded.
    """

    def __init__(self, step: Callable[[Any, Any], None], device: torch.device, plain: bool = False) -> None:
        self.step, self.on = step, device.type == "cuda" and not plain
        self.graph: torch.cuda.CUDAGraph | None = None
        self.held: list[Any] = []
        self.plain = 0
        self.about: Any = None

    def renew(self, about: Any) -> None:
        """Forget the recording unless it was made for the same constants."""
        if about is None or about != self.about:
            self.graph, self.plain, self.about = None, 0, about

    def run(self, call: Any, targets: Any) -> None:
        """One step on one batch."""
        if not self.on:
            self.step(call, targets)
            return
        leaves, tree = tree_flatten((call, targets))
        if self.graph is not None and self._fits(leaves):
            self._fill(leaves)
            self.graph.replay()
        elif self.graph is None and self.plain >= BEFORE:
            self._record(leaves, tree)
        else:
            self.plain += 1
            self._beside(call, targets)

    def _fits(self, leaves: list[Any]) -> bool:
        return len(leaves) == len(self.held) and all(
            a.shape == b.shape and a.dtype == b.dtype if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
            for a, b in zip(leaves, self.held, strict=True)
        )

    def _fill(self, leaves: list[Any]) -> None:
        for mine, given in zip(self.held, leaves, strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(given, non_blocking=True)

    def _record(self, leaves: list[Any], tree: Any) -> None:
        self.held = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        call, targets = tree_unflatten(self.held, tree)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step(call, targets)
        self.graph.replay()  # recording runs nothing

    def _beside(self, call: Any, targets: Any) -> None:
        """On a stream of its own, as a recording will be: what autograd keeps must not be tied to the default one."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.step(call, targets)
        torch.cuda.current_stream().wait_stream(stream)


class Branches:
    """Parts of a step that do not feel each other: on a GPU each on a stream of its own, so that they run side by side.

    Example:
        >>> branches = Branches(["a", "b"], torch.device("cpu"))
        >>> for key in ("a", "b"):
        ...     with branches.beside(key):
        ...         pass
        >>> branches.join()
    """

    def __init__(self, keys: Iterable[Hashable], device: torch.device) -> None:
        self.streams = {key: torch.cuda.Stream(device) for key in keys} if device.type == "cuda" else {}

    @contextmanager
    def beside(self, key: Hashable) -> Iterator[None]:
        """Work of this part; it sees everything that was done before, and `join` ends it."""
        stream = self.streams.get(key)
        if stream is None:
            yield
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        """Go on when every part is done."""
        for stream in self.streams.values():
            torch.cuda.current_stream().wait_stream(stream)
