"""Canonical forms: one per orbit, for every kind of network, with duplicates, dead units and bad input."""

import itertools
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fuzz_networks import build, random_network
from group_cases import CASES, attention, grouped, recurrent, rows, tokens
from networks import Net, edited, parameter
from orbits import ACTIVATIONS, KINDS, check_canonical, distance, made, mlp, symmetry_of, told_apart_late
from torch import Tensor, nn

import intertwine as it
from intertwine.errors import MismatchError
from intertwine.symmetry.symmetry import Symmetry


def with_symmetry(kind: str, dtype: torch.dtype = torch.float64) -> tuple[Symmetry, nn.Module, tuple[Any, ...]]:
    model, inputs = made(kind, dtype)
    return symmetry_of(kind), model, inputs


# -- told apart late ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["lexicographic", "nodesort"])
def test_units_that_only_signs_tell_apart_wait_for_the_signs(order: str) -> None:
    net = told_apart_late()
    x = torch.randn(3, 2, dtype=torch.float64)
    check_canonical(it.symmetry(net, x), net, x, order=order)


# -- every kind of network ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_one_form_per_orbit(kind: str) -> None:
    for dtype, order in ((torch.float32, "lexicographic"), (torch.float64, "nodesort")):
        sym, model, inputs = with_symmetry(kind, dtype)
        check_canonical(sym, model, *inputs, order=order)


def check_random_network(seed: int, dtype: torch.dtype) -> None:
    model, x = build(random_network(seed))
    x = x.to(dtype) if x.is_floating_point() else x
    model = model.to(dtype)
    sym = it.symmetry(model, x)
    for order in ("lexicographic", "nodesort"):
        check_canonical(sym, model, x, order=order)


@pytest.mark.parametrize("seed", [22, 50, 92, 558, *range(1000, 1009)])
def test_random_networks(seed: int) -> None:
    check_random_network(seed, torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["double", "single"])
