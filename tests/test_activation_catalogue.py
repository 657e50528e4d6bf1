"""The group of every activation torch ships, of powers, constants and low precision; and that finding it is quick."""

import math
import time
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import intertwine as it

Function = Callable[[Tensor], Tensor]
Answer = tuple[str, Fraction | None, int | None]

ONE = Fraction(1)
TRIVIAL: Answer = ("trivial", None, None)
ODD: Answer = ("sign", None, -1)
EVEN: Answer = ("sign", None, 1)
POSITIVE: Answer = ("positive", ONE, None)
ABS: Answer = ("nonzero", ONE, 1)
LINEAR: Answer = ("all", ONE, -1)


def prelu(slope: float) -> nn.PReLU:
    return nn.PReLU(init=slope)


MODULES: list[tuple[nn.Module, Answer]] = [
    (nn.ReLU(), POSITIVE),
    *((nn.LeakyReLU(s), POSITIVE) for s in (0.0, 0.01, 0.999, 2.0, -0.5, -2.0, 1e-30)),
    (nn.LeakyReLU(1.0), LINEAR),
    (nn.LeakyReLU(-1.0), ABS),
    (prelu(0.25), POSITIVE),
    (prelu(1.0), LINEAR),
    (prelu(-1.0), ABS),
    (nn.RReLU().eval(), POSITIVE),
    (nn.RReLU(0.2, 0.2), POSITIVE),
    (nn.ReLU6(), TRIVIAL),
    (nn.ELU(), TRIVIAL),
    (nn.ELU(0.3), TRIVIAL),
    (nn.ELU(0.0), POSITIVE),
    (nn.CELU(), TRIVIAL),
    (nn.CELU(0.5), TRIVIAL),
    (nn.SELU(), TRIVIAL),
    (nn.GELU(), TRIVIAL),
    (nn.GELU("tanh"), TRIVIAL),
    (nn.SiLU(), TRIVIAL),
    (nn.Mish(), TRIVIAL),
    *((nn.Softplus(b, t), TRIVIAL) for b, t in ((1.0, 20.0), (1.0, 0.0), (100.0, 20.0), (0.01, 5.0), (1.0, -5.0))),
    *((nn.Softplus(b, 20.0), TRIVIAL) for b in (-1.0, 1e14, 1e15, 1e-13)),
    (nn.Softsign(), ODD),
    (nn.Tanh(), ODD),
    (nn.Tanhshrink(), ODD),
    (nn.Hardtanh(), ODD),
    (nn.Hardtanh(-1.0, 2.0), TRIVIAL),
    (nn.Hardtanh(0.0, 6.0), TRIVIAL),
    (nn.Hardswish(), TRIVIAL),
    (nn.Hardsigmoid(), TRIVIAL),
    (nn.Sigmoid(), TRIVIAL),
    (nn.LogSigmoid(), TRIVIAL),
    (nn.Softshrink(), ODD),
    (nn.Softshrink(0.0), LINEAR),
    (nn.Hardshrink(), ODD),
    (nn.Hardshrink(0.0), LINEAR),
    (nn.Threshold(0.0, 0.0), POSITIVE),
    *((nn.Threshold(t, v), TRIVIAL) for t, v in ((1.0, 0.0), (-1.0, 0.0), (0.0, 20.0), (0.0, -1.0), (0.1, 20.0))),
    (nn.Identity(), LINEAR),
    (nn.Dropout().eval(), LINEAR),
    (nn.Sequential(nn.Tanh(), nn.Tanhshrink()), ODD),
]
FUNCTIONS: dict[str, tuple[Function, Answer]] = {
    "sin": (torch.sin, ODD),
    "cos": (torch.cos, EVEN),
    "abs": (torch.abs, ABS),
    "Gaussian RBF": (lambda x: torch.exp(-(x**2) / 2) / math.sqrt(2 * math.pi), EVEN),
    "softmax-free gate": (lambda x: x * torch.sigmoid(1.702 * x), TRIVIAL),
    "hard clamp far out": (lambda x: x.clamp(-1e15, 1e15), ODD),
    "dead zone far in": (lambda x: torch.where(x.abs() < 1e-15, 0 * x, x), ODD),
    "bump at three": (lambda x: torch.relu(x) + 0.1 * torch.exp(-((x - 3) ** 2)), TRIVIAL),
    "floor": (torch.floor, TRIVIAL),
    "round": (torch.round, ODD),
    "log": (torch.log, TRIVIAL),
    "log|x|": (lambda x: x.abs().log(), EVEN),
    "x log|x|": (lambda x: x * x.abs().log(), ODD),
    "logit": (torch.logit, TRIVIAL),
    "asin": (torch.asin, ODD),
    "sin(1/x)": (lambda x: torch.sin(1 / x), ODD),
    "sqrt": (torch.sqrt, ("positive", Fraction(1, 2), None)),
    "rsqrt": (torch.rsqrt, ("positive", Fraction(-1, 2), None)),
    "cube root": (lambda x: x.sign() * x.abs() ** (1 / 3), ("nonzero", Fraction(1, 3), -1)),
    "yes and no": (lambda x: x > 0, ("positive", Fraction(0), None)),
    "only at zero": (lambda x: (x == 0).double(), ("nonzero", Fraction(0), 1)),
    "times i": (lambda x: x * 1j, LINEAR),
    "around the circle": (lambda x: torch.exp(1j * x), TRIVIAL),
}


