"""Matching by activations: against dense float64 features, scipy and brute force; planted orders; odd features."""

import copy
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from itertools import pairwise, permutations
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from networks import Net
from orbits import KINDS, made, mlp, residual, symmetry_of
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

import intertwine as it
from intertwine.align.align import align
from intertwine.align.correlations import MatchedCorrelations, matched_correlations
from intertwine.align.similarity import CrossMoments
from intertwine.align.solver import permutations_of
from intertwine.errors import InputError, MismatchError
from intertwine.lab.zoo.networks.registry import architecture, build
from intertwine.symmetry.element import Element
from intertwine.symmetry.symmetry import Symmetry

ZOO = {"mlp": {"widths": (784, 40, 30, 10)}, "myrtle": {"width": 16}, "resnet20": {}, "vit": {"dim": 24, "depth": 2}}


def batches(inputs: tuple[Tensor, ...], *sizes: int, seed: int = 0) -> list[tuple[Any, None]]:
    """Random batches like some example inputs; whole numbers are repeated."""
    generator = torch.Generator().manual_seed(seed)

    def like(x: Tensor, n: int) -> Tensor:
        if x.is_floating_point():
            return torch.randn(n, *x.shape[1:], generator=generator, dtype=torch.float64).to(x.dtype)
        return x.repeat(n // len(x) + 1, *[1] * (x.ndim - 1))[:n]

    return [(tuple(like(x, n) for x in inputs), None) for n in sizes]


@cache
def network(name: str) -> tuple[nn.Module, Symmetry, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model, example = build(name, **ZOO[name]).eval(), architecture(name).example()
    return model, it.symmetry(model, example), (example,)


def assert_identity(sym: Symmetry, element: Element, *parts: str) -> None:
    assert permutations_of(element, *parts).distance(sym.identity()) == 0


# -- many heads --------------------------------------------------------------------------------------------------------


def test_insides_are_looked_into_where_there_are_few_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    strands = it.symmetry(heads(), torch.randn(2, 6, 5)).wire_specs
    base = next(s for s, strand in enumerate(strands) if strand.size == 3)
    fibres = [s for s, strand in enumerate(strands) if strand.bases == (base,)]
    module = import_module("intertwine.align.state")
    moving = module.MovableWires(strands, frozenset(range(len(strands))))
    assert len(fibres) == 2
    assert [moving.nested(s) for s in (base, *fibres)] == [fibres, [], []]
    assert module.MovableWires(strands, frozenset({base, fibres[0]})).nested(base) == fibres[:1]
    assert module.MovableWires(strands, frozenset(fibres)).nested(base) == [], "fixed heads have no order"
    monkeypatch.setattr(module, "MOST_PAIRS", 8)
    assert moving.nested(base) == []


def test_too_many_heads_to_look_into_are_matched_by_sorted_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is inside heads is compared in sorted order, and put in order only when the heads have theirs."""
    monkeypatch.setattr(import_module("intertwine.align.state"), "MOST_PAIRS", 8)
    torch.manual_seed(3)  # the best order of heads is another one than with a look inside
    a, b = (heads().double().eval() for _ in range(2))
    x = torch.randn(30, 6, 5, dtype=torch.float64)
    options = {"cost": "inner", "signs": False}
    found = align(a, b, x[:2], method="activations", data=[(x, None)], options=options)
    kinds = list(zip(*(transformer_features(m, x) for m in (a, b)), strict=True))
    value = sum(np.einsum("iue,jue->ij", np.sort(p, 1), np.sort(q, 1)) for p, q in kinds)
    best = linear_sum_assignment(value, maximize=True)[1]
    outer = found.element[next(w.name for w in found.symmetry.wires if not w.over and w.size == 3)].permutation
    assert outer is not None
    assert outer.tolist() == best.tolist()
    for wire in (w for w in found.symmetry.wires if w.over):
        inside = found.element[wire.name].permutation
        p, q = kinds["v" in wire.name]
        assert inside is not None
        for i, j in enumerate(best):
            assert inside[j].tolist() == linear_sum_assignment(p[i] @ q[j].T, maximize=True)[1].tolist()


# -- planted -----------------------------------------------------------------------------------------------------------


#: Every network by both costs; the largest takes long, so one of its two is in the slow tier.
PLANTED = [
    pytest.param(name, cost, marks=pytest.mark.slow) if (name, cost) == ("resnet20", "correlation") else (name, cost)
    for name in ZOO
    for cost in ("correlation", "inner")
]


@pytest.mark.parametrize(("name", "cost"), PLANTED)
def test_permutations_come_back_to_the_last_bit(name: str, cost: str) -> None:
    model, sym, inputs = network(name)
    g = permutations_of(sym.random(1))
    data = batches(inputs, 24, 10)
    found = align(model, sym.act(g, model), symmetry=sym, method="activations", data=data, options={"cost": cost})
    assert found.after == 0
    assert_identity(sym, found.element @ g)


@pytest.mark.parametrize("at", ["post", "pre"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_network(kind: str, at: str) -> None:
    model, inputs = made(kind)
    sym = symmetry_of(kind)
    if not any(w.group.permutes for w in sym.wires):
        pytest.skip("nothing permutes it")
    if (kind, at) == ("one input", "pre"):
        pytest.skip("before nonlinearities all units are straight lines of one input and correlate fully")
    g = permutations_of(sym.random(5))
    data = batches(inputs, 48)
    found = align(model, sym.act(g, model), symmetry=sym, method="activations", data=data, options={"at": at})
    assert found.after == 0
    assert_identity(sym, found.element @ g)


#: Two signs act in every tensor that shows them, so that features tell their product only.
SIGNS_TOGETHER = {"group norm", "grouped queries", "grouped queries with norms"}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in SIGNS_TOGETHER])
def test_orders_and_signs_are_found_through_scales(kind: str) -> None:
    model, inputs = made(kind)
    sym = symmetry_of(kind)
    if not sym.wires:
        pytest.skip("nothing acts on it")
    g = sym.random(5)
    found = align(model, sym.act(g, model), symmetry=sym, method="activations", data=batches(inputs, 48))
    assert_identity(sym, found.element @ g, "sign")


@pytest.mark.parametrize("normed", [False, True])
def test_scales_of_features_come_back_where_asked(normed: bool) -> None:
    """After every nonlinearity the features of b are then those of a, for all units that are not dead."""
    torch.manual_seed(0)
    middle = [nn.BatchNorm1d(7)] if normed else []
    model = (
        nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 7), *middle, nn.ReLU(), nn.Linear(7, 2)).double().eval()
    )
    (inputs, _), *_ = data = batches((torch.zeros(1, 3, dtype=torch.float64),), 64)
    sym = it.symmetry(model, *inputs)
    twin = sym.act(sym.random(5), model)
    ends = (2, len(model) - 1)  # behind the nonlinearities
    for scales in (False, True):
        found = align(model, twin, symmetry=sym, method="activations", data=data, options={"scales": scales})
        assert isinstance(found.model, nn.Sequential)
        same = [torch.allclose(found.model[:end](*inputs), model[:end](*inputs), atol=1e-9) for end in ends]
        assert same == [scales, scales]


# -- oracles -----------------------------------------------------------------------------------------------------------


def rows_of(x: Tensor, axis: int = 1) -> np.ndarray:
    return x.detach().double().movedim(axis, 0).flatten(1).numpy()


def correlated(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.corrcoef(a, b)[: len(a), len(a) :]


def of_tensors(a: list[np.ndarray], b: list[np.ndarray]) -> np.ndarray:
    """The correlation over several tensors, each around its own mean."""
    a, b = ([x - x.mean(1, keepdims=True) for x in side] for side in (a, b))
    return correlated(np.concatenate(a, 1), np.concatenate(b, 1))


def mlp_features(m: Net, x: Tensor) -> dict[str, list[np.ndarray]]:
    h = F.gelu(m.a(x))
    return {"a": [rows_of(h)], "b": [rows_of(F.gelu(m.b(h)))]}


def residual_features(m: Net, x: Tensor) -> dict[str, list[np.ndarray]]:
    x = F.relu(m.n0(m.stem(x)))
    h = F.relu(m.n1(m.a(x)))
    return {"stem": [rows_of(x), rows_of(F.relu(x + m.n2(m.b(h))))], "a": [rows_of(h)]}


ORACLES: dict[str, tuple[Callable[[], Net], Callable[[Net, Tensor], dict[str, list[np.ndarray]]], tuple[int, ...]]] = {
    "mlp": (lambda: mlp(F.gelu, (3, 7, 6, 2)), mlp_features, (3,)),
    "residual with batch norm": (lambda: residual(nn.BatchNorm2d), residual_features, (3, 4, 5)),
}


def two(kind: str) -> tuple[Net, Net, Symmetry, list[Any], dict[str, list[np.ndarray]], dict[str, list[np.ndarray]]]:
    """Two independent networks, data in two batches, and the features of both on all of it."""
    make, features, shape = ORACLES[kind]
    torch.manual_seed(20)  # no unit is dead
    a, b = (make().double().eval() for _ in range(2))
    for model in (a, b):
        model.requires_grad_(False)
        for name, buffer in model.named_buffers():
            if buffer.is_floating_point():
                buffer.uniform_(0.5, 2) if name.endswith("var") else buffer.normal_(0, 0.2)
    data = batches((torch.zeros(1, *shape, dtype=torch.float64),), 40, 23)
    x = torch.cat([inputs[0] for inputs, _ in data])
    return a, b, it.symmetry(a, x[:2]), data, features(a, x), features(b, x)


@pytest.mark.parametrize("kind", ORACLES)
def test_correlations_are_those_of_dense_features(kind: str) -> None:
    a, b, sym, data, left, right = two(kind)
    found = matched_correlations(a, b, data, symmetry=sym)
    assert {w.wire for w in found.wires} == set(left)
    for wire in found.wires:
        oracle = of_tensors(left[wire.wire], right[wire.wire])
        np.testing.assert_allclose(wire.matrix.numpy(), oracle, atol=1e-12)
        assert len(wire.tensors) == len(left[wire.wire])
        assert wire.mean == pytest.approx(oracle.diagonal().mean())
    assert found.data.samples == 63


@pytest.mark.parametrize("kind", ORACLES)
def test_the_order_is_scipys_on_corrcoef(kind: str) -> None:
    a, b, sym, data, left, right = two(kind)
    found = align(a, b, symmetry=sym, method="activations", data=data, options={"signs": False})
    cost = 0.0
    for wire in sym.wires:
        oracle = of_tensors(left[wire.name], right[wire.name])
        order = linear_sum_assignment(oracle, maximize=True)[1]
        permutation = found.element[wire.name].permutation
        assert permutation is not None
        assert permutation.tolist() == order.tolist()
        cost += float((1 - oracle[np.arange(len(order)), order]).sum())
    assert found.history[-1].own == pytest.approx(cost)


def test_before_nonlinearities_other_tensors_are_compared() -> None:
    a, b, sym, data, _, _ = two("mlp")
    x = torch.cat([inputs[0] for inputs, _ in data])
    wire = matched_correlations(a, b, data, symmetry=sym, at="pre")["a"]
    np.testing.assert_allclose(wire.matrix.numpy(), correlated(rows_of(a.a(x)), rows_of(b.a(x))), atol=1e-12)


@pytest.mark.parametrize("kind", ORACLES)
def test_004_L06_the_order_minimises_the_distance_of_features(kind: str) -> None:
    """min Σ ‖H_A − P·H_B‖²: against all permutations where there are few, against scipy where there are many."""
    a, b, sym, data, left, right = two(kind)
    found = align(a, b, symmetry=sym, method="activations", data=data, options={"cost": "inner", "signs": False})
    total = 0.0
    for wire in sym.wires:
        x, y = (np.concatenate(side[wire.name], 1) for side in (left, right))
        order = linear_sum_assignment(x @ y.T, maximize=True)[1]
        permutation = found.element[wire.name].permutation
        assert permutation is not None
        assert permutation.tolist() == order.tolist()
        best = float(((x - y[order]) ** 2).sum())
        if len(x) <= 6:
            assert best == pytest.approx(min(((x - y[list(p)]) ** 2).sum() for p in permutations(range(len(x)))))
        total += best
    steps = found.history
    assert steps[-1].own == pytest.approx(total)
    assert all(y.own <= x.own + 1e-9 for x, y in pairwise(steps))  # type: ignore[operator]


def transformer_features(m: nn.Module, x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Queries and keys side by side, and values with what attention makes of them: (heads, units, entries)."""
    assert isinstance(m, Net)
    q, k, v = (p(x).unflatten(-1, (3, 4)).transpose(1, 2) for p in (m.q, m.k, m.v))
    y = F.scaled_dot_product_attention(q, k, v)
    kinds = []
    for tensors in ((q, k), (v, y)):
        rows = [t.detach().permute(1, 3, 0, 2).flatten(2).numpy() for t in tensors]
        kinds.append(np.concatenate(rows, -1))
    return kinds[0], kinds[1]


def heads() -> Net:
    def forward(m: Net, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (3, 4)).transpose(1, 2) for p in (m.q, m.k, m.v))
        return m.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    return Net(forward, q=nn.Linear(5, 12), k=nn.Linear(5, 12), v=nn.Linear(5, 12), o=nn.Linear(12, 5))


def test_heads_are_matched_by_the_best_order_inside() -> None:
    """All orders of heads, each with the best order of units inside every pair, by brute force."""
    torch.manual_seed(1)
    a, b = (heads().double().eval() for _ in range(2))
    x = torch.randn(30, 6, 5, dtype=torch.float64)
    options = {"cost": "inner", "signs": False}
    found = align(a, b, x[:2], method="activations", data=[(x, None)], options=options)
    inner = [
        np.einsum("iue,jve->ijuv", p, q) for p, q in zip(*(transformer_features(m, x) for m in (a, b)), strict=True)
    ]
    value, orders = np.zeros((3, 3)), {}
    for i, j in np.ndindex(3, 3):
        orders[i, j] = [linear_sum_assignment(fit[i, j], maximize=True)[1] for fit in inner]
        value[i, j] = sum(fit[i, j][np.arange(4), o].sum() for fit, o in zip(inner, orders[i, j], strict=True))
    best = max(permutations(range(3)), key=lambda p: sum(value[i, j] for i, j in enumerate(p)))
    fibres = [w.name for w in found.symmetry.wires if w.over]
    base = next(w.name for w in found.symmetry.wires if not w.over and w.size == 3)
    outer = found.element[base].permutation
    assert outer is not None
    assert outer.tolist() == list(best)
    assert len(fibres) == 2
    for name in fibres:
        inside = found.element[name].permutation
        assert inside is not None
        kind = 1 if "v" in name else 0
        for i, j in enumerate(best):
            assert inside[j].tolist() == orders[i, j][kind].tolist()


# -- streaming ---------------------------------------------------------------------------------------------------------


def test_the_size_of_batches_does_not_matter_and_a_generator_is_enough() -> None:
    a, b, sym, data, _, _ = two("residual with batch norm")
    x = torch.cat([inputs[0] for inputs, _ in data])

    def once(*sizes: int) -> Iterator[tuple[Tensor, None]]:
        for part in x.split(sizes):
            yield part, None

    whole = matched_correlations(a, b, once(63), symmetry=sym)
    parts = matched_correlations(a, b, once(1, 30, 2, 30), symmetry=sym)
    for first, second in zip(whole.wires, parts.wires, strict=True):
        np.testing.assert_allclose(first.matrix.numpy(), second.matrix.numpy(), atol=1e-12)
    assert whole.data == parts.data


def test_nothing_is_lost_to_large_means() -> None:
    """Features of size 1e5 that vary by 1: products of raw numbers in float32 would have no digit left."""
    generator = torch.Generator().manual_seed(0)
    a, b = (1e5 + torch.randn(4, 4000, generator=generator) for _ in range(2))
    products = CrossMoments()
    for part in range(8):
        products.add("layer", a[:, part::8], b[:, part::8])
    oracle = correlated(a.double().numpy(), b.double().numpy())
    np.testing.assert_allclose(products.correlation().numpy(), oracle, atol=1e-9)
    np.testing.assert_allclose(products.inner().numpy(), (a.double() @ b.double().T).numpy(), rtol=1e-12)
    np.testing.assert_allclose(products.lengths()[1].numpy(), b.double().square().sum(1).numpy(), rtol=1e-12)


def test_masked_positions_are_left_out() -> None:
    a, b = torch.randn(3, 20), torch.randn(3, 20)
    masked = [torch.cat([x, torch.full((3, 2), -torch.inf)], 1) for x in (a, b)]
    products = CrossMoments()
    products.add("scores", *masked)
    np.testing.assert_allclose(products.correlation().numpy(), correlated(a.numpy(), b.numpy()), atol=1e-6)


# -- what features do not tell -----------------------------------------------------------------------------------------


def with_dead_units(model: Net, units: list[int]) -> Net:
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.a.weight[units] *= 0.01
        other.a.bias[units] = -5.0
    return other


def test_dead_units_correlate_with_nothing_and_are_matched_by_their_weights() -> None:
    torch.manual_seed(0)
    model = with_dead_units(mlp(F.relu, (3, 8, 6, 2)).double(), [1, 4, 6])
    sym = it.symmetry(model, torch.zeros(2, 3, dtype=torch.float64))
    data = batches((torch.zeros(1, 3, dtype=torch.float64),), 50)
    wire = matched_correlations(model, model, data, symmetry=sym)["a"]
    assert wire.dead == ((1, 4, 6), (1, 4, 6))
    assert bool(wire.matrix.isfinite().all())
    assert wire.matrix[[1, 4, 6]].abs().max() == 0
    assert wire.mean == pytest.approx(1.0)
    assert {unit for unit, _ in wire.lowest(3)} == {1, 4, 6}
    for cost in ("correlation", "inner"):
        g = permutations_of(sym.random(2))
        twin = sym.act(g, model)
        found = align(model, twin, symmetry=sym, method="activations", data=data, options={"cost": cost})
        assert found.after == 0
        assert any(step.start == "ambiguous units" for step in found.history)


def test_a_unit_that_is_dead_in_one_network_only_counts_as_no_match() -> None:
    model = mlp(F.relu, (3, 8, 6, 2)).double()
    sym = it.symmetry(model, torch.zeros(2, 3, dtype=torch.float64))
    data = batches((torch.zeros(1, 3, dtype=torch.float64),), 50)
    wire = matched_correlations(model, with_dead_units(model, [2]), data, symmetry=sym)["a"]
    assert wire.dead == ((), (2,))
    assert wire.mean == pytest.approx(7 / 8)


def test_all_dead_and_all_tied_units_are_no_reason_to_fail() -> None:
    model = mlp(F.relu, (3, 6, 4, 2))
    with torch.no_grad():
        model.a.weight.zero_()
        model.a.bias.fill_(-1.0)
    data = batches((torch.zeros(1, 3),), 20)
    sym = it.symmetry(model, torch.zeros(2, 3))
    found = matched_correlations(model, model, data, symmetry=sym)
    assert found["a"].mean is None
    assert found.mean is None  # nothing varies behind dead units either
    aligned = align(model, model, symmetry=sym, method="activations", data=data)
    assert aligned.after == 0
    assert all(np.isfinite(step.own) for step in aligned.history if step.own is not None)


# -- what data and networks may look like ------------------------------------------------------------------------------


def test_functions_inplace_ops_and_modules_called_twice_are_seen() -> None:
    def forward(m: Net, x: Tensor, shift: Tensor) -> Tensor:
        h = torch.relu_(m.a(x))
        h = h + F.relu(m.b(h), inplace=True)
        h = h + F.relu(m.b(h), inplace=True)
        return m.c(h) + shift

    torch.manual_seed(0)
    a, b = (Net(forward, a=nn.Linear(3, 6), b=nn.Linear(6, 6), c=nn.Linear(6, 2)).double().eval() for _ in range(2))
    x, shift = torch.randn(30, 3, dtype=torch.float64), torch.randn(30, 2, dtype=torch.float64)
    found = matched_correlations(a, b, [({"shift": shift, "x": x}, None)], x=x[:2], shift=shift[:2])

    def features(m: Net) -> list[np.ndarray]:
        first = F.relu(m.a(x))
        second = F.relu(m.b(first))
        third = F.relu(m.b(first + second))
        return [rows_of(h) for h in (first, second, third)]

    (wire,) = found.wires
    np.testing.assert_allclose(wire.matrix.numpy(), of_tensors(features(a), features(b)), atol=1e-12)
    assert len(wire.tensors) == 3


def test_networks_are_run_in_evaluation_mode_and_left_as_they_were() -> None:
    a, b, sym, data, left, right = two("residual with batch norm")
    states = [copy.deepcopy(m.state_dict()) for m in (a, b)]
    for model in (a, b):
        model.train()
    found = matched_correlations(a, b, data, symmetry=sym)
    np.testing.assert_allclose(found["a"].matrix.numpy(), of_tensors(left["a"], right["a"]), atol=1e-12)
    assert a.training
    for model, state in zip((a, b), states, strict=True):
        assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())


