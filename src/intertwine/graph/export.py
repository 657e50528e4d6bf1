"""Reading a torch.export graph: its inputs and weights, and its calls in one flat list.

Higher-order wrappers that only set a context (no_grad, autocast) are inlined. A composite op without a rule of its own
(`torch.hstack` is reshapes and a `cat`) is replaced by the ops PyTorch makes it of, if all of these have rules;
otherwise it stays as it is, so that what freezes is named as the user wrote it.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from intertwine.errors import CaptureError
from intertwine.graph.builder import find_rule
from intertwine.graph.program import Call, ProgramInput, Ref, replaced

#: Metadata of a node that says where in the user's code it stands.
_PLACE = ("stack_trace", "nn_module_stack")
#: A view needs the strides it was traced with, and weights that were moved may have others.
_ON_ANY_STRIDES: dict[Any, Any] = dict.fromkeys(
    (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default), torch.ops.aten.reshape.default
)


def decomposition_of(node: Node) -> GraphModule | None:
    """The steps of a call, with the tensors it reads as their inputs, in the order of `node.all_input_nodes`.

    None for a call that has a rule, that is not composite, or that has a step without a rule.
    """
    import intertwine.graph.rules  # noqa: F401  (registers the built-in rules)

    op = node.target
    if not isinstance(op, OpOverload) or _has_rule(op) or op._schema.is_mutable:
        return None
    if not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"):
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


def _understood(step: Node) -> bool:
    """Whether one step may stand in a program: nothing is written in place, and the op has a rule."""
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


# -- Inputs and calls --------------------------------------------------------------------------------------------------

#: Key of a node's metadata: whether a tensor that enters the graph is a buffer or a constant.
_CONSTANT = "intertwine constant"
#: Context wrappers whose body is inlined: name of the higher-order op → position of the body among its arguments.
CONTEXT_WRAPPERS = {"wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 4}


def inputs_of(
    exported: torch.export.ExportedProgram, model: nn.Module, tied: Mapping[str, str]
) -> Iterator[ProgramInput]:
    """The tensors that enter the graph of a model; `tied`: every name of a tensor → its first one."""
    fake = {node.name: node.meta.get("val") for node in exported.graph.nodes if node.op == "placeholder"}
    for spec in exported.graph_signature.input_specs:
        name, target = getattr(spec.arg, "name", ""), spec.target
        value = fake.get(name)
        if not isinstance(value, Tensor):
            continue
        shape, dtype = tuple(int(s) for s in value.shape), value.dtype
        if spec.kind == InputKind.PARAMETER:
            yield ProgramInput(name, "parameter", shape, dtype, tied[str(target)], moves=True)
        elif spec.kind == InputKind.BUFFER and str(target) in tied:
            # what is not in the checkpoint, or is an index table, is a constant of the architecture
            moves = bool(spec.persistent) and dtype.is_floating_point
            yield ProgramInput(name, "buffer", shape, dtype, tied[str(target)], moves=moves)
        elif spec.kind == InputKind.USER_INPUT:
            yield ProgramInput(name, "input", shape, dtype)
        else:
            found = exported.constants.get(str(target))
            tensor = found if isinstance(found, Tensor) else None
            weight = _weight_behind(model, tensor, tied)
            yield ProgramInput(name, "constant", shape, dtype, tensor=tensor, weight=weight)


def _weight_behind(model: nn.Module, constant: Tensor | None, tied: Mapping[str, str]) -> str | None:
    """The parameter or buffer that a constant of the graph is: some function holds it, or the model it belongs to."""
    if constant is None or constant.numel() == 0 or constant.layout != torch.strided:
        return None
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        same = tensor.shape == constant.shape and tensor.layout == torch.strided
        if same and tensor.data_ptr() == constant.data_ptr():
            return tied[name]
    return None


def calls_of(exported: torch.export.ExportedProgram) -> tuple[list[Call], tuple[Ref, ...]]:
    """The calls of the graph in order, and its outputs."""
    calls: list[Call] = []
    kinds = {spec.arg.name: spec.kind for spec in exported.graph_signature.input_specs if hasattr(spec.arg, "name")}
    for node in exported.graph.nodes:
        if node.op == "placeholder":
            node.meta[_CONSTANT] = kinds.get(node.name) in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
    names = {name: name for name in kinds}
    _inline(exported.graph_module, names, "", calls)
    outputs = tuple(
        Ref(names[spec.arg.name])
        for spec in exported.graph_signature.output_specs
        if spec.kind == OutputKind.USER_OUTPUT and getattr(spec.arg, "name", None) in names
    )
    return calls, outputs


def _inline(module: GraphModule, names: dict[str, str], prefix: str, calls: list[Call]) -> Any:
    """Append the module's calls to `calls`; `names` maps graph names to value names and is filled on the way."""
    result: Any = None
    bodies: dict[str, GraphModule] = {}
    tuples: dict[str, list[Any]] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            bodies[node.name] = getattr(module, node.target)
        elif node.op == "output":
            result = _refs(node.args[0], names)
        elif node.op == "call_function":
            wrapper = CONTEXT_WRAPPERS.get(getattr(node.target, "__name__", str(node.target)))
            if wrapper is not None:
                body = bodies[node.args[wrapper].name]
                inner = _names_inside(body, node.args[wrapper + 1 :], names)
                tuples[node.name] = list(_inline(body, inner, f"{prefix}{node.name}.", calls))
            elif node.target is operator.getitem and node.args[0].name in tuples:
                names[node.name] = tuples[node.args[0].name][node.args[1]].name
            elif (steps := decomposition_of(node)) is not None:
                inner = _names_inside(steps, node.all_input_nodes, names)
                made = _inline(steps, inner, f"{prefix}{node.name}.", calls)
                if isinstance(made, Ref):
                    names[node.name] = made.name
                else:
                    tuples[node.name] = list(made)
            else:
                names[node.name] = prefix + node.name
                calls.append(_call(node, prefix + node.name, names))
    return result


