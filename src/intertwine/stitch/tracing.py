"""A network as a list of steps in the order in which they run, traced once with torch.fx.

Every call of a module is kept with its inputs and output, blocks included, so that a place such as `layer1.0:input` or
`relu@2` is a step of the list.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from intertwine.errors import InputError
from intertwine.features.batches import Call

PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
Values = dict[fx.Node, Any]


class Untraceable(Exception):
    """A network, or a place of one, that cannot be had as a list of steps. Private: hooks take over."""


@dataclass(frozen=True)
class Called:
    """One call of a module, in proxies."""

    inputs: dict[Any, Any]
    output: Any


@dataclass(eq=False)
class Program:
    """The steps of a network."""

    model: nn.Module
    nodes: tuple[fx.Node, ...]
    calls: Mapping[int, list[Called]]  # by the id of the module
    constants: Mapping[str, Any]  # what tracing met that is no part of the network
    spec: TreeSpec
    plain: tuple[tuple[int, Any], ...]  # the arguments that are no tensors, by position
    order: dict[fx.Node, int] = field(init=False)
    over: list[list[fx.Node]] = field(init=False)  # behind each step, the values that nothing reads any more

    def __post_init__(self) -> None:
        self.order = {node: i for i, node in enumerate(self.nodes)}
        self.over = [[] for _ in self.nodes]
        for node in self.nodes:
            readers = [self.order[user] for user in node.users if user in self.order]
            self.over[max(readers, default=self.order[node])].append(node)

    def inputs(self, call: Call) -> Values:
        """The values of the first steps, which are the tensors of a call."""
        leaves, spec = tree_flatten(_sorted(call))
        given = tuple((i, leaf) for i, leaf in enumerate(leaves) if not isinstance(leaf, Tensor))
        if spec != self.spec or given != self.plain:
            raise InputError(
                "A batch is not built as the example that the networks were cut with: the arguments, or those among "
                "them that are no tensors, differ. Cut with a batch of this form, or give all batches one form."
            )
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return dict(zip(self.nodes, tensors, strict=False))

    def run(self, values: Values, nodes: Iterable[fx.Node], keep: bool = False) -> Iterator[fx.Node]:
        """Run steps one by one, telling each; values that nothing reads any more are dropped unless all are kept."""
        for node in nodes:
            if node.op != "placeholder":
                values[node] = self._value(node, values)
            yield node
            for done in () if keep else self.over[self.order[node]]:
                values.pop(done, None)

    def _value(self, node: fx.Node, values: Values) -> Any:
        if node.op == "get_attr":
            return self._attribute(str(node.target))
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "output":
            return args[0]
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        if node.op == "call_module":
            return self.model.get_submodule(str(node.target))(*args, **kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)

    def _attribute(self, path: str) -> Any:
        if path in self.constants:
            return self.constants[path]
        return operator.attrgetter(path)(self.model)

    def same_as(self, other: Program) -> bool:
        """Whether another network takes the same steps, whatever its weights and sizes."""
        return len(self.nodes) == len(other.nodes) and all(
            _step(a, self) == _step(b, other) for a, b in zip(self.nodes, other.nodes, strict=True)
        )


def _step(node: fx.Node, program: Program) -> tuple[Any, ...]:
    kind = type(program.model.get_submodule(str(node.target))) if node.op == "call_module" else None
    args = fx.map_arg((node.args, node.kwargs), _numbered(program.order))
    return node.op, node.target, kind, args


def _numbered(order: Mapping[fx.Node, int]) -> Any:
    """Steps by their numbers, so that two programs can be held against each other."""
    return lambda node: ("step", order[node])


# -- tracing -----------------------------------------------------------------------------------------------------------


def trace(model: nn.Module, call: Call, inside: Iterable[str] = ()) -> Program:
    """The steps of a network for calls of one form. Modules that hold a path of `inside` are traced through.

    Raises:
        Untraceable: a forward that depends on values, switches gradients off, or has hooks around a block.
    """
    tracer = _Tracer(call, inside)
    try:
        with _untouched(model) as added, torch.enable_grad():
            if model._forward_hooks or model._forward_pre_hooks:
                raise Untraceable("the network has hooks of its own")
            nodes = tuple(tracer.trace(model).nodes)
            added.update(_added(model, nodes))
    except Untraceable:
        raise
    except Exception as reason:  # the forward is foreign code, and whatever stops it, hooks remain
        raise Untraceable(f"torch.fx cannot trace it: {reason}") from reason
    return Program(model, _needed(nodes), tracer.calls, _constants(model, added), tracer.spec, tracer.plain)


def _sorted(call: Call) -> Call:
    return call[0], dict(sorted(call[1].items()))


class _Tracer(fx.Tracer):
    """Takes the arguments from an example call, and remembers every call of a module."""

    def __init__(self, call: Call, inside: Iterable[str]) -> None:
        super().__init__()
        leaves, self.spec = tree_flatten(_sorted(call))
        self.leaves = leaves
        self.plain = tuple((i, leaf) for i, leaf in enumerate(leaves) if not isinstance(leaf, Tensor))
        if odd := [leaf for _, leaf in self.plain if not isinstance(leaf, PLAIN)]:
            raise Untraceable(f"an argument is a {type(odd[0]).__name__}")
        self.inside = tuple(inside)
        self.calls: dict[int, list[Called]] = {}
        self.autocast = torch.is_autocast_enabled()

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        kinds = [isinstance(leaf, Tensor) for leaf in self.leaves]
        names = [f"input_{i}" for i in range(sum(kinds))]
        proxies = [self.create_proxy("placeholder", name, (), {}) for name in names]

        def forward(*given: Any) -> Any:
            tensors = iter(given)
            leaves = [next(tensors) if kind else leaf for kind, leaf in zip(kinds, self.leaves, strict=True)]
            args, kwargs = tree_unflatten(leaves, self.spec)
            return self.root.forward(*args, **kwargs)

        return forward, proxies

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if any(path.startswith(f"{module_qualified_name}.") for path in self.inside):
            return False
        return super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        leaf = self.is_leaf_module(m, self.path_of_module(m))
        if not leaf and (m._forward_hooks or m._forward_pre_hooks):
            raise Untraceable("a block has hooks of its own")
        number = len(self.calls.setdefault(id(m), []))
        self.calls[id(m)].append(Called({**dict(enumerate(args)), **kwargs}, None))
        output = super().call_module(m, forward, args, kwargs)
        self.calls[id(m)][number] = Called({**dict(enumerate(args)), **kwargs}, output)
        return output

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if not torch.is_grad_enabled() or torch.is_autocast_enabled() != self.autocast:
            raise Untraceable("its forward switches gradients or precision, which a trace does not show")
        return super().create_node(*args, **kwargs)


@contextmanager
def _untouched(model: nn.Module) -> Iterator[dict[str, Any]]:
    """What tracing leaves on the modules, such as stand-ins for tensors and constants, is taken off again."""
    before = [(module, dict(module.__dict__), _tables(module)) for module in model.modules()]
    added: dict[str, Any] = {}
    try:
        yield added
    finally:
        for module, attributes, tables in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for name, table in tables.items():
                kept = module.__dict__[name]
                if dict(kept) != table or list(kept) != list(table):
                    kept.clear()
                    kept.update(table)


def _tables(module: nn.Module) -> dict[str, dict[str, Any]]:
    return {name: dict(module.__dict__[name]) for name in ("_parameters", "_buffers", "_modules")}


def _added(model: nn.Module, nodes: Iterable[fx.Node]) -> dict[str, Any]:
    """All attributes that the steps read, while those that tracing added are still there."""
    paths = {str(node.target) for node in nodes if node.op == "get_attr"}
    return {path: operator.attrgetter(path)(model) for path in paths}


def _constants(model: nn.Module, read: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the attributes that are no part of the network itself."""
    found = {}
    for path, value in read.items():
        try:
            operator.attrgetter(path)(model)
        except AttributeError:
            found[path] = value
    return found


def _needed(nodes: tuple[fx.Node, ...]) -> tuple[fx.Node, ...]:
    """Without steps that nothing reads and that change nothing, such as an item of a tuple that is left alone."""
    kept: list[fx.Node] = []
    read: set[fx.Node] = set()
    for node in reversed(nodes):
        if node in read or not _idle(node):
            kept.append(node)
            read.update(node.all_input_nodes)
    return tuple(reversed(kept))


def _idle(node: fx.Node) -> bool:
    if node.op == "call_method":
        return not str(node.target).endswith("_")
    return node.op == "get_attr" or (node.op == "call_function" and node.target in (operator.getitem, getattr))
