"""Normalisations: what each one lets pass in front of it and behind it, with its statistics and its affine part."""

from collections.abc import Callable, Iterable

import pytest
import torch
import torch.nn.functional as F
from networks import (
    Net,
    certified,
    edited,
    element,
    gap,
    moved_by,
    parameter,
    permutation,
    prove,
    same_weights,
    wire_at,
)
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import intertwine as it
from intertwine.symmetry.symmetry import Symmetry


def image(channels: int = 3) -> Tensor:
    return torch.randn(2, channels, 5, 7)


def rows(width: int = 2) -> Tensor:
    return torch.randn(2, 11, width)


def test_group_norm() -> None:
    forward = lambda m, x: m.b(m.norm(m.a(x)).relu())  # noqa: E731
    net = Net(forward, a=nn.Conv2d(2, 6, 1), norm=nn.GroupNorm(2, 6), b=nn.Conv2d(6, 3, 1)).double()
    nn.init.normal_(net.norm.weight)
    x = image(2).double()
    everywhere = "a.weight[0{0}], a.bias[0{0}], norm.weight[0{0}], norm.bias[0{0}], b.weight[1{0}]"
    # a whole group may also change its sign: the norm hands it on, and its weight takes it back
    groups, within = f"S_2 ⋉ {{±1}}^2 on {everywhere.format(' ×3')}", f"(S_3 ⋉ (R₊)^3)² on {everywhere.format('')}"
    sym = prove(net, x, wires=[groups, within])
    swap = torch.tensor([3, 4, 5, 0, 1, 2])
    rows = {name: lambda t: t[swap] for name in ("a__weight", "a__bias", "norm__weight", "norm__bias")}
    by_hand = edited(net, **rows, b__weight=lambda w: w[:, swap])
    assert same_weights(sym.act(element(sym, "b.weight[1 ×3]", permutation=torch.tensor([1, 0])), net), by_hand)
    across = torch.tensor([3, 1, 2, 0, 4, 5])
    rows = {name: lambda t: t[across] for name in ("a__weight", "a__bias", "norm__weight", "norm__bias")}
    assert gap(net, edited(net, **rows, b__weight=lambda w: w[:, across]), x) > 1e-2


def batch_normed() -> Net:
    forward = lambda m, x: m.b(m.norm(m.a(x)).relu())  # noqa: E731
    net = Net(forward, a=nn.Conv2d(3, 5, 1), norm=nn.BatchNorm2d(5), b=nn.Conv2d(5, 2, 1)).double()
    for tensor in (net.norm.weight, net.norm.bias, net.norm.running_mean):
        nn.init.normal_(tensor)
    nn.init.uniform_(net.norm.running_var, 0.5, 2)
    return net


BATCH_NORMED = (
    "a.weight[0], a.bias[0], norm.weight[0], norm.bias[0], norm.running_mean[0], norm.running_var[0], b.weight[1]"
)


def test_batch_norm_eval() -> None:
    net, x = batch_normed().eval(), image().double()
    # before the norm any factor passes (the statistics absorb it), after it the positive ones of the ReLU
    sym = prove(net, x, wires=[f"S_5 ⋉ (R*)^5 ⋉ (R₊)^5 on {BATCH_NORMED}"])
    p = permutation(5)
    moved = sym.act(element(sym, "a.weight[0]", permutation=p), net)
    names = ("a__weight", "a__bias", "norm__weight", "norm__bias", "norm__running_mean", "norm__running_var")
    by_hand = edited(net, **{name: lambda t: t[p] for name in names}, b__weight=lambda w: w[:, p])
    assert same_weights(moved, by_hand)
    assert gap(net, by_hand, x) < 1e-12
    without_statistics = edited(net, **{name: lambda t: t[p] for name in names[:4]}, b__weight=lambda w: w[:, p])
    assert gap(net, without_statistics, x) > 1e-2


def test_batch_norm_eval_scales_the_variance_with_its_eps() -> None:
    net, x = batch_normed().eval(), image().double()
    sym = prove(net, x, wires=[f"S_5 ⋉ (R*)^5 ⋉ (R₊)^5 on {BATCH_NORMED}"])
    wire = wire_at(sym, "a.weight[0]")
    (index,) = [k for k in range(2) if next(s for s in wire.slots if s.parameter == "a.weight").powers[k]]
    s = torch.linspace(0.5, 2, 5).double()
    scale = torch.ones(2, 5).double()
    scale[index] = s
    moved = sym.act(element(sym, "a.weight[0]", scale=scale), net)
    power = float(next(t for t in wire.slots if t.parameter == "a.weight").powers[index])
    a = s**power
    by_hand = edited(
        net,
        a__weight=lambda w: w * a.view(-1, 1, 1, 1),
        a__bias=lambda b: b * a,
        norm__running_mean=lambda m: m * a,
        norm__running_var=lambda v: a**2 * (v + net.norm.eps) - net.norm.eps,
    )
    assert same_weights(moved, by_hand)
    assert gap(net, by_hand, x) < 1e-12


