"""Equivalence and fingerprints: found on the orbit, through noise too, and nowhere else."""

import copy
import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fuzz_networks import build, random_network
from networks import Net, edited
from orbits import (
    ACTIVATIONS,
    KINDS,
    check_canonical,
    check_equivalent,
    distance,
    made,
    mlp,
    noisy,
    symmetry_of,
    told_apart_late,
)
from torch import Tensor, nn

import intertwine as it
from intertwine.canonical.equivalence import equivalence_classes
from intertwine.canonical.form import CanonicalForm, canonical_form
from intertwine.canonical.pairing import pair_units
from intertwine.errors import MismatchError
from intertwine.lab.papers.work import PublishedNetworks
from intertwine.lab.zoo.networks.registry import architecture
from intertwine.symmetry.blocks import weights_of
from intertwine.symmetry.symmetry import Symmetry

# -- Equivalence and fingerprints --


@cache
def found(kind: str, dtype: torch.dtype = torch.float64) -> tuple[Symmetry, nn.Module, tuple[Any, ...]]:
    model, inputs = made(kind, dtype)
    return symmetry_of(kind), model, inputs


# -- what is read from where -------------------------------------------------------------------------------------------


def test_units_are_paired_by_size_where_signs_are_not_known_yet() -> None:
    net = told_apart_late()
    sym = it.symmetry(net, torch.zeros(1, 2, dtype=torch.float64))
    for seed in range(4):
        moved = sym.act(sym.random(seed), net)
        element = pair_units(sym, weights_of(sym, net), weights_of(sym, moved))
        assert distance(sym, net, sym.act(element, moved)) < 1e-12


def test_scales_are_read_where_most_weights_tell_them() -> None:
    """One weight into a unit is off by a fifth, 400 weights out of it by a hundredth each: the 400 know better."""
    a = mlp(F.relu, (1, 4, 400), bias=False).double()
    sym = it.symmetry(a, torch.zeros(1, 1, dtype=torch.float64))
    scale, off = torch.tensor([[0.1, 0.5, 2.0, 7.0], [1.2, 0.8, 1.2, 0.8]], dtype=torch.float64)
    b = edited(
        a,
        a__weight=lambda w: w * (scale * off)[:, None],
        b__weight=lambda w: (w + 0.01 * w.std() * torch.randn_like(w)) / scale,
    )
    [move] = pair_units(sym, weights_of(sym, a), weights_of(sym, b)).moves.values()
    assert move.permutation is not None
    assert move.scale is not None
    assert move.permutation.tolist() == [0, 1, 2, 3]
    assert (move.scale[0] * scale).log().abs().max() < 0.005


# -- on the orbit ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_network(kind: str) -> None:
    sym, model, _ = found(kind, torch.float32)
    check_equivalent(sym, model)


@pytest.mark.parametrize("kind", KINDS)
def test_noise(kind: str) -> None:
    sym, model, _ = found(kind)
    moved = sym.act(sym.random(3), model)
    slightly, much = noisy(moved, 1e-6), noisy(moved, 1e-3)
    element = it.equivalent(model, slightly, symmetry=sym)
    assert element is not None
    assert distance(sym, model, sym.act(element, slightly)) < 3e-6
    assert it.equivalent(model, much, symmetry=sym) is None
    element = it.equivalent(model, much, symmetry=sym, tol=1e-2)
    assert element is not None
    assert distance(sym, model, sym.act(element, much)) < 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_units_are_paired_by_distance(kind: str) -> None:
    """Without any help from canonical forms."""
    sym, model, _ = found(kind)
    slightly = noisy(sym.act(sym.random(3), model), 1e-6)
    element = pair_units(sym, weights_of(sym, model), weights_of(sym, slightly))
    assert distance(sym, model, sym.act(element, slightly)) < 3e-6


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_noise_that_changes_the_order(activation: str) -> None:
    """Two units with the same incoming weights: noise sorts them as it likes."""
    sym, model, _ = found(f"MLP with {activation}")
    twice = edited(model, a__weight=lambda w: w[[0, 0, 2, 3, 4]], a__bias=lambda w: w[[0, 0, 2, 3, 4]])
    order_changed = False
    for seed in range(4):
        slightly = noisy(sym.act(sym.random(seed), twice), 1e-6, seed)
        forms = [it.canonicalize(m, symmetry=sym).model for m in (twice, slightly)]
        order_changed |= distance(sym, *forms) > 1e-3
        element = it.equivalent(twice, slightly, symmetry=sym)
        assert element is not None
        assert distance(sym, twice, sym.act(element, slightly)) < 3e-6
    assert order_changed, "the test is not what it is there for"