@pytest.mark.parametrize("seed", range(2000, 2200))
def test_many_random_networks(seed: int, dtype: torch.dtype) -> None:
    check_random_network(seed, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_without_scales_is_exact(dtype: torch.dtype) -> None:
    sym, model, _ = with_symmetry("MLP with tanh", dtype)
    twin = sym.act(sym.random(1), model)
    assert distance(sym, it.canonicalize(model, symmetry=sym).model, it.canonicalize(twin, symmetry=sym).model) == 0


def test_half_precision_with_scales_is_doubted() -> None:
    sym, model, _ = with_symmetry("MLP with ReLU", torch.bfloat16)
    canonical = it.canonicalize(model, symmetry=sym)
    assert canonical.doubts == (
        "scales act on 'a.weight' in half precision, where rounding may change the order of units",
    )
    again = it.canonicalize(canonical.model, symmetry=sym)
    assert again.element.distance(sym.identity()) == 0


def test_tied_weights_stay_tied() -> None:
    sym, model, _ = with_symmetry("tied embedding")
    found = it.canonicalize(model, symmetry=sym).model
    assert isinstance(found, Net)
    assert found.out.weight is found.embed.weight


def test_a_model_without_wires() -> None:
    layer = nn.Linear(3, 2)
    canonical = it.canonicalize(layer, torch.zeros(1, 3))
    assert canonical.unique
    assert torch.equal(canonical.model.get_parameter("weight"), layer.weight)


def test_a_parameter_without_entries() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        return m.b(F.relu(torch.cat([m.a(x), x @ m.nothing], -1)))

    net = Net(forward, a=nn.Linear(3, 5), b=nn.Linear(5, 2), nothing=parameter(3, 0)).double()
    check_canonical(it.symmetry(net, *rows()), net, *rows())


# -- independent oracles -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["lexicographic", "nodesort"])
def test_all_relabelings_of_a_small_network_have_one_form(order: str) -> None:
    """All 4!·3! relabelings, made by hand: every one of them has the same form, which is one of them."""
    torch.manual_seed(0)
    net = mlp(F.gelu, (2, 4, 3, 2))
    sym = it.symmetry(net, torch.zeros(1, 2))
    forms, relabelings = set(), set()
    for p, q in itertools.product(itertools.permutations(range(4)), itertools.permutations(range(3))):
        first, second = list(p), list(q)
        twin = edited(
            net,
            a__weight=lambda w, p=first: w[p],
            a__bias=lambda w, p=first: w[p],
            b__weight=lambda w, p=first, q=second: w[q][:, p],
            b__bias=lambda w, q=second: w[q],
            c__weight=lambda w, q=second: w[:, q],
        )
        relabelings.add(bits(twin))
        forms.add(bits(it.canonicalize(twin, symmetry=sym, order=order).model))
    assert len(relabelings) == 144
    assert len(forms) == 1
    assert forms < relabelings


def test_all_signs_of_a_small_network_have_one_form() -> None:
    torch.manual_seed(0)
    net = mlp(torch.tanh, (2, 4, 2))
    sym = it.symmetry(net, torch.zeros(1, 2))
    forms = set()
    for signs in itertools.product([-1.0, 1.0], repeat=4):
        s = torch.tensor(signs)
        flipped = edited(
            net,
            a__weight=lambda w, s=s: w * s[:, None],
            a__bias=lambda w, s=s: w * s,
            b__weight=lambda w, s=s: w * s,
        )
        forms.add(bits(it.canonicalize(flipped, symmetry=sym).model))
    assert len(forms) == 1


def test_the_form_of_a_relu_network_by_hand() -> None:
    """Rows of length one, sorted by signs and then by values."""
    net = mlp(F.relu, (2, 3, 1)).double()
    with torch.no_grad():
        net.a.weight.copy_(torch.tensor([[3.0, 4.0], [-3.0, 4.0], [0.6, 0.8]]))
        net.a.bias.copy_(torch.tensor([5.0, 10.0, -2.0]))
        net.b.weight.copy_(torch.tensor([[1.0, 2.0, 3.0]]))
    form = it.canonicalize(net, *rows(2)).model
    assert isinstance(form, Net)
    assert torch.allclose(form.a.weight, torch.tensor([[-0.6, 0.8], [0.6, 0.8], [0.6, 0.8]]).double())
    assert torch.allclose(form.a.bias, torch.tensor([2.0, -2.0, 1.0]).double())
    assert torch.allclose(form.b.weight, torch.tensor([[10.0, 3.0, 5.0]]).double())


def bits(model: nn.Module) -> bytes:
    """All weights of a model; the two zeros are one."""
    return b"".join((t + 0.0).numpy().tobytes() for t in model.state_dict().values())


def test_nodesort_as_printed_needs_one_hidden_layer() -> None:
    torch.manual_seed(0)
    for widths, canonical in {(3, 6, 2): True, (3, 6, 5, 2): False}.items():
        net = mlp(F.gelu, widths)
        sym = it.symmetry(net, torch.zeros(1, 3))
        a, b = (
            it.canonicalize(m, symmetry=sym, order="nodesort-printed", base=2.0)
            for m in (net, sym.act(sym.random(1), net))
        )
        assert (distance(sym, a.model, b.model) == 0) == canonical
        assert len(a.doubts) == 1
        assert "two hidden layers" in a.doubts[0]


def test_nodesort_sorts_by_its_key() -> None:
    torch.manual_seed(0)
    net = mlp(F.gelu, (3, 6, 4)).double()
    form = it.canonicalize(net, *rows(), order="nodesort", base=3.0).model
    assert isinstance(form, Net)
    key = 3.0 ** torch.arange(4, dtype=torch.float64) @ form.b.weight.detach()
    assert torch.equal(key, key.sort().values)


# -- duplicates and dead units -----------------------------------------------------------------------------------------

Edit = Callable[[Net], Any]
ODD: dict[str, Edit] = {
    "two equal units": lambda m: (same_row(m, 0, 1), m.b.weight[:, 1].copy_(m.b.weight[:, 0])),
    "equal incoming": lambda m: same_row(m, 0, 1),
    "three times": lambda m: (same_row(m, 0, 1), same_row(m, 0, 2), same_row(m, 0, 3)),
    "parallel incoming": lambda m: (m.a.weight[1].copy_(3.1 * m.a.weight[0]), m.a.bias[1].copy_(3.1 * m.a.bias[0])),
    "opposite incoming": lambda m: (m.a.weight[1].copy_(-m.a.weight[0]), m.a.bias[1].copy_(-m.a.bias[0])),
    "equal outgoing": lambda m: m.b.weight[:, 1].copy_(m.b.weight[:, 0]),
    "nothing incoming": lambda m: (m.a.weight[1:4].zero_(), m.a.bias[1:4].zero_()),
    "only a bias": lambda m: m.a.weight[1:3].zero_(),
    "nothing outgoing": lambda m: m.b.weight[:, 1:4].zero_(),
    "both": lambda m: (m.a.weight[1:4].zero_(), m.a.bias[1:4].zero_(), m.b.weight[:, 3:].zero_()),
    "all equal": lambda m: [p.fill_(0.3) for p in m.parameters()],
    "all zero": lambda m: [p.zero_() for p in m.parameters()],
    "a layer of zeros": lambda m: [p.zero_() for p in m.b.parameters()],
    "zero biases": lambda m: (m.a.bias.zero_(), m.b.bias.zero_()),
    "small integers": lambda m: [p.copy_(torch.randint(-1, 2, p.shape)) for p in m.parameters()],
}


def same_row(m: Net, source: int, target: int) -> None:
    m.a.weight[target] = m.a.weight[source]
    m.a.bias[target] = m.a.bias[source]


@cache
def symmetry_of_mlp(activation: str, widths: tuple[int, ...]) -> Symmetry:
    """A symmetry does not depend on the weights, so one does for all of them."""
    return it.symmetry(mlp(ACTIVATIONS[activation], widths), torch.zeros(1, widths[0]))


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_duplicates_and_dead_units(activation: str, odd: str) -> None:
    for widths, dtype in (((3, 6, 5, 2), torch.float64), ((1, 6, 1), torch.float32)):
        torch.manual_seed(3)
        net = mlp(ACTIVATIONS[activation], widths).to(dtype)
        with torch.no_grad():
            ODD[odd](net)
        sym = symmetry_of_mlp(activation, widths)
        canonical = it.canonicalize(net, symmetry=sym)
        assert canonical.unique
        again = it.canonicalize(canonical.model, symmetry=sym)
        assert again.element.distance(sym.identity()) == 0
        other = it.canonicalize(sym.act(sym.random(1), net), symmetry=sym)
        scaled = any(s.scales for s in sym.wire_specs)
        assert distance(sym, canonical.model, other.model) <= (0 if not scaled else 1e-6)


SPARSE: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    "GRU": (lambda: recurrent(nn.GRU(2, 5, batch_first=True)), tokens),
    "LSTM": (lambda: recurrent(nn.LSTM(2, 4, 2, batch_first=True)), tokens),
    "attention": (attention, tokens),
    "grouped": (grouped, CASES["grouped convolution"].inputs),
}


