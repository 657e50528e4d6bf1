"""A network as a program of torch.fx steps that runs up to a layer and from a layer on, for any number of samples."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from intertwine.data.batches import Call, copied_arguments, on_device_of, samples_of
from intertwine.data.layers import LayerPath, modules_of, pick
from intertwine.errors import InputError

FEW = 3  # samples of a probe; odd, as other sizes seldom are
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-3}  # tolerance as a share of the largest entry, on a CPU
ROUGH = 0.05  # in half precision, and in single precision on a GPU, whose convolutions may round to ten bits


def first_samples(call: Call) -> Call:
    """The first samples of a call: tensors whose first size is the number of samples are shortened."""
    return _each(call, lambda x: x[:FEW])


def repeat_samples(call: Call, copies: int) -> Call:
    """All samples of a call, several times in sequence.

    >>> repeat_samples(((torch.tensor([1, 2]),), {"scale": 3}), 2)
    ((tensor([1, 2, 1, 2]),), {'scale': 3})
    """
    return call if copies == 1 else _each(call, lambda x: x.repeat(copies, *[1] * (x.dim() - 1)))


def _each(call: Call, change: Callable[[Tensor], Tensor]) -> Call:
    """The call with its tensors of samples changed."""
    count = samples_of(call)
    return tree_map(lambda x: change(x) if isinstance(x, Tensor) and x.dim() and x.shape[0] == count else x, call)


def signature(call: Call) -> tuple[Any, ...]:
    """The sizes of a call apart from the number of samples: calls of one signature have features of one shape."""
    count = samples_of(call)
    shapes = (leaf.shape for leaf in tree_leaves(call) if isinstance(leaf, Tensor))
    return tuple((shape[:1] == (count,), tuple(shape[1:] if shape[:1] == (count,) else shape)) for shape in shapes)


class NoSampleAxis(Exception):
    """A value that cannot be computed for several copies of the samples."""


def sample_axis(first: Tensor, second: Tensor, both: Tensor) -> int | None:
    """The axis of the samples, from a tensor of some samples, of others, and of all of them; None where it has none.

    >>> x = torch.arange(6.0).reshape(2, 3)
    >>> sample_axis(x, -x, torch.cat([x, -x], 1)), sample_axis(x, x, x)
    (1, None)
    """
    if first.shape == both.shape:
        if not (alike(first, both) and alike(second, both)):
            raise NoSampleAxis("it depends on other samples of the batch")
        return None
    doubled = [i for i, sizes in enumerate(zip(first.shape, both.shape, strict=False)) if sizes[1] == 2 * sizes[0]]
    if first.dim() != both.dim() or len(doubled) != 1:
        raise NoSampleAxis(f"it is {tuple(first.shape)} for some samples and {tuple(both.shape)} for twice as many")
    if not alike(torch.cat([first, second], doubled[0]), both):
        raise NoSampleAxis("it depends on other samples of the batch")
    return doubled[0]


def alike(one: Any, two: Any) -> bool:
    """Whether two values, of tensors or of structures of them, are the same up to rounding."""
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        if one.shape != two.shape or one.dtype != two.dtype:
            return False
        if not one.is_floating_point() or not one.numel():
            return torch.equal(one, two)
        largest = two.detach().nan_to_num(0, 0, 0).abs().max().item()
        rounded = one.device.type != "cpu" and one.dtype == torch.float32
        limit = ROUGH if rounded else CLOSE.get(one.dtype, ROUGH)
        return torch.allclose(one, two, rtol=0, atol=limit * largest, equal_nan=True)
    ones, twos = tree_leaves(one), tree_leaves(two)
    if len(ones) != len(twos):
        return False
    if len(ones) == 1 and ones[0] is one:
        return type(one) is type(two) and (isinstance(one, Tensor) or _same(one, two))
    return all(alike(*pair) for pair in zip(ones, twos, strict=True))


def _same(one: Any, two: Any) -> bool:
    equal = one == two
    return equal if isinstance(equal, bool) else one is two


NumberOfSamples = Callable[[int], Any]  # number of samples → value


def number_by_samples(one: Any, two: Any, samples: int) -> NumberOfSamples:
    """A plain value as a function of the number of samples, from its values for `samples` and for twice as many.

    >>> number_by_samples((6, 4), (12, 4), 3)(5)
    (10, 4)
    """
    if isinstance(one, (tuple, list)) and isinstance(two, type(one)) and len(one) == len(two):
        parts = [number_by_samples(a, b, samples) for a, b in zip(one, two, strict=True)]
        kind = torch.Size if isinstance(one, torch.Size) else tuple if isinstance(one, tuple) else list
        return lambda count: kind(part(count) for part in parts)
    plain = type(one) is type(two) and type(one) in (int, float)
    if not plain or one == two:
        if not _same(one, two):
            raise NoSampleAxis(f"it is {one!r} for {samples} samples and {two!r} for {2 * samples}")
        return lambda count: one
    if isinstance(one, float):
        return lambda count: one + (two - one) * (count - samples) / samples
    step, rest = divmod(two - one, samples)
    if rest:
        raise NoSampleAxis(f"it is {one} for {samples} samples and {two} for {2 * samples}")
    return lambda count: one + step * (count - samples)


def number_for_one_size(value: Any, samples: int) -> NumberOfSamples:
    """A plain value that is known only for one number of samples."""

    def number(count: int) -> Any:
        if count != samples:
            raise InputError(
                f"A number inside the back is known only for {samples} samples, but the batch has {count}. The "
                "network does not run on its example repeated twice; give an example whose batch size differs from "
                "all other sizes."
            )
        return value

    return number


PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
Values = dict[fx.Node, Any]


class Untraceable(Exception):
    """A network, or a layer of one, that cannot be traced. Internal: hooks are used instead."""


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module, in proxies."""

    inputs: dict[Any, Any]
    output: Any


