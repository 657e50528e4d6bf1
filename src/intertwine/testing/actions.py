"""Checks of how elements act on weights, features, gradients and optimizer state."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from intertwine.errors import InputError
from intertwine.graph.model import copy_module
from intertwine.graph.runner import float64_forward, max_abs, to_float64
from intertwine.symmetry.certify import relative_error
from intertwine.symmetry.element import Element
from intertwine.symmetry.geometry import Layout, act
from intertwine.testing.dense import LARGEST_MATRIX, DenseAction
from intertwine.testing.laws import Ledger, Subject, same_bits, strands_of

MOST_TERMS = 100_000  # the most products per tensor; above that only sampled entries are compared
CANCELLED = 1e-4  # smaller tensors, relative to the largest, are rounding noise and compared at its size


def check_action(subject: Subject, g: Element, h: Element, ledger: Ledger) -> None:
    """Check that elements act on the model's tensors as a group must."""
    sym, model = subject.symmetry, subject.model
    start = subject.tensors(model)
    by_h = sym.act(h, model)
    after_g = subject.tensors(sym.act(g, model))
    _check_identity(subject, start, ledger)
    both = subject.tensors(sym.act(g, by_h))
    check_agreement(subject, ledger, "action: composition", subject.tensors(sym.act(g @ h, model)), both)
    check_agreement(subject, ledger, "action: inverse", subject.tensors(sym.act(h.inverse(), by_h)), start)
    _check_state(subject, h, by_h, ledger)
    _check_slots(subject, g, start, ledger)
    _check_function(subject, g, ledger)
    for name, tensor in start.items():
        layout = subject.layout(name)
        if layout is not None and tensor.is_floating_point() and strands_of(layout):
            _check_dense(subject, name, layout, tensor, after_g[name], g, ledger)


def _check_state(subject: Subject, h: Element, by_h: nn.Module, ledger: Ledger) -> None:
    """A state dict moves as the model does, under every name of a tied tensor."""
    moved = by_h.state_dict()
    for name, tensor in subject.symmetry.act_on_state(h, subject.model.state_dict()).items():
        ledger.record("action: state", _bits(tensor, moved[name]), name, (), 0.0)


def check_agreement(
    subject: Subject,
    ledger: Ledger,
    law: str,
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    tolerance: float | None = None,
) -> None:
    """Tensors by name must agree."""
    for name, tensor in expected.items():
        ledger.record(law, relative_error(tensor, found[name]), name, subject.wires(name), tolerance)


def _check_identity(subject: Subject, start: Mapping[str, Tensor], ledger: Ledger) -> None:
    same = subject.tensors(subject.symmetry.act(subject.symmetry.identity(), subject.model))
    for name, tensor in start.items():
        ledger.record("action: identity", _bits(tensor, same[name]), name, subject.wires(name), 0.0)


def _bits(a: Tensor, b: Tensor) -> float:
    """The relative error; 0 only for the same bits."""
    return 0.0 if same_bits(a, b) else max(relative_error(a, b), 5e-324)


def _check_slots(subject: Subject, g: Element, start: Mapping[str, Tensor], ledger: Ledger) -> None:
    for wire in subject.symmetry.wires:
        part = g.only(wire.name)
        moved = subject.tensors(subject.symmetry.act(part, subject.model))
        own = {slot.parameter for slot in wire.slots}
        for name in moved.keys() - own:
            error = relative_error(start[name], moved[name])
            ledger.record("action: slots", error, f"{name}, where it has no slot,", (wire.name,), 0.0)
        # an element that is not the identity must change something, or the group found is larger than what acts
        varying = any(not bool((start[n] == start[n].flatten()[0]).all()) for n in own)  # a permutation shows there
        moving = part.distance(subject.symmetry.identity()) > 0 and varying
        idle = moving and all(torch.equal(start[n], moved[n]) for n in own)
        ledger.record("action: slots", float(idle), "the tensors of its slots, which do not change,", (wire.name,))


