"""`fingerprint`: a short text that two networks share when they differ by a symmetry only."""

from __future__ import annotations

from typing import Any

from torch import nn

from intertwine.canonical.form import canonical_form
from intertwine.symmetry.blocks import weights_of
from intertwine.symmetry.symmetry import Symmetry
from intertwine.symmetry.symmetry import symmetry as find_symmetry


def fingerprint(
    model: nn.Module,
    *example_args: Any,
    precision: float | int = 3e-3,
    symmetry: Symmetry | None = None,
    **example_kwargs: Any,
) -> str:
    """A hash of the canonical form: equal for two networks of one orbit, different for other networks.

    Where only permutations and signs act, canonical forms agree to the last bit and every bit enters. Where scales act,
    the last digits are rounding noise; what enters then is the sign of every weight, in canonical order, and two sums
    over all tensors, to `precision`: of the logarithms of their lengths, and of their cosines with a fixed tensor. Two
    networks of one orbit in single precision get different fingerprints with a chance of about 1e-6 / precision; two
    others that differ by less than `precision` may share one. `intertwine.equivalent` has the last word.

    Args:
        model: any network. *example_args, **example_kwargs: inputs, as for `intertwine.symmetry`.
        precision: the step to which the two sums are rounded. symmetry: the model's symmetry where it is already known.

    Example:
        >>> import torch, intertwine
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> x = torch.zeros(1, 3)
        >>> sym = intertwine.symmetry(model, x)
        >>> twin = sym.act(sym.random(seed=0), model)
        >>> intertwine.fingerprint(model, x) == intertwine.fingerprint(twin, x)
        True
    """
    found = symmetry if symmetry is not None else find_symmetry(model, *example_args, **example_kwargs)
    return canonical_form(found, weights_of(found, model)).fingerprint(precision)
