"""Certificates: random elements act, the function is measured in float64, and ops that fail are frozen.

Two independent measurements. The model itself is run before and after a random move and its outputs are compared. The
captured program is run on both, call by call, and every hidden tensor is compared with what its layout predicts; that
gives an error per wire and the op at which a symmetry fails.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from intertwine.errors import InputError
from intertwine.graph.model import copy_module, empty_caches
from intertwine.graph.program import Ref
from intertwine.graph.runner import ProgramRunner, float64_forward, generic_copy, max_abs, to_float64
from intertwine.symmetry.element import Element
from intertwine.symmetry.geometry import act
from intertwine.symmetry.symmetry import TOLERANCE, Certificate, FailedOp, Symmetry

MAX_MAGNITUDE = 1e6  # larger numbers are masks, which do not add to the rounding of later results
MAX_FAILED_OPS = 50  # after so many failing ops the certificate fails


def certify(
    symmetry: Symmetry,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    trials: int = 3,
    seed: int = 0,
    tolerance: float = TOLERANCE,
    per_wire: bool = True,
) -> Certificate:
    """See `Symmetry.certify`."""
    if trials < 1:
        raise InputError(f"trials must be at least 1, but is {trials}.")
    _check_finite(model)
    generic = generic_copy(model, seed)
    inputs = to_float64((args, dict(kwargs)))
    broken: list[FailedOp] = []
    local: dict[str, float] = {}
    reference = _reference(copy_module(generic), inputs)  # a copy, which the forward may write to
    error = float("inf") if per_wire else _measure(symmetry, generic, inputs, reference, trials, seed)
    while error > tolerance and len(broken) < MAX_FAILED_OPS:
        local, culprit = _walk(symmetry, generic, inputs, symmetry.random(seed), tolerance * 1e3)
        if culprit is None or culprit[0] in symmetry.distrusted:
            error = _measure(symmetry, generic, inputs, reference, trials, seed)
            break
        broken.append(culprit[1])
        symmetry = symmetry.distrusting(culprit[0])
    vacuous = _is_vacuous(generic, inputs, reference, seed)
    return Certificate(error <= tolerance, error, trials, local, tuple(broken), vacuous, symmetry)


def _check_finite(model: nn.Module) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and "mask" not in name and bool(tensor.isnan().any()):
            raise InputError(
                f"{name!r} holds NaN, so the model's function cannot be compared with itself. Repair or retrain the "
                "checkpoint first."
            )


def _run(model: nn.Module, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> list[Tensor]:
    args, kwargs = to_float64(inputs)
    with float64_forward():
        return [v for v in tree_leaves(model(*args, **kwargs)) if isinstance(v, Tensor)]


def relative_error(a: Tensor, b: Tensor, least: float = 1e-13) -> float:
    """Largest difference, relative to the largest entry (or to `least`); infinities must agree exactly.

    Complex numbers are compared in their real and imaginary parts.
    """
    if a.is_complex() and b.is_complex():
        a, b = (torch.view_as_real(v.resolve_conj()) for v in (a, b))
    if not a.is_floating_point():
        return 0.0 if torch.equal(a, b) else 1.0
    finite = a.isfinite()
    if a.shape != b.shape or not torch.equal(finite, b.isfinite()):
        return float("inf")
    a, b = a[finite], b[finite]
    if a.numel() == 0:
        return 0.0
    top = max(float(a.abs().max()), least)
    gap = float((a - b).abs().max())
    return gap / top if top > 1e-13 else gap


def _reference(model: nn.Module, inputs: Any) -> list[Tensor]:
    """The outputs of the model itself."""
    try:
        outputs = _run(model, inputs)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"On the example inputs, in float64, the model's forward raised {type(error).__name__}: {first} Pass "
            "inputs of the shapes and types the symmetry was found with; real inputs are converted to float64."
        ) from error
    if any(bool(v.isnan().any()) for v in outputs):
        raise InputError("The model returns NaN on the example inputs, so they prove nothing. Pass other inputs.")
    return outputs


def _measure(
    symmetry: Symmetry, model: nn.Module, inputs: Any, reference: list[Tensor], trials: int, seed: int
) -> float:
    """Largest relative change of an output over some random elements."""
    worst = 0.0
    for trial in range(trials):
        moved = _run(symmetry.act(symmetry.random(seed + trial), model), inputs)
        worst = max([worst, *(relative_error(a, b) for a, b in zip(reference, moved, strict=True))])
    return worst


def _is_vacuous(model: nn.Module, inputs: Any, reference: list[Tensor], seed: int) -> bool:
    """Whether the outputs stay the same when every weight of the model (a working copy) is changed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.mul_(1 + 0.1 * noise.to(parameter.device))
    empty_caches(model)
    return all(relative_error(a, b) < TOLERANCE for a, b in zip(reference, _run(model, inputs), strict=True))


def _walk(
    symmetry: Symmetry, model: nn.Module, inputs: Any, g: Element, tolerance: float
) -> tuple[dict[str, float], tuple[str, FailedOp] | None]:
    """Run the program on a model and on its moved copy; compare every tensor with the prediction, op by op."""
    geometry = symmetry.geometry
    program = geometry.graph.program
    names = [s.name for s in geometry.wire_specs]
    errors: dict[str, float] = {w.name: 0.0 for w in symmetry.wires}
    left, right = (ProgramRunner(program, m, inputs) for m in (symmetry.folded(model), symmetry.act(g, model)))
    reaches: dict[str, float] = {}  # the largest number met on the way to each tensor
    raw: set[str] = set()  # names of memory nothing was written to yet: there is nothing to compare
    with float64_forward():
        for position, call in enumerate(program.calls):
            around = left.size_of_inputs(position)
            reach = max((reaches.get(name, 0.0) for name in call.reads), default=0.0)
            a, b = left.step(position), right.step(position)
            reaches[call.name] = max(reach, min(max(around, max_abs(a)), MAX_MAGNITUDE))
            value = geometry.graph.values.get(call.name)
            first = call.args[0] if call.args else None
            view_of_raw = isinstance(first, Ref) and first.name in raw and call.aliases and not call.inplace
            if "empty" in call.op or view_of_raw:
                raw.add(call.name)
                continue
            if not isinstance(a, Tensor) or not a.is_floating_point():
                continue
            if value is None or not geometry.predicts(value) or tuple(a.shape) != value.shape:
                continue
            layout = geometry.layout(value)
            # what cancels to rounding noise is judged by the size of its inputs, and so is all that follows
            error = relative_error(act(layout, a, g), b, least=max(1e-4 * around, 1e-6 * reaches[call.name]))
            for wire in layout.wires:
                if names[wire] in errors:
                    errors[names[wire]] = max(errors[names[wire]], error)
            if error > tolerance:
                while call.target is operator.getitem:  # the op whose result this call takes
                    call = next(c for c in program.calls if c.name == call.args[0].name)
                wires = tuple(names[s] for s in sorted(layout.wires))
                return errors, (call.name, FailedOp(call.op, call.place, wires, error))
    return errors, None
