"""Orders for the hidden nodes of stacked networks: NodeSort, lexicographic, and matching one network to another.

An order is a tensor (networks, hidden) of old positions: node i of a new network is node `order[:, i]` of the old one.
`moved` applies any method by name, so that everything measured treats all methods alike:

    a, b = stack[:1], stack[1:2]
    moved("nodesort 1.1", b, onto=a, images=x)     # sorts b; a plays no part
    moved("weight matching", b, onto=a, images=x)  # the order of b's nodes that comes nearest to a
"""

from __future__ import annotations

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from intertwine.errors import InputError
from intertwine.reproduce.kinds.distances.stacked_mlp import Stack

UNSORTED, LEXICOGRAPHIC = "unsorted", "lexicographic"
WEIGHTS, ACTIVATIONS = "weight matching", "activation matching"
MATCHINGS = (WEIGHTS, ACTIVATIONS)
#: Columns multiplied at once in a Gram matrix: 1,000 networks then need half a GiB of float64.
COLUMNS = 2**16


def nodesort(base: float) -> str:
    """The name of the method that sorts with this base."""
    return f"nodesort {base:g}"


def orders(bases: list[float]) -> list[str]:
    """Names of the methods that need no second network."""
    return [UNSORTED, *map(nodesort, bases), LEXICOGRAPHIC]


# -- orders ------------------------------------------------------------------------------------------------------------


def nodesort_order(w2: Tensor, base: float) -> Tensor:
    """The thesis's order (8): nodes by the inner product of their outgoing weights with (p^0, ..., p^(m-1))."""
    powers = base ** torch.arange(w2.shape[2], dtype=torch.float64, device=w2.device)
    return torch.argsort((w2.double() * powers).sum(-1), dim=1, stable=True)


def lexicographic_order(w2: Tensor) -> Tensor:
    """What the thesis says order (8) is: by the first outgoing weight, then the second, and so on."""
    order = torch.arange(w2.shape[1], device=w2.device).expand(w2.shape[:2])
    for column in reversed(w2.unbind(-1)):  # stable sorts from the least to the most important column
        order = order.gather(1, torch.argsort(column.gather(1, order), dim=1, stable=True))
    return order


def matching_order(scores: Tensor) -> Tensor:
    """For score matrices (pairs, nodes of a, nodes of b): which node of b goes to which place, at the best total."""
    found = [linear_sum_assignment(matrix.numpy(), maximize=True)[1] for matrix in scores.cpu()]
    return torch.stack([torch.as_tensor(columns) for columns in found]).to(scores.device)


def weight_scores(onto: Stack, stack: Stack) -> Tensor:
    """Inner products of all weights of two nodes. With one hidden layer the best total gives the least distance."""
    biases = onto.b1[:, :, None] * stack.b1[:, None, :]
    return torch.bmm(onto.w1.mT, stack.w1) + biases + torch.bmm(onto.w2, stack.w2.mT)


def activation_scores(onto: Stack, stack: Stack, images: Tensor) -> Tensor:
    """Inner products of the nodes' features on the same images."""
    return torch.bmm(onto.hidden(images).mT, stack.hidden(images))


# -- moving networks ---------------------------------------------------------------------------------------------------


def permuted(stack: Stack, order: Tensor) -> Stack:
    """The same functions with their hidden nodes in another order."""
    w1 = stack.w1.gather(2, order[:, None, :].expand_as(stack.w1))
    w2 = stack.w2.gather(1, order[:, :, None].expand_as(stack.w2))
    return Stack(w1, stack.b1.gather(1, order), w2, stack.b2, stack.activation)


def sorted_stack(w1: Tensor, b1: Tensor, w2: Tensor, base: float) -> tuple[Tensor, Tensor, Tensor]:
    """NodeSort on tensors (networks, inputs, hidden), (networks, hidden), (networks, hidden, outputs).

    With one hidden layer the printed algorithm (its indices mended) and the sequential one are the same.
    """
    stack = permuted(Stack(w1, b1, w2, w2[:, 0]), nodesort_order(w2, base))
    return stack.w1, stack.b1, stack.w2


def moved(method: str, stack: Stack, onto: Stack, images: Tensor) -> Stack:
    """The stack after a method; matchings bring network i of the stack near network i of `onto`."""
    if method == UNSORTED or (method in MATCHINGS and stack is onto):
        return stack
    return permuted(stack, order_of(method, stack, onto, images))


def order_of(method: str, stack: Stack, onto: Stack, images: Tensor) -> Tensor:
    """The order a method gives the nodes of each network."""
    if method == LEXICOGRAPHIC:
        return lexicographic_order(stack.w2)
    if method == WEIGHTS:
        return matching_order(weight_scores(onto, stack))
    if method == ACTIVATIONS:
        return matching_order(activation_scores(onto, stack, images))
    name, _, base = method.partition(" ")
    if name != "nodesort":
        raise InputError(
            f"asked for the method {method!r}; known are 'nodesort BASE', {UNSORTED!r}, {LEXICOGRAPHIC!r}, "
            f"{WEIGHTS!r} and {ACTIVATIONS!r}"
        )
    return nodesort_order(stack.w2, float(base))


# -- distances ---------------------------------------------------------------------------------------------------------


def pairwise(tensor: Tensor) -> Tensor:
    """Euclidean distances of all pairs of networks, in float64, from a Gram matrix built a few columns at a time."""
    flat = tensor.flatten(1)
    gram = torch.zeros(len(flat), len(flat), dtype=torch.float64, device=flat.device)
    for columns in flat.split(COLUMNS, dim=1):
        wide = columns.double()
        gram += wide @ wide.T
    squares = gram.diagonal()[:, None] + gram.diagonal() - 2 * gram
    rows, columns = torch.triu_indices(len(flat), len(flat), offset=1, device=flat.device)
    return squares[rows, columns].clamp(min=0).sqrt()  # rounding can push the square of a zero distance below zero


def apart(a: Stack, b: Stack) -> dict[str, Tensor]:
    """Distance of network i of one stack to network i of the other: of w1, of w2, and of all parameters."""
    squares = {
        name: (left.double() - right.double()).square().flatten(1).sum(1)
        for (name, left), right in zip(a.tensors.items(), b.tensors.values(), strict=True)
    }
    total = sum(squares.values(), torch.zeros_like(squares["w1"]))
    return {"w1": squares["w1"].sqrt(), "w2": squares["w2"].sqrt(), "all": total.sqrt()}
