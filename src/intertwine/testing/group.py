"""`check_group`: tests that a symmetry obeys the group laws, and that its elements act correctly on a model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from functools import reduce
from operator import matmul
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from intertwine.errors import InputError
from intertwine.symmetry.element import Element
from intertwine.symmetry.symmetry import TOLERANCE, Symmetry
from intertwine.testing.actions import check_action, check_features, check_gradients
from intertwine.testing.laws import GroupReport, Ledger, Subject, same_bits


def check_elements(symmetry: Symmetry, f: Element, g: Element, h: Element, ledger: Ledger) -> None:
    """Check the laws that elements obey among themselves."""
    e = symmetry.identity()
    check_same_element(ledger, "identity", "g @ e", g @ e, g)
    check_same_element(ledger, "identity", "e @ g", e @ g, g)
    check_same_element(ledger, "inverse", "g @ g⁻¹", g @ g.inverse(), e)
    check_same_element(ledger, "inverse", "g⁻¹ @ g", g.inverse() @ g, e)
    check_same_element(ledger, "inverse", "(g⁻¹)⁻¹", g.inverse().inverse(), g)
    check_same_element(ledger, "associativity", "(f @ g) @ h", (f @ g) @ h, f @ (g @ h))
    check_same_element(ledger, "inverse", "(g @ h)⁻¹", (g @ h).inverse(), h.inverse() @ g.inverse())
    _check_only(symmetry, g, ledger)
    _check_storage(g, ledger)


def _check_only(symmetry: Symmetry, g: Element, ledger: Ledger) -> None:
    check_same_element(ledger, "only", "g on all wires", g.only(*g.wires), g)
    check_same_element(ledger, "only", "g on no wire", g.only(), symmetry.identity())
    # dependent wires are read in the old coordinates of their bases, so their parts act first
    order = sorted(g.moves, key=g.depth)
    parts = [g.only(g.wire_specs[i].name) for i in order]
    check_same_element(ledger, "only", "the product of the wires", reduce(matmul, parts, symmetry.identity()), g)


def _check_storage(g: Element, ledger: Ledger) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "element.safetensors"
        g.save(file)
        loaded = Element.load(file)
    alike = loaded.wire_specs == g.wire_specs and loaded.signature == g.signature
    ledger.record("storage", 0.0 if alike else 1.0, "the description of the group", tolerance=0.0)
    error, wire = largest_difference(loaded, g)
    ledger.record("storage", error, "the element", wire, tolerance=0.0)


def check_same_element(ledger: Ledger, law: str, what: str, a: Element, b: Element) -> None:
    """Two elements must agree; if they do not, the wire on which they differ most is named."""
    error, wire = largest_difference(a, b)
    ledger.record(law, error, what, wire)


def largest_difference(a: Element, b: Element) -> tuple[float, tuple[str, ...]]:
    """Largest difference between two elements, and the wire it is on; an absent part is infinitely far."""
    worst, wire = 0.0, ()
    for i, move in a.moves.items():
        left, right = dict(move.items()), dict(b.moves[i].items()) if i in b.moves else {}
        for name in left.keys() | right.keys():
            gap = _gap(left.get(name), right.get(name))
            if not gap <= worst:
                worst, wire = gap, (a.wire_specs[i].name,)
    return worst, wire


def _gap(a: Tensor | None, b: Tensor | None) -> float:
    if a is None or b is None or a.shape != b.shape:
        return float("inf")
    if a.numel() == 0:
        return 0.0
    a, b = a.to(torch.float64), b.to(torch.float64)
    return float((a - b).abs().max() / a.abs().max().clamp(min=1.0))


def check_group(
    symmetry: Symmetry,
    model: nn.Module,
    *example_args: Any,
    seeds: Iterable[int] = (0, 1, 2),
    tolerance: float = TOLERANCE,
    **example_kwargs: Any,
) -> GroupReport:
    """Check every law of a group and of its actions, on a symmetry and a model it belongs to.

    `Symmetry.certify` checks the symmetry of a network. This also checks everything built on it: elements compose and
    invert, act on tensors, features, gradients and optimizers, and agree with dense matrices computed by independent
    code. It is meant for tests of custom rules (`intertwine.rule`) and of changes to the engine.

    Args:
        symmetry: what to check. model: a model of its architecture; it is copied to float64 and not changed.
        *example_args, **example_kwargs: inputs to run the model on.
        seeds: each gives three random elements. tolerance: largest relative error that passes.

    Returns:
        A `GroupReport`: the laws checked, the largest error of each, and the checks that were skipped and why.

    Raises:
        ConformanceError: a law fails; `.law`, `.wires` and `.error` say which one, where and by how much.

    Example:
        >>> import torch, intertwine
        >>> from intertwine.testing.group import check_group
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> x = torch.randn(4, 3)
        >>> report = check_group(intertwine.symmetry(model, x), model, x, seeds=[0])
        >>> report.max < 1e-9
        True
    """
    if not isinstance(symmetry, Symmetry):
        raise InputError(
            f"check_group needs a Symmetry, but got a {type(symmetry).__name__}. Make one with "
            "intertwine.symmetry(model, *example_args)."
        )
    symmetry.coverage(model)  # raises an error for a model of another architecture
    before = _snapshot(model)
    subject = Subject.of(symmetry, model, example_args, example_kwargs)
    ledger = Ledger(tolerance)
    seeds = list(seeds)
    for seed in seeds:
        f, g, h = (symmetry.random(seed=3 * seed + k) for k in range(3))
        check_elements(symmetry, f, g, h, ledger)
        check_action(subject, g, h, ledger)
        check_features(subject, g, h, ledger)
        check_gradients(subject, g, ledger)
    after = _snapshot(model)
    for name, old in before.items():
        same = name in after and same_bits(old, after[name])
        ledger.record("untouched", float(not same), name, tolerance=0.0)
    return GroupReport(ledger.laws, ledger.skipped, len(symmetry.wires), 3 * len(seeds), tolerance)


def _snapshot(model: nn.Module) -> dict[str, Tensor]:
    """The values of every tensor of a model, and the mode of every module."""
    modes = {f"the mode of {name or 'the model'}": torch.tensor(m.training) for name, m in model.named_modules()}
    return modes | {n: t.detach().clone() for n, t in [*model.named_parameters(), *model.named_buffers()]}
