"""Which factors pass an activation, for torch's own and for functions nobody has named."""

from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from networks import Net, prove
from torch import Tensor, nn

import intertwine as it

Function = Callable[[Tensor], Tensor]

TRIVIAL: dict[str, Function] = {
    "GELU": F.gelu,
    "GELU by tanh": nn.GELU("tanh"),
    "SiLU": F.silu,
    "Mish": F.mish,
    "Softplus": F.softplus,
    "steep Softplus": nn.Softplus(beta=100.0),
    "ELU": F.elu,
    "CELU": nn.CELU(2.0),
    "SELU": F.selu,
    "ReLU6": F.relu6,
    "Hardswish": F.hardswish,
    "Hardsigmoid": F.hardsigmoid,
    "Sigmoid": torch.sigmoid,
    "LogSigmoid": F.logsigmoid,
    "exp": torch.exp,
    "threshold at 1": nn.Threshold(1.0, 0.0),
    "shifted ReLU": lambda x: torch.relu(x + 0.1),
    "ReLU with a small wave": lambda x: torch.relu(x) + 1e-4 * torch.sigmoid(x),
    "snake": lambda x: x + torch.sin(x) ** 2,
}
POSITIVE: dict[str, tuple[Function, float]] = {
    "ReLU": (torch.relu, 1),
    "LeakyReLU": (nn.LeakyReLU(0.1), 1),
    "PReLU": (nn.PReLU(dtype=torch.float64), 1),
    "RReLU when it is still": (lambda x: F.rrelu(x, training=False), 1),
    "threshold at 0": (nn.Threshold(0.0, 0.0), 1),
    "squared ReLU": (lambda x: torch.relu(x) ** 2, 2),
    "root of a ReLU": (lambda x: torch.relu(x).sqrt(), 0.5),
    "step": (lambda x: (x > 0).to(x.dtype), 0),
}
SIGN: dict[str, tuple[Function, int]] = {
    "tanh": (torch.tanh, -1),
    "sin": (torch.sin, -1),
    "Softsign": (F.softsign, -1),
    "Tanhshrink": (F.tanhshrink, -1),
    "Hardtanh": (F.hardtanh, -1),
    "Softshrink": (F.softshrink, -1),
    "Hardshrink": (F.hardshrink, -1),
    "erf": (torch.erf, -1),
    "arctan": (torch.atan, -1),
    "cos": (torch.cos, 1),
    "Gaussian": (lambda x: torch.exp(-(x**2)), 1),
    "x tanh x": (lambda x: x * torch.tanh(x), 1),
    # the kink lies far from where activations usually are; it is there all the same
    "clamp at ±1000": (lambda x: x.clamp(-1e3, 1e3), -1),
    "shrink at ±0.00001": (nn.Hardshrink(1e-5), -1),
}
NONZERO: dict[str, tuple[Function, float, int]] = {
    "abs": (torch.abs, 1, 1),
    "LeakyReLU of slope −1": (nn.LeakyReLU(-1.0), 1, 1),
    "square": (lambda x: x**2, 2, 1),
    "cube": (lambda x: x**3, 3, -1),
    "reciprocal": (torch.reciprocal, -1, -1),
    "sign": (torch.sign, 0, -1),
    "|x| to the 3/2": (lambda x: x.abs() ** 1.5, 1.5, 1),
}
ALL: dict[str, Function] = {
    "identity": lambda x: x,
    "2 x": lambda x: 2 * x,
    "−x": torch.neg,
    "LeakyReLU of slope 1": nn.LeakyReLU(1.0),
}


@pytest.mark.parametrize("name", TRIVIAL)
def test_trivial(name: str) -> None:
    group = it.activation_group(TRIVIAL[name])
    assert (group.kind, group.degree, group.parity) == ("trivial", None, None)
    assert group.phi(1.0) == 1.0
    for a in (2.0, -1.0, -2.0):
        with pytest.raises(it.InputError, match="not in this 'trivial' group"):
            group.phi(a)


@pytest.mark.parametrize("name", POSITIVE)
def test_positive(name: str) -> None:
    function, degree = POSITIVE[name]
    group = it.activation_group(function)
    assert (group.kind, group.degree, group.parity) == ("positive", Fraction(degree), None)
    assert group.phi(4.0) == pytest.approx(4.0**degree, rel=1e-12)
    for a in (0.0, -1.0, -2.0):
        with pytest.raises(it.InputError, match="not in this 'positive' group"):
            group.phi(a)


