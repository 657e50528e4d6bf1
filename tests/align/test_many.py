"""Many networks in one frame: circles close, the order of the networks makes no difference, and copies coincide."""

import copy
from functools import cache
from itertools import permutations

import jaxtyping
import pytest
import torch
from digit_networks import IMAGE, digits, perceptrons
from networks import gap
from orbits import distance, made, symmetry_of
from torch import nn

import intertwine as it
from intertwine.align.align import align
from intertwine.align.many import CommonFrame, align_many
from intertwine.align.solver import permutations_of
from intertwine.data.weights import entrywise_mean, mean_network
from intertwine.errors import MismatchError
from intertwine.symmetry.element import Element

METHODS = ("weights", "scale-aware")


def given(method: str = "weights") -> tuple[nn.Module, ...]:
    """Scales take longer, so there is one network less."""
    return perceptrons(64, 32, 32, 10)[: 4 if method == "weights" else 3]


@cache
def framed(method: str = "weights") -> CommonFrame:
    return align_many(given(method), IMAGE, method=method)


def dense_spread(models: list[nn.Module]) -> float:
    """Σ ‖θᵢ − mean‖² of all but the bias of the outputs, on which nothing acts."""
    rows = [torch.cat([p.double().flatten() for p in list(m.parameters())[:-1]]) for m in models]
    mean = sum(rows[1:], rows[0]) / len(rows)
    return sum(float((row - mean).square().sum()) for row in rows)


def fixed(element: Element, wire: str) -> float:
    """The share of units that an element leaves in place."""
    order = element[wire].permutation
    assert order is not None
    return float((order == torch.arange(len(order))).double().mean())


@pytest.mark.parametrize("method", METHODS)
def test_circles_close_and_functions_stay(method: str) -> None:
    found, models = framed(method), given(method)
    identity = found.symmetry.identity()
    for i, j, k in permutations(range(len(models)), 3):
        circle = found.between(i, j) @ found.between(j, k) @ found.between(k, i)
        assert circle.distance(identity) < 1e-12
    x = torch.randn(20, 1, 8, 8)
    for before, after in zip(models, found.models, strict=True):
        assert gap(before, after, x) < 1e-5
    assert found.elements[found.anchor].distance(identity) == 0


def test_pairs_found_alone_do_not_close() -> None:
    """Most units do not come back to themselves around a circle of three alignments; in the common frame all do."""
    models, sym = perceptrons(64, 32, 32, 10), framed().symmetry
    alone = [align(models[i], models[j], symmetry=sym).element for i, j in ((0, 1), (1, 2), (2, 0))]
    circle = alone[0] @ alone[1] @ alone[2]
    assert all(fixed(circle, wire.name) < 0.6 for wire in sym.wires)
    together = framed().between(0, 1) @ framed().between(1, 2) @ framed().between(2, 0)
    assert all(fixed(together, wire.name) == 1 for wire in sym.wires)


def test_between_is_the_way_from_one_to_the_other() -> None:
    model, _ = made("MLP with tanh")
    sym = symmetry_of("MLP with tanh")
    twins = [sym.act(sym.random(seed), model) for seed in range(3)]
    found = align_many(twins, symmetry=sym, method="scale-aware")
    for i, j in permutations(range(3), 2):
        assert distance(sym, twins[i], sym.act(found.between(i, j), twins[j])) < 1e-12


@pytest.mark.parametrize("method", METHODS)
def test_the_objective_is_the_spread_and_only_falls(method: str) -> None:
    found, models = framed(method), given(method)
    assert found.before == pytest.approx(dense_spread(list(models)), rel=1e-9)
    assert found.after == pytest.approx(dense_spread(list(found.models)), rel=1e-6)
    assert found.after == found.history[-1]
    assert len(found.history) > 2
    assert all(y <= x for x, y in zip(found.history, found.history[1:], strict=False))


@pytest.mark.parametrize("method", METHODS)
def test_no_worse_than_aligning_all_to_any_one_of_them(method: str) -> None:
    found, models = framed(method), given(method)
    stars = []
    for i in range(len(models)):
        others = [
            align(models[i], m, symmetry=found.symmetry, method=method).model for m in models if m is not models[i]
        ]
        stars.append(dense_spread([models[i], *others]))
    assert max(stars) > min(stars) * 1.001, "it matters to which one"
    assert found.after < 0.99 * min(stars)
    assert found.history[0] <= min(stars) * 1.01