def test_some_wires_alone() -> None:
    a, b, sym, data, left, right = two("mlp")
    found = align(a, b, symmetry=sym, method="activations", data=data, wires=["b"], options={"signs": False})
    oracle = linear_sum_assignment(of_tensors(left["b"], right["b"]), maximize=True)[1]
    first, second = (found.element[wire].permutation for wire in ("a", "b"))
    assert first is not None
    assert second is not None
    assert first.tolist() == list(range(7))
    assert second.tolist() == oracle.tolist()
    assert {step.wire for step in found.history} <= {"", "b"}


def test_the_log_tells_the_distance_of_weights_too() -> None:
    a, b, sym, data, _, _ = two("mlp")
    found = align(a, b, symmetry=sym, method="activations", data=data)
    names = [n for n in sym.layouts if n in dict(a.named_parameters())]
    moved, reference = (dict(m.named_parameters()) for m in (found.model, a))
    distance = sum(float((reference[n] - moved[n]).square().sum()) for n in names if n != "c.bias")
    assert found.after == pytest.approx(distance)
    assert found.history[-1].objective == found.after
    assert found.history[0].objective == found.before


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_bad_input_is_refused_with_words() -> None:
    a, b, sym, data, _, _ = two("mlp")
    call = {"symmetry": sym, "method": "activations"}
    with pytest.raises(InputError, match="holds no samples, so there are no features to compare"):
        align(a, b, data=[], **call)
    with pytest.raises(InputError, match="The method 'activations' needs data"):
        align(a, b, **call)
    with pytest.raises(InputError, match=r"Unknown cost 'cosine'\..* Choose one of: correlation, inner"):
        align(a, b, data=data, options={"cost": "cosine"}, **call)
    with pytest.raises(InputError, match=r"Unknown at='during'\. Choose 'post'"):
        align(a, b, data=data, options={"at": "during"}, **call)
    with pytest.raises(InputError, match=r"The features at .* hold NaN, so units cannot be compared"):
        align(a, b, data=[(torch.full((4, 3), torch.nan, dtype=torch.float64), None)], **call)


