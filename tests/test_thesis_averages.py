"""The thesis on sorted averages on trained digits, row by row: distances, averages, ensembles; and swapped equals."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise

import pytest
import torch
from digit_networks import IMAGE, accuracy, digits, loss, perceptrons
from networks import edited
from orbits import mlp, noisy
from torch import Tensor, nn

import intertwine as it
from intertwine.align.align import SOLVERS, align
from intertwine.align.starts import permutations_of
from intertwine.connect.averaging import average
from intertwine.symmetry.element import Element
from intertwine.symmetry.symmetry import Symmetry

gelu = torch.nn.functional.gelu


def one_hidden(outgoing: list[float], incoming: list[float] | None = None) -> nn.Module:
    """One input, units without a bias, one output; nothing but permutations acts (GELU)."""
    model = mlp(gelu, (1, len(outgoing), 1), bias=False).double().requires_grad_(False)
    model.a.weight.copy_(torch.tensor(incoming or [1.0] * len(outgoing), dtype=torch.float64)[:, None])
    model.b.weight.copy_(torch.tensor([outgoing], dtype=torch.float64))
    return model


def nodesort(model: nn.Module, *inputs: Tensor) -> nn.Module:
    return it.canonicalize(model, *inputs, order="nodesort").model


def outgoing(model: nn.Module) -> list[float]:
    return list(model.parameters())[-1].flatten().tolist()


def layer_distances(a: nn.Module, b: nn.Module) -> Tensor:
    """Frobenius distances of the weight matrices, then of everything."""
    squares = [(p - q).double().square().sum() for p, q in zip(a.parameters(), b.parameters(), strict=True)]
    matrices = [s for s, p in zip(squares, a.parameters(), strict=True) if p.dim() > 1]
    return torch.stack([*matrices, torch.stack(squares).sum()]).sqrt()


# -- 002-S09, S18: when are two networks the same? ---------------------------------------------------------------------

ZERO = torch.zeros(1, 1, dtype=torch.float64)


def test_002_S09_sorting_decides_exactly_and_matching_through_noise() -> None:
    """‖θ′ − π(θ)‖ < ε: sorting finds π for an exact copy; through noise only matching does."""
    a = mlp(gelu, (3, 60, 2)).double().requires_grad_(False)
    x = torch.zeros(1, 3, dtype=torch.float64)
    sym = it.symmetry(a, x)
    copied = sym.act(sym.random(1), a)
    assert float(layer_distances(nodesort(a, x), nodesort(copied, x))[-1]) == 0
    shaken = noisy(copied, 1e-3)
    floor = float(layer_distances(copied, shaken)[-1])
    sorted_apart = float(layer_distances(nodesort(a, x), nodesort(shaken, x))[-1])
    matched_apart = float(layer_distances(a, align(a, shaken, symmetry=sym).model)[-1])
    assert matched_apart == pytest.approx(floor, rel=1e-9)
    assert sorted_apart > 50 * floor


def test_002_S09_the_sorted_distance_jumps_and_the_matched_one_does_not() -> None:
    """Two units with nearly the same key: a change of 2e-6 swaps them, and everything else they hold."""
    a = one_hidden([1.0, 1.0 + 1e-6], [5.0, -5.0])
    sym = it.symmetry(a, ZERO)
    jumps, moves = [], []
    for step in (0.0, 0.9e-6, 1.1e-6, 2e-6):
        b = one_hidden([1.0 + step, 1.0 + 1e-6], [5.0, -5.0])
        jumps.append(float(layer_distances(nodesort(a, ZERO), nodesort(b, ZERO))[-1]))
        moves.append(float(layer_distances(a, align(a, b, symmetry=sym).model)[-1]))
    assert moves == pytest.approx([0, 0.9e-6, 1.1e-6, 2e-6], abs=1e-12)
    assert max(jumps[:2]) < 1e-6
    assert min(jumps[2:]) == pytest.approx(200**0.5, rel=1e-6)


def test_002_S18_no_two_trained_networks_are_the_same_and_a_copy_is() -> None:
    models = perceptrons(64, 64, 10)
    sorted_models = [nodesort(m, IMAGE) for m in models]
    apart = [float(layer_distances(a, b)[-1]) for a, b in combinations(sorted_models, 2)]
    sym = it.symmetry(models[0], IMAGE)
    copied = sym.act(permutations_of(sym.random(1)), models[0])
    assert min(apart) > 1
    assert float(layer_distances(sorted_models[0], nodesort(copied, IMAGE))[-1]) < 1e-5
    assert [it.equivalent(models[0], m, symmetry=sym) is not None for m in (*models, copied)] == [True] + [
        False
    ] * 3 + [True]


# -- 002-S19, S20: averages entry by entry, and the toy points ---------------------------------------------------------


def test_002_S19_averages_are_entrywise() -> None:
    """As printed, a double sum over the entries, the average would be one number per layer; it is one per entry."""
    a, b = perceptrons(64, 64, 10)[:2]
    mean = average([a, b])
    assert isinstance(mean, nn.Module)
    for p, x, y in zip(mean.parameters(), a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, (x + y) / 2)
        assert p.shape == x.shape
        assert float(p.sum()) == pytest.approx(float((x + y).sum()) / 2, rel=1e-3, abs=1e-3)


def test_002_S19_checkpoints_of_one_run_average_without_loss() -> None:
    """Stochastic weight averaging: ten steps of one run lie together, so their mean needs no alignment."""
    images, labels = digits()[0][0]
    model = copy.deepcopy(perceptrons(64, 64, 10)[0]).requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    states, losses = [], []
    for some in torch.randperm(len(images))[:640].split(64):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[some]), labels[some]).backward()
        optimizer.step()
        states.append(copy.deepcopy(model.state_dict()))
        losses.append(loss(model))
    averaged = average(states)
    assert isinstance(averaged, dict)
    model.load_state_dict(averaged)
    assert loss(model) < sum(losses) / len(losses)
    assert accuracy(model) > 0.95


@pytest.mark.parametrize(
    ("point", "wanted"),
    [
        ([1.4, -3.0, 5.6], [-3.0, 1.4, 5.6]),
        ([5.0, 1.2, -2.4], [-2.4, 1.2, 5.0]),
        ([-3.2, 0.9, 6.0], [-3.2, 0.9, 6.0]),
    ],
)
def test_002_S20_the_toy_points(point: list[float], wanted: list[float]) -> None:
    """With one output the key of a unit is its outgoing weight: sorting moves every point into x₁ ≤ x₂ ≤ x₃."""
    assert outgoing(nodesort(one_hidden(point), ZERO)) == wanted


def test_002_S20_one_chamber_is_not_one_octant() -> None:
    """The three sorted points have the signs (−, +, +). That is an accident: sorted points with other signs exist."""
    first, second = ([*map(abs, p)] for p in ([1.0, 2.0, 3.0], [0.5, 4.0, 5.0]))
    assert outgoing(nodesort(one_hidden(first), ZERO)) == first
    assert outgoing(nodesort(one_hidden([-x for x in second]), ZERO)) == [-5.0, -4.0, -0.5]


# -- 002-S21, S22: what averages are worth -----------------------------------------------------------------------------


def test_002_S21_sorted_averages_can_be_zero() -> None:
    """The claim was that networks in sorted form cannot average to zero. (1, 1) and (−1, −1) are sorted, and do."""
    a, b = one_hidden([1.0, 1.0]), one_hidden([-1.0, -1.0])
    for model in (a, b):
        assert outgoing(nodesort(model, ZERO)) == outgoing(model)
    merged = it.merge([a, b], ZERO, method="sorted").model
    assert outgoing(merged) == [0.0, 0.0]
    x = torch.randn(20, 1, dtype=torch.float64)
    assert bool((merged(x) == 0).all())
    assert bool((a(x) != 0).any())


METHODS = ("none", "sorted", "weights")


@cache
def averages(*widths: int, pairs: int = 3) -> dict[str, tuple[float, float]]:
    """Method → mean accuracy and loss of the averages of pairs of trained networks."""
    models = perceptrons(*widths)
    found = {}
    for method in METHODS:
        merged = [it.merge([models[i], models[i + 1]], IMAGE, method=method).model for i in range(pairs)]
        found[method] = sum(map(accuracy, merged)) / pairs, sum(map(loss, merged)) / pairs
    return found


@pytest.mark.parametrize("widths", [(64, 64, 10), (64, 32, 10), (64, 32, 32, 10)])
def test_002_S21_accuracy_of_naive_sorted_and_matched_averages(widths: tuple[int, ...]) -> None:
    """Matched averages keep what the networks know. Sorting helps a little with one hidden layer, not with two."""
    single = sum(map(accuracy, perceptrons(*widths))) / 4
    found = averages(*widths)
    assert found["weights"][0] > single - (0.02 if len(widths) == 3 else 0.06)
    for baseline in ("none", "sorted"):
        assert found["weights"][0] > found[baseline][0] + 0.02
        assert found["weights"][1] < 0.7 * found[baseline][1]


def test_002_S21_barriers_of_the_three() -> None:
    models, sym = perceptrons(64, 32, 10), it.symmetry(perceptrons(64, 32, 10)[0], IMAGE)
    a, b = models[:2]
    ends = {
        "none": (a, b),
        "sorted": (nodesort(a, IMAGE), nodesort(b, IMAGE)),
        "weights": (a, align(a, b, symmetry=sym).model),
    }
    found = {name: it.barrier(*two, digits()[1], points=5) for name, two in ends.items()}
    for name in ("none", "sorted"):
        assert found["weights"].loss_barrier < 0.4 * found[name].loss_barrier
    assert (found["weights"].error_barrier or 0.0) < 0.02


def test_002_S21_averages_of_four() -> None:
    models = perceptrons(64, 32, 10)
    found = {m: accuracy(it.merge(models, IMAGE, method=m).model) for m in METHODS}
    assert found["weights"] > max(found["none"], found["sorted"]) + 0.1


def test_002_S22_the_ensemble() -> None:
    """The mean of predictions is no worse than the networks are on average, and the average of weights not better."""
    models = perceptrons(64, 32, 10)
    ((images, labels),) = digits()[1]
    with torch.no_grad():
        votes = torch.stack([m(images).softmax(1) for m in models]).mean(0)
    ensemble = float((votes.argmax(1) == labels).double().mean())
    assert ensemble >= sum(map(accuracy, models)) / 4
    cross_entropy = float(nn.functional.nll_loss(votes.log(), labels))
    assert cross_entropy < sum(map(loss, models)) / 4, "loss is convex in the predictions"
    assert cross_entropy < loss(it.merge(models, IMAGE).model)


# -- 002-S23: the distance suite ---------------------------------------------------------------------------------------


def test_002_S23_distances_before_and_after() -> None:
    """Distances per layer and in all. Sorting changes little; matching weights brings networks together."""
    models = perceptrons(64, 64, 10)
    sym = it.symmetry(models[0], IMAGE)
    train, _ = digits()
    sort: Callable[[nn.Module], nn.Module] = lambda m: sym.act(  # noqa: E731
        permutations_of(it.canonicalize(m, symmetry=sym, order="nodesort").element), m
    )
    ways: dict[str, Callable[[nn.Module, nn.Module], tuple[nn.Module, nn.Module]]] = {
        "none": lambda a, b: (a, b),
        "nodesort": lambda a, b: (sort(a), sort(b)),
        "weights": lambda a, b: (a, align(a, b, symmetry=sym).model),
    }
    if "activations" in SOLVERS:
        ways["activations"] = lambda a, b: (a, align(a, b, symmetry=sym, method="activations", data=train).model)
    means = {
        name: torch.stack([layer_distances(*way(a, b)) for a, b in combinations(models, 2)]).mean(0)
        for name, way in ways.items()
    }
    share = {name: float(mean[-1] / means["none"][-1]) for name, mean in means.items()}
    assert 0.9 < share["nodesort"] < 1.02
    assert share["weights"] < 0.8
    assert bool((means["weights"] < means["nodesort"]).all()), "in every layer"
    if "activations" in share:
        assert share["weights"] < share["activations"] < share["nodesort"]


# -- 003-F18: a network and itself with equals swapped -----------------------------------------------------------------


def unit_distances(model: nn.Module) -> list[Tensor]:
    """‖W^l[m] − W^l[n]‖² + ‖W^{l+1}[:, m] − W^{l+1}[:, n]‖² for every hidden layer."""
    weights = [p.double() for p in model.parameters() if p.dim() > 1]
    return [
        torch.cdist(w, w).square() + torch.cdist(v.T.contiguous(), v.T.contiguous()).square()
        for w, v in pairwise(weights)
    ]


def nearest_pairs(distances: Tensor, beta: float) -> list[tuple[int, int]]:
    """Disjoint pairs of units nearer than beta times the largest distance, nearest first."""
    n, limit, used, found = len(distances), beta * float(distances.max()), set(), []
    for flat in distances.flatten().argsort().tolist():
        i, j = divmod(flat, n)
        if i < j and float(distances[i, j]) < limit and not used & {i, j}:
            used |= {i, j}
            found.append((i, j))
    return found


def swapping(sym: Symmetry, pairs: list[list[tuple[int, int]]]) -> Element:
    """The element that swaps some pairs of units on every wire."""
    identity = sym.identity()
    moves = dict(identity.moves)
    for wire, swaps in enumerate(pairs):
        order = torch.arange(sym.wires[wire].size)
        for i, j in swaps:
            order[[i, j]] = order[[j, i]]
        moves[wire] = replace(moves[wire], permutation=order)
    return replace(identity, moves=moves)


@pytest.mark.parametrize(("beta", "flat", "drop"), [(0.1, 0.005, 0.1), (0.3, 0.08, 0.5)])
def test_003_F18_swapped_equals_are_connected_and_random_swaps_are_not(beta: float, flat: float, drop: float) -> None:
    """The loss barrier between a trained network and itself with pairs of units swapped, as many in both cases.

    0.001 against 0.19 with a third of the units swapped, 0.05 against 1.0 with nearly all of them.
    """
    model = perceptrons(64, 64, 64, 10, count=1)[0]
    sym = it.symmetry(model, IMAGE)
    near = [nearest_pairs(d, beta) for d in unit_distances(model)]
    assert min(map(len, near)) >= 10
    at_random = [torch.randperm(64)[: 2 * len(pairs)].view(-1, 2).tolist() for pairs in near]
    rises = []
    for swaps in (near, at_random):
        other = sym.act(swapping(sym, swaps), model)
        assert loss(other) == pytest.approx(loss(model), rel=1e-4), "the ends are one function"
        rises.append(it.barrier(model, other, digits()[1], points=5).loss_barrier)
    assert rises[0] < flat
    assert rises[1] > drop


def test_003_F18_exact_equals_are_flat() -> None:
    """Units with the same incoming weights: swapping them changes nothing at any point of the line."""
    model = perceptrons(64, 64, 64, 10, count=1)[0]
    twin = edited(
        model,
        **{"1__weight": lambda w: w[torch.arange(64) // 2], "1__bias": lambda b: b[torch.arange(64) // 2]},
    )
    sym = it.symmetry(twin, IMAGE)
    g = swapping(sym, [[(i, i + 1) for i in range(0, 64, 2)], []])
    other = sym.act(g, twin)
    assert not torch.equal(list(other.parameters())[2], list(twin.parameters())[2])
    found = it.barrier(twin, other, digits()[1], points=5)
    assert abs(found.loss_barrier) < 1e-5
