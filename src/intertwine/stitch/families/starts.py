"""Where a matrix can begin before it is trained (row 001-C35)."""

from __future__ import annotations

import torch
from torch import Tensor

from intertwine.errors import InputError
from intertwine.shapes import Float
from intertwine.stitch.assignment import check_injection, matrix_from

#: Without the direct fit, which is the family's own.
PLAIN_STARTS = ("identity", "random", "permutation", "ones")


def start_matrix(inputs: int, outputs: int, how: str, generator: torch.Generator) -> Float[Tensor, "outputs inputs"]:
    """A matrix to begin with.

    "identity": ones on the diagonal, also of a matrix that is not square. "random": even in ±1/√inputs, as layers of
    PyTorch begin (rows 000-G28, 001-C29). "permutation": a random choice of inputs, none twice. "ones": all ones.

    Example:
        >>> import torch
        >>> start_matrix(3, 2, "identity", torch.Generator())
        tensor([[1., 0., 0.], [0., 1., 0.]])
    """
    if how == "identity":
        return torch.eye(outputs, inputs)
    if how == "ones":
        return torch.ones(outputs, inputs)
    if how == "permutation":
        return matrix_from(random_order(inputs, outputs, generator), torch.ones(outputs), inputs)
    if how == "random":
        return random_uniform((outputs, inputs), inputs, generator)
    raise InputError(f"A matrix was asked to begin at {how!r}. It can begin at: {', '.join(PLAIN_STARTS)}.")


def random_uniform(shape: tuple[int, ...], inputs: int, generator: torch.Generator) -> Tensor:
    """Even in ±1/√inputs."""
    return (2 * torch.rand(shape, generator=generator) - 1) / inputs**0.5


def random_order(inputs: int, outputs: int, generator: torch.Generator) -> Tensor:
    """One input for every output, none twice."""
    check_injection("permutation", inputs, outputs)
    return torch.randperm(inputs, generator=generator)[:outputs]
