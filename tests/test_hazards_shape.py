"""Tensors taken apart, put together, repeated and looked up: what is left of an order afterwards."""

from collections.abc import Callable
from math import factorial, log

import pytest
import torch
import torch.nn.functional as F
from networks import (
    Net,
    certified,
    edited,
    element,
    gap,
    parameter,
    permutation,
    place,
    prove,
    reasons,
    same_weights,
    wire_at,
)
from torch import Tensor, nn

import intertwine as it
from intertwine.graph.tape import Tape


def rows(width: int = 3) -> Tensor:
    return torch.randn(2, 11, width)


# -- taking apart ------------------------------------------------------------------------------------------------------


def test_split() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        a, b = m.fc(x).relu().split([4, 5], -1)
        return m.a(a) + m.b(b)

    net = Net(forward, fc=nn.Linear(3, 9), a=nn.Linear(4, 2), b=nn.Linear(5, 2)).double()
    x = rows().double()
    sym = prove(
        net,
        x,
        wires=[
            "S_4 ⋉ (R₊)^4 on fc.weight[0], fc.bias[0], a.weight[1]",
            "S_5 ⋉ (R₊)^5 on fc.weight[0 +4], fc.bias[0 +4], b.weight[1]",
        ],
    )
    p = permutation(5)
    order = torch.cat([torch.arange(4), 4 + p])
    by_hand = edited(net, fc__weight=lambda w: w[order], fc__bias=lambda b: b[order], b__weight=lambda w: w[:, p])
    assert same_weights(sym.act(element(sym, "b.weight[1]", permutation=p), net), by_hand)
    assert gap(net, by_hand, x) < 1e-12
    # the two readers are different, so a unit that crosses the cut is another function
    across = torch.tensor([4, 1, 2, 3, 0, 5, 6, 7, 8])
    assert gap(net, edited(net, fc__weight=lambda w: w[across], fc__bias=lambda b: b[across]), x) > 1e-3


def test_chunk() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        a, b, c = m.fc(x).chunk(3, -1)
        return m.sum(a + b) + m.own(c.relu())

    # what is added shares its order, what is read alone keeps its own
    prove(
        Net(forward, fc=nn.Linear(3, 15), sum=nn.Linear(5, 2), own=nn.Linear(5, 2)),
        rows(),
        wires=[
            "S_5 ⋉ (R*)^5 on fc.weight[0], fc.bias[0], fc.weight[0 +5], fc.bias[0 +5], sum.weight[1]",
            "S_5 ⋉ (R₊)^5 on fc.weight[0 +10], fc.bias[0 +10], own.weight[1]",
        ],
    )


def test_slices_that_overlap() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        y = m.fc(x).relu()
        return m.a(y[..., :6]) + m.b(y[..., 4:])

    # units 4 and 5 are read by both
    prove(
        Net(forward, fc=nn.Linear(3, 9), a=nn.Linear(6, 2), b=nn.Linear(5, 2)),
        rows(),
        wires=[
            "S_4 ⋉ (R₊)^4 on fc.weight[0], fc.bias[0], a.weight[1]",
            "S_2 ⋉ (R₊)^2 on fc.weight[0 +4], fc.bias[0 +4], a.weight[1 +4], b.weight[1]",
            "S_3 ⋉ (R₊)^3 on fc.weight[0 +6], fc.bias[0 +6], b.weight[1 +2]",
        ],
    )


def test_every_second_unit() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        y = m.fc(x).relu()
        return m.a(y[..., ::2]) + m.b(y[..., 1::2])

    net, x = Net(forward, fc=nn.Linear(3, 10), a=nn.Linear(5, 2), b=nn.Linear(5, 2)), rows()
    # even and odd units have different readers; at the least they may move in pairs
    sym = certified(it.symmetry(net, x), net, x)
    assert sym.log_order >= log(factorial(5)) - 1e-9
    assert sym.dimension >= 5


def test_unbind() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        a, b = m.fc(x).unflatten(-1, (2, 5)).unbind(-2)
        return m.a(a.relu()) + m.b(b.tanh())

    prove(
        Net(forward, fc=nn.Linear(3, 10), a=nn.Linear(5, 2), b=nn.Linear(5, 2)),
        rows(),
        wires=[
            "S_5 ⋉ (R₊)^5 on fc.weight[0], fc.bias[0], a.weight[1]",
            "S_5 ⋉ {±1}^5 on fc.weight[0 +5], fc.bias[0 +5], b.weight[1]",
        ],
    )


