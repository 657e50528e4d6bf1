"""What is no activation is refused, and the reason says what was given and what to do."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import intertwine as it


def counter() -> Callable[[Tensor], Tensor]:
    """A function that answers differently each time."""
    calls = []

    def count(x: Tensor) -> Tensor:
        calls.append(1)
        return x * len(calls)

    return count


def late() -> Callable[[Tensor], Tensor]:
    """A function that changes its mind after the third call."""
    calls = []

    def moody(x: Tensor) -> Tensor:
        calls.append(1)
        return torch.relu(x) if len(calls) <= 3 else torch.tanh(x)

    return moody


def raises(x: Tensor) -> Tensor:
    raise RuntimeError("not today.")


MIXING = r"was given as an activation, and its value at one entry changes with .*not elementwise.*intertwine\.symmetry"
UNSTEADY = r"gave two different answers to the same input: it is random or keeps state.*Call \.eval\(\)"
REFUSED: dict[str, tuple[Callable[..., object], str]] = {
    "softmax": (lambda x: x.softmax(-1), "fn " + MIXING),
    "Softmin": (nn.Softmin(-1), "Softmin " + MIXING),
    "LogSoftmax": (nn.LogSoftmax(-1), "LogSoftmax " + MIXING),
    "layer norm": (lambda x: F.layer_norm(x, x.shape[-1:]), MIXING),
    "unit length": (lambda x: x / x.norm(), MIXING),
    "minus the median": (lambda x: x - x.median(), MIXING),
    "running sum": (lambda x: x.cumsum(0), MIXING),
    "sorted": (lambda x: x.sort().values, MIXING),
    "shifted by one": (lambda x: x.roll(1), MIXING),
    "position": (lambda x: x + torch.arange(len(x)), MIXING),
    "GLU": (
        nn.GLU(),
        r"GLU was called with a tensor of shape \(48,\) and returned one of shape \(24,\).*keeps the shape",
    ),
    "a sum": (torch.sum, r"sum was called .* returned one of shape \(\).*Pass a function that is"),
    "two inputs": (lambda x, y: x * y, r"fn needs 2 inputs \(x, y\); an activation takes one.*lambda x: fn\(x, y\)"),
    "attention": (nn.MultiheadAttention(4, 2), r"MultiheadAttention needs 3 inputs \(query, key, value\)"),
    "torch.add": (torch.add, r"add was called with one float64 tensor .* raised TypeError"),
    "Linear": (nn.Linear(3, 3), r"Linear was called with one float64 tensor of shape \(48,\) .*raised RuntimeError"),
    "LayerNorm": (nn.LayerNorm(8), r"LayerNorm was called .*raised RuntimeError.*takes one tensor of any shape"),
    "an error": (raises, r"raises was called .*raised RuntimeError: not today\. An activation takes one tensor"),
    "a tuple": (lambda x: (x, x), r"returned a tuple, not a tensor.*lambda x: fn\(x\)\[0\]"),
    "a number": (lambda x: 3.0, "returned a float, not a tensor"),
    "Dropout": (nn.Dropout(), "Dropout " + UNSTEADY),
    "RReLU": (nn.RReLU(), "RReLU " + UNSTEADY),
    "noise": (torch.rand_like, "rand_like " + UNSTEADY),
    "a counter": (counter(), "count " + UNSTEADY),
    "a change of mind": (late(), "moody " + UNSTEADY),
    "BatchNorm": (
        nn.BatchNorm1d(3),
        "BatchNorm1d was given .*keeps running statistics of its inputs.*Pass the activation",
    ),
    "LSTM": (nn.LSTM(3, 3), "LSTM was given .*keeps a state from step to step.*whole network"),
    "GRUCell": (nn.GRUCell(3, 3), "GRUCell was given .*keeps a state from step to step"),
    "PReLU per channel": (
        nn.PReLU(8),
        r"A PReLU with 8 slopes .*8 activations.*LeakyReLU\(s\)\) for s in prelu\.weight",
    ),
    "never a number": (lambda x: x * torch.nan, "NaN at every one of 1444 numbers.*defined somewhere"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_reason(name: str) -> None:
    fn, reason = REFUSED[name]
    with pytest.raises(it.InputError, match=reason):
        it.activation_group(fn)


def test_the_advice_for_a_prelu_works() -> None:
    module = nn.PReLU(3)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([0.25, 1.0, -1.0]))
    kinds = [it.activation_group(nn.LeakyReLU(s)).kind for s in module.weight.tolist()]
    assert kinds == ["positive", "all", "nonzero"]


def test_the_advice_for_dropout_works() -> None:
    assert it.activation_group(nn.Dropout().eval()).kind == "all"
    assert it.activation_group(nn.RReLU().eval()).kind == "positive"
