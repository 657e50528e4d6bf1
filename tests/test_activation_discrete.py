"""Activations that repeat themselves under one factor and its powers only."""

import math
from collections.abc import Callable

import pytest
import torch
from networks import Net, prove
from torch import Tensor, nn

import intertwine as it

Function = Callable[[Tensor], Tensor]


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