def test_unbind_a_stack_of_weights() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        for w, b in zip(m.weights.unbind(0), m.biases.unbind(0), strict=True):
            x = (x @ w + b).relu()
        return m.head(m.stem(x))

    # two layers of width 4 in one tensor; the first reads the input, so its rows and with them all rows stay in place
    net = Net(forward, weights=parameter(2, 4, 4), biases=parameter(2, 4), stem=nn.Linear(4, 5), head=nn.Linear(5, 2))
    sym = certified(it.symmetry(net, rows(4)), net, rows(4))
    assert "S_5 ⋉ (R*)^5" in [str(w.group) for w in sym.wires]


#: How one of several pieces of 12 units is taken → the piece, of 4 units.
PIECES: dict[str, Callable[[Tensor], Tensor]] = {
    "chunk": lambda h: h.chunk(3, -1)[1],
    "split": lambda h: h.split([4, 4, 4], -1)[1],
    "unbind": lambda h: h.unflatten(-1, (3, 4)).unbind(-2)[1],
    "all chunks but the last": lambda h: torch.cat(h.chunk(3, -1)[:-1], -1)[..., 4:],
}


@pytest.mark.parametrize("how", PIECES)
def test_pieces_that_nobody_reads(how: str) -> None:
    net = Net(lambda m, x: m.head(PIECES[how](m.fc(x)).relu()), fc=nn.Linear(3, 12), head=nn.Linear(4, 2))
    sym = certified(it.symmetry(net, rows()), net, rows())
    wire = wire_at(sym, "head.weight[1]")
    assert str(wire.group) == "S_4 ⋉ (R₊)^4"
    assert {place(slot) for slot in wire.slots} == {"fc.weight[0 +4]", "fc.bias[0 +4]", "head.weight[1]"}


@pytest.mark.parametrize(("start", "length"), [(-1, 1), (-4, 2), (-6, 3), (0, 6), (5, 1), (-6, 6)])
def test_narrow_counts_from_the_end(start: int, length: int) -> None:
    """As a slice of the same entries does."""
    inside = slice(start % 6, start % 6 + length)
    x, parts = rows(), {"fc": nn.Linear(3, 6), "head": nn.Linear(6, 2)}

    def net(take: Callable[[Tensor], Tensor]) -> Net:
        def forward(m: Net, x: Tensor) -> Tensor:
            h = m.fc(x).tanh()
            return m.head(h) * take(h).square().sum(-1, keepdim=True)

        return Net(forward, **parts)

    narrowed, sliced = net(lambda h: h.narrow(-1, start, length)), net(lambda h: h[..., inside])
    wires = [str(wire) for wire in certified(it.symmetry(sliced, x), sliced, x).wires]
    assert [str(wire) for wire in certified(it.symmetry(narrowed, x), narrowed, x).wires] == wires


def test_a_rule_that_narrows_too_far_is_told() -> None:
    tape = Tape()
    with pytest.raises(ValueError, match="entries 4 … 7 of an axis of 6"):
        tape.narrow(tape.fixed((2, 6)), 1, 4, 3)


# -- putting together --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [F.relu, F.tanh])
@pytest.mark.parametrize(
    "pieces",
    [
        lambda h: torch.stack([h[:, k] for k in range(3)], 1),
        lambda h: torch.stack(h.unbind(-1), -1),
        lambda h: torch.cat([h[:, k : k + 1] for k in range(3)], 1),
    ],
    ids=["stack", "unbind", "cat"],
)
def test_units_one_by_one_keep_their_scales(
    pieces: Callable[[Tensor], Tensor], activation: Callable[[Tensor], Tensor]
) -> None:
    net = Net(lambda m, x: m.head(activation(pieces(m.a(x)))), a=nn.Linear(3, 3), head=nn.Linear(3, 2)).double()
    x = torch.randn(4, 3).double()
    group = "(R₊)^1" if activation is F.relu else "{±1}^1"
    blocks = ["", " +1", " +2"]
    prove(net, x, wires=[f"{group} on a.weight[0{b}], a.bias[0{b}], head.weight[1{b}]" for b in blocks])
    factor = torch.tensor([2.0, 1, 1], dtype=torch.float64)
    scaled = {"a__weight": lambda w: w * factor[:, None], "a__bias": lambda b: b * factor}
    moved = edited(net, **scaled, head__weight=lambda w: w / factor)
    assert (gap(net, moved, x) < 1e-12) is (activation is F.relu)