def _check_function(subject: Subject, g: Element, ledger: Ledger) -> None:
    error = subject.change(g)
    if not error <= ledger.tolerance:  # one wire at a time, to name those that fail alone
        failing = [w for w in g.wires if not subject.change(g.only(w)) <= ledger.tolerance]
        ledger.record("function", error, "the model's output", tuple(failing))
    ledger.record("function", error, "the model's output")


def _check_dense(
    subject: Subject, name: str, layout: Layout, x: Tensor, moved: Tensor, g: Element, ledger: Ledger
) -> None:
    """The fast path, as the model was moved and as gradients are, against rows of matrices."""
    linear = replace(layout, shift=0.0)
    matrices = any(subject.symmetry.wire_specs[i].matrix for i in strands_of(layout))
    cases = [(layout, 1, moved), (linear, -1, act(linear, x, g, -1))]
    cases += [] if matrices else [(linear, -2, act(linear, x, g, -2))]
    numbers = x.flatten().tolist()
    for case, degree, fast in cases:
        action = DenseAction(case, g, degree)
        entries = _entries(x.numel(), len(action.row(0)))
        slow = torch.tensor([action.value(i, numbers) for i in entries], dtype=torch.float64)
        error = relative_error(slow, fast.flatten()[torch.tensor(entries)].to("cpu", torch.float64))
        ledger.record("dense", error, f"{name} at degree {degree}", subject.wires(name))


