"""The laws of gradients: they move contragrediently, and so do the moments that optimizers keep of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from intertwine.graph.copies import copied
from intertwine.symmetry.certify import relative_error
from intertwine.symmetry.element import Element
from intertwine.symmetry.exact import float64_forward, to_float64
from intertwine.symmetry.layout import act
from intertwine.symmetry.runner import largest
from intertwine.testing.laws import Ledger
from intertwine.testing.subject import Subject

CANCELLED = 1e-4  # a gradient this much smaller than the largest is rounding noise, and is judged by its size


def check_gradients(subject: Subject, g: Element, ledger: Ledger) -> None:
    """Check pairing, gradients and the moments of an optimizer."""
    _check_pairing(subject, g, ledger)
    for name in subject.symmetry._discovery.diagonals:
        ledger.skip(f"gradient of {name}", "it is kept at ones, so that its gradient means nothing after a rotation")
    here, there = (_trainable(m) for m in (subject.model, subject.symmetry.act(g, subject.model)))
    reason = _differentiate(subject, here) or _differentiate(subject, there)
    if reason:
        ledger.skip("gradient", reason)
        ledger.skip("optimizer", reason)
        return
    _check_gradient(subject, g, here, there, ledger)
    _check_optimizer(subject, g, here, there, ledger)


def _check_pairing(subject: Subject, g: Element, ledger: Ledger) -> None:
    """A gradient is read off a step; moving both must not change the reading."""
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
        ledger.note("pairing", error, name, subject.wires(name))


def _check_gradient(subject: Subject, g: Element, here: nn.Module, there: nn.Module, ledger: Ledger) -> None:
    own, moved = _gradients(here), _gradients(there)
    noise = CANCELLED * max(map(largest, own.values()), default=0.0)
    for name, gradient in own.items():
        if name in subject.symmetry._discovery.diagonals:
            continue
        layout = subject.symmetry.layout_of(name)
        expected = gradient if layout is None else act(layout, gradient, g, -1)
        ledger.note("gradient", relative_error(expected, moved[name], noise), name, subject.wires(name))


def _check_optimizer(subject: Subject, g: Element, here: nn.Module, there: nn.Module, ledger: Ledger) -> None:
    """After one step the moments are powers of the gradients, with scales too; matrices move no second moments."""
    matrices = any(s.matrix for s in subject.symmetry.strands)
    # norm weights that were folded stay ones: no optimizer's state can be folded with them
    names = [name for name, _ in here.named_parameters() if name not in subject.symmetry._discovery.diagonals]
    own, moved = _stepped(here, names, matrices), _stepped(there, names, matrices)
    carried = subject.symmetry.act_on_optimizer(g, own, here)["state"]
    noise = {key: CANCELLED * max(largest(s[key]) for s in carried.values()) for s in carried.values() for key in s}
    for index, state in moved.state_dict()["state"].items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                error = relative_error(value, carried[index][key], noise[key])
                ledger.note("optimizer", error, f"{key} of {names[index]}", subject.wires(names[index]))


def _trainable(model: nn.Module) -> nn.Module:
    return copied(model).requires_grad_(True)


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