def test_a_unit_without_an_axis_is_frozen_and_the_reason_does_not_say_too_much() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        h = m.a(x)
        return m.head(torch.stack([h[:, k].relu() for k in range(3)], 1))

    net = Net(forward, a=nn.Linear(3, 3), head=nn.Linear(3, 2))
    sym = certified(it.symmetry(net, torch.randn(4, 3)), net, torch.randn(4, 3))
    assert sym.wires == ()
    assert "no scale of it could be followed" in reasons(sym, "a.weight")


def test_stack() -> None:
    forward = lambda m, x: m.head(torch.stack([m.a(x).relu(), m.b(x).relu()], 1).amax(1))  # noqa: E731
    net = Net(forward, a=nn.Linear(3, 5), b=nn.Linear(3, 5), head=nn.Linear(5, 2))
    where = "a.weight[0], a.bias[0], b.weight[0], b.bias[0], head.weight[1]"
    prove(net, rows(), wires=[f"S_5 ⋉ (R₊)^5 on {where}"])


def test_stack_joined_again() -> None:
    forward = lambda m, x: m.head(torch.stack([m.a(x).relu(), m.b(x).relu()], -2).flatten(-2))  # noqa: E731
    net, x = Net(forward, a=nn.Linear(3, 5), b=nn.Linear(3, 5), head=nn.Linear(10, 2)), rows()
    # a stack lays one order beside the other; at the least the two layers may move together
    sym = certified(it.symmetry(net, x), net, x)
    assert sym.log_order >= log(factorial(5)) - 1e-9
    assert sym.dimension >= 5


def test_repeat() -> None:
    net = Net(lambda m, x: m.head(m.fc(x).relu().repeat(1, 1, 2)), fc=nn.Linear(3, 5), head=nn.Linear(10, 4)).double()
    # the two copies of a unit are alike, so the columns that read them may change places, unit by unit
    sym = prove(
        net,
        rows().double(),
        wires=["S_5 ⋉ (R₊)^5 on fc.weight[0], fc.bias[0], head.weight[1]", "(S_2)⁵ on head.weight[1 ×5]"],
    )
    p = permutation(5)
    by_hand = edited(
        net,
        fc__weight=lambda w: w[p],
        fc__bias=lambda b: b[p],
        head__weight=lambda w: w.reshape(4, 2, 5)[:, :, p].reshape(4, 10),
    )
    assert same_weights(sym.act(element(sym, "fc.weight[0]", permutation=p), net), by_hand)


def test_repeat_interleave() -> None:
    forward = lambda m, x: m.head(m.fc(x).relu().repeat_interleave(2, -1))  # noqa: E731
    net = Net(forward, fc=nn.Linear(3, 5), head=nn.Linear(10, 4))
    wires = ["S_5 ⋉ (R₊)^5 on fc.weight[0], fc.bias[0], head.weight[1 ×2]", "(S_2)⁵ on head.weight[1]"]
    prove(net, rows(), wires=wires)


def test_expand() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        return m.head(m.fc(x).relu()[:, :, None].expand(-1, -1, 4, -1) * m.gain)

    net = Net(forward, fc=nn.Linear(3, 5), gain=parameter(4, 5), head=nn.Linear(5, 2))
    # a gain between two layers hands factors on in both directions; the four copies stay apart in the output
    where = "fc.weight[0], fc.bias[0], gain[1], head.weight[1]"
    prove(net, rows(), wires=[f"S_5 ⋉ (R*)^5 ⋉ (R₊)^5 on {where}"])


# -- looking up --------------------------------------------------------------------------------------------------------


def test_gather_tokens() -> None:
    def forward(m: Net, x: Tensor, place: Tensor) -> Tensor:
        y = m.fc(x)
        return m.head(y.gather(1, place[:, None, None].expand(-1, 1, 5)).squeeze(1))

    net = Net(forward, fc=nn.Linear(3, 5), head=nn.Linear(5, 2))
    # the same place is read in every feature, so features keep all their freedom
    wires = ["S_5 ⋉ (R*)^5 on fc.weight[0], fc.bias[0], head.weight[1]"]
    prove(net, rows(), torch.tensor([3, 7]), wires=wires)


