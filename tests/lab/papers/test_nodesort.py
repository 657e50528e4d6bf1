"""The kind `distances` on its tiny plan: 8×8 digits, 16 hidden nodes, five networks; and the result of a thousand."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from digit_networks import IMAGE, accuracy, digits, loss, perceptrons
from networks import edited
from nodesort_experiment import tiny, tiny_rows
from orbits import mlp, noisy
from torch import Tensor, nn

import intertwine as it
from intertwine.align.align import SOLVERS, align
from intertwine.align.solver import permutations_of
from intertwine.connect.arithmetic import average
from intertwine.errors import InputError
from intertwine.lab.papers.experiments import ExperimentResult, find, plans_folder, read_result, reproduce
from intertwine.lab.papers.nodesort import DISTANCES, by_method, deviation, series, summary
from intertwine.lab.papers.nodesort_networks import (
    MLPRecipe,
    MLPStack,
    fresh,
    lexicographic_order,
    nodesort_order,
    permuted,
    read_images,
    recipe_of,
    reordered,
    score,
    stack_distances,
    train,
)
from intertwine.lab.papers.ordering import OCTANT, REGION, octant, ordered
from intertwine.lab.papers.plan import read_plan
from intertwine.symmetry.element import Element
from intertwine.symmetry.symmetry import Symmetry

# -- The kind `distances` on its tiny plan --


ROOT = Path(__file__).parents[3]
RESULT = ROOT / "experiments" / "results" / "sorensen-table1.paper.json"
METHODS = [
    *("unsorted", "nodesort 1.001", "nodesort 1.1", "nodesort 2", "nodesort 10", "lexicographic"),
    *("weight matching", "activation matching"),
]
RECIPE = MLPRecipe(inputs=6, hidden=9, outputs=4, epochs=2, batch_size=8, learning_rate=1e-2)


def part(measured: str, **where: Any) -> dict[str, dict[str, Any]]:
    return by_method(tiny_rows(), measured, **where)


def write_plan(folder: Path, changes: dict[str, str]) -> str:
    """The plan with some of its words changed."""
    text = (ROOT / "experiments" / "sorensen-table1.toml").read_text(encoding="utf-8")
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    path = folder / "plan.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def some_data(samples: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(samples, RECIPE.inputs)
    return x, x[:, : RECIPE.outputs].argmax(1)


# -- the whole run -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_thread")
def test_the_rows_have_every_part() -> None:
    assert list(dict.fromkeys(row["measured"] for row in tiny_rows())) == [
        *("start", "all_pairs", "some_pairs", "control", "accuracy", "curves", "stability"),
    ]
    assert list(part("all_pairs")) == METHODS[:-2]
    assert list(part("some_pairs")) == METHODS
    averaged = dict.fromkeys(row["networks"] for row in tiny_rows() if row["measured"] == "accuracy")
    assert list(averaged) == [1, 2, 5], "ten networks were asked for, five are there"
    assert list(part("accuracy", networks=2)) == [*METHODS, "ensemble"]
    assert {row.get("noise") for row in tiny_rows() if row["measured"] == "stability"} == {1e-6, 1e-4, 1e-2}
    for method in METHODS:
        curve = part("curves")[method]["accuracy"]["mean"]
        assert len(curve) == 11
        assert curve[0] == pytest.approx(part("curves")["unsorted"]["accuracy"]["mean"][0])


@pytest.mark.usefixtures("one_thread")
def test_distances_are_those_of_the_weights_on_the_disk() -> None:
    """Recomputed with numpy from the files of the networks, unsorted and in the order of the last column of p^j."""
    nets = [{name: chunk[name][i] for name in chunk} for chunk in tiny()[1] for i in range(len(chunk["w1"]))]
    assert len(nets) == 5
    for method, base in (("unsorted", None), ("nodesort 2", 2.0)):
        for layer, axis in (("w1", 1), ("w2", 0)):
            found = []
            for net in nets:
                keys = np.float64(net["w2"]) @ (base or 1.0) ** np.arange(10)
                order = np.arange(16) if base is None else np.argsort(keys, kind="stable")
                found.append(np.take(np.float64(net[layer]), order, axis))
            distances = [np.linalg.norm(a - b) for a, b in combinations(found, 2)]
            row = part("all_pairs")[method][layer]
            wanted = [min(distances), max(distances), np.mean(distances), np.std(distances, ddof=1)]
            assert [row[name] for name in ("min", "max", "mean", "deviation")] == pytest.approx(wanted, rel=1e-6)
            numbers = tiny()[0].numbers[series(method)]
            assert numbers[f"W{'₁₂'[axis == 0]} mean"] == pytest.approx([np.mean(distances)], rel=1e-6)


@pytest.mark.usefixtures("one_thread")
def test_distances_of_all_pairs_and_of_some_agree() -> None:
    """Ten pairs are fewer than the 300 asked for, so both ways of computing them see the same pairs."""
    for method in METHODS[:-2]:
        for layer in ("w1", "w2"):
            gram, direct = (part(name)[method][layer] for name in ("all_pairs", "some_pairs"))
            assert gram["count"] == direct["count"] == 10
            for number in ("min", "max", "mean", "deviation"):
                assert gram[number] == pytest.approx(direct[number], rel=1e-5)


@pytest.mark.usefixtures("one_thread")
def test_permuted_copies_have_distance_zero() -> None:
    control = {method: row["distance"] for method, row in part("control").items()}
    assert control.pop("unsorted") > 1
    control.pop("activation matching")  # dead nodes look alike to it, so it may swap them
    assert control == dict.fromkeys(METHODS[1:-1], 0.0)


@pytest.mark.usefixtures("one_thread")
def test_training_worked() -> None:
    assert part("accuracy", networks=1)["single"]["min"] > 0.8


@pytest.mark.usefixtures("one_thread")
def test_the_figure_is_drawn_from_the_rows_alone(tmp_path: Path) -> None:
    assert tiny()[0].plot(tmp_path / "tiny.svg").read_text().startswith("<?xml")
    printed = DISTANCES.draw(read_result(RESULT).plan, read_result(RESULT).rows)
    labels = [text.get_text() for text in printed.axes[0].get_yticklabels()]
    assert labels[:2] == ["thesis, Table 1", "NodeSort, p = 1.001"]
    assert "thesis, Table 1" not in [t.get_text() for t in DISTANCES.draw(tiny()[0].plan, tiny_rows()).axes[0].texts]


@pytest.mark.usefixtures("one_thread")
def test_a_killed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    """Killed after its first chunk, the run leaves whole files; the next run reads them and finds the same numbers."""
    call = f"reproduce('sorensen-table1', 'cpu', folder={str(tmp_path)!r})"
    code = f"from intertwine.lab.papers.experiments import reproduce; {call}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, "-c", code], env=environment) as process:
        while not (found := sorted(tmp_path.rglob("nets-*.safetensors"))):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    found[0].write_bytes(first := found[0].read_bytes())
    stamp = found[0].stat().st_mtime_ns
    rows = reproduce("sorensen-table1", "cpu", folder=tmp_path).rows
    assert (found[0].read_bytes(), found[0].stat().st_mtime_ns) == (first, stamp), "it was trained again"
    for layer in ("w1", "w2"):
        again = by_method(rows, "all_pairs")["unsorted"][layer]["mean"]
        assert again == pytest.approx(part("all_pairs")["unsorted"][layer]["mean"], rel=1e-2)


@pytest.mark.usefixtures("one_thread")
def test_other_settings_do_not_read_old_networks(tmp_path: Path) -> None:
    few = {
        "hidden = 16": "hidden = 4",
        "epochs = 5": "epochs = 1",
        "nets = 5": "nets = 2",
        "noise_nets = 100": "noise_nets = 2",
    }
    for changes, folders in (
        ({}, 1),
        ({}, 1),
        ({"hidden = 16": "hidden = 3"}, 2),
        ({"batch_size = 32": "batch_size = 64"}, 3),
    ):
        reproduce(write_plan(tmp_path, few | changes), "cpu", folder=tmp_path / "work")
        assert len(list((tmp_path / "work" / "distances").iterdir())) == folders


# -- the result of a thousand networks ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_thread")
def test_the_committed_result_is_of_the_plan_and_of_a_thousand_networks() -> None:
    result, plan = read_result(RESULT), find("sorensen-table1").to_dict()
    assert result.plan["settings"] == plan["settings"], "the plan has changed since; run it again"
    assert by_method(result.rows, "accuracy", networks=1)["single"]["count"] == 1000
    assert {row["w1"]["count"] for row in by_method(result.rows, "all_pairs").values()} == {499_500}


@pytest.mark.usefixtures("one_thread")
def test_verdicts_of_the_thousand() -> None:
    """The unsorted means agree; W₁ fits p = 1.1 and not 10, W₂ fits 10 and not 1.1."""
    found = {(line.series, line.label): line for line in read_result(RESULT).lines()}
    assert len(found) == 36
    agrees = [key for key, line in found.items() if line.verdict == "agrees" and "mean" in key[1]]
    for key in (
        ("unsorted", "W₁ mean"),
        ("unsorted", "W₂ mean"),
        ("sorted, p = 1.1", "W₁ mean"),
        ("sorted, p = 10", "W₂ mean"),
    ):
        assert key in agrees
    for key in (("sorted, p = 10", "W₁ mean"), ("sorted, p = 1.1", "W₂ mean")):
        assert key not in agrees
    assert found["unsorted", "W₁ mean"].count == 499_500
    assert all(found[key].spread is not None for key in found)


@pytest.mark.usefixtures("one_thread")
def test_claims_of_the_thousand() -> None:
    holds = {claim.says: claim.holds for claim in read_result(RESULT).claims()}
    assert len(holds) == 7
    assert [says for says, held in holds.items() if not held] == [
        "And a meaningful one it is (right on more than 90 % of the test images, p = 1.1)",
        "An average between sorted networks is more likely to be a meaningful one (p = 10)",
    ]


@pytest.mark.usefixtures("one_thread")
def test_a_deviation_that_was_not_kept_comes_from_the_extremes() -> None:
    values = torch.randn(2000, dtype=torch.float64) * 3
    kept = summary(values)
    assert deviation(kept) == kept["deviation"] == pytest.approx(float(values.std()))
    assert deviation(kept | {"deviation": None}) == pytest.approx(3, rel=0.15)
    assert deviation(summary(values[:1])) == 0


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("nets = 5", "nets = 1", "nets must be at least 2, but is 1"),
        ('"relu"', '"swish"', "Unknown activation 'swish'. Choose one of: relu, tanh, sigmoid"),
        ("nets = 1000", "networks = 5", "Unknown entry 'networks'"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        find(write_plan(tmp_path, {old: new}), "cpu")


@pytest.mark.usefixtures("one_thread")
def test_a_plan_without_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the table \[data\] is missing"):
        find(write_plan(tmp_path, {'[data]\nname = "mnist"\n': ""}))


@pytest.mark.usefixtures("one_thread")
def test_pixels_run_from_0_to_1() -> None:
    images = read_images(it.zoo.data("digits"), torch.device("cpu"))
    assert (float(images.train_x.min()), float(images.train_x.max())) == (0, 1)
    assert images.train_x.shape == (1437, 64)
    assert images.classes == 10


# -- the stack ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_thread")
def test_the_real_plan_is_the_architecture_of_the_thesis() -> None:
    plan = find("sorensen-table1").settings
    images = read_images(it.zoo.data("digits"), torch.device("cpu"))
    recipe = recipe_of(plan, images)
    net = fresh(MLPRecipe(784, recipe.hidden, recipe.outputs), [torch.Generator()])
    assert sum(tensor.numel() for tensor in net.tensors.values()) == 407_050
    assert plan.nets == 1000


@pytest.mark.usefixtures("one_thread")
def test_a_network_does_not_feel_its_neighbours() -> None:
    x, y = some_data()
    together, alone = train(RECIPE, [3, 4, 5], x, y), train(RECIPE, [4], x, y)
    for many, one in zip(together.tensors.values(), alone.tensors.values(), strict=True):
        assert torch.allclose(many[1:2], one, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("one_thread")
def test_a_stack_computes_what_its_modules_compute() -> None:
    x, y = some_data()
    stack = train(RECIPE, [0, 1, 2], x, y)
    accuracy, loss = score(stack, x, y)
    for i in range(3):
        outputs = stack.module(i)(x)
        assert torch.allclose(stack(x)[i], outputs, atol=1e-5)
        assert float(accuracy[i]) == pytest.approx(float((outputs.argmax(1) == y).double().mean()))
        assert float(loss[i]) == pytest.approx(torch.nn.functional.cross_entropy(outputs, y).item(), rel=1e-5)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("method", METHODS)
def test_no_method_changes_the_functions(method: str) -> None:
    x, y = some_data()
    a, b = (train(RECIPE, seeds, x, y) for seeds in ([0, 1], [2, 3]))
    assert torch.allclose(reordered(method, b, a, x)(x), b(x), atol=1e-5)


@pytest.mark.usefixtures("one_thread")
def test_matching_comes_nearest() -> None:
    """With one hidden layer weight matching is the best permutation there is, for every pair."""
    x, y = some_data()
    a, b = (train(RECIPE, seeds, x, y) for seeds in (range(8), range(8, 16)))
    nearest = stack_distances(a, reordered("weight matching", b, a, x))["all"]
    for method in METHODS:
        assert (nearest <= stack_distances(reordered(method, a, a, x), reordered(method, b, a, x))["all"] + 1e-9).all()


@pytest.mark.usefixtures("one_thread")
def test_lexicographic_order_breaks_ties_by_the_next_column() -> None:
    w2 = torch.tensor([[[1.0, 5.0], [0.0, 9.0], [1.0, 4.0]]])
    assert lexicographic_order(w2).tolist() == [[1, 2, 0]]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("base", [1.001, 1.1, 2.0, 10.0])
def test_the_library_sorts_as_the_stack_does(base: float) -> None:
    x, y = some_data()
    stack = train(RECIPE, [0, 1], x, y)
    sorted_ = permuted(stack, nodesort_order(stack.w2, base))
    w1, b1, w2 = sorted_.w1, sorted_.b1, sorted_.w2
    for i in range(2):
        canonical = it.canonicalize(stack.module(i), x[:1], order="nodesort-printed", base=base).model
        expected = MLPStack(w1, b1, w2, stack.b2).module(i)
        for ours, theirs in zip(expected.parameters(), canonical.parameters(), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.usefixtures("one_thread")
def test_sorting_twice_is_sorting_once() -> None:
    x, y = some_data()
    stack = train(RECIPE, [0, 1], x, y)
    once = permuted(stack, nodesort_order(stack.w2, 1.1))
    assert torch.equal(permuted(once, nodesort_order(once.w2, 1.1)).w1, once.w1)


# -- The kind "ordering" --


NAME = "sorensen-fig2"


def test_coordinates_are_sorted_whatever_their_signs() -> None:
    points = [[3.0, -1.0, 2.0], [-0.1, -0.3, -0.2], [0.0, 5.0, -5.0]]
    assert ordered(points) == [sorted(point) for point in points]


def test_the_figure_of_the_thesis(tmp_path: Path) -> None:
    result = reproduce(NAME, "cpu", folder=tmp_path)
    named, drawn = ([row for row in result.rows if bool(row["point"]) == there] for there in (True, False))
    assert [row["after"] for row in result.rows] == [sorted(row["before"]) for row in result.rows]
    assert {octant(row["after"]) for row in named} == {(False, True, True)}
    share = sum(row["after"][0] <= 0 < row["after"][1] for row in drawn) / len(drawn)
    assert result.numbers[OCTANT]["all"].count(100.0) == pytest.approx(share * 50)
    assert 0.2 < share < 0.6, "one sign of three, whichever: 3/8 of normal points"
    assert set(result.numbers[REGION]["all"]) == {100.0}
    assert result.plot(tmp_path / "figure.svg").exists()
    full = ExperimentResult(result.manifest | {"plan": find(NAME).to_dict()}, result.rows)
    assert {line.verdict for line in full.lines()} == {"agrees"}
    assert [claim.holds for claim in full.claims()] == [True, False, True]


def test_a_point_has_three_coordinates(tmp_path: Path) -> None:
    text = (plans_folder() / f"{NAME}.toml").read_text(encoding="utf-8")
    (tmp_path / "flat.toml").write_text(text.replace("r = [1.4, -3.0, 5.6]", "r = [1.4, -3.0]", 1), encoding="utf-8")
    with pytest.raises(InputError, match="the point 'r' has 2 coordinates, but the figure has three axes"):
        read_plan(tmp_path / "flat.toml")


# -- The thesis on sorted averages on trained digits, row by row --


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


METHODS_THESIS_AVERAGES = ("none", "sorted", "weights")


@cache
def averages(*widths: int, pairs: int = 3) -> dict[str, tuple[float, float]]:
    """Method → mean accuracy and loss of the averages of pairs of trained networks."""
    models = perceptrons(*widths)
    found = {}
    for method in METHODS_THESIS_AVERAGES:
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
    found = {m: accuracy(it.merge(models, IMAGE, method=m).model) for m in METHODS_THESIS_AVERAGES}
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