@dataclass(eq=False)
class TracedProgram:
    """The steps of a network in the order in which they run.

    Every call of a module is kept with its inputs and output, blocks included, so that a layer such as `layer1.0:input`
    or `relu@2` is a step.
    """

    model: nn.Module
    nodes: tuple[fx.Node, ...]
    calls: Mapping[int, list[ModuleCall]]  # by the id of the module
    constants: Mapping[str, Any]  # tensors and constants that are no part of the network
    spec: TreeSpec
    plain: tuple[tuple[int, Any], ...]  # the arguments that are not tensors, by position
    order: dict[fx.Node, int] = field(init=False)
    unused: list[list[fx.Node]] = field(init=False)  # after each step, the values that no later step reads

    def __post_init__(self) -> None:
        self.order = {node: i for i, node in enumerate(self.nodes)}
        self.unused = [[] for _ in self.nodes]
        for node in self.nodes:
            readers = [self.order[user] for user in node.users if user in self.order]
            self.unused[max(readers, default=self.order[node])].append(node)

    def inputs(self, call: Call) -> Values:
        """The values of the first steps: the tensors of a call."""
        leaves, spec = tree_flatten(_sorted(call))
        given = tuple((i, leaf) for i, leaf in enumerate(leaves) if not isinstance(leaf, Tensor))
        if spec != self.spec or given != self.plain:
            raise InputError(
                "A batch has another form than the example: its arguments, or those that are not tensors, differ. "
                "Give all batches the form of the first."
            )
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return dict(zip(self.nodes, tensors, strict=False))

    def run(self, values: Values, nodes: Iterable[fx.Node], keep: bool = False) -> Iterator[fx.Node]:
        """Run steps one by one and yield each; values that no later step reads are dropped unless `keep`."""
        for node in nodes:
            if node.op != "placeholder":
                values[node] = self._value(node, values)
            yield node
            for done in () if keep else self.unused[self.order[node]]:
                values.pop(done, None)

    def _value(self, node: fx.Node, values: Values) -> Any:
        if node.op == "get_attr":
            path = str(node.target)
            return self.constants[path] if path in self.constants else operator.attrgetter(path)(self.model)
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "output":
            return args[0]
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        if node.op == "call_module":
            return self.model.get_submodule(str(node.target))(*args, **kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)

    def same_as(self, other: TracedProgram) -> bool:
        """Whether another network has the same steps, whatever its weights and sizes."""
        return len(self.nodes) == len(other.nodes) and all(
            _step(a, self) == _step(b, other) for a, b in zip(self.nodes, other.nodes, strict=True)
        )


