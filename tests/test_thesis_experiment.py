"""The experiment of the NodeSort thesis at a tiny scale: 8×8 digits, 16 hidden nodes, five networks, the same code."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import intertwine as it
from intertwine.errors import InputError

ROOT = Path(__file__).parents[1]
EXPERIMENTS = ROOT / "experiments"
sys.path.insert(0, str(EXPERIMENTS))

import thesis_store  # noqa: E402  # pyrefly: ignore[missing-import]
import thesis_table1  # noqa: E402  # pyrefly: ignore[missing-import]
from stacked_mlp import Recipe, Stack, fresh, score, train  # noqa: E402  # pyrefly: ignore[missing-import]
from stacked_order import (  # noqa: E402  # pyrefly: ignore[missing-import]
    apart,
    lexicographic_order,
    moved,
    nodesort_order,
    permuted,
    sorted_stack,
)

METHODS = [
    *("unsorted", "nodesort 1.001", "nodesort 1.1", "nodesort 2", "nodesort 10", "lexicographic"),
    *("weight matching", "activation matching"),
]
SMALLER = {
    "inputs = 784": "inputs = 64",
    "hidden = 512": "hidden = 16",
    "nets = 1000": "nets = 5",
    "learning_rate = 1e-3": "learning_rate = 1e-2",
    "matching_images = 2000": "matching_images = 300",
    "average_groups = 50": "average_groups = 4",
    "curve_pairs = 20": "curve_pairs = 3",
}
RECIPE = Recipe(inputs=6, hidden=9, outputs=4, epochs=2, batch_size=8, learning_rate=1e-2)


def write_digits(folder: Path) -> None:
    """scikit-learn's digits in the shape of MNIST's file."""
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    images, labels = (digits.images * 15.9375).astype(np.uint8), digits.target
    parts = {"train_images": images[:1500], "train_labels": labels[:1500]}
    np.savez(folder / "mnist.npz", **parts, test_images=images[1500:], test_labels=labels[1500:])


def write_plan(folder: Path, extra: dict[str, str] | None = None) -> Path:
    """The real plan with some numbers made smaller."""
    text = (EXPERIMENTS / "thesis_table1.toml").read_text()
    for old, new in (SMALLER | (extra or {})).items():
        assert old in text
        text = text.replace(old, new)
    path = folder / "plan.toml"
    path.write_text(text)
    return path


@cache
def tiny_result() -> dict[str, Any]:
    """What the command writes for the tiny plan, run once per process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_digits(folder)
        assert thesis_table1.main(arguments(folder, folder / "result.json")) == 0
        return json.loads((folder / "result.json").read_text())


def arguments(folder: Path, out: Path) -> list[str]:
    options = {"--plan": write_plan(folder), "--data": folder, "--work": folder / "work", "--out": out}
    return [*(str(word) for pair in options.items() for word in pair), "--device", "cpu", "--no-check"]