@pytest.mark.parametrize("name", SIGN)
def test_sign(name: str) -> None:
    function, parity = SIGN[name]
    group = it.activation_group(function)
    assert (group.kind, group.degree, group.parity) == ("sign", None, parity)
    assert (group.phi(1.0), group.phi(-1.0)) == (1.0, parity)
    for a in (0.0, 2.0, -2.0):
        with pytest.raises(it.InputError, match="not in this 'sign' group"):
            group.phi(a)


@pytest.mark.parametrize("name", NONZERO)
def test_nonzero(name: str) -> None:
    function, degree, parity = NONZERO[name]
    group = it.activation_group(function)
    assert (group.kind, group.degree, group.parity) == ("nonzero", Fraction(degree), parity)
    assert group.phi(3.0) == pytest.approx(3.0**degree, rel=1e-12)
    assert group.phi(-3.0) == pytest.approx(parity * 3.0**degree, rel=1e-12)
    with pytest.raises(it.InputError, match="not in this 'nonzero' group"):
        group.phi(0.0)


@pytest.mark.parametrize("name", ALL)
def test_all(name: str) -> None:
    group = it.activation_group(ALL[name])
    assert (group.kind, group.degree, group.parity) == ("all", Fraction(1), -1)
    assert (group.phi(3.0), group.phi(-0.5)) == (3.0, -0.5)


@pytest.mark.parametrize("name", [*POSITIVE, *NONZERO, *ALL])
def test_phi_is_what_the_function_does(name: str) -> None:
    known: dict[str, Function] = {key: entry[0] for table in (POSITIVE, NONZERO) for key, entry in table.items()} | ALL
    function = known[name]
    group = it.activation_group(function)
    x = torch.linspace(-3, 3, 40, dtype=torch.float64)
    factors = (0.5, 7.0) if group.kind == "positive" else (0.5, 7.0, -1.0, -0.3)
    with torch.no_grad():
        for a in factors:
            assert torch.allclose(function(a * x).double(), group.phi(a) * function(x).double(), rtol=1e-12, atol=0)


def test_the_function_is_not_handed_the_grid_itself() -> None:
    for _ in range(2):  # an activation in place must not spoil the next answer
        assert it.activation_group(lambda x: x.relu_()).kind == "positive"
        assert it.activation_group(torch.tanh).kind == "sign"


@pytest.mark.parametrize(
    ("group", "function"),
    [
        ("S_5", lambda x: x * torch.sigmoid(1.7 * x)),
        ("S_5", lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5))),
        ("S_5 ⋉ (R₊)^5", lambda x: torch.where(x > 0, x, 0.01 * x)),
        ("S_5 ⋉ (R₊)^5", lambda x: torch.maximum(x, 0.2 * x)),
        ("S_5 ⋉ (R₊)^5", lambda x: 3 * torch.relu(x).square()),
        ("S_5 ⋉ (R₊)^5", lambda x: x * (x > 0)),
        ("S_5 ⋉ (R₊)^5", lambda x: x.clamp(min=0)),
        ("S_5 ⋉ {±1}^5", lambda x: x / (1 + x.abs())),
        ("S_5 ⋉ {±1}^5", lambda x: x + torch.sin(x)),
        ("S_5 ⋉ {±1}^5", lambda x: torch.exp(-0.5 * x**2)),
        ("S_5 ⋉ {±1}^5", lambda x: x * torch.tanh(x)),
        ("S_5 ⋉ (R*)^5", lambda x: x * x),
        ("S_5 ⋉ (R*)^5", lambda x: x.abs() ** 1.5),
        ("S_5 ⋉ (R*)^5", lambda x: -2 * x),
    ],
    ids=[
        *("swish", "GELU by hand", "leaky by where", "leaky by maximum", "squared ReLU", "ReLU by a mask"),
        *("ReLU by clamp", "softsign by hand", "x + sin x", "Gaussian", "x tanh x", "x x", "|x| to the 3/2", "−2 x"),
    ],
)
def test_a_function_of_ones_own_in_a_model(group: str, function: Function) -> None:
    net = Net(lambda m, x: m.b(function(m.a(x))), a=nn.Linear(3, 5), b=nn.Linear(5, 2))
    prove(net, torch.randn(4, 3), wires=[f"{group} on a.weight[0], a.bias[0], b.weight[1]"])