@pytest.mark.parametrize("seed", range(1100, 1104))
def test_random_networks(seed: int) -> None:
    model, x = build(random_network(seed))
    check_equivalent(it.symmetry(model, x), model)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2200, 2400))
def test_many_random_networks(seed: int) -> None:
    model, x = build(random_network(seed))
    check_equivalent(it.symmetry(model, x), model)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_element_itself(activation: str) -> None:
    """On a network without duplicates and dead units only one element takes b to a."""
    sym, model, _ = found(f"MLP with {activation}")
    g = sym.random(4)
    back = it.equivalent(model, sym.act(g, model), symmetry=sym)
    assert back is not None
    assert (back @ g).distance(sym.identity()) < 1e-9


@pytest.mark.parametrize("activation", ["tanh", "ReLU"])
def test_duplicates_and_dead_units(activation: str) -> None:
    sym, model, _ = found(f"MLP with {activation}")
    odd = edited(
        model,
        a__weight=lambda w: torch.stack([w[0], w[0], torch.zeros_like(w[0]), w[3], w[4]]),
        a__bias=lambda w: torch.stack([w[0], w[0], torch.zeros_like(w[0]), w[3], w[4]]),
    )
    check_equivalent(sym, odd)


@pytest.mark.parametrize("kind", ["GRU", "LSTM", "attention"])
def test_sparse_weights(kind: str) -> None:
    """Signs and scales of some units can then be read through others only, or not at all."""
    sym, model, _ = found(kind)
    generator = torch.Generator().manual_seed(0)
    sparse = edited(
        model,
        **{
            name.replace(".", "__"): lambda w: w * (torch.rand(w.shape, generator=generator) < 0.15)
            for name, _ in model.named_parameters()
        },
    )
    check_equivalent(sym, sparse)
    for seed in range(4):
        moved = sym.act(sym.random(seed), sparse)
        element = pair_units(sym, weights_of(sym, sparse), weights_of(sym, moved))
        assert distance(sym, sparse, sym.act(element, moved)) < 1e-6


def test_signs_that_only_each_other_can_tell() -> None:
    """A unit that nothing reaches feeds one that nothing reads: the sign of the weight between them is both theirs."""
    torch.manual_seed(0)
    net = mlp(torch.tanh, bias=False).double()
    with torch.no_grad():
        net.a.weight[0] = net.b.weight[0] = net.b.weight[:, 0] = net.c.weight[:, 0] = 0.0
        net.b.weight[0, 0] = 0.7
    sym = it.symmetry(net, torch.zeros(1, 3, dtype=torch.float64))
    check_equivalent(sym, net)
    for seed in range(4):
        moved = sym.act(sym.random(seed), net)
        element = pair_units(sym, weights_of(sym, net), weights_of(sym, moved))
        assert distance(sym, net, sym.act(element, moved)) == 0
        forms = [it.canonicalize(m, symmetry=sym).model for m in (net, moved)]
        assert distance(sym, *forms) == 0


# -- elsewhere ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["MLP with GELU", "MLP with ReLU", "two scales and eps", "attention", "tied embedding"]
)
def test_one_changed_weight(kind: str) -> None:
    """Of every tensor that is read, moved or not."""
    sym, model, _ = found(kind)
    mark = it.fingerprint(model, symmetry=sym)
    for name, parameter in model.named_parameters():
        other = edited(model, **{name.replace(".", "__"): _one_changed})
        assert it.equivalent(model, other, symmetry=sym) is None, name
        assert it.fingerprint(other, symmetry=sym) != mark, name
        assert parameter.isfinite().all()


def _one_changed(w: Tensor) -> Tensor:
    w.view(-1)[-1] += 0.5
    return w


