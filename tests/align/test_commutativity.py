"""Commutativity: its cost against plain layers, its slope against autograd, the solver on trained digit networks."""

import copy
from collections.abc import Callable
from itertools import pairwise, permutations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from digit_networks import IMAGE, digits, perceptrons
from networks import Net
from orbits import KINDS, made, mlp, symmetry_of
from torch import Tensor, nn

import intertwine as it
from intertwine.align.activation_sites import run_side_by_side
from intertwine.align.align import Alignment, align
from intertwine.align.commutativity import CommutativityCost, LayerTerm, SampledLayers
from intertwine.align.solver import permutations_of
from intertwine.align.state import MovableWires, squared_distance
from intertwine.errors import InputError
from intertwine.symmetry.blocks import weights_of
from intertwine.symmetry.symmetry import Symmetry

EVERYTHING = 10**6


def commuting_of(sym: Symmetry, a: nn.Module, b: nn.Module, data: Any, samples: int = EVERYTHING) -> CommutativityCost:
    layers = SampledLayers(samples, torch.Generator().manual_seed(0))
    run_side_by_side(sym, a, b, data, [layers])
    moving = MovableWires(sym.wire_specs, frozenset(range(len(sym.wires))))
    return CommutativityCost(sym, moving, layers.found.values(), (weights_of(sym, a), weights_of(sym, b)))


def convolutions(**options: Any) -> Callable[[], Net]:
    def make() -> Net:
        return Net(
            lambda m, x: m.c(F.gelu(m.b(F.gelu(m.a(x)))).mean((2, 3))),
            a=nn.Conv2d(2, 4, 3, padding=1), b=nn.Conv2d(4, 6, 3, **options), c=nn.Linear(6, 2),
        )  # fmt: skip

    return make


def one_dimensional() -> Net:
    return Net(lambda m, x: m.b(F.gelu(m.a(x.flatten(2)))).mean(2), a=nn.Conv1d(2, 4, 5, 2), b=nn.Conv1d(4, 2, 3))


def three_dimensional() -> Net:
    return Net(
        lambda m, x: m.b(F.gelu(m.a(x[:, :, None]))).mean((2, 3, 4)),
        a=nn.Conv3d(2, 4, (1, 3, 2), padding=(0, 1, 0)), b=nn.Conv3d(4, 2, (1, 2, 3), dilation=(1, 2, 1)),
    )  # fmt: skip


LAYERS = {
    "plain": convolutions(),
    "strided and padded": convolutions(stride=2, padding=(1, 2)),
    "dilated": convolutions(dilation=(2, 1)),
    "same": convolutions(padding="same", dilation=2),
    "valid": convolutions(padding="valid"),
    "grouped": convolutions(groups=2),
    "one axis": one_dimensional,
    "three axes": three_dimensional,
}


def layer_inputs(model: nn.Module, x: Tensor) -> dict[nn.Module, Tensor]:
    """What every layer reads, by plain hooks."""
    found: dict[nn.Module, Tensor] = {}
    for module in model.children():
        module.register_forward_pre_hook(lambda m, args: found.__setitem__(m, args[0].detach()))
    model(x)
    return found


def dense_cost(a: nn.Module, b: nn.Module, x: Tensor) -> float:
    """Σ ‖(W_A − W_B)(H_A − H_B)‖², each layer run as it is, with the difference of weights and no bias."""
    left, right = layer_inputs(a, x), layer_inputs(b, x)
    total = 0.0
    with torch.no_grad():
        for p, q in zip(a.children(), b.children(), strict=True):
            change = left[p] - right[q]
            layer = copy.deepcopy(p)
            layer.get_parameter("weight").sub_(q.get_parameter("weight"))
            layer.get_parameter("bias").zero_()
            total += float(layer(change).square().sum())
    return total


@pytest.mark.parametrize("kind", LAYERS)
def test_the_cost_is_that_of_plain_layers(kind: str) -> None:
    torch.manual_seed(0)
    a, b = (LAYERS[kind]().double().eval() for _ in range(2))
    x = torch.randn(5, 2, 7, 8, dtype=torch.float64)
    sym = it.symmetry(a, x[:2])
    found = commuting_of(sym, a, b, [(x[:3], None), (x[3:], None)])
    assert found.cost == pytest.approx(dense_cost(a, b, x), rel=1e-10)
    g = permutations_of(sym.random(3))
    found.start_at(g)
    assert found.cost == pytest.approx(dense_cost(a, sym.act(g, b), x), rel=1e-10)


