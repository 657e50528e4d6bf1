"""Carriers: which hidden tensors speak for which strand when features are compared.

After nonlinearities ("post", the default): the results of elementwise functions that bend (ReLU, GELU, PReLU) and of
products of two features (gates). Before them ("pre"): what those functions read. A strand that meets no nonlinearity,
such as the stream of a transformer, is judged by every hidden tensor that carries it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from intertwine.align.hidden import Captured
from intertwine.errors import InputError
from intertwine.graph.meeting import Meeting, Pointwise
from intertwine.graph.program import Call, Ref

#: Nonlinear functions of several tensors, entry by entry.
GATES = frozenset({"prelu", "_prelu_kernel", "glu", "maximum", "minimum", "fmax", "fmin"})
SIDES = ("post", "pre")


def carriers(captured: Captured, at: str) -> Mapping[int, tuple[int, ...]]:
    """Strand → positions of the calls whose results speak for it."""
    if at not in SIDES:
        raise InputError(
            f"at={at!r} was asked for; features are taken 'post' (after nonlinearities) or 'pre' (before)."
        )
    chosen = _beside_nonlinearities(captured, at)
    every: dict[int, list[int]] = {}
    for position, layout in captured.layouts.items():
        for strand in dict.fromkeys(leaf.strand for leaf in layout.leaves()):
            every.setdefault(strand, []).append(position)
    return {s: tuple(p for p in places if p in chosen) or tuple(places) for s, places in every.items()}


def _beside_nonlinearities(captured: Captured, at: str) -> set[int]:
    bends = _bending(captured)
    found: set[int] = set()
    for position, call in enumerate(captured.program.calls):
        if call.name not in bends and not _is_gate(call, captured):
            continue
        if at == "post":
            found.add(position)
            continue
        for name in call.reads & captured.from_data:
            value = captured.value(name)
            found |= {captured.made_at[id(value)]} if id(value) in captured.made_at else set()
    return found


def _bending(captured: Captured) -> set[str]:
    """Names of the calls that apply a function of one number that is no straight line."""
    found = set()
    for meeting in captured.discovery.graph.tape.meetings:
        if isinstance(meeting, Meeting) and meeting.call is not None:
            laws = [law for law in meeting.laws.values() if isinstance(law, Pointwise)]
            if laws and _bends(laws[0]):
                found.add(meeting.call.name)
    return found


def _bends(law: Pointwise) -> bool:
    points = torch.linspace(-3, 3, 25, dtype=torch.float64)
    values = law.fn(points).double()
    steps = values.diff()
    return not bool((steps.diff().abs() <= 1e-9 * (1 + values.abs().max())).all())


def _is_gate(call: Call, captured: Captured) -> bool:
    name = call.op.removeprefix("aten.").split(".")[0].removesuffix("_")
    if name == "mul" or name == "__imul__":
        return sum(isinstance(v, Ref) and v.name in captured.from_data for v in call.args) > 1
    return name in GATES