def _names_inside(body: GraphModule, given: Iterable[Node], names: Mapping[str, str]) -> dict[str, str]:
    """Names of the inputs of a graph that is inlined → names of the values it is given."""
    inputs = (node.name for node in body.graph.nodes if node.op == "placeholder")
    return dict(zip(inputs, (names[node.name] for node in given), strict=True))


def without_unused_pieces(calls: list[Call], outputs: Iterable[Ref]) -> list[Call]:
    """The calls except those that take one result of an op (a piece of a split) and that nothing reads."""
    read = {name for call in calls for name in call.reads} | {out.name for out in outputs}
    return [call for call in calls if call.target is not operator.getitem or call.name in read]


def _call(node: Node, name: str, names: dict[str, str]) -> Call:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    for v in values:
        if isinstance(v, Tensor) and not all(isinstance(n, int) for n in v.shape):
            raise CaptureError(
                f"The forward decides by the values of its data at {_where(node) or _path(node)}: {node.target} "
                f"returns a tensor of shape {tuple(v.shape)}. Shapes must be known from the inputs' shapes. "
                f"{_way_out(node)}"
            )
    shapes = tuple(tuple(v.shape) if isinstance(v, Tensor) else None for v in values)
    dtype = next((v.dtype for v in values if isinstance(v, Tensor)), None)
    args, kwargs = _refs((node.args, dict(node.kwargs)), names)
    target = cast("Callable[..., Any]", node.target)
    return Call(name, target, args, kwargs, shapes, dtype, _where(node), _path(node), _aliases(node))


def _way_out(node: Node) -> str:
    """What to do about a shape that depends on data; a mask that is the same for all data can become indices."""
    values = [(n, n.meta.get("val")) for n in node.all_input_nodes]
    masks = [n for n, v in values if isinstance(v, Tensor) and v.dtype in (torch.bool, torch.uint8)]
    if str(node.target).startswith("aten.nonzero"):
        masks = node.all_input_nodes
    if masks and all(_is_constant(mask) for mask in masks):
        return (
            "The mask is the same for all data: keep its positions, mask.nonzero()[:, 0], as a buffer that __init__ "
            "registers, and index with that."
        )
    return "Keep all positions and mask them (torch.where), or capture the part of the model before that line."


def _is_constant(node: Node) -> bool:
    """Whether a tensor is made of buffers and constants alone, neither of inputs nor of parameters."""
    if node.op == "placeholder":
        return node.meta.get(_CONSTANT, False)
    return all(map(_is_constant, node.all_input_nodes))


def _aliases(node: Node) -> bool:
    """Whether a result shares the first argument's storage: the schema says which ops may, the storages which do."""
    schema = getattr(node.target, "_schema", None)
    first = node.args[0] if node.args and isinstance(node.args[0], Node) else None
    if schema is None or first is None:
        return schema is None
    # inactive dropout returns its input, which fake tensors do not show; an op in place returns what it wrote to, also
    # the assignments to buffers that export adds at the end
    if "dropout" in schema.name or schema.arguments[0].is_write:
        return True
    if not any(r.alias_info is not None for r in schema.returns):
        return False
    before, after = first.meta.get("val"), node.meta.get("val")
    after = after[0] if isinstance(after, (tuple, list)) and after else after
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return True
    try:
        return before.untyped_storage()._cdata == after.untyped_storage()._cdata
    except NotImplementedError:  # inside a function transform, which is refused in words later
        return True


def _refs(value: Any, names: dict[str, str]) -> Any:
    return replaced(value, Node, lambda node: Ref(names.get(node.name, node.name)))


def _where(node: Node) -> str:
    """`file.py:12`, the innermost line of the forward that is not torch's own; empty inside a torch layer."""
    trace = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    frames = [line for line in trace if line.startswith('File "')]
    own = [f for f in frames if os.path.dirname(torch.__file__) not in f]
    if not own:
        return ""
    file, line = own[-1].split('"')[1], own[-1].split("line ")[1].split(",")[0]
    return f"{os.path.basename(file)}:{line}"


def _path(node: Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]) if stack else ""
