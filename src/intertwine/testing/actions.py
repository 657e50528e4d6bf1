"""The laws of an action, on the tensors of a model, and the comparison with dense matrices."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from intertwine.symmetry.certify import relative_error
from intertwine.symmetry.element import Element
from intertwine.symmetry.layout import Layout, act
from intertwine.testing.dense import LARGEST_MATRIX, DenseAction
from intertwine.testing.laws import Ledger
from intertwine.testing.subject import Subject, same_bits, strands_of

MOST_TERMS = 100_000  # numbers the slow path adds up per tensor before it takes samples


def check_action(subject: Subject, g: Element, h: Element, ledger: Ledger) -> None:
    """Check that elements act on the model's tensors as a group must."""
    sym, model = subject.symmetry, subject.model
    start = subject.tensors(model)
    by_h = sym.act(h, model)
    after_g = subject.tensors(sym.act(g, model))
    _check_identity(subject, start, ledger)
    both = subject.tensors(sym.act(g, by_h))
    agree(subject, ledger, "action: composition", subject.tensors(sym.act(g @ h, model)), both)
    agree(subject, ledger, "action: inverse", subject.tensors(sym.act(h.inverse(), by_h)), start)
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
        ledger.note("action: state", _bits(tensor, moved[name]), name, (), 0.0)


def agree(
    subject: Subject,
    ledger: Ledger,
    law: str,
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    tolerance: float | None = None,
) -> None:
    """Tensors by name must agree."""
    for name, tensor in expected.items():
        ledger.note(law, relative_error(tensor, found[name]), name, subject.wires(name), tolerance)


def _check_identity(subject: Subject, start: Mapping[str, Tensor], ledger: Ledger) -> None:
    still = subject.tensors(subject.symmetry.act(subject.symmetry.identity(), subject.model))
    for name, tensor in start.items():
        ledger.note("action: identity", _bits(tensor, still[name]), name, subject.wires(name), 0.0)


def _bits(a: Tensor, b: Tensor) -> float:
    """0 for the same bits, however small the difference otherwise."""
    return 0.0 if same_bits(a, b) else max(relative_error(a, b), 5e-324)


def _check_slots(subject: Subject, g: Element, start: Mapping[str, Tensor], ledger: Ledger) -> None:
    for wire in subject.symmetry.wires:
        part = g.only(wire.name)
        moved = subject.tensors(subject.symmetry.act(part, subject.model))
        own = {slot.parameter for slot in wire.slots}
        for name in moved.keys() - own:
            error = relative_error(start[name], moved[name])
            ledger.note("action: slots", error, f"{name}, where it has no slot,", (wire.name,), 0.0)
        # an element that is not the identity must do something, or the group found is larger than what acts
        moving = part.distance(subject.symmetry.identity()) > 0 and any(not _constant(start[n]) for n in own)
        idle = moving and all(torch.equal(start[n], moved[n]) for n in own)
        ledger.note("action: slots", float(idle), "every one of its slots, which stays,", (wire.name,))


def _constant(x: Tensor) -> bool:
    """Whether all entries are the same, so that no permutation shows."""
    return bool((x == x.flatten()[0]).all())


def _check_function(subject: Subject, g: Element, ledger: Ledger) -> None:
    error = subject.change(g)
    if not error <= ledger.tolerance:  # one wire at a time, to name those that fail alone
        guilty = [w for w in g.wires if not subject.change(g.only(w)) <= ledger.tolerance]
        ledger.note("function", error, "the model's output", tuple(guilty))
    ledger.note("function", error, "the model's output")


def _check_dense(
    subject: Subject, name: str, layout: Layout, x: Tensor, moved: Tensor, g: Element, ledger: Ledger
) -> None:
    """The fast path, as the model was moved and as gradients are, against rows of matrices."""
    linear = replace(layout, shift=0.0)
    matrices = any(subject.symmetry.strands[i].matrix for i in strands_of(layout))
    cases = [(layout, 1, moved), (linear, -1, act(linear, x, g, -1))]
    cases += [] if matrices else [(linear, -2, act(linear, x, g, -2))]
    numbers = x.flatten().tolist()
    for case, degree, fast in cases:
        action = DenseAction(case, g, degree)
        entries = _entries(x.numel(), len(action.row(0)))
        slow = torch.tensor([action.value(i, numbers) for i in entries], dtype=torch.float64)
        error = relative_error(slow, fast.flatten()[torch.tensor(entries)].to("cpu", torch.float64))
        ledger.note("dense", error, f"{name} at degree {degree}", subject.wires(name))


def _entries(size: int, terms: int) -> list[int]:
    """All entries of a small tensor, a random choice of a large one's."""
    most = max(min(LARGEST_MATRIX, MOST_TERMS // terms), 16)
    return list(range(size)) if size <= most else random.Random(size).sample(range(size), most)