def test_batch_norm_train() -> None:
    net, x = batch_normed().train(), image().double()
    # eps breaks the scales before the norm when the statistics are the batch's own; the signs stay
    sym = prove(net, x, wires=[f"S_5 ⋉ (R*)^5 on {BATCH_NORMED}"])
    g = sym.random(seed=1)
    moved = sym.act(g, net)
    moved(x)
    net(x)
    # the statistics that training has updated are again those of the moved network
    assert same_weights(sym.act(g, net), moved)


def test_batch_norm_without_affine_part() -> None:
    forward = lambda m, x: m.b(m.norm(m.a(x)).relu())  # noqa: E731
    net = Net(forward, a=nn.Conv2d(3, 5, 1), norm=nn.BatchNorm2d(5, affine=False), b=nn.Conv2d(5, 2, 1)).eval()
    places = "a.weight[0], a.bias[0], norm.running_mean[0], norm.running_var[0], b.weight[1]"
    prove(net, image(), wires=[f"S_5 ⋉ (R₊)^5 on {places}"])


def test_instance_norm() -> None:
    forward = lambda m, x: m.b(m.norm(m.a(x)).relu())  # noqa: E731
    net = Net(forward, a=nn.Conv2d(3, 5, 1), norm=nn.InstanceNorm2d(5, affine=True), b=nn.Conv2d(5, 2, 1))
    places = "a.weight[0], a.bias[0], norm.weight[0], norm.bias[0], b.weight[1]"
    prove(net, image(), wires=[f"S_5 ⋉ (R*)^5 on {places}"])
    plain = Net(forward, a=nn.Conv2d(3, 5, 1), norm=nn.InstanceNorm2d(5), b=nn.Conv2d(5, 2, 1))
    prove(plain, image(), wires=["S_5 on a.weight[0], a.bias[0], b.weight[1]"])


def test_weight_standardisation() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        w = m.conv.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.var((1, 2, 3), keepdim=True) + 1e-5).sqrt()
        return m.head(F.conv2d(m.stem(x).relu(), w * m.gain, m.conv.bias).relu())

    def by_batch_norm(m: Net, x: Tensor) -> Tensor:
        w = m.conv.weight
        w = F.batch_norm(w.reshape(1, 5, -1), None, None, m.gain.view(-1), training=True).reshape_as(w)
        return m.head(F.conv2d(m.stem(x).relu(), w, m.conv.bias).relu())

    for function in (forward, by_batch_norm):
        parts = {"stem": nn.Conv2d(3, 4, 1), "conv": nn.Conv2d(4, 5, 3), "head": nn.Conv2d(5, 2, 1)}
        net = Net(function, **parts, gain=parameter(5, 1, 1, 1))
        prove(
            net,
            image(),
            wires=[
                "S_4 on stem.weight[0], stem.bias[0], conv.weight[1]",
                "S_5 ⋉ (R*)^5 on conv.weight[0], conv.bias[0], gain[0], head.weight[1]",
            ],
        )


def test_layer_norm() -> None:
    def net(activation: nn.Module) -> Net:
        forward = lambda m, x: m.b(m.act(m.norm(m.a(x))))  # noqa: E731
        return Net(forward, a=nn.Linear(2, 7), norm=nn.LayerNorm(7), act=activation, b=nn.Linear(7, 3))

    where = "a.weight[0], a.bias[0], norm.weight[0], norm.bias[0], b.weight[1]"
    prove(net(nn.ReLU()), rows(), wires=[f"S_7 ⋉ (R₊)^7 on {where}"])
    prove(net(nn.Identity()), rows(), wires=[f"S_7 ⋉ (R*)^7 on {where}"])
    prove(net(nn.GELU()), rows(), wires=[f"S_7 on {where}"])


def rms_by_hand(m: Net, x: Tensor) -> Tensor:
    x = m.a(x)
    return m.b(m.norm.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)))


