"""What the engine says about a forward that it cannot follow, or a weight that it leaves alone, is so."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from networks import Net, certified, gap, parameter, reasons
from torch import Tensor, nn

import intertwine as it
from intertwine.errors import CaptureError


def rows() -> Tensor:
    return torch.randn(4, 3)


def scaled(gate: Callable[[Net], Callable[[Tensor], Tensor]]) -> Net:
    """Units that pass a function made with the network itself at hand, which knows its parameter `scale`."""
    net = Net(lambda m, x: m.head(m.gate(m.a(x))), a=nn.Linear(3, 6), head=nn.Linear(6, 2), scale=parameter(6))
    vars(net)["gate"] = gate(net)
    return net


def hooked(net: Net) -> Callable[[Tensor], Tensor]:
    net.a.register_forward_hook(lambda module, inputs, output: output * net.scale)
    return torch.relu


# -- weights that something else holds ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "gate",
    [lambda net: lambda h: h * net.scale, hooked, lambda net: functools.partial(torch.mul, net.scale)],
    ids=["lambda", "hook", "partial"],
)
def test_a_weight_that_a_function_holds_is_read_and_said_to_be(
    gate: Callable[[Net], Callable[[Tensor], Tensor]],
) -> None:
    net, x = scaled(gate).double(), rows().double()
    sym = certified(it.symmetry(net, x), net, x)
    assert "it is read through something else that holds it" in reasons(sym, "scale")
    assert "never reads" not in reasons(sym, "scale")
    twin = sym.act(sym.random(seed=0), net)
    assert torch.equal(net.scale, twin.get_parameter("scale"))
    assert gap(net, twin, x) < 1e-12
    assert any("S_6" in str(w.group) for w in it.symmetry(scaled(_nothing), x.float()).wires)
    assert not any("S_6" in str(w.group) for w in sym.wires)  # the units meet a tensor that stays


def _nothing(net: Net) -> Callable[[Tensor], Tensor]:
    return torch.relu


def test_a_weight_that_is_read_both_ways_stays() -> None:
    net, x = scaled(lambda net: functools.partial(torch.mul, net.scale)).double(), rows().double()
    net._forward = lambda m, x: m.head(m.gate(m.a(x))) + m.head(m.a(x) * m.scale)
    sym = certified(it.symmetry(net, x), net, x)
    assert "something else that holds it" in reasons(sym, "scale")
    assert gap(net, sym.act(sym.random(seed=0), net), x) < 1e-12


def test_a_weight_that_nothing_reads_is_still_said_to_be_read_by_nothing() -> None:
    net = scaled(_nothing)
    assert reasons(it.symmetry(net, rows()), "scale") == "the forward never reads it with these inputs"


# -- function transforms -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: m.head(torch.vmap(lambda v: torch.relu(m.w @ v))(x)),
        lambda m, x: m.head(torch.vmap(lambda v, w: torch.relu(w @ v), in_dims=(0, None))(x, m.w)),
        lambda m, x: torch.func.jacrev(lambda v: m.head(torch.relu(v @ m.w.T)).sum())(x),
    ],
    ids=["vmap", "vmap of a weight", "jacrev"],
)
def test_a_transform_is_said_to_be_one(forward: Callable[[Any, Tensor], Tensor]) -> None:
    net = Net(forward, w=parameter(6, 3), head=nn.Linear(6, 2))
    with pytest.raises(CaptureError, match=r"torch\.vmap or a transform like it at \S+\.py:\d+, which is") as e:
        it.symmetry(net, rows())
    assert ".data" not in str(e.value)


# -- constant masks ----------------------------------------------------------------------------------------------------

MASK = torch.tensor([True, False, True, True, False, True])


def masked(take: Callable[[Any, Tensor], Tensor]) -> Net:
    net = Net(lambda m, x: m.head(take(m, m.a(x))), a=nn.Linear(3, 6), head=nn.Linear(4, 2))
    net.register_buffer("mask", MASK)
    net.register_buffer("kept", MASK.nonzero()[:, 0])
    return net


@pytest.mark.parametrize(
    "take",
    [
        lambda m, h: h[:, torch.tensor([True, False, True, True, False, True])],
        lambda m, h: h[:, m.mask],
        lambda m, h: h[:, ~(~m.mask)],
        lambda m, h: h[:, m.mask.nonzero()[:, 0]],
        lambda m, h: torch.masked_select(h, m.mask).view(4, 4),
    ],
    ids=["written there", "buffer", "computed", "nonzero", "masked_select"],
)
def test_a_constant_mask_has_positions(take: Callable[[Any, Tensor], Tensor]) -> None:
    with pytest.raises(
        CaptureError, match=r"same for all data: keep its positions, mask\.nonzero\(\)\[:, 0\], as a buff"
    ):
        it.symmetry(masked(take), rows())


def test_the_way_out_of_a_constant_mask_is_one() -> None:
    net, x = masked(lambda m, h: h[:, m.kept]).double(), rows().double()
    sym = certified(it.symmetry(net, x), net, x)
    assert "positions along it matter to index" in reasons(sym, "a.weight")


@pytest.mark.parametrize(
    "take",
    [lambda h, w: h[:, h[0] > h[0].median()], lambda h, w: h[:, w[:, 0] > 0], lambda h, w: (h > 0).nonzero() * 1.0],
    ids=["of the data", "of a weight", "nonzero of the data"],
)
def test_a_mask_of_data_has_none(take: Callable[[Tensor, Tensor], Tensor]) -> None:
    net = Net(lambda m, x: take(m.a(x), m.a.weight).sum(), a=nn.Linear(3, 6))
    with pytest.raises(CaptureError, match=r"Keep all positions and mask them") as e:
        it.symmetry(net, rows())
    assert "same for all data" not in str(e.value)


# -- words -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("step", "word"), [(2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (21, "21st")])
def test_every_third_entry(step: int, word: str) -> None:
    net = Net(lambda m, x: m.head(m.a(x)[:, ::step]), a=nn.Linear(3, step + 1), head=nn.Linear(2, 2))
    assert f"every {word} entry is taken" in reasons(it.symmetry(net, rows()), "a.weight")
