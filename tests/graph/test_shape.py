"""Tensors taken apart, put together, repeated and looked up: what is left of an order afterwards."""

import math
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
from intertwine.graph.builder import GraphBuilder
from intertwine.symmetry.certify import relative_error


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
    tape = GraphBuilder()
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


# -- Graph and symmetry, where changed code went unnoticed -------------------------------------------------------------


def images() -> Tensor:
    return torch.randn(2, 3, 8, 8)


def test_uneven_reflection_keeps_the_channels() -> None:
    net = Net(
        lambda m, x: m.head(F.pad(m.stem(x), (3, 1, 0, 2), mode="reflect")),
        stem=nn.Conv2d(3, 5, 1), head=nn.Conv2d(5, 2, 3),
    )  # fmt: skip
    prove(net, images(), wires=["S_5 ⋉ (R*)^5 on stem.weight[0], stem.bias[0], head.weight[1]"])


def test_cropped_channels_are_a_wire_of_their_own() -> None:
    """The first two of eight channels are cut off and stay as they are; one of zeros is laid behind the others."""
    net = Net(
        lambda m, x: m.head(F.pad(m.stem(x).relu(), (0, 0, 0, 0, -2, 1))),
        stem=nn.Conv2d(3, 8, 1), head=nn.Conv2d(7, 2, 1),
    )  # fmt: skip
    wires = [
        "S_6 ⋉ (R₊)^6 on stem.weight[0 +2], stem.bias[0 +2], head.weight[1]",
        "(R*)^1 on head.weight[1 +6]",  # zeros are read at any scale
    ]
    prove(net, images(), wires=wires)


def test_uneven_reflection_keeps_the_channels_of_one_long_row() -> None:
    """6 channels of 8 + 0 + 2 times 8 + 3 + 1 positions each, side by side."""
    net = Net(
        lambda m, x: m.head(F.pad(m.stem(x).relu(), (3, 1, 0, 2), mode="reflect").flatten(1)),
        stem=nn.Conv2d(3, 6, 1), head=nn.Linear(6 * 10 * 12, 2),
    )  # fmt: skip
    prove(net, images(), wires=["S_6 ⋉ (R₊)^6 on stem.weight[0], stem.bias[0], head.weight[1 ×120]"])


def test_moved_axes() -> None:
    net = Net(
        lambda m, x: m.head(torch.movedim(torch.movedim(m.stem(x).relu(), 1, -1), (0, 1), (1, 0))),
        stem=nn.Conv2d(3, 5, 1), head=nn.Linear(5, 2),
    )  # fmt: skip
    prove(net, images(), wires=["S_5 ⋉ (R₊)^5 on stem.weight[0], stem.bias[0], head.weight[1]"])


def test_patches_of_one_image_and_of_several() -> None:
    for batch in ((2,), ()):
        net = Net(lambda m, x: m.head(F.unfold(m.stem(x).relu(), 2).mT), stem=nn.Conv2d(3, 5, 1), head=nn.Linear(20, 2))
        x = torch.randn(*batch, 3, 8, 8)
        prove(net, x, wires=["S_5 ⋉ (R₊)^5 on stem.weight[0], stem.bias[0], head.weight[1 ×4]"])


def test_two_readings_of_one_axis_have_a_common_refinement() -> None:
    """12 units read as 2 × 6 and as 6 × 2: what both leave free is 2 × 3 × 2."""

    def forward(m: Net, x: Tensor) -> Tensor:
        hidden = m.body(x).relu()
        hidden = (hidden.view(-1, 2, 6) + m.a + m.b).relu().view(-1, 6, 2)
        return m.head((hidden + m.c + m.d).relu().flatten(1))

    net = Net(
        forward, body=nn.Linear(3, 12), head=nn.Linear(12, 2), a=parameter(2, 1), b=parameter(1, 6), c=parameter(6, 1),
        d=parameter(1, 2),
    )  # fmt: skip
    sym = it.symmetry(net, torch.randn(4, 3))
    assert sorted(wire.size for wire in sym.wires) == [2, 2, 3]
    assert sym.certify(net, torch.randn(4, 3)).ok


@pytest.mark.parametrize("readings", [((2, 6), (4, 3)), ((4, 3), (2, 6))])
def test_two_layers_read_in_two_ways_have_a_common_refinement(readings: tuple[tuple[int, int], ...]) -> None:
    """12 units as 2 × 6 meet 12 units as 4 × 3: both are 2 × 2 × 3."""

    def forward(m: Net, x: Tensor) -> Tensor:
        parts = zip((m.a, m.b), (m.p, m.q), readings, strict=True)
        first, second = ((layer(x).view(-1, *sizes) + add).relu().flatten(1) for layer, add, sizes in parts)
        return m.head((first + second).relu())

    p, q = (parameter(outer, 1) for outer, _ in readings)
    net = Net(forward, a=nn.Linear(3, 12), b=nn.Linear(3, 12), p=p, q=q, head=nn.Linear(12, 2))
    two, four = ("p", "q") if readings[0] == (2, 6) else ("q", "p")
    layers = "a.weight[0{0}], a.bias[0{0}], b.weight[0{0}], b.bias[0{0}], head.weight[1{0}]"
    wires = [
        f"S_2 ⋉ (R₊)^2 on {layers.format(' ×6')}, {two}[0], {four}[0 ×2]",
        f"(S_2)² on {layers.format(' ×3')}, {four}[0]",
        f"(S_3)⁴ on {layers.format('')}",
    ]
    prove(net, torch.randn(4, 3), wires=wires)


def test_running_variances_are_the_only_variances() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).eval()
    roles = {slot.parameter: slot.role for wire in it.symmetry(net, torch.randn(2, 3)).wires for slot in wire.slots}
    assert {name for name, role in roles.items() if role == "variance"} == {"1.running_var"}
    assert len(roles) == 7


def own_heads() -> Net:
    """2 heads of 5 units that read 7 hidden ones; heads are axes of the parameters."""

    def forward(m: Net, x: Tensor) -> Tensor:
        inside = torch.einsum("bi,hdi->bhd", m.body(x).relu(), m.up).relu()
        return torch.einsum("bhd,hdo->bo", inside, m.down)

    return Net(forward, body=nn.Linear(3, 7), up=parameter(2, 5, 7), down=parameter(2, 5, 4))


def test_orders_inside_heads_are_counted_for_each_head() -> None:
    sym = it.symmetry(own_heads(), torch.randn(4, 3))
    assert math.isclose(sym.log_order, math.log(math.factorial(7) * math.factorial(2) * math.factorial(5) ** 2))


def test_heads_that_are_an_axis_of_their_own_have_each_its_own_order_inside() -> None:
    wires = [
        "S_7 ⋉ (R₊)^7 on body.weight[0], body.bias[0], up[2]",
        "S_2 on up[0], down[0]",
        "(S_5 ⋉ (R₊)^5)² on up[1], down[1]",
    ]
    prove(own_heads(), torch.randn(4, 3), wires=wires)


def test_coverage_counts_positions_beside_channels_once() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2)).eval()
    everything = sum(p.numel() for p in net.parameters())
    assert math.isclose(it.symmetry(net, images()).coverage(net), (everything - 2) / everything)


def test_outputs_that_are_all_infinite_agree() -> None:
    inf = torch.full((3,), math.inf)
    assert relative_error(inf, inf) == 0.0
    assert relative_error(torch.zeros(0), torch.zeros(0)) == 0.0
    assert relative_error(inf, torch.zeros(3)) == math.inf
