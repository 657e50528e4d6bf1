"""Ops beside a better known one: scans, extrema of both kinds, losses, products with a bias, other weight norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from networks import Net, certified, edited, gap, parameter, permutation, prove, reasons
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import intertwine as it
from intertwine.graph.capture import capture

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


# -- Distances and angles between rows ---------------------------------------------------------------------------------


PLACES = "body.weight[0], body.bias[0], points[1]"


def rows() -> Tensor:
    return torch.randn(4, 3)


def near(distance: Callable[[Tensor, Tensor], Tensor]) -> Net:
    """Rows of five features beside six learned points; what comes out is weighed by a head."""
    parts = {"body": nn.Linear(3, 5), "points": parameter(6, 5), "head": nn.Linear(6, 2)}
    return Net(lambda m, x: m.head(distance(m.body(x), m.points)), **parts)


def each(fn: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Every row with every point, for functions that take them one by one."""
    return lambda h, points: fn(h.unsqueeze(-2), points)


@pytest.mark.parametrize(
    "distance",
    [
        torch.cdist,
        lambda h, points: torch.cdist(h, points, p=1.0),
        lambda h, points: torch.cdist(h.unsqueeze(0), points)[0],
        each(lambda h, points: F.cosine_similarity(h, points, dim=-1)),
        each(lambda h, points: F.pairwise_distance(h, points, eps=0.0)),
    ],
    ids=["cdist", "cdist p=1", "cdist broadcast", "cosine", "pairwise without eps"],
)
def test_features_move_on_both_sides_with_their_signs(distance: Callable[[Tensor, Tensor], Tensor]) -> None:
    net = near(distance)
    points = "S_6 on points[0], head.weight[1]"
    prove(net, rows(), wires=[f"S_5 ⋉ {{±1}}^5 on {PLACES}", points])


def test_the_eps_of_pairwise_distance_takes_the_signs_away() -> None:
    net = near(each(F.pairwise_distance))
    prove(net, rows(), wires=[f"S_5 on {PLACES}", "S_6 on points[0], head.weight[1]"])


def test_a_scaled_feature_is_another_function() -> None:
    """The hazard: what passes a matrix product does not pass a distance."""
    net, x = near(torch.cdist).double(), rows().double()
    scale = torch.tensor([2.0, 1, 1, 1, 1], dtype=torch.float64)
    scaled = {"body__weight": lambda w: w * scale[:, None], "body__bias": lambda b: b * scale}
    assert gap(net, edited(net, **scaled, points=lambda p: p / scale), x) > 1e-3
    order = permutation(5)
    moved = {"body__weight": lambda w: w[order], "body__bias": lambda b: b[order]}
    assert gap(net, edited(net, **moved, points=lambda p: p[:, order]), x) < 1e-12
    assert gap(net, edited(net, **moved), x) > 1e-3


# -- Ops without a rule of their own that PyTorch makes of others ------------------------------------------------------


def around_composite(fn: Callable[[Any, Tensor], Tensor], width: int = 6, **parts: nn.Module | nn.Parameter) -> Net:
    """Six units, what is done to them, and a layer that reads the result of that width."""
    return Net(lambda m, x: m.head(fn(m, m.a(x))), a=nn.Linear(3, 6), head=nn.Linear(width, 2), **parts)


HALVES = [f"S_3 ⋉ (R₊)^3 on {BODY}, head.weight[1]", "S_3 ⋉ (R₊)^3 on a.weight[0 +3], a.bias[0 +3], head.weight[1 +3]"]
BOTH = [f"S_6 on {BODY}, head.weight[1], head.weight[1 +6]"]
PICKED = torch.tensor([[[0], [2], [1]], [[3], [1], [1]]])


def two(h: Tensor) -> list[Tensor]:
    """The units after two activations that share signs and scales of no kind."""
    return [h.relu(), h.tanh()]


def swapped(halves: Any) -> Tensor:
    """The two halves laid together again, each on its own."""
    first, second = halves
    return torch.cat([first.relu(), second.relu()], -1)


@pytest.mark.parametrize(
    ("fn", "width", "example", "wires"),
    [
        (lambda m, h: torch.hstack(two(h)), 12, rows, BOTH),
        (lambda m, h: torch.column_stack(two(h)), 12, rows, BOTH),
        (lambda m, h: torch.vstack([h.relu(), 2 * h.relu()]), 6, rows, FREE),
        (lambda m, h: torch.dstack(two(h)).flatten(1), 12, rows, [f"S_6 on {BODY}, head.weight[1 ×2]"]),
        (lambda m, h: swapped(torch.hsplit(h, 2)), 6, rows, HALVES),
        (lambda m, h: swapped(torch.hsplit(h, [3])), 6, rows, HALVES),
        (lambda m, h: swapped(torch.dsplit(h, 2)), 6, tokens, HALVES),
        (lambda m, h: torch.vsplit(h.relu(), 2)[1], 6, rows, FREE),
        (lambda m, h: torch.take_along_dim(h.relu(), PICKED, 1), 6, tokens, FREE),
        (lambda m, h: torch.broadcast_tensors(h.relu(), torch.zeros(4, 1, 1))[0], 6, rows, FREE),
        (lambda m, h: torch.linalg.norm(h.relu(), dim=1), 6, tokens, FREE),
        (lambda m, h: torch.linalg.matrix_norm(h.relu().unsqueeze(1), dim=(1, 2)), 6, tokens, FREE),
    ],
    ids=[
        "hstack", "column_stack", "vstack", "dstack", "hsplit", "hsplit at", "dsplit", "vsplit", "take_along_dim",
        "broadcast_tensors", "linalg.norm", "linalg.matrix_norm",
    ],
)  # fmt: skip
def test_it_is_read_as_its_steps(
    fn: Callable[[Any, Tensor], Tensor], width: int, example: Callable[[], Tensor], wires: list[str]
) -> None:
    prove(around_composite(fn, width), example(), wires=wires)


