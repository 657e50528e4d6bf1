"""The forward as a program: sharing, tying, buffers, inputs and outputs, branches, and writing in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
    reasons,
    same_weights,
)
from torch import Tensor, nn

import intertwine as it


def rows(width: int = 3) -> Tensor:
    return torch.randn(2, 11, width)


def mlp(hidden: int = 5, **parts: nn.Module | nn.Parameter) -> dict[str, nn.Module | nn.Parameter]:
    return {"a": nn.Linear(3, hidden), "b": nn.Linear(hidden, 2), **parts}


MLP = "a.weight[0], a.bias[0], b.weight[1]"

# -- used twice --------------------------------------------------------------------------------------------------------


def test_shared_module_called_twice() -> None:
    net = Net(lambda m, x: m.b(m.mid(m.mid(m.a(x).relu()).relu()).relu()), **mlp(mid=nn.Linear(5, 5))).double()
    x = rows().double()
    # one weight has the same units on both its axes: they move together
    sym = prove(net, x, wires=[f"S_5 ⋉ (R₊)^5 on {MLP}, mid.weight[0], mid.weight[1], mid.bias[0]"])
    p, s = permutation(5), torch.linspace(0.5, 2, 5).double()
    moved = sym.act(element(sym, "mid.bias[0]", permutation=p, scale=s[None]), net)
    by_hand = edited(
        net,
        a__weight=lambda w: (w * s[:, None])[p],
        a__bias=lambda b: (b * s)[p],
        mid__weight=lambda w: (w * s[:, None] / s)[p][:, p],
        mid__bias=lambda b: (b * s)[p],
        b__weight=lambda w: (w / s)[:, p],
    )
    assert same_weights(moved, by_hand)
    assert gap(net, by_hand, x) < 1e-12
    assert gap(net, edited(net, mid__weight=lambda w: w[p], mid__bias=lambda b: b[p]), x) > 1e-3


def test_shared_module_between_different_layers() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        return m.b(m.mid(m.a(x).relu()).relu()) + m.d(m.mid(m.c(x).tanh()).relu())

    net = Net(forward, **mlp(mid=nn.Linear(5, 4), c=nn.Linear(3, 5)) | {"b": nn.Linear(4, 2), "d": nn.Linear(4, 2)})
    # what enters is a ReLU once and a tanh once: their common group is the permutations
    prove(
        net,
        rows(),
        wires=[
            "S_5 on a.weight[0], a.bias[0], c.weight[0], c.bias[0], mid.weight[1]",
            "S_4 ⋉ (R₊)^4 on mid.weight[0], mid.bias[0], b.weight[1], d.weight[1]",
        ],
    )


@pytest.mark.parametrize(("activation", "group"), [(torch.relu, "S_5"), (torch.tanh, "S_5 ⋉ {±1}^5")])
def test_parameter_used_twice(activation: Callable[[Tensor], Tensor], group: str) -> None:
    # a tied autoencoder: the code is written and read by one matrix
    net = Net(lambda m, x: activation(x @ m.w.T + m.bias) @ m.w, w=parameter(5, 3), bias=parameter(5))
    prove(net, rows(), wires=[f"{group} on w[0], bias[0]"])


def test_parameter_under_two_names() -> None:
    net = Net(lambda m, x: m.b(m.a(x).relu()) + m.c(m.a(x).relu()), **mlp(c=nn.Linear(5, 2)))
    net.c.weight = net.b.weight
    sym = prove(net, rows(), wires=[f"S_5 ⋉ (R₊)^5 on {MLP}"])
    moved = moved_by(sym.random(seed=1), sym, net)
    assert moved.c.weight is moved.b.weight


# -- buffers -----------------------------------------------------------------------------------------------------------


def with_buffer(value: Tensor, persistent: bool) -> Net:
    forward = lambda m, x: m.b((m.a(x) - m.centre).relu())  # noqa: E731
    net = Net(forward, **mlp())
    net.register_buffer("centre", value, persistent=persistent)
    return net


def test_persistent_buffer() -> None:
    prove(with_buffer(torch.randn(5), True), rows(), wires=[f"S_5 ⋉ (R₊)^5 on {MLP}, centre[0]"])


def test_non_persistent_buffer() -> None:
    net = with_buffer(torch.randn(5), False)
    # it is not in a checkpoint, so it cannot move, and what meets it cannot either
    sym = prove(net, rows(), wires=[])
    assert "constant buffer centre" in reasons(sym, "a.weight")
    assert torch.equal(moved_by(sym.random(), sym, net).centre, net.centre)


def test_integer_buffer() -> None:
    forward = lambda m, x: m.b(m.a(x).relu()[..., m.order])  # noqa: E731
    net = Net(forward, **mlp())
    net.register_buffer("order", torch.tensor([2, 0, 1, 4, 3]))
    sym = certified(it.symmetry(net, rows()), net, rows())
    assert [w for w in sym.wires if w.group.permutes] == []
    assert "index" in reasons(sym, "a.weight")
    assert torch.equal(moved_by(sym.random(), sym, net).order, net.order)


def test_counter_of_a_batch_norm() -> None:
    net = Net(lambda m, x: m.b(m.norm(m.a(x).mT).mT), **mlp(norm=nn.BatchNorm1d(5))).eval()
    sym = certified(it.symmetry(net, rows()), net, rows())
    moved = moved_by(sym.random(), sym, net)
    assert moved.norm.num_batches_tracked.dtype == torch.int64
    assert torch.equal(moved.norm.num_batches_tracked, net.norm.num_batches_tracked)


# -- inputs and outputs ------------------------------------------------------------------------------------------------


def test_several_inputs_and_outputs() -> None:
    def forward(m: Net, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        left, right = m.a(x).relu(), m.c(y)
        return m.b(left * right), right

    # what is returned is in its place for good, and what is multiplied with it too
    sym = prove(Net(forward, **mlp(c=nn.Linear(4, 5))), rows(), rows(4), wires=[f"(R₊)^5 on {MLP}"])
    assert "output" in reasons(sym, "c.weight")


def test_keyword_inputs() -> None:
    def forward(m: Net, x: Tensor, *, shift: Tensor, double: bool = False) -> Tensor:
        y = m.a(x + shift).relu()
        return m.b(2 * y if double else y.tanh())

    net = Net(forward, **mlp())
    wires = [f"S_5 ⋉ (R₊)^5 on {MLP}"]
    prove(net, rows(), shift=torch.randn(3), double=True, wires=wires)
    prove(net, x=rows(), shift=torch.randn(3), double=True, wires=wires)
    prove(net, rows(), shift=torch.randn(3), wires=[f"S_5 on {MLP}"])


def test_dict_and_nested_outputs() -> None:
    def forward(m: Net, inputs: dict[str, Tensor]) -> dict[str, object]:
        hidden = m.a(inputs["x"]).relu()
        return {"logits": m.b(hidden), "all": [hidden.sum(-1), (hidden.amax(),)], "none": None}

    # a sum and a maximum over the units are blind to their order, not to their scale
    prove(Net(forward, **mlp()), {"x": rows()}, wires=[f"S_5 on {MLP}"])


@dataclass
class Answer:
    """What a model may return: a dataclass of its own."""

    logits: Tensor
    hidden: Tensor | None = None


torch.export.register_dataclass(Answer)


def test_dataclass_outputs() -> None:
    net = Net(lambda m, x: Answer(m.b(m.a(x).relu())), **mlp())
    prove(net, rows(), wires=[f"S_5 ⋉ (R₊)^5 on {MLP}"])
    net = Net(lambda m, x: Answer(m.b(m.a(x).relu()), m.a(x)), **mlp())
    prove(net, rows(), wires=[])


# -- branches ----------------------------------------------------------------------------------------------------------


def test_control_flow_on_shapes_and_settings() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        y = m.a(x)
        y = y.relu() if x.shape[1] > 4 else y.tanh()
        for _ in range(2 if m.training else 3):
            y = y + m.mid(y)
        return m.b(y)

    net = Net(forward, **mlp(mid=nn.Linear(5, 5)))
    where = f"{MLP}, mid.weight[0], mid.weight[1], mid.bias[0]"
    prove(net, rows(), wires=[f"S_5 ⋉ (R₊)^5 on {where}"])
    prove(net, rows()[:, :3], wires=[f"S_5 ⋉ {{±1}}^5 on {where}"])


# -- in place ----------------------------------------------------------------------------------------------------------


def test_activation_in_place() -> None:
    net = Net(lambda m, x: m.b(F.relu(m.a(x), inplace=True)), **mlp())
    prove(net, rows(), wires=[f"S_5 ⋉ (R₊)^5 on {MLP}"])


def test_activation_in_place_changes_what_was_kept() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        kept = m.a(x)
        kept.tanh_()
        return m.b(kept) + m.c(kept.relu())

    # both readers see the tanh, though the first name is older
    net = Net(forward, **mlp(c=nn.Linear(5, 2)))
    prove(net, rows(), wires=[f"S_5 on {MLP}, c.weight[1]"])


def test_residual_added_in_place() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.a(x)
        short = x
        x = m.mid(x).relu_()
        x += short
        x.add_(m.c(short))
        return m.b(x.relu_())

    net = Net(forward, **mlp(mid=nn.Linear(5, 5), c=nn.Linear(5, 5)))
    where = "mid.weight[0], mid.weight[1], mid.bias[0], c.weight[0], c.weight[1], c.bias[0]"
    prove(net, rows(), wires=[f"S_5 ⋉ (R₊)^5 on {MLP}, {where}"])


def test_writing_through_a_view() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        y = m.a(x).relu()
        y[..., :2] *= 3
        return m.b(y)

    net = Net(forward, **mlp())
    x = rows()
    sym = certified(it.symmetry(net, x), net, x)
    # units on different sides of the cut are treated differently: they must not change places
    wires = [w for w in sym.wires if w.group.permutes]
    assert all(w.size in (2, 3) for w in wires)
    if not wires:
        assert "in place" in reasons(sym, "a.weight")
    order = torch.tensor([2, 1, 0, 3, 4])
    wrong = edited(net, a__weight=lambda w: w[order], a__bias=lambda b: b[order], b__weight=lambda w: w[:, order])
    assert gap(net, wrong, x) > 1e-3


def test_overwriting_through_a_view() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        y = torch.zeros(*x.shape[:-1], 5)
        y[..., :3] = m.c(x)
        y[..., 3:] = m.d(x)
        return m.b(y.relu())

    net, x = Net(forward, b=nn.Linear(5, 2), c=nn.Linear(3, 3), d=nn.Linear(3, 2)), rows()
    sym = certified(it.symmetry(net, x), net, x)
    assert all(w.size in (2, 3) for w in sym.wires)


# -- Weights of which a forward reads a part, or nothing ---------------------------------------------------------------


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
