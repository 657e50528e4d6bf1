"""What the parts of an element must be. One that comes out of a file is asked before it acts: a damaged permutation
or a negative scale would give another function without a word."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

#: How far a matrix may be from orthogonal.
TOLERANCE = 1e-6


def fault(found: Mapping[str, Tensor], neutral: Mapping[str, Tensor], matrix: str | None = None) -> str | None:
    """Why tensors are not a move of a wire, beside the move that does nothing; None where they are one.

    Args:
        found, neutral: permutation, scale, sign, matrix → tensor. matrix: the group of the matrices, "GL", "O" or "O1".

    >>> neutral = {"permutation": torch.arange(3)}
    >>> fault({"permutation": torch.tensor([2, 0, 1])}, neutral), fault({"permutation": torch.zeros(3).long()}, neutral)
    (None, 'its permutation names some unit twice')
    """
    if found.keys() != neutral.keys():
        return f"it has {', '.join(sorted(found)) or 'no parts'} instead of {', '.join(sorted(neutral))}"
    for name, part in found.items():
        if (part.shape, part.dtype) != (neutral[name].shape, neutral[name].dtype):
            return f"its {name} is {_form(part)} instead of {_form(neutral[name])}"
        if wrong := _wrong(name, part, neutral[name], matrix):
            return f"its {name} {wrong}"
    return None


def _wrong(name: str, part: Tensor, neutral: Tensor, matrix: str | None) -> str | None:
    if name == "permutation":
        return None if torch.equal(part.sort(-1).values, neutral) else "names some unit twice"
    if not bool(part.isfinite().all()):
        return "holds NaN or infinity"
    if name == "scale":
        return None if bool((part > 0).all()) else "holds numbers that are not positive"
    if name == "sign":
        return None if bool((part.abs() == 1).all()) else "holds numbers other than 1 and -1"
    if matrix == "GL":
        return None if bool((torch.linalg.matrix_rank(part) == part.shape[-1]).all()) else "has no inverse"
    straight = bool((part @ part.mT - neutral).abs().max() < TOLERANCE)
    keeps_ones = matrix != "O1" or bool((part.sum(-1) - 1).abs().max() < TOLERANCE)
    return None if straight and keeps_ones else "is not orthogonal" if not straight else "moves the all-ones direction"


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{tuple(tensor.shape)}"
