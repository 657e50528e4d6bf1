"""A network as a list of steps for a stack, traced with torch.fx, and the chains of layers for fused kernels.

A chain is a sequence of convolution, normalisation, addition of a skip connection, ReLU or leaky ReLU, and pooling by
two. Each part is optional, and each result inside a chain has a single reader.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

ADDITIONS = {operator.add, operator.iadd, torch.add}
ROOT = ""  # the path of the network itself


@dataclass(frozen=True)
class Chain:
    """The paths of the layers; `slope` is that of the activation below zero, 1 without an activation."""

    nodes: tuple[fx.Node, ...] = ()
    conv: str | None = None
    norm: str | None = None
    skip: fx.Node | None = None
    slope: float = 1.0
    pool: bool = False


def chains(graph: fx.Graph, model: nn.Module) -> Iterator[Chain]:
    """The chains of a traced network, which are disjoint."""
    used: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "call_module" and node not in used:
            chain = _follow(node, model, used)
            if chain.conv or chain.norm or chain.pool:
                used.update(chain.nodes)
                yield chain


def _follow(node: fx.Node, model: nn.Module, used: set[fx.Node]) -> Chain:
    """The longest chain that begins at a node."""
    chain, at = Chain(), node
    if _has_kernel(_module(at, model)):
        chain, at = _extended(chain, at, conv=str(at.target))
    norm = _module(at, model)
    if at is not None and isinstance(norm, nn.BatchNorm2d) and norm.momentum is not None:
        chain, at = _extended(chain, at, norm=str(at.target))
    if chain.norm and at is not None and at.target in ADDITIONS and at not in used and not at.kwargs:
        others = [a for a in at.args if a is not chain.nodes[-1]]
        if len(others) == 1 and isinstance(others[0], fx.Node):
            chain, at = _extended(chain, at, skip=others[0])
    slope = _slope(_module(at, model))
    if at is not None and slope is not None:
        chain, at = _extended(chain, at, slope=slope)
        if at is not None and chain.skip is None and _halves(_module(at, model)):
            chain, at = _extended(chain, at, pool=True)
    return chain


def _extended(chain: Chain, node: fx.Node, **parts: object) -> tuple[Chain, fx.Node | None]:
    """The chain with one more node, and the reader of its result if there is exactly one."""
    reader = next(iter(node.users)) if len(node.users) == 1 else None
    return replace(chain, nodes=(*chain.nodes, node), **parts), reader  # pyrefly: ignore


def _module(node: fx.Node | None, model: nn.Module) -> nn.Module | None:
    return model.get_submodule(str(node.target)) if node is not None and node.op == "call_module" else None


def _has_kernel(module: nn.Module | None) -> bool:
    """Whether the kernels support a module: a plain convolution."""
    return (
        isinstance(module, nn.Conv2d)
        and "weight" in module._parameters  # not parametrised
        and module.groups == 1
        and module.dilation == (1, 1)
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
        and module.stride[0] == module.stride[1]
        and module.padding[0] == module.padding[1]
        and module.out_channels % 8 == 0
    )


def _slope(module: nn.Module | None) -> float | None:
    """The slope of a ReLU-like activation below zero; None for other modules."""
    match module:
        case nn.ReLU():
            return 0.0
        case nn.LeakyReLU() if module.negative_slope >= 0:
            return module.negative_slope
    return None


def _halves(module: nn.Module | None) -> bool:
    """Whether a module is max-pooling over 2 × 2 pixels."""
    if not isinstance(module, nn.MaxPool2d) or module.return_indices:
        return False
    pairs = [p if isinstance(p, tuple) else (p, p) for p in (module.kernel_size, module.stride)]
    return pairs == [(2, 2), (2, 2)] and (module.padding, module.dilation, module.ceil_mode) == (0, 1, False)


@dataclass(frozen=True)
class StackStep:
    """One step: a module by its path, a function or a tensor method; `into` is the name of its result."""

    into: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    path: str | None = None
    call: Callable[..., Any] | str | None = None
    drops: tuple[str, ...] = ()  # results without a later reader
    chain: Chain | None = None


@dataclass(frozen=True)
class StackProgram:
    """The steps, the names of the inputs, and the output."""

    steps: tuple[StackStep, ...]
    inputs: tuple[str, ...]
    output: Any


def trace(model: nn.Module, fuse: bool = False) -> StackProgram:
    """The steps of a network; with `fuse`, each chain of layers is one step.

    A network that cannot be traced, see `_graph`, is a single step.
    """
    graph = _graph(model)
    if graph is None:
        x = fx.Graph().placeholder("x")
        return StackProgram((StackStep("y", (x,), {}, path=ROOT),), ("x",), fx.Graph().placeholder("y"))
    found = {chain.nodes[-1]: chain for chain in chains(graph, model)} if fuse else {}
    skipped = {node for chain in found.values() for node in chain.nodes[:-1]}
    steps, inputs, output = [], [], None
    for node in graph.nodes:
        if node.op == "placeholder":
            inputs.append(node.name)
        elif node.op == "output":
            output = node.args[0]
        elif node in found:
            steps.append(StackStep(node.name, (found[node].nodes[0].args[0],), {}, chain=found[node]))
        elif node not in skipped:
            args, kwargs, path, call = node.args, dict(node.kwargs), None, None
            if node.op == "call_module":
                path = str(node.target)
            elif node.op == "get_attr":
                args, kwargs, call = (str(node.target),), {}, "get_attr"
            else:
                call = node.target
            steps.append(StackStep(node.name, args, kwargs, path, call))
    return StackProgram(_with_drops(steps, output), tuple(inputs), output)


def _graph(model: nn.Module) -> fx.Graph | None:
    """The traced forward; None if it depends on data or optional inputs, or differs between training and evaluation."""
    other_mode = copy.deepcopy(model).train(not model.training)  # copied first: tracing adds constants to the model
    try:
        graph, other = fx.symbolic_trace(model).graph, fx.symbolic_trace(other_mode).graph
    except Exception:  # noqa: BLE001 - the forward is user code; it then runs as a whole
        return None
    optional = any(node.args or str(node.target).startswith("*") for node in graph.find_nodes(op="placeholder"))
    return None if optional or str(graph) != str(other) else graph


def _with_drops(steps: list[StackStep], output: Any) -> tuple[StackStep, ...]:
    """Drop every result after its last reader, so that memory is freed as early as in the network itself."""
    needed = _read(output)
    done: list[StackStep] = []
    for step in reversed(steps):
        read = _read((step.args, step.kwargs, step.chain.skip if step.chain else None))
        done.append(replace(step, drops=tuple(sorted(read - needed))))
        needed |= read
    return tuple(reversed(done))


def _read(tree: Any) -> set[str]:
    found: set[str] = set()
    fx.map_arg(tree, lambda node: found.add(node.name))
    return found