@pytest.mark.parametrize("kept", [0.15, 0.4])
@pytest.mark.parametrize("kind", SPARSE)
def test_sparse_weights(kind: str, kept: float) -> None:
    """Signs and scales of some units can then be read through others only, or not at all."""
    torch.manual_seed(0)
    model, inputs = SPARSE[kind][0]().double(), SPARSE[kind][1]()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(torch.rand(p.shape) < kept)
    check_canonical(it.symmetry(model, *inputs), model, *inputs)


def test_heads_that_are_equal() -> None:
    torch.manual_seed(0)
    net = attention().double()
    with torch.no_grad():
        by_head = (
            net.qkv.weight.view(3, 2, 4, 6),
            net.qkv.bias.view(3, 2, 4),
            net.out.weight.view(6, 2, 4).transpose(0, 1),
        )
        for t in by_head[:2]:
            t[:, 1] = t[:, 0]
        by_head[2][1] = by_head[2][0]
    check_canonical(it.symmetry(net, *tokens()), net, *tokens())


def test_a_wide_layer_of_equal_units_is_quick() -> None:
    net = mlp(F.relu, (8, 512, 512, 2))
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(0.01)
    sym = it.symmetry(net, torch.zeros(1, 8))
    start = time.process_time()
    assert it.canonicalize(net, symmetry=sym).unique
    assert time.process_time() - start < 10