@pytest.mark.parametrize("method", METHODS)
def test_the_order_of_the_networks_makes_no_difference(method: str) -> None:
    models = perceptrons(64, 16, 10)[: 4 if method == "weights" else 3]
    sym = it.symmetry(models[0], IMAGE)
    merged = []
    for order in ((0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0)):
        order = [i for i in order if i < len(models)]
        found = align_many([models[i] for i in order], symmetry=sym, method=method)
        merged.append(mean_network(found.models[order.index(i)] for i in range(len(models))))
    for other in merged[1:]:
        assert all(torch.equal(p, q) for p, q in zip(merged[0].parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["MLP with GELU", "residual with batch norm", "attention", "depthwise convolution"])
def test_copies_coincide(kind: str) -> None:
    model, _ = made(kind)
    sym = symmetry_of(kind)
    twins = [sym.act(permutations_of(sym.random(seed)), model) for seed in range(4)]
    found = align_many(twins, symmetry=sym)
    assert found.after == 0 < found.before
    assert all(distance(sym, found.models[0], other) == 0 for other in found.models[1:])
    scaled = align_many([sym.act(sym.random(seed), model) for seed in range(3)], symmetry=sym, method="scale-aware")
    assert scaled.after < 1e-10 * scaled.before
    assert all(distance(sym, scaled.models[0], other) < 1e-5 for other in scaled.models[1:])


def test_a_method_that_looks_at_data_takes_no_rounds() -> None:
    models, data = perceptrons(64, 16, 10)[:3], digits()[0]
    found = align_many(models, IMAGE, method="activations", data=data)
    assert len(found.history) == 1
    anchor = models[found.anchor]
    for i, model in enumerate(models):
        if i != found.anchor:
            alone = align(anchor, model, symmetry=found.symmetry, method="activations", data=data)
            assert float(alone.element.distance(found.elements[i])) < 1e-12


def test_two_networks_are_one_alignment() -> None:
    a, b = perceptrons(64, 32, 32, 10)[:2]
    sym = framed().symmetry
    found = align_many([a, b], symmetry=sym)
    first, second = (a, b) if found.anchor == 0 else (b, a)
    assert found.after == pytest.approx(align(first, second, symmetry=sym).after / 2, rel=1e-6)


def test_nothing_given_is_changed_and_what_it_prints() -> None:
    models = perceptrons(64, 16, 10)
    before = [copy.deepcopy(m.state_dict()) for m in models]
    found = align_many(models, IMAGE, rounds=1)
    for model, state in zip(models, before, strict=True):
        assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert "4 networks, weights: squared distances to the mean" in repr(found)
    assert found.to_dict()["history"] == list(found.history)
    assert len(found.history) <= 2


def test_what_is_refused() -> None:
    models = perceptrons(64, 16, 10)
    with pytest.raises(it.InputError, match="align_many needs at least two networks, but got 1"):
        align_many(models[:1], IMAGE)
    with pytest.raises(it.InputError, match=r"Unknown method 'weight'\. Did you mean 'weights"):
        align_many(models, IMAGE, method="weight")
    with pytest.raises(it.InputError, match="a generator can be read once"):
        align_many(models, IMAGE, data=iter([]))
    with pytest.raises(MismatchError, match="different architectures"):
        align_many([models[0], perceptrons(64, 32, 32, 10)[0]], IMAGE)
    with pytest.raises(it.InputError, match=r"There is no network 4\. Networks are numbered 0 to 3"):
        framed().between(0, 4)


def test_the_mean_of_states() -> None:
    """Against plain sums; agreeing entries keep every bit, whole numbers are the first's, shapes must agree."""
    states = [{"w": torch.randn(5), "n": torch.tensor(i), "mask": torch.tensor([0.1, -torch.inf])} for i in (3, 4, 5)]
    mean = entrywise_mean(iter(states), [0.5, 0.25, 0.25])
    torch.testing.assert_close(mean["w"], 0.5 * states[0]["w"] + 0.25 * states[1]["w"] + 0.25 * states[2]["w"])
    assert int(mean["n"]) == 3
    assert torch.equal(mean["mask"], states[0]["mask"])
    with pytest.raises(it.InputError, match="nothing to average"):
        entrywise_mean([])
    with pytest.raises(MismatchError, match=r"'w' has shape \(5,\) in the first and has shape \(2,\) in another"):
        entrywise_mean([{"w": torch.zeros(5)}, {"w": torch.zeros(2)}])


def test_tied_weights_stay_tied_in_a_mean() -> None:
    def tied(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
        model["b"].weight = model["a"].weight
        return model

    mean = mean_network([tied(0), tied(1)])
    assert mean.get_parameter("a.weight") is mean.get_parameter("b.weight")
    wanted = (tied(0).get_parameter("a.weight") + tied(1).get_parameter("a.weight")) / 2
    torch.testing.assert_close(mean.get_parameter("a.weight"), wanted)


def test_one_network_is_no_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as a user runs it
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    with pytest.raises(it.InputError, match=r"Put them into a list: align_many\(\[a, b\], x\)"):
        it.align_many(net, net, torch.zeros(1, 3))  # pyrefly: ignore


def test_tables() -> None:
    pytest.importorskip("polars")
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    twin, x = copy.deepcopy(net), torch.zeros(1, 3)
    one, many = it.align(net, twin, x), it.align_many([net, twin], x)
    assert (one.to_frame().height, many.to_frame()["objective"].to_list()) == (len(one.history), list(many.history))
