"""Composite ops: one without a rule of its own is taken apart into the ops that PyTorch itself makes it of.

`torch.hstack` is reshapes and a `cat`, `torch.inner` a product of matrices, `linalg.norm` a vector norm. PyTorch says
which ops are composite (CompositeImplicitAutograd). Where every step has a rule, the steps stand in the program instead
of the op. Where one has none the op stays as it is, so that what freezes is named as the user wrote it.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from intertwine.graph.registry import find_rule

#: What says where in the user's code a call stands.
_PLACE = ("stack_trace", "nn_module_stack")
#: A view needs the strides it was traced with, and weights that were moved may have others.
_ON_ANY_STRIDES: dict[Any, Any] = dict.fromkeys(
    (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default), torch.ops.aten.reshape.default
)


def steps_of(node: Node) -> GraphModule | None:
    """The steps of a call, with the tensors it reads as their inputs, in the order of `node.all_input_nodes`.

    None for a call that has a rule, that is not composite, or that has a step without a rule.
    """
    import intertwine.graph.rules  # noqa: F401  (registers the built-in rules)

    op = node.target
    if not isinstance(op, OpOverload) or _has_rule(op) or op._schema.is_mutable or not _is_composite(op):
        return None
    steps = _traced(op, node)
    if steps is None or not all(_understood(step) for step in steps.graph.nodes):
        return None
    for step in steps.graph.nodes:
        step.meta |= {key: node.meta.get(key) for key in _PLACE}
        step.target = _ON_ANY_STRIDES.get(step.target, step.target)
    return steps


def _has_rule(op: OpOverload) -> bool:
    return torch.Tag.pointwise in op.tags or find_rule(str(op)) is not None


def _is_composite(op: OpOverload) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


def _understood(step: Node) -> bool:
    """Whether one step may stand in a program: nothing is written in place, and the engine knows what it does."""
    if step.op == "call_function" and step.target is not operator.getitem:
        return isinstance(step.target, OpOverload) and not step.target._schema.is_mutable and _has_rule(step.target)
    return step.op != "get_attr"


def _traced(op: OpOverload, node: Node) -> GraphModule | None:
    """A composite op, run on the fake tensors of the graph; None for what cannot be run like that."""
    nodes = node.all_input_nodes
    fakes = [fake for n in nodes if isinstance(fake := n.meta.get("val"), FakeTensor)]
    if not fakes or len(fakes) < len(nodes):
        return None

    def run(*tensors: Any) -> Any:
        given = dict(zip(nodes, tensors, strict=True))
        args, kwargs = map_arg((node.args, dict(node.kwargs)), given.__getitem__)
        return op.decompose(*args, **kwargs)

    try:
        with fakes[0].fake_mode, torch.no_grad():
            return make_fx(run)(*fakes)
    except Exception:  # noqa: BLE001  (anything may be raised in there; the op then stays as it is)
        return None