@pytest.mark.parametrize("forward", [lambda m, x: m.b(m.norm(m.a(x))), rms_by_hand], ids=["torch", "by hand"])
def test_rms_norm(forward: Callable[..., Tensor]) -> None:
    net = Net(forward, a=nn.Linear(2, 7), norm=nn.RMSNorm(7), b=nn.Linear(7, 3))
    # no mean is taken, so each feature may change its sign before the norm, and take any factor after it
    prove(net, rows(), wires=["S_7 ⋉ (R*)^7 ⋉ {±1}^7 on a.weight[0], a.bias[0], norm.weight[0], b.weight[1]"])


def test_weight_norm() -> None:
    net = Net(lambda m, x: m.b(m.a(x).relu()), a=weight_norm(nn.Linear(3, 5)), b=weight_norm(nn.Linear(5, 2))).double()
    a, b = "a.parametrizations.weight.original", "b.parametrizations.weight.original"
    # of the length the ReLU lets positive factors pass, but the next layer's norm does not; of the direction the
    # length is divided out, and its sign is taken back by the sign of the length
    where = f"{a}0[0], {a}1[0], a.bias[0], {b}1[1]"
    sym = prove(net, rows(3).double(), wires=[f"S_5 ⋉ (R*)^5 on {where}", f"(R*)^2 on {b}0[0], {b}1[0]"])
    p = permutation(5)
    moved = moved_by(element(sym, "a.bias[0]", permutation=p), sym, net)
    assert torch.allclose(moved.a.weight, net.a.weight[p])
    assert torch.allclose(moved.b.weight, net.b.weight[:, p])
    assert wire_at(sym, f"{b}0[0]").pinned


def test_spectral_norm() -> None:
    net = Net(lambda m, x: m.b(m.a(x).relu()), a=spectral_norm(nn.Linear(3, 5)), b=nn.Linear(5, 2)).eval()
    stem = "a.parametrizations.weight"
    # in evaluation mode the norm is u·Wv with stored vectors u and v: a factor on a row is taken back by u
    prove(net, rows(3), wires=[f"S_5 ⋉ (R₊)^5 on {stem}.original[0], {stem}.0._u[0], a.bias[0], b.weight[1]"])


def test_unit_length() -> None:
    net = Net(lambda m, x: m.b(F.normalize(m.a(x), dim=-1)), a=nn.Linear(2, 5), b=nn.Linear(5, 3))
    prove(net, rows(), wires=["S_5 ⋉ {±1}^5 on a.weight[0], a.bias[0], b.weight[1]"])


# -- Recurrent layers --------------------------------------------------------------------------------------------------


GATED = pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3)], ids=["LSTM", "GRU"])


def sequence() -> Tensor:
    return torch.randn(2, 11, 3)


def read(layer: nn.RNNBase, width: int) -> Net:
    return Net(lambda m, x: m.head(m.rnn(x)[0]), rnn=layer, head=nn.Linear(width, 2))


