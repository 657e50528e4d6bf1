"""Ops beside a better known one: scans, extrema of both kinds, losses, products with a bias, other weight norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from networks import Net, edited, gap, parameter, permutation, prove
from torch import Tensor, nn
from torch.nn.utils import parametrizations

BODY = "a.weight[0], a.bias[0]"
FREE = [f"S_6 ⋉ (R₊)^6 on {BODY}, head.weight[1]"]
ORDER = [f"S_6 on {BODY}, head.weight[1]"]


def tokens() -> Tensor:
    return torch.randn(2, 4, 3)


def between(fn: Callable[[Any, Tensor], Tensor], **parts: nn.Module | nn.Parameter) -> Net:
    return Net(lambda m, x: m.head(fn(m, m.a(x))), a=nn.Linear(3, 6), head=nn.Linear(6, 2), **parts)


# -- scans and extrema along another axis --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fn", "wires"),
    [
        (lambda m, h: h.relu().cumsum(1), FREE),
        (lambda m, h: h.cummax(1).values, FREE),
        (lambda m, h: h.cummin(1)[0], FREE),
        (lambda m, h: h.cummax(1).indices.to(h.dtype), FREE),
        (lambda m, h: sum(torch.aminmax(h, dim=1, keepdim=True)) * torch.ones(2, 4, 1), FREE),
        (lambda m, h: torch.cumprod(h, 1), ORDER),
        (lambda m, h: h.clone().cumprod_(1), ORDER),
        (lambda m, h: torch.logcumsumexp(h, -2), ORDER),
    ],
    ids=["cumsum", "cummax", "cummin", "places", "aminmax", "cumprod", "cumprod_", "logcumsumexp"],
)
def test_along_the_tokens(fn: Callable[[Any, Tensor], Tensor], wires: list[str]) -> None:
    prove(between(fn), tokens(), wires=wires)


@pytest.mark.parametrize("scan", [torch.cumprod, torch.logcumsumexp, lambda h, d: torch.cummax(h, d)[0]])
def test_along_the_units_their_order_matters(scan: Callable[[Tensor, int], Tensor]) -> None:
    net, x = between(lambda m, h: scan(h, -1)).double(), tokens().double()
    prove(net, x, wires=[])
    p = permutation(6)
    moved = {"a__weight": lambda w: w[p], "a__bias": lambda b: b[p], "head__weight": lambda w: w[:, p]}
    assert gap(net, edited(net, **moved), x) > 1e-3


@pytest.mark.parametrize(
    ("scan", "passes"),
    [
        (torch.cumprod, False),
        (torch.logcumsumexp, False),
        (lambda h, d: torch.cummax(h, d)[0], True),
        (lambda h, d: torch.aminmax(h, dim=d)[1], True),
    ],
    ids=["cumprod", "logcumsumexp", "cummax", "aminmax"],
)
def test_a_scale_passes_comparisons_alone(scan: Callable[[Tensor, int], Tensor], passes: bool) -> None:
    net, x = between(lambda m, h: scan(h, 1)).double(), tokens().double()

    def scaled(by: float) -> nn.Module:
        factor = torch.tensor([by, 1, 1, 1, 1, 1], dtype=torch.float64)
        body = {"a__weight": lambda w: w * factor[:, None], "a__bias": lambda b: b * factor}
        return edited(net, **body, head__weight=lambda w: w / factor)

    assert (gap(net, scaled(2.0), x) < 1e-12) is passes
    assert gap(net, scaled(-1.0), x) > 1e-3


def test_both_extrema_of_all() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        low, high = torch.aminmax(m.a(x))
        return m.head(m.a(x) / (high - low))

    prove(Net(forward, a=nn.Linear(3, 6), head=nn.Linear(6, 2)), tokens(), wires=ORDER)


# -- losses ----------------------------------------------------------------------------------------------------------

LOSSES = [F.mse_loss, F.smooth_l1_loss, lambda x, y, **k: F.huber_loss(x, y, delta=0.5, **k), F.l1_loss]
NAMES = ["mse", "smooth_l1", "huber", "l1"]


@pytest.mark.parametrize("loss", LOSSES, ids=NAMES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_between_two_layers(loss: Callable[..., Tensor], reduction: str) -> None:
    net = Net(lambda m, x: loss(m.a(x), m.b(x), reduction=reduction), a=nn.Linear(3, 6), b=nn.Linear(3, 6)).double()
    x = tokens().double()
    prove(net, x, wires=[f"S_6 ⋉ {{±1}}^6 on {BODY}, b.weight[0], b.bias[0]"])
    p = permutation(6)
    alone = {"a__weight": lambda w: w[p], "a__bias": lambda b: b[p]}
    assert gap(net, edited(net, **alone), x) > 1e-3
    both = {**alone, "b__weight": lambda w: w[p], "b__bias": lambda b: b[p]}
    assert gap(net, edited(net, **both), x) < 1e-12
    doubled = {name: lambda w: 2 * w for name in both}
    assert gap(net, edited(net, **doubled), x) > 1e-3


def test_a_loss_entry_by_entry() -> None:
    def forward(loss: Callable[..., Tensor]) -> Net:
        return between(lambda m, h: loss(h, m.aim.expand_as(h), reduction="none"), aim=parameter(6))

    prove(forward(F.mse_loss), tokens(), wires=[f"S_6 ⋉ (R*)^6 on {BODY}, aim[0], head.weight[1]"])
    prove(forward(F.smooth_l1_loss), tokens(), wires=[f"S_6 ⋉ {{±1}}^6 on {BODY}, aim[0], head.weight[1]"])


# -- the rest ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act", [F.rrelu_, nn.RReLU(inplace=True).eval(), F.rrelu])
def test_rrelu_in_eval_mode_is_leaky(act: Callable[[Tensor], Tensor]) -> None:
    net = between(lambda m, h: act(h))
    prove(net, tokens(), wires=FREE)
    with pytest.raises(ValueError, match="random numbers"):
        prove(between(lambda m, h: F.rrelu_(h, training=True)), tokens(), wires=FREE)


def test_addbmm_sums_over_its_batch() -> None:
    """Tokens and units of the two batch entries meet one by one; the bias moves with the columns."""

    def forward(m: Net, x: Tensor) -> Tensor:
        return m.head(torch.addbmm(m.bias, m.a(x), m.w).relu())

    parts = {"a": nn.Linear(3, 6), "w": parameter(2, 6, 5), "bias": parameter(5), "head": nn.Linear(5, 2)}
    net, x = Net(forward, **parts).double(), tokens().double()
    columns = "S_5 ⋉ (R₊)^5 on w[2], bias[0], head.weight[1]"
    prove(net, x, wires=[f"S_6 ⋉ (R*)^6 on {BODY}, w[1]", columns])
    assert gap(net, edited(net, w=lambda w: w.flip(0)), x) > 1e-3  # each entry has a matrix of its own


def test_addbmm_ignores_its_bias_with_beta_zero() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        return m.head(torch.addbmm(m.a(x)[0], m.a(x), m.w, beta=0))

    net = Net(forward, a=nn.Linear(3, 6), w=parameter(2, 6, 6), head=nn.Linear(6, 2))
    prove(net, tokens(), wires=[f"S_6 ⋉ (R*)^6 on {BODY}, w[1]", "S_6 ⋉ (R*)^6 on w[2], head.weight[1]"])


def test_addr() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        return m.head(torch.addr(m.bias, m.a(x).mean((0, 1)), m.v).mT).sum(0)

    parts = {"a": nn.Linear(3, 6), "v": parameter(5), "bias": parameter(6, 1), "head": nn.Linear(6, 2)}
    sym = prove(
        Net(forward, **parts), tokens(), wires=["S_5 on v[0]", f"S_6 ⋉ (R*)^6 on {BODY}, bias[0], head.weight[1]"]
    )
    assert sym.unsupported == ()


def test_one_norm_of_the_whole_weight_passes_signs_and_no_scales() -> None:
    layer = parametrizations.weight_norm(nn.Linear(6, 5), dim=cast(int, None))  # as its page says, its types do not
    net = Net(
        lambda m, x: m.head(m.layer(m.a(x).tanh()).tanh()), a=nn.Linear(3, 6), layer=layer, head=nn.Linear(5, 2)
    ).double()
    x = tokens().double()
    weight = "layer.parametrizations.weight.original1"
    prove(
        net,
        x,
        wires=[
            f"S_6 ⋉ {{±1}}^6 on {BODY}, {weight}[1]",
            f"S_5 ⋉ {{±1}}^5 on {weight}[0], layer.bias[0], head.weight[1]",
        ],
    )
    linear = Net(lambda m, x: m.layer(m.a(x)), a=nn.Linear(3, 6), layer=layer).double()
    scale = torch.tensor([2.0, 1, 1, 1, 1, 1], dtype=torch.float64)
    body = {"a__weight": lambda w: w * scale[:, None], "a__bias": lambda b: b * scale}
    assert gap(linear, edited(linear, **body, **{weight: lambda w: w / scale}), x) > 1e-3
    prove(linear, x, wires=[f"S_6 ⋉ {{±1}}^6 on {BODY}, {weight}[1]"])
