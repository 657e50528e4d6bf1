"""The forward as a program: sharing, tying, buffers, inputs and outputs, branches, and writing in place."""

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