def test_one_changed_weight_of_many() -> None:
    """The sign and the length stay, the direction does not."""
    torch.manual_seed(0)
    net = mlp(F.relu, (8, 32, 32, 8))
    sym = it.symmetry(net, torch.zeros(1, 8))
    for k in range(8):

        def doubled(w: Tensor, k: int = k) -> Tensor:
            w[k, w[k].abs().argmax()] *= 2
            return w

        other = edited(net, b__weight=doubled)
        assert it.fingerprint(other, symmetry=sym) != it.fingerprint(net, symmetry=sym)
        assert it.equivalent(net, other, symmetry=sym) is None


@pytest.mark.parametrize("kind", ["MLP with tanh", "MLP with ReLU", "attention", "two scales and eps"])
def test_a_doubled_last_layer(kind: str) -> None:
    sym, model, _ = found(kind)
    last = list(model.named_parameters())[-2][0].replace(".", "__")
    other = edited(model, **{last: lambda w: 2 * w})
    assert it.equivalent(model, other, symmetry=sym) is None
    assert it.fingerprint(other, symmetry=sym) != it.fingerprint(model, symmetry=sym)


def test_no_permutation_matches_where_none_is_found() -> None:
    """Two layers with the same numbers, joined in another way: brute force over all 4!·3! permutations agrees."""
    torch.manual_seed(0)
    net = mlp(F.gelu, (2, 4, 3, 2)).double()
    sym = it.symmetry(net, torch.zeros(1, 2))
    rejoined = edited(net, b__weight=lambda w: w[:, [1, 0, 2, 3]])
    swapped = [1, 0, 2, 3]
    moved = edited(rejoined, a__weight=lambda w: w[swapped], a__bias=lambda w: w[swapped])
    assert it.equivalent(net, rejoined, symmetry=sym) is None
    assert not matches(net, rejoined)
    assert it.equivalent(net, moved, symmetry=sym) is not None
    assert matches(net, moved)


def matches(a: nn.Module, b: nn.Module) -> bool:
    """Whether some relabeling of the hidden units of b gives a."""
    x, y = a.state_dict(), b.state_dict()
    for p, q in itertools.product(itertools.permutations(range(4)), itertools.permutations(range(3))):
        first, second = list(p), list(q)
        there = {
            "a.weight": y["a.weight"][first], "a.bias": y["a.bias"][first], "b.weight": y["b.weight"][second][:, first],
            "b.bias": y["b.bias"][second], "c.weight": y["c.weight"][:, second], "c.bias": y["c.bias"],
        }  # fmt: skip
        if all(torch.equal(x[name], t) for name, t in there.items()):
            return True
    return False


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_other_shapes() -> None:
    a, b = mlp(F.gelu, (3, 5, 2)), mlp(F.gelu, (3, 6, 2))
    message = r"'a.weight' has shape \(5, 3\) in the first and has shape \(6, 3\) in the second"
    with pytest.raises(MismatchError, match=message):
        it.equivalent(a, b, torch.zeros(1, 3))


def test_other_names() -> None:
    a = mlp(F.gelu, (3, 5, 2))
    b = nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 2))
    with pytest.raises(MismatchError, match=r"'a.weight' .* in the first and does not exist in the second"):
        it.equivalent(a, b, torch.zeros(1, 3))


def test_another_activation() -> None:
    a, b = mlp(F.gelu, (3, 5, 2)), mlp(F.relu, (3, 5, 2))
    with pytest.raises(MismatchError, match=r"compute different functions: at .* the first calls .*gelu.*relu"):
        it.equivalent(a, b, torch.zeros(1, 3))


def test_an_element_of_another_symmetry() -> None:
    net, other = mlp(F.gelu, (3, 5, 2)), mlp(F.gelu, (3, 6, 2))
    element = it.canonicalize(other, torch.zeros(1, 3)).element
    with pytest.raises(MismatchError, match=r"symmetry of another architecture"):
        it.symmetry(net, torch.zeros(1, 3)).act(element, net)


def test_weights_that_are_no_numbers() -> None:
    net = mlp(F.gelu, (3, 5, 2))
    broken = edited(net, b__weight=lambda w: w * float("nan"))
    with pytest.raises(it.InputError, match=r"'b.weight' holds NaN"):
        it.equivalent(net, broken, torch.zeros(1, 3))


