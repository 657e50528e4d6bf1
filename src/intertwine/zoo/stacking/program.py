"""A network as a list of steps over its modules: what a stack runs instead of the network's own forward.

The forward is traced once with `torch.fx`. Steps that follow one another without a branch can be taken together, see
`chains`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import fx, nn

from intertwine.zoo.stacking.chains import Chain, chains

ROOT = ""  # the path of the network itself


@dataclass(frozen=True)
class Step:
    """One step: a module by its path, or a function or a tensor method; `into` is the name of its result."""

    into: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    path: str | None = None
    call: Callable[..., Any] | str | None = None
    drops: tuple[str, ...] = ()  # results nobody reads after this step
    chain: Chain | None = None


@dataclass(frozen=True)
class Program:
    """The steps, the names of the inputs, and what is returned."""

    steps: tuple[Step, ...]
    inputs: tuple[str, ...]
    output: Any


def trace(model: nn.Module, together: bool = False) -> Program:
    """The steps of a network; `together` takes each chain of layers as one step.

    A network that cannot be traced, see `_graph`, is one single step.
    """
    graph = _graph(model)
    if graph is None:
        x = fx.Graph().placeholder("x")
        return Program((Step("y", (x,), {}, path=ROOT),), ("x",), fx.Graph().placeholder("y"))
    found = {chain.nodes[-1]: chain for chain in chains(graph, model)} if together else {}
    skipped = {node for chain in found.values() for node in chain.nodes[:-1]}
    steps, inputs, output = [], [], None
    for node in graph.nodes:
        if node.op == "placeholder":
            inputs.append(node.name)
        elif node.op == "output":
            output = node.args[0]
        elif node in found:
            steps.append(Step(node.name, (found[node].nodes[0].args[0],), {}, chain=found[node]))
        elif node not in skipped:
            steps.append(_step(node))
    return Program(_with_drops(steps, output), tuple(inputs), output)


def _graph(model: nn.Module) -> fx.Graph | None:
    """The traced forward; none where it branches on data or on optional inputs, or is another one in training."""
    turned = copy.deepcopy(model).train(not model.training)  # before the trace, which leaves constants in the model
    try:
        graph, other = fx.symbolic_trace(model).graph, fx.symbolic_trace(turned).graph
    except Exception:  # noqa: BLE001 - the forward is foreign code; whole, it is called as it is
        return None
    optional = any(node.args or str(node.target).startswith("*") for node in graph.find_nodes(op="placeholder"))
    return None if optional or str(graph) != str(other) else graph


def _step(node: fx.Node) -> Step:
    if node.op == "call_module":
        return Step(node.name, node.args, dict(node.kwargs), path=str(node.target))
    if node.op == "get_attr":
        return Step(node.name, (str(node.target),), {}, call="get_attr")
    return Step(node.name, node.args, dict(node.kwargs), call=node.target)


def _with_drops(steps: list[Step], output: Any) -> tuple[Step, ...]:
    """Let every result go after its last reader, so that memory is held no longer than in the network itself."""
    needed = _read(output)
    done: list[Step] = []
    for step in reversed(steps):
        read = _read((step.args, step.kwargs, step.chain.skip if step.chain else None))
        done.append(replace(step, drops=tuple(sorted(read - needed))))
        needed |= read
    return tuple(reversed(done))


def _read(tree: Any) -> set[str]:
    found: set[str] = set()
    fx.map_arg(tree, lambda node: found.add(node.name))
    return found
