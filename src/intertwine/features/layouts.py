"""Layouts of captured tensors, found while the first batch passes through the network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from intertwine.features.capture import pick
from intertwine.features.places import Site
from intertwine.features.policy import USUAL, layout_of
from intertwine.graph.capture import refuse_scripted


@dataclass
class Layouts:
    """Finds the layout of every captured tensor during the first forward.

    The kind of module tells where it can. Other modules, such as activations and blocks, take the layout that the last
    telling module with an output of the same shape had, or else the next one: a ReLU behind Conv1d has channels first,
    behind Linear last.
    """

    recent: dict[tuple[int, ...], str] = field(default_factory=dict)
    found: dict[Site, str] = field(default_factory=dict)
    kinds: dict[Site, str] = field(default_factory=dict)
    open: dict[tuple[int, ...], list[Site]] = field(default_factory=dict)  # shape → places without a telling module yet

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        refuse_scripted(model)
        handles = [module.register_forward_hook(self._see) for module in model.modules()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _see(self, module: nn.Module, _inputs: Any, output: Any) -> None:
        try:
            x = pick(output)
        except LookupError:
            return
        if layout := layout_of(module, x.dim()):
            self.recent[tuple(x.shape)] = layout
            self.found.update(dict.fromkeys(self.open.pop(tuple(x.shape), ()), layout))

    def note(self, site: Site, module: nn.Module, x: Tensor) -> None:
        """Called for every tensor that is kept, in the order of the forward."""
        known = layout_of(module, x.dim(), site.keys) or self.recent.get(tuple(x.shape))
        self.found[site] = known or USUAL.get(x.dim()) or "n" + "p" * (x.dim() - 1)
        if known is None:
            self.open.setdefault(tuple(x.shape), []).append(site)
        self.kinds[site] = type(module).__name__