@pytest.mark.parametrize("kind", ["plain", "grouped"])
def test_steps_know_the_cost_and_the_element(kind: str) -> None:
    """One wire after the other, every step kept or not: the cost is that of the network moved by the element."""
    torch.manual_seed(0)
    a, b = (LAYERS[kind]().double().eval() for _ in range(2))
    x = torch.randn(5, 2, 7, 8, dtype=torch.float64)
    sym = it.symmetry(a, x[:2])
    found = commuting_of(sym, a, b, [(x, None)])
    kept = 0
    for seed in range(12):
        g = permutations_of(sym.random(seed))
        before = found.cost
        s = seed % len(sym.wires)
        kept += (done := found.step({s: g.moves[s]}))
        assert found.cost < before if done else found.cost == before
        assert found.cost == pytest.approx(dense_cost(a, sym.act(found.element, b), x), rel=1e-10)
    assert 0 < kept < 12


def test_fits_are_exact_on_outputs_and_the_slope_on_inputs() -> None:
    torch.manual_seed(0)
    a, b = (mlp(torch.tanh, (3, 5, 4, 2)).double().eval() for _ in range(2))
    x = torch.randn(20, 3, dtype=torch.float64)
    sym = it.symmetry(a, x[:2])
    found = commuting_of(sym, a, b, [(x, None)])
    left, right = layer_inputs(a, x), layer_inputs(b, x)
    s = [w.name for w in sym.wires].index("b")
    change = left[a.b] - right[b.b]
    outer = (change @ a.b.weight.T).T @ (change @ b.b.weight.T)
    q = torch.eye(4, dtype=torch.float64, requires_grad=True)
    h, k = left[a.c], right[b.c]
    residual = h @ a.c.weight.T + k @ b.c.weight.T - (k @ q.T) @ a.c.weight.T - (h @ q) @ b.c.weight.T
    (slope,) = torch.autograd.grad(residual.square().sum(), q)
    total = sum(found.similarities(s).values(), torch.zeros(4, 4, dtype=torch.float64))
    torch.testing.assert_close(total, outer.detach() - slope / 2)


def test_a_sample_of_positions_is_bounded_fair_and_the_same_in_both() -> None:
    model, sym = made("residual")[0], symmetry_of("residual")
    x = torch.randn(40, 3, 4, 5, dtype=torch.float64)
    layers = SampledLayers(64, torch.Generator().manual_seed(0))
    run_side_by_side(sym, model, model, [(part, None) for part in x.split([1, 20, 19])], [layers])
    assert sorted(layers.found) == ["conv2d", "conv2d_1", "conv2d_2", "linear"]
    for name, layer in layers.found.items():
        assert layer.inputs is not None
        assert torch.equal(*layer.inputs)
        assert len(layer.inputs[0]) == (40 if name == "linear" else 64)
    stem = layers.found["conv2d"].inputs
    assert stem is not None
    patches = F.unfold(x, 3).unflatten(1, (3, 9)).movedim(3, 1).flatten(0, 1)
    places = [next(i for i, p in enumerate(patches) if torch.equal(p, row)) for row in stem[0]]
    assert len(set(places)) == 64
    assert 80 < sum(places) / 64 < 160  # 6 positions in each of 40 images: the middle is 120


# -- the solver --------------------------------------------------------------------------------------------------------


def cost_of_all_orders(a: nn.Module, b: nn.Module, x: Tensor) -> list[float]:
    """Σ ‖(W_A − W_B)(H_A − H_B)‖² for every order of the units of b, a network of three linear layers, by indexing."""
    left, right = layer_inputs(a, x), layer_inputs(b, x)
    (h, i), (k, m) = ((left[a.get_submodule(n)], right[b.get_submodule(n)]) for n in "bc")
    (w, v), (u, t) = ([m.get_parameter(f"{n}.weight").detach() for m in (a, b)] for n in "bc")
    costs = []
    for q in map(list, permutations(range(len(v)))):
        last = (k - m[:, q]) @ (u - t[:, q]).T
        for p in map(list, permutations(range(v.shape[1]))):
            middle = (h - i[:, p]) @ (w - v[q][:, p]).T
            costs.append(float(middle.square().sum() + last.square().sum()))  # the first layers read the same x
    return costs


@pytest.mark.parametrize(("seed", "better"), [(0, 0), (1, 0), (2, 2), (3, 0)])
def test_004_L16_the_search_against_all_orders(seed: int, better: int) -> None:
    """2,880 orders of two wires: how many are better than the one that was found."""
    torch.manual_seed(seed)
    a, b = (mlp(F.relu, (3, 5, 4, 2)).double().eval() for _ in range(2))
    x = torch.randn(60, 3, dtype=torch.float64)
    found = align(a, b, x[:2], method="commutativity", data=[(x, None)])
    own = found.history[-1].own
    assert own is not None
    assert own == pytest.approx(dense_cost(a, found.model, x), rel=1e-9)
    costs = cost_of_all_orders(a, b, x)
    assert min(abs(cost - own) for cost in costs) < 1e-9 * own  # one of them is what was found
    assert min(costs) <= own * (1 + 1e-9)
    assert sum(cost < own * (1 - 1e-9) for cost in costs) <= better


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("GRU", "LSTM", "tied embedding", "nothing")])
def test_planted_permutations_come_back(kind: str) -> None:
    model, inputs = made(kind)
    sym = symmetry_of(kind)
    if not any(w.group.permutes for w in sym.wires):
        pytest.skip("nothing permutes it")
    g = permutations_of(sym.random(5))
    x = tuple(torch.randn(24, *i.shape[1:], dtype=i.dtype) for i in inputs)
    found = align(model, sym.act(g, model), symmetry=sym, method="commutativity", data=[(x, None)])
    assert found.after == 0