def test_a_mask_may_be_infinite() -> None:
    """A constant that nothing moves is compared as it is."""

    def masked(m: Net, x: Tensor) -> Tensor:
        return m.b(F.gelu(m.a(x))) + m.mask

    net = Net(masked, a=nn.Linear(3, 5), b=nn.Linear(5, 2))
    net.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
    assert it.equivalent(net, net, torch.zeros(1, 3)) is not None
    other = edited(net, mask=lambda w: w.flip(0))
    assert it.equivalent(net, other, torch.zeros(1, 3)) is None


# -- Families --


TRAINED = PublishedNetworks("tiny10")


def forms(sym: Symmetry, models: dict[str, nn.Module]) -> Iterator[tuple[str, CanonicalForm]]:
    for name, model in models.items():
        yield name, canonical_form(sym, weights_of(sym, model))


@pytest.mark.parametrize("activation", [F.gelu, torch.tanh, F.relu])
def test_copies_are_found(activation: object) -> None:
    assert callable(activation)
    torch.manual_seed(0)
    first, other = (mlp(activation, (3, 6, 5, 2)) for _ in range(2))
    sym = it.symmetry(first, torch.zeros(1, 3))
    moved = sym.act(sym.random(1), first)
    models = {"first": first, "other": other, "again": first, "moved": moved, "noisy": noisy(moved, 1e-6)}
    models |= {"far": noisy(moved, 1e-2), "other moved": sym.act(sym.random(2), other)}
    found = equivalence_classes(forms(sym, models))
    assert {f.first: [(c.name, c.how) for c in f.copies] for f in found} == {
        "first": [("again", "identical"), ("moved", "moved"), ("noisy", "moved, with noise")],
        "other": [("other moved", "moved")],
        "far": [],
    }
    for family in found:
        assert family.fingerprint == it.fingerprint(models[family.first], symmetry=sym)
        for found_copy in family.copies:
            back = sym.act(found_copy.element, models[found_copy.name])
            assert distance(sym, models[family.first], back) <= found_copy.difference < 3e-6
    assert found[0].to_dict()["copies"][0] == {"name": "again", "how": "identical", "difference": 0.0}


def test_no_networks() -> None:
    assert equivalence_classes([]) == ()


def test_the_tolerance() -> None:
    torch.manual_seed(0)
    net = mlp(F.gelu, (3, 6, 2))
    sym = it.symmetry(net, torch.zeros(1, 3))
    models = {"first": net, "noisy": noisy(sym.act(sym.random(1), net), 1e-3)}
    assert len(equivalence_classes(forms(sym, models))) == 2
    assert len(equivalence_classes(forms(sym, models), tol=1e-2)) == 1


@pytest.mark.skipif(not TRAINED.files, reason="INTERTWINE_DATA names no folder that holds tiny10/seed*.safetensors")
def test_trained_networks() -> None:
    models = {f"seed{seed}": TRAINED.seed(seed) for seed in (0, 1)}
    x = architecture("tiny10").example()
    a, b = models
    sym = it.symmetry(models[a], x)
    check_canonical(sym, models[a], x)
    models["moved"] = sym.act(sym.random(1), models[b])
    models["noisy"] = noisy(sym.act(sym.random(2), models[a]), 1e-7)
    found = equivalence_classes(forms(sym, models))
    assert [(f.first, [c.name for c in f.copies]) for f in found] == [(a, ["noisy"]), (b, ["moved"])]


def test_fingerprints_see_the_smallest_weight() -> None:
    """Where nothing but order is free, weights are compared bit by bit: 1e-9 is not 2e-9, although 1 + 1e-9 is 1."""
    one = nn.Sequential(nn.Linear(3, 6), nn.GELU(), nn.Linear(6, 2)).eval()
    two = copy.deepcopy(one)
    with torch.no_grad():
        one.get_parameter("0.weight")[0, 0], two.get_parameter("0.weight")[0, 0] = 1e-9, 2e-9
    x = torch.zeros(1, 3)
    assert it.fingerprint(one, x) != it.fingerprint(two, x)