def _step(node: fx.Node, program: TracedProgram) -> tuple[Any, ...]:
    kind = type(program.model.get_submodule(str(node.target))) if node.op == "call_module" else None
    args: Any = fx.map_arg((node.args, node.kwargs), lambda one: ("step", program.order[one]))  # pyrefly: ignore
    return node.op, node.target, kind, args


# -- tracing -----------------------------------------------------------------------------------------------------------


def trace_program(model: nn.Module, call: Call, inside: Iterable[str] = ()) -> TracedProgram:
    """The steps of a network for calls of one form. Modules that contain a path of `inside` are traced through.

    Raises:
        Untraceable: a forward that depends on values, disables gradients, or has hooks around a block.
    """
    tracer = _Tracer(call, inside)
    try:
        with _untouched(model) as added, torch.enable_grad():
            if model._forward_hooks or model._forward_pre_hooks:
                raise Untraceable("the network has hooks of its own")
            nodes = tuple(tracer.trace(model).nodes)
            paths = {str(node.target) for node in nodes if node.op == "get_attr"}
            added.update(
                {path: operator.attrgetter(path)(model) for path in paths}
            )  # while the constants are still there
    except Untraceable:
        raise
    except Exception as reason:  # the forward is foreign code; whatever it raises, hooks remain
        raise Untraceable(f"torch.fx cannot trace it: {reason}") from reason
    return TracedProgram(model, _needed(nodes), tracer.calls, _constants(model, added), tracer.spec, tracer.plain)


def _sorted(call: Call) -> Call:
    return call[0], dict(sorted(call[1].items()))


class _Tracer(fx.Tracer):
    """Takes the arguments from an example call, and records every call of a module."""

    def __init__(self, call: Call, inside: Iterable[str]) -> None:
        super().__init__()
        leaves, self.spec = tree_flatten(_sorted(call))
        self.leaves = leaves
        self.plain = tuple((i, leaf) for i, leaf in enumerate(leaves) if not isinstance(leaf, Tensor))
        if odd := [leaf for _, leaf in self.plain if not isinstance(leaf, PLAIN)]:
            raise Untraceable(f"an argument is a {type(odd[0]).__name__}")
        self.inside = tuple(inside)
        self.calls: dict[int, list[ModuleCall]] = {}
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
        if (m._forward_hooks or m._forward_pre_hooks) and not self.is_leaf_module(m, self.path_of_module(m)):
            raise Untraceable("a block has hooks of its own")
        calls = self.calls.setdefault(id(m), [])
        number, inputs = len(calls), {**dict(enumerate(args)), **kwargs}
        calls.append(ModuleCall(inputs, None))  # calls inside of this one come later
        output = super().call_module(m, forward, args, kwargs)
        calls[number] = ModuleCall(inputs, output)
        return output

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if not torch.is_grad_enabled() or torch.is_autocast_enabled() != self.autocast:
            raise Untraceable("its forward switches gradients or precision, which a trace does not record")
        return super().create_node(*args, **kwargs)