def some_data(samples: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(samples, RECIPE.inputs)
    return x, x[:, : RECIPE.outputs].argmax(1)


# -- the whole run -----------------------------------------------------------------------------------------------------


def test_the_result_has_every_part() -> None:
    result = tiny_result()
    assert list(result) == [
        *("manifest", "start", "all_pairs", "some_pairs", "control", "accuracy", "curves", "stability"),
    ]
    assert list(result["all_pairs"]) == METHODS[:-2]
    assert list(result["some_pairs"]) == METHODS
    assert list(result["accuracy"]) == ["1", "2", "5"], "ten networks were asked for, five are there"
    assert list(result["accuracy"]["2"]) == [*METHODS, "ensemble"]
    assert list(result["stability"]) == ["1e-06", "0.0001", "0.01"]
    for method in METHODS:
        curve = result["curves"][method]["accuracy"]["mean"]
        assert len(curve) == 11
        assert curve[0] == pytest.approx(result["curves"]["unsorted"]["accuracy"]["mean"][0])


def test_the_manifest_says_how_it_was_made() -> None:
    manifest = tiny_result()["manifest"]
    assert manifest["plan"]["recipe"]["hidden"] == 16
    assert manifest["seeds"] == [0, 4]
    assert manifest["epochs"] == 5
    assert manifest["torch"] == torch.__version__
    assert manifest["device"].startswith("CPU")
    assert manifest["networks_trained_in_this_run"] == 5
    assert {"finished", "training_seconds", "measuring_seconds", "python", "images_crc32"} <= set(manifest)


def test_distances_of_all_pairs_and_of_some_agree() -> None:
    """Ten pairs are fewer than the 300 asked for, so both ways of computing them see the same pairs."""
    result = tiny_result()
    for method in METHODS[:-2]:
        for layer in ("w1", "w2"):
            gram, direct = (result[name][method][layer] for name in ("all_pairs", "some_pairs"))
            assert gram["count"] == direct["count"] == 10
            for number in ("min", "max", "mean"):
                assert gram[number] == pytest.approx(direct[number], rel=1e-6)


def test_permuted_copies_have_distance_zero() -> None:
    control = dict(tiny_result()["control"])
    assert control.pop("unsorted") > 1
    control.pop("activation matching")  # dead nodes look alike to it, so it may swap them
    assert control == dict.fromkeys(METHODS[1:-1], 0.0)


def test_training_worked() -> None:
    assert tiny_result()["accuracy"]["1"]["single"]["min"] > 0.8


def test_a_killed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    """Killed after its first chunk, the run leaves whole files; the next run reads them and finds the same numbers."""
    write_digits(tmp_path)
    words = arguments(tmp_path, tmp_path / "result.json")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    slow = [sys.executable, str(EXPERIMENTS / "thesis_table1.py"), *words, "--chunk", "1"]
    with subprocess.Popen(slow, env=environment, stdout=subprocess.DEVNULL) as process:
        while not (found := sorted((tmp_path / "work").rglob("*.safetensors"))):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "result.json").exists()
    first = found[0].read_bytes()
    assert thesis_table1.main([*words, "--chunk", "1"]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert found[0].read_bytes() == first
    assert result["manifest"]["networks_trained_in_this_run"] < 5
    for layer in ("w1", "w2"):
        whole = tiny_result()["all_pairs"]["unsorted"][layer]["mean"]
        assert result["all_pairs"]["unsorted"][layer]["mean"] == pytest.approx(whole, rel=1e-2)


def test_other_settings_do_not_read_old_networks(tmp_path: Path) -> None:
    write_digits(tmp_path)
    images = thesis_store.read_images(tmp_path, "cpu", check=False)
    for extra, expected in (
        ({}, 5),
        ({}, 0),
        ({"epochs = 5": "epochs = 1"}, 5),
        ({"first_seed = 0": "first_seed = 9"}, 5),
    ):
        plan = thesis_store.read_plan(write_plan(tmp_path, extra))
        _, new = thesis_store.trained(plan, images, tmp_path / "work", 5, lambda line: None)
        assert new == expected


def test_the_picture_needs_only_the_result(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(json.dumps(tiny_result()))
    picture = tmp_path / "picture.svg"
    assert thesis_table1.main(["--out", str(tmp_path / "result.json"), "--plot", str(picture)]) == 0
    assert picture.read_text().startswith("<?xml")


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_missing_images_say_which_file_and_where_to_get_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert thesis_table1.main(["--data", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert "mnist.npz" in message
    assert str(tmp_path) in message
    assert "https://" in message
    assert "INTERTWINE_DATA" in message


def test_images_that_are_not_mnist_are_refused_unless_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_digits(tmp_path)
    assert thesis_table1.main(["--data", str(tmp_path)]) == 2
    assert "is not the file that was published for mnist" in capsys.readouterr().err


def test_images_are_found_through_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_digits(tmp_path)
    monkeypatch.setenv("INTERTWINE_DATA", str(tmp_path))
    images = thesis_store.read_images(None, "cpu", check=False)
    assert images.train_x.shape == (1500, 64)
    assert float(images.train_x.max()) == 1
    assert images.train_y.dtype == torch.int64


def test_the_checksum_is_that_of_the_bytes(tmp_path: Path) -> None:
    """The result file and the folder of trained networks name the images by it, so it must stay what it was."""
    write_digits(tmp_path)
    with np.load(tmp_path / "mnist.npz") as archive:
        names = ("train_images", "train_labels", "test_images", "test_labels")
        contents = b"".join(archive[name].astype(np.uint8).tobytes() for name in names)
    assert thesis_store.read_images(tmp_path, "cpu", check=False).checksum == zlib.crc32(contents)


def test_a_file_with_other_arrays_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "mnist.npz", pictures=np.zeros(3))
    with pytest.raises(InputError, match="pictures"):
        thesis_store.read_images(tmp_path, "cpu")


def test_images_of_another_size_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_digits(tmp_path)
    assert thesis_table1.main(["--data", str(tmp_path), "--work", str(tmp_path / "work"), "--no-check"]) == 2
    assert "784 inputs and 10 outputs, but the images have 64 pixels and 10 classes" in capsys.readouterr().err


def test_a_plan_with_a_wrong_word_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="missing \\['nets'\\], unknown \\['networks'\\]"):
        thesis_store.read_plan(write_plan(tmp_path, {"nets = 1000": "networks = 5"}))
    with pytest.raises(InputError, match="activation 'swish'"):
        thesis_store.read_plan(write_plan(tmp_path, {'"relu"': '"swish"'}))


def test_one_network_is_too_few(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at least 2; 1 were asked for"):
        thesis_store.read_plan(write_plan(tmp_path), nets=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Use the device cpu"):
        thesis_store.read_images(tmp_path, "cuda")


def test_a_picture_without_result_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert thesis_table1.main(["--out", str(tmp_path / "none.json"), "--plot", str(tmp_path / "p.svg")]) == 2
    assert "run the experiment first" in capsys.readouterr().err


# -- the stack ---------------------------------------------------------------------------------------------------------


def test_the_real_plan_is_the_architecture_of_the_thesis() -> None:
    plan = thesis_store.read_plan(EXPERIMENTS / "thesis_table1.toml")
    net = fresh(plan.recipe, [torch.Generator()])
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