def _entries(size: int, terms: int) -> list[int]:
    """All entries of a small tensor, a random choice of a large one's."""
    most = max(min(LARGEST_MATRIX, MOST_TERMS // terms), 16)
    return list(range(size)) if size <= most else random.Random(size).sample(range(size), most)


# -- Features --


def check_features(subject: Subject, g: Element, h: Element, ledger: Ledger) -> None:
    """Check the features of every module that returns a tensor."""
    sym = subject.symmetry
    modules = dict(subject.model.named_modules(remove_duplicate=False))
    sites = [name for name in sym.geometry.graph.sites if name in modules]
    own = outputs_of_modules(subject, subject.model, sites)
    moved = outputs_of_modules(subject, sym.act(g, subject.model), sites)
    noise = CANCELLED * max(map(max_abs, own.values()), default=0.0)
    for name, x in own.items():
        wires = _wires(subject, name)
        try:
            predicted = sym.act_on_features(g, name, x)
        except InputError as error:
            ledger.skip(f"features of {name}", str(error))
            continue
        ledger.record("features", relative_error(moved[name], predicted, noise), name, wires)
        twice = sym.act_on_features(g, name, sym.act_on_features(h, name, x))
        once = sym.act_on_features(g @ h, name, x)
        ledger.record("features: composition", relative_error(twice, once, noise), name, wires)


def outputs_of_modules(subject: Subject, model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """Module path → the first tensor the module returned last, read with hooks and not from the captured program."""
    kept: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            tensors = [v for v in tree_leaves(output) if isinstance(v, Tensor)]
            if tensors and tensors[0].is_floating_point():
                kept[name] = tensors[0].clone()

        return hook

    watched = copy_module(model)
    for name in names:
        watched.get_submodule(name).register_forward_hook(keep(name))
    subject.forward(watched)
    return kept


def _wires(subject: Subject, site: str) -> tuple[str, ...]:
    """The wires that move the features of a module; none for a view, whose layout is not computed yet."""
    geometry = subject.symmetry.geometry
    value = geometry.graph.values[geometry.graph.sites[site]]
    found = strands_of(geometry.layout(value)) if not value.lazy else set()
    return tuple(geometry.wire_specs[i].name for i in sorted(found))


# -- Gradients and optimizer state --


def check_gradients(subject: Subject, g: Element, ledger: Ledger) -> None:
    """Check pairing, gradients and the moments of an optimizer."""
    _check_pairing(subject, g, ledger)
    for name in subject.symmetry.geometry.diagonals:
        ledger.skip(f"gradient of {name}", "it is fixed at ones, so its gradient is meaningless after a rotation")
    here, there = (copy_module(m).requires_grad_(True) for m in (subject.model, subject.symmetry.act(g, subject.model)))
    reason = _differentiate(subject, here) or _differentiate(subject, there)
    if reason:
        ledger.skip("gradient", reason)
        ledger.skip("optimizer", reason)
        return
    _check_gradient(subject, g, here, there, ledger)
    _check_optimizer(subject, g, here, there, ledger)


def _check_pairing(subject: Subject, g: Element, ledger: Ledger) -> None:
    """The pairing of a gradient and a step must not change if both are moved."""
    generator = torch.Generator().manual_seed(0)
    for name, x in subject.tensors(subject.model).items():
        layout = subject.layout(name)
        if layout is None or not x.is_floating_point():
            continue
        linear = replace(layout, shift=0.0)
        covector, step = (torch.randn(2, *x.shape, generator=generator, dtype=torch.float64)).unbind(0)
        before = (covector * step).sum()
        after = (act(linear, covector, g, -1) * act(linear, step, g)).sum()
        error = float((before - after).abs() / (covector.norm() * step.norm()).clamp(min=1.0))
        ledger.record("pairing", error, name, subject.wires(name))


def _check_gradient(subject: Subject, g: Element, here: nn.Module, there: nn.Module, ledger: Ledger) -> None:
    own, moved = _gradients(here), _gradients(there)
    noise = CANCELLED * max(map(max_abs, own.values()), default=0.0)
    for name, gradient in own.items():
        if name in subject.symmetry.geometry.diagonals:
            continue
        layout = subject.symmetry.layout_of(name)
        expected = gradient if layout is None else act(layout, gradient, g, -1)
        ledger.record("gradient", relative_error(expected, moved[name], noise), name, subject.wires(name))


def _check_optimizer(subject: Subject, g: Element, here: nn.Module, there: nn.Module, ledger: Ledger) -> None:
    """After one step the moments are powers of the gradients, with scales too; matrices move no second moments."""
    matrices = any(s.matrix for s in subject.symmetry.wire_specs)
    # folded norm weights stay ones: no optimizer state can be folded with them
    names = [name for name, _ in here.named_parameters() if name not in subject.symmetry.geometry.diagonals]
    own, moved = _stepped(here, names, matrices), _stepped(there, names, matrices)
    carried = subject.symmetry.act_on_optimizer(g, own, here)["state"]
    noise = {key: CANCELLED * max(max_abs(s[key]) for s in carried.values()) for s in carried.values() for key in s}
    for index, state in moved.state_dict()["state"].items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                error = relative_error(value, carried[index][key], noise[key])
                ledger.record("optimizer", error, f"{key} of {names[index]}", subject.wires(names[index]))


def _differentiate(subject: Subject, model: nn.Module) -> str | None:
    """Fill in the gradients of a fixed linear function of the outputs; a reason where that cannot be done."""
    generator = torch.Generator().manual_seed(1)
    args, kwargs = to_float64((subject.args, dict(subject.kwargs)))
    try:
        with float64_forward(), torch.enable_grad():
            outputs = [v for v in tree_leaves(model(*args, **kwargs)) if isinstance(v, Tensor)]
            floating = [v for v in outputs if v.is_floating_point()]
            read = [(v * torch.randn(v.shape, generator=generator).to(v.device)).sum() for v in floating]
            torch.stack(read).sum().backward()
    except (RuntimeError, NotImplementedError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"the outputs cannot be differentiated ({first})"
    return None


def _gradients(model: nn.Module) -> Mapping[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _stepped(model: nn.Module, names: list[str], matrices: bool) -> torch.optim.Optimizer:
    parameters = [p for name, p in model.named_parameters() if name in names]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9) if matrices else torch.optim.Adam(parameters)
    optimizer.step()
    return optimizer
