"""Recurrent layers: gates stacked on one axis, a hidden state on both axes of one weight, directions, projections.

In an LSTM and a GRU the state is made by an odd function (tanh) of one of the stacked gates, so each unit may also
change its sign: the rows of that gate flip, and so does everything that reads the state.
"""

from collections.abc import Callable, Iterable

import pytest
import torch
from networks import Net, certified, edited, element, gap, permutation, prove, same_weights
from torch import Tensor, nn

import intertwine as it
from intertwine.symmetry.symmetry import Symmetry

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
