"""Small networks on which statements of Chen, Zhou and Yan (2024) fail as printed, with data to see it on."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def sum_of_two_features() -> tuple[nn.Sequential, Tensor]:
    """Theorem 3.3 without the input arrow: the readout adds two different features, so it does not see them swapped.

    z = (relu(x), relu(x − 1)), y = z₁ + z₂, on x from 0 to 3.

    Example:
        >>> from intertwine.canonical.counterexamples import sum_of_two_features
        >>> model, x = sum_of_two_features()
        >>> model[:2](x)[-1].tolist()
        [3.0, 2.0]
    """
    return _network((1.0, 1.0), (0.0, -1.0), (1.0, 1.0)), _inputs()


def silent_feature() -> tuple[nn.Sequential, nn.Sequential, Tensor]:
    """Proposition 3.2: two networks on a line of constant loss, one with a feature of which the other has no trace.

    a: z = (x, relu(x − 1)), b: z = (x, 0), both y = z₁, on x from 0 to 3. All along the line from b to a the output is
    x, and even the features move linearly; yet a's features span a plane of functions and b's a line, so that no
    invertible map takes one to the other.

    Example:
        >>> import torch
        >>> from intertwine.canonical.counterexamples import silent_feature
        >>> a, b, x = silent_feature()
        >>> torch.equal(a(x), b(x))
        True
    """
    return _network((1.0, 1.0), (0.0, -1.0), (1.0, 0.0)), _network((1.0, 0.0), (0.0, 0.0), (1.0, 0.0)), _inputs()


def _network(weight: tuple[float, float], bias: tuple[float, float], readout: tuple[float, float]) -> nn.Sequential:
    hidden, last = nn.Linear(1, 2), nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        hidden.weight.copy_(torch.tensor(weight)[:, None])
        hidden.bias.copy_(torch.tensor(bias))
        last.weight.copy_(torch.tensor(readout)[None, :])
    return nn.Sequential(hidden, nn.ReLU(), last)


def _inputs() -> Tensor:
    return torch.linspace(0, 3, 13)[:, None]