def test_index_tokens() -> None:
    def forward(m: Net, x: Tensor, place: Tensor) -> Tensor:
        y = m.fc(x)
        return m.head(y[torch.arange(2), place] + y.index_select(1, torch.tensor([4])).squeeze(1) + y[:, [0, 3]].sum(1))

    net = Net(forward, fc=nn.Linear(3, 5), head=nn.Linear(5, 2))
    wires = ["S_5 ⋉ (R*)^5 on fc.weight[0], fc.bias[0], head.weight[1]"]
    prove(net, rows(), torch.tensor([3, 7]), wires=wires)


def test_index_features() -> None:
    net = Net(lambda m, x: m.head(m.fc(x).relu()[..., [4, 0, 2]]), fc=nn.Linear(3, 5), head=nn.Linear(3, 2))
    sym = certified(it.symmetry(net, rows()), net, rows())
    assert [w for w in sym.wires if w.group.permutes] == []
    assert "positions along it matter to index" in reasons(sym, "fc.weight")


def test_mean_over_masked_tokens() -> None:
    def forward(m: Net, x: Tensor, mask: Tensor) -> Tensor:
        y = m.fc(x)
        weight = mask.unsqueeze(-1).expand(y.size()).to(y.dtype)
        return m.head((y * weight).sum(1) / weight.sum(1).clamp(min=1e-9))

    net = Net(forward, fc=nn.Linear(3, 5), head=nn.Linear(5, 2))
    wires = ["S_5 ⋉ (R*)^5 on fc.weight[0], fc.bias[0], head.weight[1]"]
    prove(net, rows(), torch.tensor([[1] * 11, [1] * 4 + [0] * 7]), wires=wires)


# -- contractions ------------------------------------------------------------------------------------------------------


def test_einsum() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("btc,chd->bhtd", x, w) for w in (m.q, m.k, m.v))
        scores = torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1)
        return torch.einsum("bhij,bhjd,hdo->bio", scores, v, m.o)

    net = Net(forward, q=parameter(3, 4, 5), k=parameter(3, 4, 5), v=parameter(3, 4, 7), o=parameter(4, 7, 2))
    prove(
        net,
        rows(),
        wires=[
            "S_4 on q[1], k[1], v[1], o[0]",
            "(S_5 ⋉ (R*)^5)⁴ on q[2], k[2]",
            "(S_7 ⋉ (R*)^7)⁴ on v[2], o[1]",
        ],
    )


def test_mixture_of_experts() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        share = m.router(x).softmax(-1)
        hidden = torch.einsum("btc,ewc->btew", x, m.up).relu()
        return torch.einsum("bte,btew,eow->bto", share, hidden, m.down)

    net = Net(forward, router=nn.Linear(3, 4), up=parameter(4, 5, 3), down=parameter(4, 2, 5)).double()
    sym = prove(
        net,
        rows().double(),
        wires=["S_4 on router.weight[0], router.bias[0], up[0], down[0]", "(S_5 ⋉ (R₊)^5)⁴ on up[1], down[2]"],
    )
    order = permutation(5, 4)
    by_hand = edited(
        net,
        up=lambda w: torch.stack([w[e, order[e]] for e in range(4)]),
        down=lambda w: torch.stack([w[e][:, order[e]] for e in range(4)]),
    )
    assert same_weights(sym.act(element(sym, "up[1]", permutation=order), net), by_hand)
    # without their router, experts in another order are another function
    expert = permutation(4)
    assert gap(net, edited(net, up=lambda w: w[expert], down=lambda w: w[expert]), rows().double()) > 1e-3


@pytest.mark.parametrize(
    "spell",
    [
        lambda x, w: x @ w,
        lambda x, w: torch.bmm(x, w.expand(2, -1, -1)),
        lambda x, w: torch.tensordot(x, w, 1),
        lambda x, w: torch.addmm(torch.zeros(5), x.flatten(0, 1), w).unflatten(0, (2, 11)),
        lambda x, w: (x.unsqueeze(-1) * w).sum(-2),
        lambda x, w: F.linear(x, w.t()),
        lambda x, w: torch.einsum("...c,cd", x, w),
    ],
    ids=["@", "bmm", "tensordot", "addmm", "multiply and sum", "linear", "einsum"],
)
def test_matrix_products_in_every_spelling(spell: Callable[[Tensor, Tensor], Tensor]) -> None:
    net = Net(lambda m, x: spell(x, m.a).relu() @ m.b, a=parameter(3, 5), b=parameter(5, 2))
    prove(net, rows(), wires=["S_5 ⋉ (R₊)^5 on a[1], b[0]"])