@pytest.mark.parametrize(
    ("fn", "shape"),
    [
        (lambda m, x: torch.inner(m.a(x).relu(), m.w), (2, 6)),
        (lambda m, x: torch.linalg.vecdot(m.a(x).relu(), m.w), (1, 6)),
        (lambda m, x: torch.linalg.multi_dot([m.a(x).relu(), m.w.mT]), (2, 6)),
    ],
    ids=["inner", "vecdot", "multi_dot"],
)
def test_products_carry_scales(fn: Callable[[Any, Tensor], Tensor], shape: tuple[int, ...]) -> None:
    prove(Net(fn, a=nn.Linear(3, 6), w=parameter(*shape)), rows(), wires=[f"S_6 ⋉ (R₊)^6 on {BODY}, w[1]"])


def test_the_norm_of_the_units_takes_their_scales_away() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        h = m.a(x)
        return m.head(h) / (1 + torch.linalg.norm(h, dim=-1, keepdim=True))

    net, x = Net(forward, a=nn.Linear(3, 6), head=nn.Linear(6, 2)).double(), rows().double()
    prove(net, x, wires=[f"S_6 ⋉ {{±1}}^6 on {BODY}, head.weight[1]"])
    scale = torch.tensor([2.0, 1, 1, 1, 1, 1], dtype=torch.float64)
    scaled = {"a__weight": lambda w: w * scale[:, None], "a__bias": lambda b: b * scale}
    assert gap(net, edited(net, **scaled, head__weight=lambda w: w / scale), x) > 1e-3


def test_a_unit_does_not_cross_the_cut_of_a_split() -> None:
    net, x = (
        around_composite(lambda m, h: torch.hsplit(h.relu(), 2)[0] * torch.hsplit(h, 2)[1], 3).double(),
        rows().double(),
    )
    pairs = "a.weight[0 +3], a.bias[0 +3]"
    prove(net, x, wires=[f"S_3 ⋉ (R₊)^2·3 on {BODY}, {pairs}, head.weight[1]"])
    across = torch.tensor([3, 1, 2, 0, 4, 5])
    assert gap(net, edited(net, a__weight=lambda w: w[across], a__bias=lambda b: b[across]), x) > 1e-3
    p = permutation(3)
    both = torch.cat([p, 3 + p])
    moved = edited(net, a__weight=lambda w: w[both], a__bias=lambda b: b[both], head__weight=lambda w: w[:, p])
    assert gap(net, moved, x) < 1e-12


@pytest.mark.parametrize("split", [lambda h: torch.dsplit(h, 2), lambda h: h.split(3, -1)], ids=["dsplit", "split"])
def test_what_is_written_into_a_piece_is_written_into_the_whole(split: Callable[[Tensor], Any]) -> None:
    def write(m: Net, h: Tensor) -> Tensor:
        split(h)[0].relu_()
        return h

    net, x = around_composite(write), tokens()
    sym = certified(it.symmetry(net, x), net, x)
    assert sym.wires == ()
    assert "written in place through a view" in reasons(sym, "a.weight")


def test_a_step_without_a_rule_leaves_the_op_as_it_is_written() -> None:
    net = Net(lambda m, x: torch.linalg.matrix_norm(m.a(x), "nuc"), a=nn.Linear(3, 6))
    sym = it.symmetry(net, tokens())
    assert [op for op, _ in sym.unsupported] == ["aten.linalg_matrix_norm.str_ord"]
    assert "there is no rule for aten.linalg_matrix_norm.str_ord" in reasons(sym, "a.weight")


def test_a_rule_comes_before_the_steps() -> None:
    net = Net(lambda m, x: F.cosine_similarity(m.a(x), m.w, dim=-1), a=nn.Linear(3, 6), w=parameter(6))
    assert "aten.cosine_similarity.default" in [call.op for call in capture(net, (rows(),)).calls]


def test_weights_of_any_strides() -> None:
    """A view inside an op needs the strides that the weights had when the forward was traced."""
    net = Net(lambda m, x: torch.inner(m.a(x).relu(), m.w), a=nn.Linear(3, 6), w=parameter(2, 6))
    net.w = nn.Parameter(torch.randn(6, 5, 2).permute(2, 1, 0))
    prove(net, rows(), wires=[f"S_6 ⋉ (R₊)^6 on {BODY}, w[2]"])
    assert {"aten.view.default", "aten._unsafe_view.default"}.isdisjoint(c.op for c in capture(net, (rows(),)).calls)


def test_inside_a_context_that_is_inlined() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = torch.hstack([m.a(x).relu(), torch.ones(4, 1)])
        return m.head(h)

    net = Net(forward, a=nn.Linear(3, 6), head=nn.Linear(7, 2))
    prove(net, rows(), wires=[f"S_6 ⋉ (R₊)^6 on {BODY}, head.weight[1]"])


def test_in_eval_mode_nothing_is_dropped() -> None:
    net = around_composite(lambda m, h: m.drop(h).relu(), drop=nn.FeatureAlphaDropout(0.5)).eval()
    prove(net, tokens(), wires=FREE)
    with pytest.raises(it.errors.InputError, match="draws random numbers"):
        it.symmetry(net.train(), tokens())