@contextmanager
def _untouched(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Restore the modules after tracing, which leaves proxies and constants on them."""
    tables = ("_parameters", "_buffers", "_modules")
    before = [
        (module, dict(module.__dict__), {name: dict(module.__dict__[name]) for name in tables})
        for module in model.modules()
    ]
    added: dict[str, Any] = {}
    try:
        yield added
    finally:
        for module, attributes, contents in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for name, table in contents.items():
                kept = module.__dict__[name]
                if dict(kept) != table or list(kept) != list(table):
                    kept.clear()
                    kept.update(table)


def _constants(model: nn.Module, read: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the attributes that the network itself does not have."""
    found = {}
    for path, value in read.items():
        try:
            operator.attrgetter(path)(model)
        except AttributeError:
            found[path] = value
    return found


def _needed(nodes: tuple[fx.Node, ...]) -> tuple[fx.Node, ...]:
    """Without steps that nothing reads and that change nothing, such as an unused item of a tuple."""
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


# -- split programs ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PointValues:
    """The features of a network at a stitch point, and its values that skip the point."""

    tensor: Tensor
    skip_values: tuple[Any, ...] = ()


@dataclass(frozen=True, eq=False)
class SplitPlan:
    """How a network continues after a step.

    Attributes:
        step: the step. rest: the later steps. constants: earlier steps that do not depend on the inputs; they run
        again.
        crossing: earlier tensors that the rest reads. numbers: earlier plain values that it reads, such as sizes.
        reads_inputs: whether the rest reads inputs of the network too.
    """

    step: fx.Node
    rest: tuple[fx.Node, ...]
    constants: tuple[fx.Node, ...]
    crossing: tuple[fx.Node, ...]
    numbers: tuple[fx.Node, ...]
    reads_inputs: bool


class TracedNetwork:
    """A network split at steps of its program. `by_few`: whether it runs on few samples of a batch.

    Raises:
        Untraceable: a network that cannot be traced, or a layer that is no single step.
    """

    def __init__(self, model: nn.Module, places: Sequence[LayerPath], example: Call, by_few: bool = True) -> None:
        self.model, self.places, self.by_few = model, tuple(places), by_few
        call = on_device_of(example, model)
        self.program = trace_program(model, call, [site.path for site in places])
        values = self.program.inputs(copied_arguments(call))
        with torch.no_grad():
            for _ in self.program.run(values, self.program.nodes, keep=True):
                pass
        self.plans = tuple(_plan(self.program, values, self._step(site, values)) for site in places)
        self.crossing = tuple(tuple(node.name for node in plan.crossing) for plan in self.plans)
        self._numbers: dict[Any, dict[fx.Node, NumberOfSamples]] = {}

    def same_as(self, other: TracedNetwork, point: int, other_point: int) -> bool:
        """Whether both networks have the same program and are split at the same step."""
        step, other_step = self.plans[point].step, other.plans[other_point].step
        return self.program.order[step] == other.program.order[other_step] and self.program.same_as(other.program)

    def start(self, call: Call, wanted: Collection[int], with_skip: Collection[int] = ()) -> dict[int, PointValues]:
        """The features at the wanted points, with skip values for those in `with_skip`; one run without gradients.

        Values are copied when the run reaches the point: a later step may overwrite them.
        """
        program, found = self.program, {}
        last = max((program.order[self.plans[number].step] for number in wanted), default=-1)
        values = program.inputs(on_device_of(copied_arguments(call), self.model))
        with torch.no_grad():
            for node in program.run(values, program.nodes[: last + 1]):
                for number in wanted:
                    if self.plans[number].step is node:
                        crossing = self.plans[number].crossing if number in with_skip else ()
                        found[number] = PointValues(_copy(values[node]), tuple(_copy(values[one]) for one in crossing))
        return found

    def finish(self, number: int, tensor: Tensor, skip_values: tuple[Any, ...], call: Call, copies: int = 1) -> Any:
        """The network from a point on, with this tensor there and these skip values, both for all copies."""
        plan, program = self.plans[number], self.program
        inputs = copied_arguments(repeat_samples(call, copies)) if plan.reads_inputs else call
        count, numbers = copies * samples_of(call), self._numbers_of(call)
        values = program.inputs(on_device_of(inputs, self.model))
        values |= dict(zip(plan.crossing, skip_values, strict=True)) | {plan.step: tensor}
        values |= {node: numbers[node](count) for node in plan.numbers}
        for node in program.run(values, (*plan.constants, *plan.rest)):
            if node.op == "output":
                return values[node]
        raise AssertionError("a program ends with its output")

    def _step(self, site: LayerPath, values: Values) -> fx.Node:
        """The step of a layer path."""
        calls = self.program.calls.get(id(modules_of(self.model)[site.path]), [])
        if len(calls) < (site.call or 1):
            raise Untraceable(f"{str(site)!r} is inside a module that is one step")
        called: ModuleCall = calls[(site.call or 1) - 1]
        structure = called.inputs if site.side == "input" else called.output
        nodes = [leaf.node for leaf in tree_leaves(structure) if isinstance(leaf, fx.Proxy)]
        value = tree_map(lambda leaf: values.get(leaf.node) if isinstance(leaf, fx.Proxy) else leaf, structure)
        try:
            tensor = pick(value, site.keys)
        except LookupError as reason:
            raise Untraceable(str(reason)) from reason
        for several in (nodes, list(_items(nodes))):
            fitting = [node for node in dict.fromkeys(several) if values.get(node) is tensor]
            if fitting and (several is nodes or len(fitting) == 1):
                return fitting[0]
        raise Untraceable(f"{str(site)!r} is no single step")

    def _numbers_of(self, call: Call) -> dict[fx.Node, NumberOfSamples]:
        """The plain values as functions of the number of samples, found by running few samples once and twice."""
        wanted = list(dict.fromkeys(node for plan in self.plans for node in plan.numbers))
        if not wanted:
            return {}
        key = signature(call)
        if key not in self._numbers:
            small = first_samples(call) if self.by_few else call
            once, count = self._plain_values(small, wanted), samples_of(small)
            try:
                twice = self._plain_values(repeat_samples(small, 2), wanted)
            except Exception:  # noqa: BLE001 - foreign code that does not take twice the samples
                self._numbers[key] = {node: number_for_one_size(once[node], count) for node in wanted}
            else:
                self._numbers[key] = {node: number_by_samples(once[node], twice[node], count) for node in wanted}
        return self._numbers[key]

    def _plain_values(self, call: Call, wanted: list[fx.Node]) -> Values:
        program, found = self.program, {}
        values = program.inputs(on_device_of(copied_arguments(call), self.model))
        last = max(program.order[node] for node in wanted)
        with torch.no_grad():
            for node in program.run(values, program.nodes[: last + 1]):
                if node in wanted:
                    found[node] = values[node]
        return found


def _items(nodes: Sequence[fx.Node]) -> Iterator[fx.Node]:
    """The steps that take an item of some values, and items of these."""
    found = [user for node in nodes for user in node.users if user.target is operator.getitem]
    if found:
        yield from found
        yield from _items(found)


def _copy(value: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, value)


def _plan(program: TracedProgram, values: Values, step: fx.Node) -> SplitPlan:
    """The steps to run after a step, and what they read from before it."""
    later = set(_reached(program, [step]))
    fed = set(_reached(program, [node for node in program.nodes if node.op == "placeholder"]))
    rest: dict[fx.Node, None] = {}
    read: dict[fx.Node, None] = {}
    for node in program.nodes[program.order[step] + 1 :]:
        if node in fed and node not in later and _is_plain(values[node]):
            continue  # a size that is read late is still a number from before
        rest[node] = None
        read |= {one: None for one in node.all_input_nodes if one not in rest and one is not step}
    outer = sorted((node for node in read if node.op != "placeholder"), key=program.order.__getitem__)
    crossing = tuple(node for node in outer if node in fed and not _is_plain(values[node]))
    if mixed := [node for node in crossing if not all(isinstance(x, Tensor) for x in tree_leaves(values[node]))]:
        raise Untraceable(f"{mixed[0].name} holds tensors and numbers")
    numbers = tuple(node for node in outer if node in fed and _is_plain(values[node]))
    needed, left = set(), [node for node in outer if node not in fed]
    while left:
        node = left.pop()
        if node not in needed:
            needed.add(node)
            left += node.all_input_nodes
    constants = tuple(sorted(needed, key=program.order.__getitem__))
    return SplitPlan(step, tuple(rest), constants, crossing, numbers, any(node.op == "placeholder" for node in read))


def _reached(program: TracedProgram, begin: Sequence[fx.Node]) -> Iterator[fx.Node]:
    """Some steps and all that depend on them."""
    found = set(begin)
    for node in program.nodes:
        if node in found or any(one in found for one in node.all_input_nodes):
            found.add(node)
            yield node


def _is_plain(value: Any) -> bool:
    return not any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
