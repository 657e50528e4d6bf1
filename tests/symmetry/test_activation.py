"""Which factors pass an activation, for torch's own and for functions nobody has named."""

import math
import time
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


# -- Every activation of torch, powers, constants and low precision; finding the group is quick ------------------------


Answer = tuple[str, Fraction | None, int | None]

ONE = Fraction(1)
TRIVIAL_ACTIVATION_CATALOGUE: Answer = ("trivial", None, None)
ODD: Answer = ("sign", None, -1)
EVEN: Answer = ("sign", None, 1)
POSITIVE_ACTIVATION_CATALOGUE: Answer = ("positive", ONE, None)
ABS: Answer = ("nonzero", ONE, 1)
LINEAR: Answer = ("all", ONE, -1)


def prelu(slope: float) -> nn.PReLU:
    return nn.PReLU(init=slope)


MODULES: list[tuple[nn.Module, Answer]] = [
    (nn.ReLU(), POSITIVE_ACTIVATION_CATALOGUE),
    *((nn.LeakyReLU(s), POSITIVE_ACTIVATION_CATALOGUE) for s in (0.0, 0.01, 0.999, 2.0, -0.5, -2.0, 1e-30)),
    (nn.LeakyReLU(1.0), LINEAR),
    (nn.LeakyReLU(-1.0), ABS),
    (prelu(0.25), POSITIVE_ACTIVATION_CATALOGUE),
    (prelu(1.0), LINEAR),
    (prelu(-1.0), ABS),
    (nn.RReLU().eval(), POSITIVE_ACTIVATION_CATALOGUE),
    (nn.RReLU(0.2, 0.2), POSITIVE_ACTIVATION_CATALOGUE),
    (nn.ReLU6(), TRIVIAL_ACTIVATION_CATALOGUE),
    (nn.ELU(), TRIVIAL_ACTIVATION_CATALOGUE),
    (nn.ELU(0.3), TRIVIAL_ACTIVATION_CATALOGUE),
    (nn.ELU(0.0), POSITIVE_ACTIVATION_CATALOGUE),
    (nn.CELU(), TRIVIAL_ACTIVATION_CATALOGUE),
    (nn.CELU(0.5), TRIVIAL_ACTIVATION_CATALOGUE),
    (nn.SELU(), TRIVIAL_ACTIVATION_CATALOGUE),
    (nn.GELU(), TRIVIAL_ACTIVATION_CATALOGUE),
    (nn.GELU("tanh"), TRIVIAL_ACTIVATION_CATALOGUE),
    (nn.SiLU(), TRIVIAL_ACTIVATION_CATALOGUE),
    (nn.Mish(), TRIVIAL_ACTIVATION_CATALOGUE),
    *(
        (nn.Softplus(b, t), TRIVIAL_ACTIVATION_CATALOGUE)
        for b, t in ((1.0, 20.0), (1.0, 0.0), (100.0, 20.0), (0.01, 5.0), (1.0, -5.0))
    ),
    *((nn.Softplus(b, 20.0), TRIVIAL_ACTIVATION_CATALOGUE) for b in (-1.0, 1e14, 1e15, 1e-13)),
    (nn.Softsign(), ODD),
    (nn.Tanh(), ODD),
    (nn.Tanhshrink(), ODD),
    (nn.Hardtanh(), ODD),
    (nn.Hardtanh(-1.0, 2.0), TRIVIAL_ACTIVATION_CATALOGUE),
    (nn.Hardtanh(0.0, 6.0), TRIVIAL_ACTIVATION_CATALOGUE),
    (nn.Hardswish(), TRIVIAL_ACTIVATION_CATALOGUE),
    (nn.Hardsigmoid(), TRIVIAL_ACTIVATION_CATALOGUE),
    (nn.Sigmoid(), TRIVIAL_ACTIVATION_CATALOGUE),
    (nn.LogSigmoid(), TRIVIAL_ACTIVATION_CATALOGUE),
    (nn.Softshrink(), ODD),
    (nn.Softshrink(0.0), LINEAR),
    (nn.Hardshrink(), ODD),
    (nn.Hardshrink(0.0), LINEAR),
    (nn.Threshold(0.0, 0.0), POSITIVE_ACTIVATION_CATALOGUE),
    *(
        (nn.Threshold(t, v), TRIVIAL_ACTIVATION_CATALOGUE)
        for t, v in ((1.0, 0.0), (-1.0, 0.0), (0.0, 20.0), (0.0, -1.0), (0.1, 20.0))
    ),
    (nn.Identity(), LINEAR),
    (nn.Dropout().eval(), LINEAR),
    (nn.Sequential(nn.Tanh(), nn.Tanhshrink()), ODD),
]
FUNCTIONS: dict[str, tuple[Function, Answer]] = {
    "sin": (torch.sin, ODD),
    "cos": (torch.cos, EVEN),
    "abs": (torch.abs, ABS),
    "Gaussian RBF": (lambda x: torch.exp(-(x**2) / 2) / math.sqrt(2 * math.pi), EVEN),
    "softmax-free gate": (lambda x: x * torch.sigmoid(1.702 * x), TRIVIAL_ACTIVATION_CATALOGUE),
    "hard clamp far out": (lambda x: x.clamp(-1e15, 1e15), ODD),
    "dead zone far in": (lambda x: torch.where(x.abs() < 1e-15, 0 * x, x), ODD),
    "bump at three": (lambda x: torch.relu(x) + 0.1 * torch.exp(-((x - 3) ** 2)), TRIVIAL_ACTIVATION_CATALOGUE),
    "floor": (torch.floor, TRIVIAL_ACTIVATION_CATALOGUE),
    "round": (torch.round, ODD),
    "log": (torch.log, TRIVIAL_ACTIVATION_CATALOGUE),
    "log|x|": (lambda x: x.abs().log(), EVEN),
    "x log|x|": (lambda x: x * x.abs().log(), ODD),
    "logit": (torch.logit, TRIVIAL_ACTIVATION_CATALOGUE),
    "asin": (torch.asin, ODD),
    "sin(1/x)": (lambda x: torch.sin(1 / x), ODD),
    "sqrt": (torch.sqrt, ("positive", Fraction(1, 2), None)),
    "rsqrt": (torch.rsqrt, ("positive", Fraction(-1, 2), None)),
    "cube root": (lambda x: x.sign() * x.abs() ** (1 / 3), ("nonzero", Fraction(1, 3), -1)),
    "yes and no": (lambda x: x > 0, ("positive", Fraction(0), None)),
    "only at zero": (lambda x: (x == 0).double(), ("nonzero", Fraction(0), 1)),
    "times i": (lambda x: x * 1j, LINEAR),
    "around the circle": (lambda x: torch.exp(1j * x), TRIVIAL_ACTIVATION_CATALOGUE),
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
    assert answer(lambda x: torch.relu(x) * (1 + 1e-7 * torch.sigmoid(x))) == TRIVIAL_ACTIVATION_CATALOGUE


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
    assert answer(lambda x: torch.relu(x.to(dtype))) == POSITIVE_ACTIVATION_CATALOGUE
    assert answer(lambda x: x.to(dtype)) == LINEAR
    assert answer(lambda x: torch.tanh(x.to(dtype))) == ODD
    assert answer(lambda x: F.gelu(x.to(dtype))) == TRIVIAL_ACTIVATION_CATALOGUE


def test_single_precision_inside() -> None:
    assert answer(lambda x: F.leaky_relu(x.float(), 0.1).type_as(x)) == POSITIVE_ACTIVATION_CATALOGUE
    assert answer(lambda x: F.silu(x.float()).type_as(x)) == TRIVIAL_ACTIVATION_CATALOGUE


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


# -- Activations that repeat themselves under one factor and its powers only -------------------------------------------


def octaves(x: Tensor) -> Tensor:
    return x.abs().log2()


def wave(c: float, height: float = 1.0) -> Function:
    """x·(2 + height·sin) with one period from x to c·x."""
    return lambda x: x * (2 + height * torch.sin(2 * math.pi * x.abs().log() / math.log(c)))


def powers_of(c: float) -> Function:
    """The largest power of c below |x|, with the sign of x: a staircase."""
    return lambda x: x.sign() * c ** (x.abs().log() / math.log(c)).floor()


FOUND: dict[str, tuple[Function, tuple[float, float], int | None]] = {
    "wave of 2": (wave(2.0), (2.0, 2.0), -1),
    "wave of π": (wave(math.pi), (math.pi, math.pi), -1),
    "wave of 1.1": (wave(1.1), (1.1, 1.1), -1),
    "wave of 1.03": (wave(1.03), (1.03, 1.03), -1),
    "wave of 1000": (wave(1000.0), (1000.0, 1000.0), -1),
    "small wave": (wave(2.0, 1e-4), (2.0, 2.0), -1),
    "b is negative": (lambda x: x * torch.cos(math.pi * octaves(x)), (2.0, -2.0), -1),
    "even, b is negative": (lambda x: x.abs() ** 1.5 * torch.cos(math.pi * octaves(x)), (2.0, -(2**1.5)), 1),
    "x sin log|x|": (lambda x: x * torch.sin(x.abs().log()), (math.exp(math.pi), -math.exp(math.pi)), -1),
    "−2 and neither −1 nor 2": (
        lambda x: x * (2 + x.sign() * torch.sin(math.pi * octaves(x))),
        (-2.0, -2.0),
        None,
    ),
    "one half-line only": (lambda x: torch.where(x > 0, wave(3.0)(x), 0 * x), (3.0, 3.0), None),
    "beside a straight half-line": (lambda x: torch.where(x > 0, x, wave(3.0)(x)), (3.0, 3.0), None),
    "two shapes of one period": (
        lambda x: torch.where(x > 0, wave(2.0)(x), 3 * x * (2 + torch.cos(2 * math.pi * octaves(x)))),
        (2.0, 2.0),
        None,
    ),
    "periods 4 and 8 make 64": (lambda x: torch.where(x > 0, wave(4.0)(x), wave(8.0)(x)), (64.0, 64.0), None),
    "on the square": (lambda x: x * wave(2.0)(x), (2.0, 4.0), 1),
    "on the 40th power": (lambda x: x**39 * wave(2.0)(x), (2.0, 2.0**40), 1),
    "on the reciprocal": (lambda x: x**-4 * wave(2.0)(x), (2.0, 0.125), -1),
    "no growth": (lambda x: 2 + torch.sin(2 * math.pi * octaves(x)), (2.0, 1.0), 1),
    "powers of two": (powers_of(2.0), (2.0, 2.0), -1),
    "powers of e": (powers_of(math.e), (math.e, math.e), -1),
}
NOTHING: dict[str, Function] = {
    "two periods that never meet": lambda x: (
        x * (3 + torch.sin(2 * math.pi * octaves(x)) + torch.sin(6 * x.abs().log()))
    ),
    "a wave that gets faster": lambda x: x * (2 + torch.sin(octaves(x) ** 2)),
    "a wave that dies away": lambda x: x * (2 + torch.sin(2 * math.pi * octaves(x)) / (1 + x.abs().log() ** 2)),
    "different growth on the two sides": lambda x: torch.where(x > 0, wave(2.0)(x), x * wave(2.0)(x)),
    "a wave and a bias": lambda x: wave(2.0)(x) + 0.1,
}


@pytest.mark.parametrize("name", FOUND)
def test_the_generator_is_found(name: str) -> None:
    function, (a, b), parity = FOUND[name]
    group = it.activation_group(function)
    assert group.discrete is not None
    assert group.discrete == pytest.approx((a, b), rel=1e-10)
    assert (group.kind, group.degree, group.parity) == ("trivial" if parity is None else "sign", None, parity)
    # and the function does what φ says
    x = torch.linspace(-3, 3, 41, dtype=torch.float64)
    x = x[x.abs() > 1e-3]
    for k in (-2, -1, 1, 2, 3):
        member = group.discrete[0] ** k
        assert torch.allclose(function(member * x), group.phi(member) * function(x), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", NOTHING)
def test_nothing_is_made_up(name: str) -> None:
    group = it.activation_group(NOTHING[name])
    assert group.discrete is None
    assert group.degree is None


def test_phi_on_powers_and_on_nothing_else() -> None:
    odd = it.activation_group(wave(2.0))
    assert [odd.phi(a) for a in (8.0, 0.25, -1.0, -4.0)] == [8.0, 0.25, -1.0, -4.0]
    turning = it.activation_group(FOUND["b is negative"][0])
    assert [turning.phi(a) for a in (2.0, 4.0, -0.5, 1.0)] == [-2.0, 4.0, 0.5, 1.0]
    negative = it.activation_group(FOUND["−2 and neither −1 nor 2"][0])
    assert [negative.phi(a) for a in (-2.0, 4.0, -8.0, -0.5)] == [-2.0, 4.0, -8.0, -0.5]
    for group, wrong in ((odd, 3.0), (odd, 2.0 + 1e-6), (negative, 2.0), (negative, -1.0), (negative, -4.0)):
        with pytest.raises(it.InputError, match=r"not in this '(sign|trivial)' group and of the powers of -?2, so φ"):
            group.phi(wrong)
    one_side = it.activation_group(FOUND["one half-line only"][0])
    with pytest.raises(it.InputError, match="powers of 3"):
        one_side.phi(-3.0)


def test_the_engine_keeps_to_permutations_and_signs() -> None:
    """A discrete factor is no scale and no sign; the wire carries what it can."""
    wave_in_torch = wave(2.0)
    net = Net(lambda m, x: m.b(wave_in_torch(m.a(x))), a=nn.Linear(3, 5), b=nn.Linear(5, 2))
    prove(net, torch.randn(4, 3), wires=["S_5 ⋉ {±1}^5 on a.weight[0], a.bias[0], b.weight[1]"])


# -- What is no activation is refused, and the reason says what was given and what to do -------------------------------


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


MIXING = r"is not elementwise: its value at one entry changes with the entries beside it.*intertwine\.symmetry"
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
        "BatchNorm1d keeps running statistics of its inputs, .*Pass the activation",
    ),
    "LSTM": (nn.LSTM(3, 3), "LSTM keeps a state from step to step.*whole network"),
    "GRUCell": (nn.GRUCell(3, 3), "GRUCell keeps a state from step to step"),
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
