"""The kind `distances` on its tiny plan: 8×8 digits, 16 hidden nodes, five networks; and the result of a thousand."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import intertwine as it
from intertwine.errors import InputError
from intertwine.reproduce.experiments import Result, find, read_result, reproduce
from intertwine.reproduce.kinds.distances import KIND
from intertwine.reproduce.kinds.distances.apart import summary
from intertwine.reproduce.kinds.distances.stacked_mlp import Recipe, Stack, fresh, score, train
from intertwine.reproduce.kinds.distances.stacked_order import (
    apart,
    lexicographic_order,
    moved,
    nodesort_order,
    permuted,
    sorted_stack,
)
from intertwine.reproduce.kinds.distances.store import read_images, recipe_of
from intertwine.reproduce.kinds.distances.table import by_method, deviation, series

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "experiments" / "results" / "sorensen-table1.paper.json"
METHODS = [
    *("unsorted", "nodesort 1.001", "nodesort 1.1", "nodesort 2", "nodesort 10", "lexicographic"),
    *("weight matching", "activation matching"),
]
RECIPE = Recipe(inputs=6, hidden=9, outputs=4, epochs=2, batch_size=8, learning_rate=1e-2)


@cache
def tiny() -> tuple[Result, list[dict[str, np.ndarray]]]:
    """The experiment at scale cpu, run once per process, and the weights of its networks as they lie on the disk."""
    with tempfile.TemporaryDirectory() as folder:
        result = reproduce("sorensen-table1", "cpu", folder=folder)
        return result, [load_file(file) for file in sorted(Path(folder).rglob("nets-*.safetensors"))]


def tiny_rows() -> list[dict[str, Any]]:
    return tiny()[0].rows


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


def test_distances_of_all_pairs_and_of_some_agree() -> None:
    """Ten pairs are fewer than the 300 asked for, so both ways of computing them see the same pairs."""
    for method in METHODS[:-2]:
        for layer in ("w1", "w2"):
            gram, direct = (part(name)[method][layer] for name in ("all_pairs", "some_pairs"))
            assert gram["count"] == direct["count"] == 10
            for number in ("min", "max", "mean", "deviation"):
                assert gram[number] == pytest.approx(direct[number], rel=1e-5)


def test_permuted_copies_have_distance_zero() -> None:
    control = {method: row["distance"] for method, row in part("control").items()}
    assert control.pop("unsorted") > 1
    control.pop("activation matching")  # dead nodes look alike to it, so it may swap them
    assert control == dict.fromkeys(METHODS[1:-1], 0.0)


def test_training_worked() -> None:
    assert part("accuracy", networks=1)["single"]["min"] > 0.8


def test_the_figure_is_drawn_from_the_rows_alone(tmp_path: Path) -> None:
    assert tiny()[0].plot(tmp_path / "tiny.svg").read_text().startswith("<?xml")
    printed = KIND.draw(read_result(RESULT).plan, read_result(RESULT).rows)
    labels = [text.get_text() for text in printed.axes[0].get_yticklabels()]
    assert labels[:2] == ["thesis, Table 1", "NodeSort, p = 1.001"]
    assert "thesis, Table 1" not in [t.get_text() for t in KIND.draw(tiny()[0].plan, tiny_rows()).axes[0].texts]


def test_a_killed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    """Killed after its first chunk, the run leaves whole files; the next run reads them and finds the same numbers."""
    call = f"reproduce('sorensen-table1', 'cpu', folder={str(tmp_path)!r})"
    code = f"from intertwine.reproduce.experiments import reproduce; {call}"
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


def test_the_committed_result_is_of_the_plan_and_of_a_thousand_networks() -> None:
    result, plan = read_result(RESULT), find("sorensen-table1").to_dict()
    assert result.plan["settings"] == plan["settings"], "the plan has changed since; run it again"
    assert by_method(result.rows, "accuracy", networks=1)["single"]["count"] == 1000
    assert {row["w1"]["count"] for row in by_method(result.rows, "all_pairs").values()} == {499_500}


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


def test_claims_of_the_thousand() -> None:
    holds = {claim.says: claim.holds for claim in read_result(RESULT).claims()}
    assert len(holds) == 7
    assert [says for says, held in holds.items() if not held] == [
        "And a meaningful one it is (right on more than 90 % of the test images, p = 1.1)",
        "An average between sorted networks is more likely to be a meaningful one (p = 10)",
    ]


def test_a_deviation_that_was_not_kept_comes_from_the_extremes() -> None:
    values = torch.randn(2000, dtype=torch.float64) * 3
    kept = summary(values)
    assert deviation(kept) == kept["deviation"] == pytest.approx(float(values.std()))
    assert deviation(kept | {"deviation": None}) == pytest.approx(3, rel=0.15)
    assert deviation(summary(values[:1])) == 0


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("nets = 5", "nets = 1", "1 networks were asked for, but distances need at least 2"),
        ('"relu"', '"swish"', "the activation 'swish' was asked for; there are relu, tanh, sigmoid"),
        ("nets = 1000", "networks = 5", "has 'networks'"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        find(write_plan(tmp_path, {old: new}), "cpu")


def test_a_plan_without_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the table \[data\] is missing"):
        find(write_plan(tmp_path, {'[data]\nname = "mnist"\n': ""}))


def test_pixels_run_from_0_to_1() -> None:
    images = read_images(it.zoo.data("digits"), torch.device("cpu"))
    assert (float(images.train_x.min()), float(images.train_x.max())) == (0, 1)
    assert images.train_x.shape == (1437, 64)
    assert images.classes == 10


# -- the stack ---------------------------------------------------------------------------------------------------------


def test_the_real_plan_is_the_architecture_of_the_thesis() -> None:
    plan = find("sorensen-table1").settings
    images = read_images(it.zoo.data("digits"), torch.device("cpu"))
    recipe = recipe_of(plan, images)
    net = fresh(Recipe(784, recipe.hidden, recipe.outputs), [torch.Generator()])
    assert sum(tensor.numel() for tensor in net.tensors.values()) == 407_050
    assert plan.nets == 1000


def test_a_network_does_not_feel_its_neighbours() -> None:
    x, y = some_data()
    together, alone = train(RECIPE, [3, 4, 5], x, y), train(RECIPE, [4], x, y)
    for many, one in zip(together.tensors.values(), alone.tensors.values(), strict=True):
        assert torch.allclose(many[1:2], one, rtol=1e-4, atol=1e-6)


def test_a_stack_computes_what_its_modules_compute() -> None:
    x, y = some_data()
    stack = train(RECIPE, [0, 1, 2], x, y)
    accuracy, loss = score(stack, x, y)
    for i in range(3):
        outputs = stack.module(i)(x)
        assert torch.allclose(stack(x)[i], outputs, atol=1e-5)
        assert float(accuracy[i]) == pytest.approx(float((outputs.argmax(1) == y).double().mean()))
        assert float(loss[i]) == pytest.approx(torch.nn.functional.cross_entropy(outputs, y).item(), rel=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_no_method_changes_the_functions(method: str) -> None:
    x, y = some_data()
    a, b = (train(RECIPE, seeds, x, y) for seeds in ([0, 1], [2, 3]))
    assert torch.allclose(moved(method, b, a, x)(x), b(x), atol=1e-5)


def test_matching_comes_nearest() -> None:
    """With one hidden layer weight matching is the best permutation there is, for every pair."""
    x, y = some_data()
    a, b = (train(RECIPE, seeds, x, y) for seeds in (range(8), range(8, 16)))
    nearest = apart(a, moved("weight matching", b, a, x))["all"]
    for method in METHODS:
        assert (nearest <= apart(moved(method, a, a, x), moved(method, b, a, x))["all"] + 1e-9).all()


def test_lexicographic_order_breaks_ties_by_the_next_column() -> None:
    w2 = torch.tensor([[[1.0, 5.0], [0.0, 9.0], [1.0, 4.0]]])
    assert lexicographic_order(w2).tolist() == [[1, 2, 0]]


@pytest.mark.parametrize("base", [1.001, 1.1, 2.0, 10.0])
def test_the_library_sorts_as_the_stack_does(base: float) -> None:
    x, y = some_data()
    stack = train(RECIPE, [0, 1], x, y)
    w1, b1, w2 = sorted_stack(stack.w1, stack.b1, stack.w2, base)
    for i in range(2):
        canonical = it.canonicalize(stack.module(i), x[:1], order="nodesort-printed", base=base).model
        expected = Stack(w1, b1, w2, stack.b2).module(i)
        for ours, theirs in zip(expected.parameters(), canonical.parameters(), strict=True):
            assert torch.equal(ours, theirs)


def test_sorting_twice_is_sorting_once() -> None:
    x, y = some_data()
    stack = train(RECIPE, [0, 1], x, y)
    once = permuted(stack, nodesort_order(stack.w2, 1.1))
    assert torch.equal(permuted(once, nodesort_order(once.w2, 1.1)).w1, once.w1)