def test_a_symmetry_of_training_mode_is_refused_with_words() -> None:
    model = residual(nn.BatchNorm2d).train()
    sym = it.symmetry(model, torch.zeros(2, 3, 4, 5))
    with pytest.raises(MismatchError, match=r"another symmetry than on the example inputs.*model.eval\(\)"):
        align(model, model, symmetry=sym, method="activations", data=[(torch.randn(4, 3, 4, 5), None)])


# -- the picture -------------------------------------------------------------------------------------------------------


def test_matrices_before_and_after_stand_side_by_side() -> None:
    pytest.importorskip("matplotlib")
    a, b, sym, data, _, _ = two("mlp")
    found = align(a, b, symmetry=sym, method="activations", data=data)
    before = matched_correlations(a, b, data, symmetry=sym)
    after = matched_correlations(found.reference, found.model, data, symmetry=sym)
    assert before.mean is not None
    assert after.mean is not None
    assert after.mean > before.mean + 0.1
    axes = [ax for ax in after.plot(before).axes if ax.images]
    assert len(axes) == 4  # two wires, before and after
    titles = [ax.get_title() for ax in axes]
    assert [("before" in t, "after" in t) for t in titles] == [(True, False)] * 2 + [(False, True)] * 2
    worst = after.worst_first()[0]
    order = np.argsort(-worst.matrix.numpy().diagonal())  # the best match first, in both pictures
    for axis, shown in ((axes[2], worst), (axes[0], before[worst.wire])):
        drawn = np.asarray(axis.images[0].get_array())
        np.testing.assert_array_equal(drawn, shown.matrix.numpy()[np.ix_(order, order)])
    plain = after.to_dict()
    assert plain["mean"] == after.mean
    assert plain["wires"][0]["matched"] == after.wires[0].matched.tolist()
    assert "2 wires on 63 samples" in repr(after)
    with pytest.raises(InputError, match=r"Unknown wire 'z'\. Choose one of: a, b"):
        after["z"]
    with pytest.raises(MismatchError, match="`before` has other wires"):
        after.plot(MatchedCorrelations(before.wires[:1], before.data))