def test_layers_without_weights_of_their_own_are_refused_with_words() -> None:
    model, inputs = made("GRU")
    sym = symmetry_of("GRU")
    stripped = Net(lambda m, x: m.layer(x)[0].sum(-1), layer=model.get_submodule("layer"))
    sym = it.symmetry(stripped, *inputs)
    with pytest.raises(InputError, match="No linear or convolution layer of this network reads a weight of its own"):
        align(stripped, stripped, symmetry=sym, method="commutativity", data=[(inputs, None)])


@pytest.mark.parametrize("options", [{"samples": 0}, {"exchanges": -1}])
def test_bad_options_are_refused_with_words(options: dict[str, int]) -> None:
    model, inputs = made("MLP with ReLU")
    call = {"symmetry": symmetry_of("MLP with ReLU"), "method": "commutativity", "data": [(inputs, None)]}
    with pytest.raises(InputError, match="samples must be at least 1, but is "):
        align(model, model, options=options, **call)


# -- trained networks --------------------------------------------------------------------------------------------------


def aligned(method: str, **options: Any) -> Alignment:
    a, b = perceptrons(64, 48, 32, 10)[:2]
    return align(a, b, IMAGE, method=method, data=digits()[0], options=options)


def factors(term: LayerTerm) -> tuple[float, float]:
    """‖W_A − W_B‖² and ‖H_A − H_B‖², whose product bounds the cost."""
    return squared_distance(*term.weights), squared_distance(*term.inputs)


def factors_of(found: Alignment) -> list[tuple[float, float, float]]:
    """Per layer: ‖W_A − W_B‖², ‖H_A − H_B‖² and the product ‖(W_A − W_B)(H_A − H_B)‖²."""
    commuting = commuting_of(found.symmetry, found.reference, found.model, digits()[0], samples=512)
    return [(*factors(term), term.cost()) for term in commuting.terms]


def test_004_L14_weights_and_activations_shrink_both_factors_and_their_product() -> None:
    """Eq. 2: weight matching shrinks the first factor, activation matching the second; the product follows."""
    a, b = perceptrons(64, 48, 32, 10)[:2]
    sym = it.symmetry(a, IMAGE)
    plain = commuting_of(sym, a, b, digits()[0], samples=512)
    before = [(*factors(term), term.cost()) for term in plain.terms]
    by_weights, by_features = factors_of(aligned("weights")), factors_of(aligned("activations", cost="inner"))
    assert len(before) == 3
    for i in range(3):
        assert by_weights[i][0] < before[i][0]
        assert by_features[i][0] < before[i][0]
        assert before[0][1] == 0  # both networks see the same images
        if i:
            assert by_features[i][1] < 0.8 * before[i][1]
            assert by_weights[i][1] < before[i][1]
            assert by_features[i][2] < by_features[i][0] * by_features[i][1]  # the product is bounded by its factors
    sums = [[sum(layer[k] for layer in layers) for k in range(3)] for layers in (before, by_weights, by_features)]
    assert sums[1][0] == min(total[0] for total in sums)  # nothing brings weights nearer than matching weights
    assert sums[2][1] == min(total[1] for total in sums)  # nor features than matching features
    assert sums[1][2] < 0.8 * sums[0][2]
    assert sums[2][2] < 0.8 * sums[0][2]


def test_004_L16_the_search_lowers_the_product_below_both_methods() -> None:
    found = aligned("commutativity")
    own = {step.start: step.own for step in found.history if step.sweep == 0}
    assert set(own) == {"identity", "weights", "activations"}
    last = found.history[-1].own
    assert last is not None
    assert last < 0.97 * min(cost for cost in own.values() if cost is not None)
    for start in own:
        steps = [step.own for step in found.history if step.start == start]
        assert all(x is not None and y is not None and y < x for x, y in pairwise(steps))
    assert found.history[-1].objective == found.after
    weights, features = (factors_of(aligned(method)) for method in ("weights", "activations"))
    assert sum(x[2] for x in factors_of(found)) < min(sum(x[2] for x in layers) for layers in (weights, features))