def test_units_that_nothing_tells_apart_are_doubted() -> None:
    """Two rings of three units and one of six: every unit looks the same, and not all can be exchanged."""

    def forward(m: Net, x: Tensor) -> Tensor:
        h = F.gelu(x.sum(-1, keepdim=True) + m.b)
        return m.out(F.gelu(h @ m.w + h))

    net = Net(forward, b=parameter(12), w=parameter(12, 12), out=nn.Linear(12, 1)).double()
    ring = torch.zeros(12, 12, dtype=torch.float64)
    for units in ([0, 1, 2], [3, 4, 5], [6, 7, 8, 9, 10, 11]):
        for i, j in zip(units, units[1:] + units[:1], strict=True):
            ring[i, j] = 1
    with torch.no_grad():
        net.w.copy_(ring)
        net.b.fill_(0.1)
        net.out.weight.fill_(0.2)
    sym = it.symmetry(net, *rows())
    assert sym.wire_specs[0].size == 12
    doubts = {seed: it.canonicalize(sym.act(sym.random(seed), net), symmetry=sym).doubts for seed in range(4)}
    assert any(doubts.values())
    assert {d for ds in doubts.values() for d in ds} == {
        "some units look the same from all sides but cannot be exchanged, so their order is arbitrary"
    }


# -- nothing is changed, and bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_alone(training: bool) -> None:
    torch.manual_seed(0)
    net = CASES["two scales and eps"].make().train(training)
    before = {name: t.clone() for name, t in net.state_dict().items()}
    x = torch.randn(2, 3, 4, 5)
    canonical = it.canonicalize(net, x)
    it.fingerprint(net, x)
    it.equivalent(net, net, x)
    assert net.training == canonical.model.training == training
    assert before.keys() == net.state_dict().keys()
    assert all(torch.equal(before[name], t) for name, t in net.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in net.parameters())


def small() -> tuple[Net, Tensor]:
    return mlp(F.gelu, (3, 5, 2)), torch.zeros(1, 3)


def test_nan_in_a_weight_that_nothing_moves() -> None:
    net, x = small()
    with torch.no_grad():
        net.b.bias[0] = float("nan")
    with pytest.raises(it.InputError, match=r"'b.bias' holds NaN"):
        it.canonicalize(net, x)


@pytest.mark.parametrize(("value", "what"), [(float("nan"), "NaN"), (float("inf"), "infinite values")])
def test_weights_that_are_no_numbers(value: float, what: str) -> None:
    net, x = small()
    with torch.no_grad():
        net.a.weight[0, 0] = value
    for verb in (it.canonicalize, it.fingerprint):
        with pytest.raises(it.InputError, match=f"'a.weight' holds {what}, which have no order and no length"):
            verb(net, x)


def test_an_unknown_order() -> None:
    net, x = small()
    with pytest.raises(it.InputError, match=r"Unknown order 'sorted'\..*Choose one of: lexicographic, nodesort"):
        it.canonicalize(net, x, order="sorted")


@pytest.mark.parametrize("order", ["nodesort", "nodesort-printed"])
@pytest.mark.parametrize("base", [1.0, 0.5, -2.0, float("nan")])
def test_a_base_that_is_too_small(order: str, base: float) -> None:
    net, x = small()
    with pytest.raises(it.InputError, match=r"NodeSort needs a base above 1"):
        it.canonicalize(net, x, order=order, base=base)


def test_powers_that_overflow() -> None:
    net = mlp(F.gelu, (3, 4, 400))
    with pytest.raises(it.InputError, match=r"400 weights of a unit \(wire 'a'\) by powers of 10\.0, which overflow"):
        it.canonicalize(net, torch.zeros(1, 3), order="nodesort-printed", base=10.0)
    assert it.canonicalize(net, torch.zeros(1, 3), order="nodesort", base=10.0).unique


def test_a_symmetry_with_matrices() -> None:
    net = attention().double()
    sym = it.symmetry(net, *tokens(), continuous=True)
    with pytest.raises(it.InputError, match=r"contains matrices .* Pass the symmetry without continuous=True"):
        it.canonicalize(net, symmetry=sym)


def test_a_symmetry_of_another_architecture() -> None:
    net, x = small()
    with pytest.raises(MismatchError, match=r"in the given model it has shape \(6, 3\)"):
        it.canonicalize(mlp(F.gelu, (3, 6, 2)), symmetry=it.symmetry(net, x))


def test_to_dict() -> None:
    net, x = small()
    assert it.canonicalize(net, x).to_dict() == {"order": "lexicographic", "unique": True, "doubts": []}
