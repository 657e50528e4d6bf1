"""Token models around their attention: look-up tables, tied outputs, learned tokens, gated layers."""

import torch
import torch.nn.functional as F
from networks import Net, edited, element, gap, moved_by, parameter, permutation, prove, reasons, same_weights
from torch import Tensor, nn


def tokens(width: int = 2, count: int = 11) -> Tensor:
    return torch.randn(2, count, width)


def test_embedding() -> None:
    net = Net(lambda m, x: m.fc(m.table(x)), table=nn.Embedding(11, 5, padding_idx=0), fc=nn.Linear(5, 2))
    sym = prove(net, torch.randint(0, 11, (2, 7)), wires=["S_5 ⋉ (R*)^5 on table.weight[1], fc.weight[1]"])
    assert "looked up by index" in reasons(sym, "table.weight")


def tied() -> Net:
    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.table(x)
        return m.head(x + m.b(m.a(x).relu()))

    net = Net(
        forward, table=nn.Embedding(11, 5), a=nn.Linear(5, 7), b=nn.Linear(7, 5), head=nn.Linear(5, 11, bias=False)
    )
    net.head.weight = net.table.weight
    return net.double()


def test_tied_embedding_and_output() -> None:
    net, x = tied(), torch.randint(0, 11, (2, 7))
    # the stream is written and read by one table: a factor a must also be 1/a, so that only signs are left
    sym = prove(
        net,
        x,
        wires=[
            "S_5 ⋉ {±1}^5 on table.weight[1], a.weight[1], b.weight[0], b.bias[0]",
            "S_7 ⋉ (R₊)^7 on a.weight[0], a.bias[0], b.weight[1]",
        ],
    )
    p, sign = permutation(5), torch.tensor([1, -1, -1, 1, 1]).double()
    moved = moved_by(element(sym, "table.weight[1]", permutation=p, sign=sign[None]), sym, net)
    assert moved.head.weight is moved.table.weight
    by_hand = edited(
        net,
        table__weight=lambda w: (w * sign)[:, p],
        a__weight=lambda w: (w * sign)[:, p],
        b__weight=lambda w: (w * sign[:, None])[p],
        b__bias=lambda b: (b * sign)[p],
    )
    assert same_weights(moved, by_hand)
    assert gap(net, by_hand, x) < 1e-12


def test_position_and_class_tokens() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        x = torch.cat([m.token.expand(x.shape[0], -1, -1), x], 1) + m.position
        return m.head(m.norm(x + m.mix(x.transpose(1, 2)).transpose(1, 2))[:, 0])

    parts = {"stem": nn.Linear(2, 7), "mix": nn.Linear(12, 12), "norm": nn.LayerNorm(7), "head": nn.Linear(7, 3)}
    net = Net(forward, **parts, token=parameter(1, 1, 7), position=parameter(1, 12, 7))
    where = "stem.weight[0], stem.bias[0], token[2], position[2], norm.weight[0], norm.bias[0], head.weight[1]"
    prove(net, tokens(), wires=[f"S_7 ⋉ (R*)^7 on {where}"])


def test_gated_linear_unit() -> None:
    net = Net(lambda m, x: m.b(F.glu(m.a(x))), a=nn.Linear(2, 14), b=nn.Linear(7, 3)).double()
    # value and gate share one order; only the value carries a factor
    where = "a.weight[0], a.bias[0], a.weight[0 +7], a.bias[0 +7], b.weight[1]"
    sym = prove(net, tokens().double(), wires=[f"S_7 ⋉ (R*)^7 on {where}"])
    p, s = permutation(7), torch.linspace(0.5, 2, 7).double()
    rows, factor = torch.cat([p, 7 + p]), torch.cat([s, torch.ones(7)])
    by_hand = edited(
        net,
        a__weight=lambda w: (w * factor[:, None])[rows],
        a__bias=lambda b: (b * factor)[rows],
        b__weight=lambda w: (w / s)[:, p],
    )
    assert same_weights(sym.act(element(sym, "b.weight[1]", permutation=p, scale=s[None]), net), by_hand)
    assert gap(net, by_hand, tokens().double()) < 1e-12


def test_swiglu() -> None:
    forward = lambda m, x: m.down(F.silu(m.gate(x)) * m.up(x))  # noqa: E731
    net = Net(forward, gate=nn.Linear(2, 7), up=nn.Linear(2, 7), down=nn.Linear(7, 3))
    where = "gate.weight[0], gate.bias[0], up.weight[0], up.bias[0], down.weight[1]"
    sym = prove(net, tokens(), wires=[f"S_7 ⋉ (R*)^7 on {where}"])
    assert {s.role for s in sym.wires[0].slots if s.parameter.startswith("gate")} == {"permuted"}
