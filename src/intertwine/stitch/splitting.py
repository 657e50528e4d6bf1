"""A traced network cut in two: the steps up to a place, the steps behind it, and what goes around the cut."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from intertwine.features.batches import Call, fresh, placed
from intertwine.features.capture import pick
from intertwine.features.fingerprint import samples_of
from intertwine.features.places import Site, modules_of
from intertwine.stitch.batching import Number, by_samples, few, only_once, repeated, signature
from intertwine.stitch.hooked import Taken
from intertwine.stitch.tracing import Called, Program, Untraceable, Values, trace


@dataclass(frozen=True, eq=False)
class Plan:
    """How a network goes on behind a step.

    Attributes:
        cut: the step. rest: the steps behind it. constants: earlier steps that no input reaches, run again.
        crossing: earlier tensors that the rest reads. numbers: earlier plain values that it reads, such as sizes.
        reads_inputs: whether the rest reads inputs of the network too.
    """

    cut: fx.Node
    rest: tuple[fx.Node, ...]
    constants: tuple[fx.Node, ...]
    crossing: tuple[fx.Node, ...]
    numbers: tuple[fx.Node, ...]
    reads_inputs: bool


class Traced:
    """One network and the places where it is cut, as steps. `by_few`: whether it takes few samples of a batch alone.

    Raises:
        Untraceable: a network or a place that is no step; see `tracing`.
    """

    def __init__(self, model: nn.Module, places: Sequence[Site], example: Call, by_few: bool = True) -> None:
        self.model, self.places, self.by_few = model, tuple(places), by_few
        call = placed(example, model)
        self.program = trace(model, call, [site.path for site in places])
        values = self.program.inputs(fresh(call))
        with torch.no_grad():
            for _ in self.program.run(values, self.program.nodes, keep=True):
                pass
        self.plans = tuple(_plan(self.program, values, self._step(site, values)) for site in places)
        self.crossing = tuple(tuple(node.name for node in plan.crossing) for plan in self.plans)
        self._numbers: dict[Any, dict[fx.Node, Number]] = {}

    def same_as(self, other: Traced, mine: int, its: int) -> bool:
        """Whether both networks take the same steps and are cut behind the same one."""
        cuts = self.program.order[self.plans[mine].cut], other.program.order[other.plans[its].cut]
        return cuts[0] == cuts[1] and self.program.same_as(other.program)

    def start(self, call: Call, wanted: Collection[int], around: Collection[int] = ()) -> dict[int, Taken]:
        """What the network has at the wanted places, and what goes around those of `around`; one run, no gradients.

        Everything is copied when the run passes the place: a later step may overwrite it.
        """
        program, found = self.program, {}
        last = max((program.order[self.plans[number].cut] for number in wanted), default=-1)
        values = program.inputs(placed(fresh(call), self.model))
        with torch.no_grad():
            for node in program.run(values, program.nodes[: last + 1]):
                for number in wanted:
                    if self.plans[number].cut is node:
                        beside = self.plans[number].crossing if number in around else ()
                        found[number] = Taken(_copy(values[node]), tuple(_copy(values[one]) for one in beside))
        return found

    def finish(self, number: int, tensor: Tensor, around: tuple[Any, ...], call: Call, copies: int = 1) -> Any:
        """The network from a place on, where it has this tensor, with these values around it, both for all copies."""
        plan, program = self.plans[number], self.program
        given = program.inputs(placed(fresh(repeated(call, copies)) if plan.reads_inputs else call, self.model))
        count, numbers = copies * samples_of(call), self._learned(call)
        values = given | dict(zip(plan.crossing, around, strict=True)) | {plan.cut: tensor}
        values |= {node: numbers[node](count) for node in plan.numbers}
        for node in program.run(values, (*plan.constants, *plan.rest)):
            if node.op == "output":
                return values[node]
        raise AssertionError("a program ends with its output")

    # -- places --------------------------------------------------------------------------------------------------------

    def _step(self, site: Site, values: Values) -> fx.Node:
        """The step whose value is meant by a place."""
        calls = self.program.calls.get(id(modules_of(self.model)[site.path]), [])
        if len(calls) < (site.call or 1):
            raise Untraceable(f"{str(site)!r} is inside a module that is one step")
        called: Called = calls[(site.call or 1) - 1]
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

    # -- plain values --------------------------------------------------------------------------------------------------

    def _learned(self, call: Call) -> dict[fx.Node, Number]:
        """How the plain values depend on the number of samples, found by running few samples once and twice."""
        wanted = list(dict.fromkeys(node for plan in self.plans for node in plan.numbers))
        if not wanted:
            return {}
        key = signature(call)
        if key not in self._numbers:
            small = few(call) if self.by_few else call
            once = self._plain(small, wanted)
            count = samples_of(small)
            try:
                twice = self._plain(repeated(small, 2), wanted)
            except Exception:  # noqa: BLE001 - foreign code that does not take twice the samples
                self._numbers[key] = {node: only_once(once[node], count) for node in wanted}
            else:
                self._numbers[key] = {node: by_samples(once[node], twice[node], count) for node in wanted}
        return self._numbers[key]

    def _plain(self, call: Call, wanted: list[fx.Node]) -> Values:
        program = self.program
        values, found = program.inputs(placed(fresh(call), self.model)), {}
        last = max(program.order[node] for node in wanted)
        with torch.no_grad():
            for node in program.run(values, program.nodes[: last + 1]):
                if node in wanted:
                    found[node] = values[node]
        return found


def _items(nodes: Sequence[fx.Node]) -> Iterator[fx.Node]:
    """The steps that take an item out of some values, and items out of these."""
    found = [user for node in nodes for user in node.users if user.target is operator.getitem]
    if found:
        yield from found
        yield from _items(found)


def _copy(value: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, value)


# -- plans -------------------------------------------------------------------------------------------------------------


def _plan(program: Program, values: Values, cut: fx.Node) -> Plan:
    """What has to be run behind a step, and what that reads from before it."""
    behind = set(_reached(program, [cut]))
    fed = set(_reached(program, [node for node in program.nodes if node.op == "placeholder"]))
    rest: dict[fx.Node, None] = {}
    read: dict[fx.Node, None] = {}
    for node in program.nodes[program.order[cut] + 1 :]:
        if node in fed and node not in behind and _is_plain(values[node]):
            continue  # a size that is asked for late is still a number from before
        rest[node] = None
        read |= {one: None for one in node.all_input_nodes if one not in rest and one is not cut}
    outer = sorted((node for node in read if node.op != "placeholder"), key=program.order.__getitem__)
    crossing = tuple(node for node in outer if node in fed and not _is_plain(values[node]))
    if mixed := [node for node in crossing if not all(isinstance(x, Tensor) for x in tree_leaves(values[node]))]:
        raise Untraceable(f"{mixed[0].name} holds tensors and numbers")
    numbers = tuple(node for node in outer if node in fed and _is_plain(values[node]))
    constants = _closed([node for node in outer if node not in fed])
    first = tuple(sorted(constants, key=program.order.__getitem__))
    return Plan(cut, tuple(rest), first, crossing, numbers, any(node.op == "placeholder" for node in read))


def _reached(program: Program, begin: Sequence[fx.Node]) -> Iterator[fx.Node]:
    """The steps that some steps have an influence on, and these themselves."""
    found = set(begin)
    for node in program.nodes:
        if node in found or any(one in found for one in node.all_input_nodes):
            found.add(node)
            yield node


def _closed(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Some steps and all that they need."""
    found, left = set(), list(nodes)
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += node.all_input_nodes
    return found


def _is_plain(value: Any) -> bool:
    return not any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
