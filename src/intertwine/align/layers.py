"""Layers: the linear and convolution layers of two networks, with what enters them at some positions of the data.

A layer is kept as weights (groups, outputs, inputs, places of the kernel) and inputs (samples, groups, inputs, places
of the kernel), so that it is one product of matrices. Layers whose weight is no parameter itself (weight norm, weights
stored the other way round) and transposed convolutions are not kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from intertwine.align.hidden import Captured
from intertwine.graph.program import Call, Ref
from intertwine.shapes import Float, Int
from intertwine.symmetry.layout import Layout, Still, Tree

LINEAR = "aten.linear.default"
#: Convolutions → how many axes of space they have.
CONVOLUTIONS = {f"aten.conv{n}d.{way}": n for n in (1, 2, 3) for way in ("default", "padding")}


@dataclass
class Layer:
    """One call of a linear or convolution layer: which weight it reads, and inputs of both networks to it.

    `inputs`: (samples, channels, places of the kernel). `degree`: −1 where the tree of the channels is that of the
    weight, on which scales act the other way round.
    """

    weight: str
    groups: int
    channels: Tree
    degree: int
    keys: Float[Tensor, " samples"] = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    inputs: tuple[Tensor, Tensor] | None = None

    def layout(self) -> Layout:
        """Of the inputs."""
        assert self.inputs is not None
        return Layout((Still(len(self.inputs[0])), self.channels, Still(self.inputs[0].shape[2])))


@dataclass
class Layers:
    """Listens to two networks (see `hidden.watch`) and keeps a fair sample of the positions at which layers look."""

    samples: int
    generator: torch.Generator
    found: dict[str, Layer] = field(default_factory=dict)

    def hear(
        self, captured: Captured, position: int, read: tuple[Mapping[str, Any], Mapping[str, Any]], a: Any, b: Any
    ) -> None:
        call = captured.program.calls[position]
        layer = self.found.get(call.name) or _layer(captured, call)
        if layer is None:
            return
        self.found[call.name] = layer
        views = [_View(call, values) for values in read]
        keys = torch.rand(views[0].positions, generator=self.generator, dtype=torch.float64)
        both = torch.cat([layer.keys, keys])
        kept = both.argsort()[: self.samples]
        old, new = kept[kept < len(layer.keys)], kept[kept >= len(layer.keys)] - len(layer.keys)
        fresh = [view.at(new) for view in views]
        if layer.inputs is not None:
            fresh = [torch.cat([x[old.to(x.device)], y]) for x, y in zip(layer.inputs, fresh, strict=True)]
        layer.keys, layer.inputs = both[torch.cat([old, new + len(layer.keys)])], (fresh[0], fresh[1])


def _layer(captured: Captured, call: Call) -> Layer | None:
    """What a call is as a layer; None if it is none."""
    if call.op != LINEAR and call.op not in CONVOLUTIONS:
        return None
    x, weight = call.args[:2]
    sources = {source.name: source.target for source in captured.program.sources if source.moves}
    name = sources.get(weight.name)
    layouts = captured.discovery.parameters
    if name not in layouts or x.name not in captured.from_data or len(layouts[name].axes) < 2:
        return None
    groups = 1 if call.op == LINEAR else _given(call, 6, "groups", 1)
    if groups == 1:
        return Layer(name, 1, layouts[name].axes[1], -1)
    value = captured.value(x.name)
    if value is None or not captured.discovery.predicts(value):
        return None
    return Layer(name, groups, captured.discovery.layout(value).axes[-1 - CONVOLUTIONS[call.op]], 1)


def _given(call: Call, place: int, name: str, default: Any) -> Any:
    return call.args[place] if len(call.args) > place else call.kwargs.get(name, default)


class _View:
    """What a layer looks at: one position per row of a linear layer, one per output pixel of a convolution."""

    def __init__(self, call: Call, values: Mapping[str, Any]) -> None:
        x, weight = (values[v.name] for v in call.args[:2] if isinstance(v, Ref))
        if call.op == LINEAR:
            self.x, self.kernel, self.grid = x.reshape(-1, x.shape[-1]), (), (x.numel() // x.shape[-1],)
        else:
            self.kernel = tuple(weight.shape[2:])
            x = x if x.ndim == len(self.kernel) + 2 else x[None]
            self.stride = _each(_given(call, 3, "stride", 1), self.kernel)
            self.dilation = _each(_given(call, 5, "dilation", 1), self.kernel)
            self.x = F.pad(x, self._padding(call))
            reach = zip(self.x.shape[2:], self.kernel, self.stride, self.dilation, strict=True)
            self.grid = (len(x), *((n - d * (k - 1) - 1) // s + 1 for n, k, s, d in reach))

    def _padding(self, call: Call) -> list[int]:
        given = _given(call, 4, "padding", 0)
        if given == "same":
            totals = [d * (k - 1) for d, k in zip(self.dilation, self.kernel, strict=True)]
            sides = [(t // 2, t - t // 2) for t in totals]
        else:
            sides = [(p, p) for p in _each(0 if given == "valid" else given, self.kernel)]
        return [n for side in reversed(sides) for n in side]

    @property
    def positions(self) -> int:
        return prod(self.grid)

    def at(self, positions: Int[Tensor, " some"]) -> Float[Tensor, "some channels places"]:
        """What the layer sees at some positions."""
        positions = positions.to(self.x.device)
        if not self.kernel:
            return self.x[positions].unsqueeze(-1)
        sample, *corner = torch.unravel_index(positions, self.grid)
        space = len(self.kernel)
        index: list[Tensor] = [sample.reshape(-1, *[1] * space)]
        for d in range(space):
            steps = torch.arange(self.kernel[d], device=self.x.device) * self.dilation[d]
            shape = [1] * (space + 1)
            shape[0], shape[d + 1] = -1, self.kernel[d]
            index.append((corner[d][:, None] * self.stride[d] + steps).reshape(shape))
        patches = self.x.movedim(1, -1)[tuple(index)]
        return patches.movedim(-1, 1).flatten(2)


def _each(value: int | Sequence[int], kernel: tuple[int, ...]) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * len(kernel)
    return tuple(value) * (len(kernel) if len(value) == 1 else 1)
