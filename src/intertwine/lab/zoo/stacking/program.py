"""The steps a stack runs, traced with torch.fx, and the chains of layers that one fused kernel can take."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

# ----------------------------------------------------------------------------------------------------
# Chains: layers that follow one another without a branch, and that one kernel can take together.
#
# A chain is some of: convolution, normalisation, what a skip connection adds, a ReLU-like unit, pooling by two; in this
# order. Each result within it has one reader only.


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


# ----------------------------------------------------------------------------------------------------
# A network as a list of steps over its modules: what a stack runs instead of the network's own forward.
#
# The forward is traced once with `torch.fx`. Steps that follow one another without a branch can be taken together, see
# `chains`.


ROOT = ""  # the path of the network itself


@dataclass(frozen=True)
class StackStep:
    """One step: a module by its path, or a function or a tensor method; `into` is the name of its result."""

    into: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    path: str | None = None
    call: Callable[..., Any] | str | None = None
    drops: tuple[str, ...] = ()  # results nobody reads after this step
    chain: Chain | None = None


@dataclass(frozen=True)
class StackProgram:
    """The steps, the names of the inputs, and what is returned."""

    steps: tuple[StackStep, ...]
    inputs: tuple[str, ...]
    output: Any


def trace(model: nn.Module, together: bool = False) -> StackProgram:
    """The steps of a network; `together` takes each chain of layers as one step.

    A network that cannot be traced, see `_graph`, is one single step.
    """
    graph = _graph(model)
    if graph is None:
        x = fx.Graph().placeholder("x")
        return StackProgram((StackStep("y", (x,), {}, path=ROOT),), ("x",), fx.Graph().placeholder("y"))
    found = {chain.nodes[-1]: chain for chain in chains(graph, model)} if together else {}
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
            steps.append(_step(node))
    return StackProgram(_with_drops(steps, output), tuple(inputs), output)


def _graph(model: nn.Module) -> fx.Graph | None:
    """The traced forward; none where it branches on data or on optional inputs, or is another one in training."""
    turned = copy.deepcopy(model).train(not model.training)  # before the trace, which leaves constants in the model
    try:
        graph, other = fx.symbolic_trace(model).graph, fx.symbolic_trace(turned).graph
    except Exception:  # noqa: BLE001 - the forward is foreign code; whole, it is called as it is
        return None
    optional = any(node.args or str(node.target).startswith("*") for node in graph.find_nodes(op="placeholder"))
    return None if optional or str(graph) != str(other) else graph


def _step(node: fx.Node) -> StackStep:
    if node.op == "call_module":
        return StackStep(node.name, node.args, dict(node.kwargs), path=str(node.target))
    if node.op == "get_attr":
        return StackStep(node.name, (str(node.target),), {}, call="get_attr")
    return StackStep(node.name, node.args, dict(node.kwargs), call=node.target)


def _with_drops(steps: list[StackStep], output: Any) -> tuple[StackStep, ...]:
    """Let every result go after its last reader, so that memory is held no longer than in the network itself."""
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
