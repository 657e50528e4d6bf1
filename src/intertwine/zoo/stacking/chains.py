"""Chains: layers that follow one another without a branch, and that one kernel can take together.

A chain is some of: convolution, normalisation, what a skip connection adds, a ReLU-like unit, pooling by two; in this
order. Each result within it has one reader only.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import fx, nn

ADDITIONS = {operator.add, operator.iadd, torch.add}


@dataclass(frozen=True)
class Chain:
    """The paths of its layers; `slope` is the unit's below zero, 1 where there is no unit."""

    nodes: tuple[fx.Node, ...] = ()
    conv: str | None = None
    norm: str | None = None
    skip: fx.Node | None = None
    slope: float = 1.0
    pool: bool = False


def chains(graph: fx.Graph, model: nn.Module) -> Iterator[Chain]:
    """The chains of a traced network; no layer is in two of them."""
    taken: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "call_module" and node not in taken:
            chain = _follow(node, model, taken)
            if chain.conv or chain.norm or chain.pool:
                taken.update(chain.nodes)
                yield chain


def _follow(node: fx.Node, model: nn.Module, taken: set[fx.Node]) -> Chain:
    """The longest chain that begins at a node."""
    chain, place = Chain(), node
    if _is_plain(_module(place, model)):
        chain, place = _with(chain, place, conv=str(place.target))
    if place is not None and _remembers(_module(place, model)):
        chain, place = _with(chain, place, norm=str(place.target))
    if chain.norm and place is not None and place.target in ADDITIONS and place not in taken and not place.kwargs:
        others = [a for a in place.args if a is not chain.nodes[-1]]
        if len(others) == 1 and isinstance(others[0], fx.Node):
            chain, place = _with(chain, place, skip=others[0])
    slope = _slope(_module(place, model))
    if place is not None and slope is not None:
        chain, place = _with(chain, place, slope=slope)
        if place is not None and chain.skip is None and _halves(_module(place, model)):
            chain, place = _with(chain, place, pool=True)
    return chain


def _with(chain: Chain, node: fx.Node, **parts: object) -> tuple[Chain, fx.Node | None]:
    """The chain with one more node, and the only reader of its result, if there is only one."""
    reader = next(iter(node.users)) if len(node.users) == 1 else None
    return replace(chain, nodes=(*chain.nodes, node), **parts), reader  # pyrefly: ignore


def _module(node: fx.Node | None, model: nn.Module) -> nn.Module | None:
    return model.get_submodule(str(node.target)) if node is not None and node.op == "call_module" else None


def _is_plain(module: nn.Module | None) -> bool:
    """A convolution of the kind the kernels know."""
    return (
        isinstance(module, nn.Conv2d)
        and "weight" in module._parameters  # and is not made of others
        and module.groups == 1
        and module.dilation == (1, 1)
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
        and module.stride[0] == module.stride[1]
        and module.padding[0] == module.padding[1]
        and module.out_channels % 8 == 0
    )


def _remembers(module: nn.Module | None) -> bool:
    """A normalisation whose running statistics, if it has any, move by a fixed share."""
    return isinstance(module, nn.BatchNorm2d) and module.momentum is not None


def _slope(module: nn.Module | None) -> float | None:
    """The slope of a unit below zero, if it has one."""
    match module:
        case nn.ReLU():
            return 0.0
        case nn.LeakyReLU() if module.negative_slope >= 0:
            return module.negative_slope
    return None


def _halves(module: nn.Module | None) -> bool:
    """Whether a module takes the largest of every 2 × 2 pixels."""
    if not isinstance(module, nn.MaxPool2d) or module.return_indices:
        return False
    pairs = [p if isinstance(p, tuple) else (p, p) for p in (module.kernel_size, module.stride)]
    return pairs == [(2, 2), (2, 2)] and (module.padding, module.dilation, module.ceil_mode) == (0, 1, False)
