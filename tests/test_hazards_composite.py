"""Ops without a rule of their own that PyTorch makes of others: they are read as what they are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import Net, certified, edited, gap, parameter, permutation, prove, reasons
from torch import Tensor, nn

import intertwine as it
from intertwine.graph.capture import capture

BODY = "a.weight[0], a.bias[0]"


def rows() -> Tensor:
    return torch.randn(4, 3)


def tokens() -> Tensor:
    return torch.randn(2, 4, 3)


def between(fn: Callable[[Any, Tensor], Tensor], width: int = 6, **parts: nn.Module | nn.Parameter) -> Net:
    """Six units, what is done to them, and a layer that reads the result of that width."""
    return Net(lambda m, x: m.head(fn(m, m.a(x))), a=nn.Linear(3, 6), head=nn.Linear(width, 2), **parts)


FREE = [f"S_6 ⋉ (R₊)^6 on {BODY}, head.weight[1]"]
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
    prove(between(fn, width), example(), wires=wires)


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
    net, x = between(lambda m, h: torch.hsplit(h.relu(), 2)[0] * torch.hsplit(h, 2)[1], 3).double(), rows().double()
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

    net, x = between(write), tokens()
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
    net = between(lambda m, h: m.drop(h).relu(), drop=nn.FeatureAlphaDropout(0.5)).eval()
    prove(net, tokens(), wires=FREE)
    with pytest.raises(it.errors.InputError, match="draws random numbers"):
        it.symmetry(net.train(), tokens())
