"""Weights of which a forward reads a part, or nothing: at other sizes, or in another mode, the rest is read too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from networks import Net, gap, parameter, prove, reasons
from torch import Tensor, nn

import intertwine as it

SOME = "only a part of it is read with inputs of these sizes"


def body(**parts: nn.Module | nn.Parameter) -> dict[str, nn.Module | nn.Parameter]:
    return {"enter": nn.Linear(4, 8), "leave": nn.Linear(8, 3), **parts}


def masked(m: Net, x: Tensor) -> Tensor:
    """Causal attention with a stored mask, as nanoGPT has it."""
    h = m.enter(x)
    alike = (h @ h.mT).masked_fill(m.mask[: x.shape[1], : x.shape[1]] == 0, -9.0)
    return m.leave((alike.softmax(-1) @ h).relu())


#: What is sliced by the size of the input → the forward and the parts.
TABLES: dict[str, tuple[Callable[[Net, Tensor], Tensor], dict[str, nn.Module | nn.Parameter]]] = {
    "positions": (
        lambda m, x: m.leave((m.enter(x) + m.table[:, : x.shape[1]]).relu()),
        body(table=parameter(1, 10, 8)),
    ),
    "a mask": (masked, body(mask=nn.Parameter(torch.ones(10, 10).tril()))),
    "queries that are averaged": (
        lambda m, x: m.leave((m.enter(x) + m.table[: x.shape[1]].mean(0)).relu()),
        body(table=parameter(10, 8)),
    ),
    "what a layer makes of positions": (
        lambda m, x: m.leave((m.enter(x) + m.inside(m.table)[: x.shape[1]].mean(0)).relu()),
        body(table=parameter(10, 8), inside=nn.Linear(8, 8)),
    ),
    "a transposed table": (
        lambda m, x: m.leave((m.enter(x) + m.table.T[: x.shape[1]]).relu()),
        body(table=parameter(8, 10)),
    ),
    "the first piece of two": (
        lambda m, x: m.leave((m.enter(x) + m.table.split([x.shape[1], 10 - x.shape[1]])[0].mean(0)).relu()),
        body(table=parameter(10, 8)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", TABLES)
def test_the_symmetry_holds_at_other_sizes(what: str) -> None:
    forward, parts = TABLES[what]
    net = Net(forward, **parts).double()
    sym = it.symmetry(net, torch.randn(2, 5, 4).double())
    assert any(SOME in reason for _, reason in sym.frozen)
    twin = sym.act(sym.random(seed=0), net)
    for length in (3, 5, 9):
        assert gap(net, twin, torch.randn(2, length, 4).double()) < 1e-12
    assert sym.certify(net, torch.randn(2, 5, 4).double()).ok


@pytest.mark.parametrize(
    "read",
    [
        lambda w: (w[:8], w[8:16], w[16:]),
        lambda w: w.chunk(3),
        lambda w: w.view(3, 8, 4).unbind(0),
        lambda w: tuple(w.view(3, 8, 4)[i] for i in range(3)),
    ],
    ids=["slices", "chunks", "unbound", "selected"],
)
def test_weights_that_are_read_piece_by_piece_keep_their_wires(read: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        a, b, c = (F.linear(x, w) for w in read(m.fused))
        return m.leave((a * b + c).relu())

    net, x = Net(forward, fused=parameter(24, 4), leave=nn.Linear(8, 3)).double(), torch.randn(2, 4).double()
    sym = it.symmetry(net, x)
    assert [w.size for w in sym.wires] == [8]
    assert not any(SOME in reason for _, reason in sym.frozen)
    assert gap(net, sym.act(sym.random(seed=0), net), x) < 1e-12


def test_a_piece_that_nobody_reads_keeps_the_others_in_their_places() -> None:
    net = Net(lambda m, x: m.leave(F.linear(x, m.fused.chunk(2)[0])), fused=parameter(16, 4), leave=nn.Linear(8, 3))
    sym = it.symmetry(net, torch.randn(2, 4))
    assert SOME in reasons(sym, "fused")
    assert not sym.wires


LEFT = "left out by the slice"

#: Scores of pairs of tokens that a layer makes of one token, cut to the length of the input → the forward.
SCORES: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "as they are": lambda m, x: m.scores(m.enter(x).relu())[..., : x.shape[1]].softmax(-1) @ x,
    "in heads": lambda m, x: (
        m.scores(m.enter(x).relu()).unflatten(-1, (10, 2))[:, :, : x.shape[1]].softmax(-2).mT @ x.unsqueeze(1)
    ),
    "after a softmax": lambda m, x: m.scores(m.enter(x).relu()).softmax(-1)[..., : x.shape[1]] @ x,
    "in two pieces": lambda m, x: (
        m.scores(m.enter(x).relu()).split([x.shape[1], 10 - x.shape[1]], -1)[0].softmax(-1) @ x
    ),
    "counted from the end": lambda m, x: m.scores(m.enter(x).relu())[..., -x.shape[1] :].softmax(-1) @ x,
}


@pytest.mark.parametrize("what", SCORES)
def test_units_beyond_the_length_of_the_example_stay_as_they_are(what: str) -> None:
    net = Net(SCORES[what], enter=nn.Linear(4, 8), scores=nn.Linear(8, 20 if what == "in heads" else 10)).double()
    x = torch.randn(2, 5, 4).double()
    sym = it.symmetry(net, x)
    assert LEFT in reasons(sym, "scores.weight")
    assert [str(w.group) for w in sym.wires if w.size == 8] == ["S_8 ⋉ (R₊)^8"]  # the layer before keeps all it had
    twin = sym.act(sym.random(seed=0), net)
    for length in (3, 5, 9):
        assert gap(net, twin, torch.randn(2, length, 4).double()) < 1e-12
    assert sym.certify(net, x).ok


def test_what_is_read_of_a_layer_cut_in_pieces_may_move() -> None:
    net = Net(lambda m, x: m.leave(m.enter(x).chunk(4, -1)[1].relu()), enter=nn.Linear(4, 12), leave=nn.Linear(3, 2))
    sym = prove(net, torch.randn(2, 4), wires=["S_3 ⋉ (R₊)^3 on enter.weight[0 +3], enter.bias[0 +3], leave.weight[1]"])
    assert LEFT in reasons(sym, "enter.weight")


def test_a_slice_beside_other_readers_freezes_nothing() -> None:
    net = Net(
        lambda m, x: m.leave(m.enter(x).relu()) * m.enter(x).relu()[..., :3].sum(-1, keepdim=True),
        enter=nn.Linear(4, 8), leave=nn.Linear(8, 2),
    )  # fmt: skip
    sym = prove(
        net,
        torch.randn(2, 4),
        wires=[
            "S_3 on enter.weight[0], enter.bias[0], leave.weight[1]",
            "S_5 ⋉ (R₊)^5 on enter.weight[0 +3], enter.bias[0 +3], leave.weight[1 +3]",
        ],
    )
    assert not any(LEFT in reason for _, reason in sym.frozen)


def test_registers_that_are_dropped_in_the_end_keep_their_wire() -> None:
    """Their order does not matter to the tokens that look at them, though nothing reads what they themselves become."""

    def forward(m: Net, x: Tensor) -> Tensor:
        h = torch.cat([m.registers.expand(len(x), -1, -1), m.enter(x)], 1)
        h = h + F.scaled_dot_product_attention(h, h, h)
        return m.leave(h[:, 3:])

    net = Net(forward, **body(registers=parameter(1, 3, 8)))
    sym = it.symmetry(net, torch.randn(2, 5, 4))
    assert any(wire.size == 3 and wire.group.permutes for wire in sym.wires)
    assert not any(LEFT in reason for _, reason in sym.frozen)
    assert sym.certify(net, torch.randn(2, 5, 4)).ok


class WithContext(nn.Module):
    """A forward that reads some of its layers only where it is given more."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.context, self.leave = nn.Linear(4, 8), nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        h = self.enter(x)
        return self.leave((h if context is None else h + self.context(context)).relu())


def test_weights_that_are_never_read_stay_as_they_are() -> None:
    net, x = WithContext().double(), torch.randn(2, 4).double()
    sym = it.symmetry(net, x)
    assert set(reasons(sym, "context.weight").splitlines()) == {"the forward never reads it with these inputs"}
    twin = sym.act(sym.random(seed=0), net)
    assert torch.equal(net.context.weight, twin.get_parameter("context.weight"))
    assert gap(net, twin, x) < 1e-12
    whole = it.symmetry(net, x, torch.randn(2, 5).double())
    assert any(slot.parameter == "context.weight" for slot in whole.wires[0].slots)
