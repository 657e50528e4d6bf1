"""check_group: does a symmetry obey the laws of a group that acts on a model?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from intertwine.errors import InputError
from intertwine.symmetry.certificate import TOLERANCE
from intertwine.symmetry.symmetry import Symmetry
from intertwine.testing.actions import check_action
from intertwine.testing.elements import check_elements
from intertwine.testing.features import check_features
from intertwine.testing.gradients import check_gradients
from intertwine.testing.laws import GroupReport, Ledger
from intertwine.testing.subject import Subject, same_bits


def check_group(
    symmetry: Symmetry,
    model: nn.Module,
    *example_args: Any,
    seeds: Iterable[int] = (0, 1, 2),
    tolerance: float = TOLERANCE,
    **example_kwargs: Any,
) -> GroupReport:
    """Check every law of a group and of its actions, on a symmetry and a model it belongs to.

    `Symmetry.certify` asks whether the symmetry of a network is true. This asks besides whether everything built on it
    hangs together: elements compose and invert, act on tensors, features, gradients and optimizers, and agree with
    dense matrices that are found without any of the code they are compared with. It is meant for the tests of those who
    write rules of their own (`intertwine.rule`) or change the engine.

    Args:
        symmetry: what to check. model: a model of its architecture; it is copied to float64 and not changed.
        *example_args, **example_kwargs: inputs to run the model on.
        seeds: each gives three random elements. tolerance: largest relative error that passes.

    Returns:
        A `GroupReport`: the laws checked, the largest error of each, and what could not be checked and why.

    Raises:
        ConformanceError: a law fails; `.law`, `.wires` and `.error` say which one, where and by how much.

    Example:
        >>> import torch, intertwine
        >>> from intertwine.testing import check_group
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> x = torch.randn(4, 3)
        >>> report = check_group(intertwine.symmetry(model, x), model, x, seeds=[0])
        >>> report.max < 1e-9
        True
    """
    _check_arguments(symmetry, model)
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
    _check_untouched(model, before, ledger)
    return GroupReport(ledger.laws, ledger.skipped, len(symmetry.wires), 3 * len(seeds), tolerance)


def _check_arguments(symmetry: Symmetry, model: nn.Module) -> None:
    if not isinstance(symmetry, Symmetry):
        raise InputError(
            f"A Symmetry was expected, a {type(symmetry).__name__} was given. Make one with "
            "intertwine.symmetry(model, *example_args)."
        )
    symmetry.coverage(model)  # refuses what is no model of this architecture


def _snapshot(model: nn.Module) -> dict[str, Tensor]:
    """The values of every tensor of a model, and the mode of every module."""
    modes = {f"the mode of {name or 'the model'}": torch.tensor(m.training) for name, m in model.named_modules()}
    return modes | {n: t.detach().clone() for n, t in [*model.named_parameters(), *model.named_buffers()]}


def _check_untouched(model: nn.Module, before: dict[str, Tensor], ledger: Ledger) -> None:
    after = _snapshot(model)
    for name, old in before.items():
        same = name in after and same_bits(old, after[name])
        ledger.note("untouched", float(not same), name, tolerance=0.0)