def answer(fn: Callable[..., object]) -> Answer:
    group = it.activation_group(fn)
    assert group.discrete is None
    assert group.exponent == (None if group.degree is None else float(group.degree))
    return group.kind, group.degree, group.parity


@pytest.mark.parametrize(("module", "expected"), MODULES, ids=[str(m) for m, _ in MODULES])
def test_a_module_of_torch(module: nn.Module, expected: Answer) -> None:
    assert answer(module) == expected


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function(name: str) -> None:
    function, expected = FUNCTIONS[name]
    assert answer(function) == expected


@pytest.mark.parametrize("degree", range(1, 31))
def test_whole_powers(degree: int) -> None:
    parity = -1 if degree % 2 else 1
    assert answer(lambda x: x**degree) == ("all" if degree == 1 else "nonzero", Fraction(degree), parity)
    # on the negative half-line another coefficient: only positive factors are left
    assert answer(lambda x: torch.where(x < 0, 3 * x**degree, x**degree)) == ("positive", Fraction(degree), None)


@pytest.mark.parametrize("degree", [-1, -2, -3, -17, -30])
def test_negative_powers(degree: int) -> None:
    assert answer(lambda x: x**degree) == ("nonzero", Fraction(degree), -1 if degree % 2 else 1)


@pytest.mark.parametrize("exponent", [0.5, 0.75, 1.5, 2.25, 7 / 3, -1.5, 60.0, 100.0])
def test_fractional_powers(exponent: float) -> None:
    expected = Fraction(exponent).limit_denominator(64)
    assert answer(lambda x: x.abs() ** exponent) == ("nonzero", expected, 1)


@pytest.mark.parametrize("exponent", [math.pi, math.sqrt(2), 1.37, -0.707])
def test_powers_that_are_no_simple_fraction(exponent: float) -> None:
    """All factors pass with the exact exponent; the engine, which needs a fraction, sees none and stays careful."""
    group = it.activation_group(lambda x: x.abs() ** exponent)
    assert (group.kind, group.degree, group.parity) == ("nonzero", None, 1)
    assert group.exponent == pytest.approx(exponent, rel=1e-14)
    assert group.phi(-5.0) == pytest.approx(5.0**exponent, rel=1e-13)


def test_nearly_a_power() -> None:
    group = it.activation_group(lambda x: x.abs() ** (1 + 1e-7))
    assert group.degree is None
    assert group.exponent == pytest.approx(1 + 1e-7, abs=1e-13)
    assert answer(lambda x: torch.relu(x) * (1 + 1e-7 * torch.sigmoid(x))) == TRIVIAL


def test_zero_and_constants() -> None:
    """Zero is linear, so any matrix passes. A constant c ≠ 0 passes any factor with φ = 1, as c = 1·c."""
    for zero in (torch.zeros_like, lambda x: 0 * x, lambda x: torch.relu(-x.abs())):
        assert answer(zero) == LINEAR
    for constant in (torch.ones_like, lambda x: 0 * x - 2.5, lambda x: torch.full_like(x, -torch.inf)):
        assert answer(constant) == ("nonzero", Fraction(0), 1)
    group = it.activation_group(torch.ones_like)
    assert [group.phi(a) for a in (3.0, -1.0, -0.2)] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_low_precision(dtype: torch.dtype) -> None:
    assert answer(lambda x: torch.relu(x.to(dtype))) == POSITIVE
    assert answer(lambda x: x.to(dtype)) == LINEAR
    assert answer(lambda x: torch.tanh(x.to(dtype))) == ODD
    assert answer(lambda x: F.gelu(x.to(dtype))) == TRIVIAL


def test_single_precision_inside() -> None:
    assert answer(lambda x: F.leaky_relu(x.float(), 0.1).type_as(x)) == POSITIVE
    assert answer(lambda x: F.silu(x.float()).type_as(x)) == TRIVIAL


def test_a_module_of_the_user_is_left_alone() -> None:
    module = nn.PReLU(init=0.25)
    assert it.activation_group(module).kind == "positive"
    assert module.weight.dtype == torch.float32
    assert module.weight.tolist() == [0.25]


def test_random_numbers_are_not_used_up() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    it.activation_group(torch.relu)
    with pytest.raises(it.InputError):
        it.activation_group(nn.Dropout())
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize("fn", [F.gelu, torch.relu, torch.tanh, torch.log, nn.SiLU()])
def test_it_is_quick(fn: Callable[..., object]) -> None:
    it.activation_group(fn)
    times = []
    for _ in range(7):
        start = time.process_time()
        it.activation_group(fn)
        times.append(time.process_time() - start)
    assert min(times) < 0.02  # a few milliseconds with every call checked against its annotations