def hidden(suffix: str, *readers: str) -> set[str]:
    """The axes on which the hidden units of one layer and direction stand, whatever the number of gates."""
    own = {f"rnn.{t}_{suffix} 0" for t in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
    return own | {f"rnn.weight_hh_{suffix} 1", *readers}


def orders(sym: Symmetry) -> list[list[str]]:
    """The axes of every wire that permutes."""
    return ordered({f"{s.parameter} {s.axis}" for s in w.slots} for w in sym.wires if w.group.permutes)


def ordered(axes: Iterable[set[str]]) -> list[list[str]]:
    return sorted(map(sorted, axes))


@pytest.mark.parametrize(("activation", "group"), [("tanh", "S_5 ⋉ {±1}^5"), ("relu", "S_5 ⋉ (R₊)^5")])
def test_rnn(activation: str, group: str) -> None:
    net = read(nn.RNN(3, 5, nonlinearity=activation, batch_first=True), 5)
    own = "rnn.weight_ih_l0[0], rnn.weight_hh_l0[0], rnn.bias_ih_l0[0], rnn.bias_hh_l0[0]"
    prove(net, sequence(), wires=[f"{group} on {own}, rnn.weight_hh_l0[1], head.weight[1]"])


@GATED
def test_lstm_and_gru(kind: Callable[..., nn.RNNBase], gates: int) -> None:
    net, x = read(kind(3, 5, batch_first=True), 5).double(), sequence().double()
    sym = certified(it.symmetry(net, x), net, x)
    assert orders(sym) == ordered([hidden("l0", "head.weight 1")])
    p = permutation(5)
    rows = torch.arange(5 * gates).reshape(gates, 5)[:, p].flatten()
    by_hand = edited(
        net,
        rnn__weight_ih_l0=lambda w: w[rows],
        rnn__weight_hh_l0=lambda w: w[rows][:, p],
        rnn__bias_ih_l0=lambda b: b[rows],
        rnn__bias_hh_l0=lambda b: b[rows],
        head__weight=lambda w: w[:, p],
    )
    assert same_weights(sym.act(element(sym, "rnn.weight_hh_l0[1]", permutation=p), net), by_hand)
    assert gap(net, by_hand, x) < 1e-12
    one_axis = edited(net, rnn__weight_ih_l0=lambda w: w[rows], rnn__weight_hh_l0=lambda w: w[rows])
    assert gap(net, one_axis, x) > 1e-3


@GATED
def test_lstm_and_gru_signs(kind: Callable[..., nn.RNNBase], gates: int) -> None:
    net, x = read(kind(3, 5, batch_first=True), 5).double(), sequence().double()
    # first without the library: the candidate gate (the third) of unit 2 and all that reads the unit change sign
    rows, columns = torch.ones(5 * gates).double(), torch.ones(5).double()
    rows[2 * 5 + 2] = columns[2] = -1
    flipped = edited(
        net,
        rnn__weight_ih_l0=lambda w: w * rows[:, None],
        rnn__weight_hh_l0=lambda w: w * rows[:, None] * columns,
        rnn__bias_ih_l0=lambda b: b * rows,
        rnn__bias_hh_l0=lambda b: b * rows,
        head__weight=lambda w: w * columns,
    )
    assert gap(net, flipped, x) < 1e-12
    sym = certified(it.symmetry(net, x), net, x)
    assert [str(w.group) for w in sym.wires] == ["S_5 ⋉ {±1}^5"]


@GATED
def test_two_layers_in_two_directions(kind: Callable[..., nn.RNNBase], gates: int) -> None:
    net, x = read(kind(3, 5, num_layers=2, bidirectional=True, batch_first=True), 10), sequence()
    sym = certified(it.symmetry(net, x), net, x)
    above = ("rnn.weight_ih_l1 1", "rnn.weight_ih_l1_reverse 1")
    below = [hidden(layer, *above) for layer in ("l0", "l0_reverse")]
    top = [hidden(layer, "head.weight 1") for layer in ("l1", "l1_reverse")]
    assert orders(sym) == ordered([*below, *top]), "every layer and direction has an order of its own"


def test_lstm_with_projection() -> None:
    net, x = read(nn.LSTM(3, 5, proj_size=4, batch_first=True), 4), sequence()
    sym = certified(it.symmetry(net, x), net, x)
    projected = {"rnn.weight_hr_l0 0", "rnn.weight_hh_l0 1", "head.weight 1"}
    cell = hidden("l0", "rnn.weight_hr_l0 1") - {"rnn.weight_hh_l0 1"}
    assert orders(sym) == ordered([cell, projected])
    # what is projected meets linear maps alone, in the next step and in the head
    assert [str(w.group) for w in sym.wires if w.size == 4] == ["S_4 ⋉ (R*)^4"]


def test_a_returned_state_keeps_its_order() -> None:
    net = Net(lambda m, x: m.rnn(x)[1], rnn=nn.GRU(3, 5, batch_first=True))
    assert orders(it.symmetry(net, sequence())) == []


def test_the_last_state_alone_is_read() -> None:
    net = Net(
        lambda m, x: m.head(m.rnn(x)[1][-1]), rnn=nn.GRU(3, 5, num_layers=2, batch_first=True), head=nn.Linear(5, 2)
    )
    x = sequence()
    sym = certified(it.symmetry(net, x), net, x)
    assert orders(sym) == ordered([hidden("l0", "rnn.weight_ih_l1 1"), hidden("l1", "head.weight 1")])


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells_in_a_loop(kind: Callable[..., nn.RNNCellBase]) -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        state = None
        for t in range(3):
            state = m.rnn(x[:, t], state)
        return m.head(state[0] if isinstance(state, tuple) else state)

    net, x = Net(forward, rnn=kind(3, 5), head=nn.Linear(5, 2)), sequence()
    sym = certified(it.symmetry(net, x), net, x)
    assert sym.unsupported == ()
    tensors = {f"rnn.{t} 0" for t in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
    assert orders(sym) == ordered([tensors | {"rnn.weight_hh 1", "head.weight 1"}])
