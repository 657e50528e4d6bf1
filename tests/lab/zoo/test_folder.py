"""A zoo on disk: its networks by index and seed, its manifest, and errors for damaged or changed files."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from image_folders import write_images
from safetensors.torch import load_file, save_file
from torch import nn

from intertwine import zoo
from intertwine.errors import InputError, IntertwineError, MismatchError
from intertwine.files import sha256
from intertwine.lab.zoo import folder as folder_module
from intertwine.lab.zoo.manifest import Manifest, Record, TrainingPlan, read_manifest

pytestmark = pytest.mark.usefixtures("one_thread")

SEEDS = (0, 2, 5, 7)
SOURCE = Path(__file__).parents[3] / "src"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("trained") / "zoo"
    zoo.train("mlp", seeds=SEEDS, data="digits", out=place, options={"widths": [64, 16, 10]}, epochs=2)
    return place


@pytest.fixture
def place(trained: Path, tmp_path: Path) -> Path:
    """A copy of the zoo, to be spoilt."""
    return shutil.copytree(trained, tmp_path / "zoo")


def entries(place: Path) -> dict[str, Any]:
    return json.loads((place / "manifest.json").read_text())


def write(place: Path, manifest: dict[str, Any]) -> None:
    (place / "manifest.json").write_text(json.dumps(manifest))


def same(model: nn.Module, file: Path) -> bool:
    state, stored = model.state_dict(), load_file(file)
    return state.keys() == stored.keys() and all(torch.equal(state[name], stored[name]) for name in state)


def refused(kind: type[IntertwineError], call: Callable[[], Any], *words: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    for word in words:
        assert word in str(caught.value)


# -- what is in it -----------------------------------------------------------------------------------------------------


def test_networks_by_place(trained: Path) -> None:
    found = zoo.load(trained)
    assert (len(found), found.seeds, [r.seed for r in found.records]) == (4, SEEDS, list(SEEDS))
    for i, seed in enumerate(SEEDS):
        file = trained / f"seed{seed}.safetensors"
        assert found.records[i].file == file.name
        assert same(found[i], file)
        assert same(found[i - 4], file)
        assert not found[i].training
    cut = found[1:3]
    assert isinstance(cut, list)
    assert [same(model, trained / f"seed{seed}.safetensors") for model, seed in zip(cut, (2, 5), strict=True)] == [
        True
    ] * 2
    assert [same(m, trained / f"seed{s}.safetensors") for m, s in zip(found[::-2], (7, 2), strict=True)] == [True] * 2
    assert found[4:] == []
    for index in (4, -5, 100):
        with pytest.raises(
            IndexError, match=rf"Network {index} is out of range: .*zoo holds 4 of the seeds \(0, 2, 5, 7\)"
        ):
            found[index]


def test_networks_by_seed_and_in_a_row(trained: Path) -> None:
    found = zoo.load(str(trained))
    assert same(found.seed(7), trained / "seed7.safetensors")
    refused(InputError, lambda: found.seed(1), str(trained), "no network of seed 1", "it holds (0, 2, 5, 7)")
    row = list(found)
    assert [same(m, trained / f"seed{s}.safetensors") for m, s in zip(row, SEEDS, strict=True)] == [True] * 4
    assert found[0] is not found[0]  # each is the caller's own
    state = torch.get_rng_state()
    assert len(list(found)) == 4
    assert torch.equal(torch.get_rng_state(), state)


def test_a_zoo_in_one_line(trained: Path, place: Path) -> None:
    found = zoo.load(trained)
    low, high = min(r.accuracy for r in found.records), max(r.accuracy for r in found.records)
    line = f"Zoo(4 networks: mlp on digits by plain, accuracy {low:.1%} to {high:.1%}, in {trained})"
    assert repr(found) == line
    write(place, entries(place) | {"records": entries(place)["records"][:1]})
    assert repr(zoo.load(place)).startswith("Zoo(1 network: mlp on digits")
    write(place, entries(place) | {"records": []})
    assert repr(zoo.load(place)).startswith(
        f"Zoo(0 networks: mlp on digits by plain, in {place}: no network is finished"
    )


def test_a_zoo_is_tested_again(trained: Path, place: Path) -> None:
    found = zoo.load(trained)
    score = found.evaluate()
    assert score.accuracy.tolist() == [record.accuracy for record in found.records]
    assert score.loss.tolist() == pytest.approx([record.loss for record in found.records], rel=1e-5)
    data = found.dataset()
    for i, model in enumerate(found):
        with torch.no_grad():
            right = model(data.inputs(data.test_images)).argmax(1) == data.test_labels
        assert float(right.double().mean()) == pytest.approx(found.records[i].accuracy)
    for together in (1, 3):
        assert found.evaluate(together=together).accuracy.tolist() == score.accuracy.tolist()
    few = found.evaluate(data.subset(test=10)).accuracy
    assert few.tolist() == pytest.approx([round(10 * float(a)) / 10 for a in few])
    write(place, entries(place) | {"records": []})
    refused(InputError, zoo.load(place).evaluate, str(place), "no network is finished yet", "again to continue")
    refused(InputError, partial(zoo.load(place).seed, 3), "no network of seed 3", "no network is finished yet")


def test_the_data_as_the_networks_saw_it(tmp_path: Path) -> None:
    found = zoo.train("mlp", seeds=[0], data="digits", out=tmp_path, epochs=1, normalise="unit")
    assert (found.dataset().mean, found.dataset().std) == ((0.0,), (255.0,))
    assert (zoo.data("digits").mean, zoo.data("digits").std) != ((0.0,), (255.0,))
    assert zoo.load(tmp_path).evaluate().accuracy.tolist() == [found.records[0].accuracy]


def test_other_data_is_refused(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = zoo.load(trained)
    real = zoo.data("digits")
    labels = real.test_labels.clone()
    labels[0] = (labels[0] + 1) % 10
    changed = replace(real, test_labels=labels).subset()
    monkeypatch.setattr(folder_module, "data", lambda name, folder: changed)
    words = (
        "digits is not the data that",
        str(trained),
        changed.checksum[:12],
        real.checksum[:12],
        "folder of the same data",
    )
    refused(MismatchError, found.dataset, *words)
    refused(MismatchError, found.evaluate, *words)
    monkeypatch.setattr(folder_module, "data", lambda name, folder: real)
    assert found.dataset().checksum == real.checksum


def test_a_folder_of_images_that_was_moved(tmp_path: Path) -> None:
    images, moved = write_images(tmp_path / "images"), tmp_path / "moved"
    options, data = {"widths": [75, 4, 2]}, f"folder:{images}"
    found = zoo.train("mlp", seeds=[0], data=data, out=tmp_path / "zoo", options=options, epochs=1)
    images.rename(moved)
    refused(InputError, found.evaluate, str(images), "does not exist", "Give the folder")
    there = found.dataset(moved)
    assert (there.mean, there.name) == (zoo.data("imagefolder", moved).mean, f"folder:{moved}")
    assert found.evaluate(there).accuracy.tolist() == [found.records[0].accuracy]
    other = write_images(tmp_path / "other", side=6)
    refused(
        MismatchError, lambda: found.dataset(other), data, "is not the data that", "Give the folder of the same data"
    )


def test_data_of_the_users_own_must_be_passed(tmp_path: Path) -> None:
    own = zoo.data("digits").subset(300, 50)
    found = zoo.train("mlp", seeds=[0], data=own, out=tmp_path / "zoo", options={"widths": [64, 4, 10]}, epochs=1)
    words = (str(tmp_path / "zoo"), "a Dataset of your own, 'digits[:300, :50]'", "Pass it: zoo.evaluate(data).")
    for call in (found.dataset, found.evaluate, partial(found.dataset, tmp_path)):
        refused(InputError, call, *words)
    assert found.evaluate(own).accuracy.tolist() == [found.records[0].accuracy]


# -- a manifest that is not right --------------------------------------------------------------------------------------


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    data = {"name": "d", "checksum": "c", "mean": [0.1], "std": [1e-7], "classes": ["a"], "shape": [1, 2, 2]}
    plan = TrainingPlan(
        {"name": "mlp", "options": {"widths": [4, 1]}}, {"name": "plain", "rate": 0.1}, data, "float32", "last"
    )
    history: dict[str, list[float | None]] = {"train_loss": [1 / 3, 0.25], "accuracy": [None, 0.5]}
    first = Record(
        3, "seed3.safetensors", "0" * 64, 1 / 3, 2.5, 2, 0.5, 1, 8, 1.5, "cpu", "now", {"torch": "2"}, history
    )
    manifest = Manifest(plan).with_records([first, replace(first, seed=1)])
    assert [record.seed for record in manifest.records] == [1, 3]
    manifest.write(tmp_path)
    assert read_manifest(tmp_path) == manifest


def test_a_folder_without_a_manifest(place: Path, tmp_path: Path) -> None:
    (place / "manifest.json").unlink()
    for folder in (place, tmp_path / "nowhere"):
        words = (str(folder), "is not a zoo", "holds no manifest.json", "intertwine zoo train", "--out")
        refused(InputError, partial(zoo.load, folder), *words)


def changed(place: list[str | int], value: Any) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        inner: Any = manifest
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = value

    return change


def removed(place: list[str | int]) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        inner: Any = manifest
        for key in place[:-1]:
            inner = inner[key]
        del inner[place[-1]]

    return change


DAMAGES: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    (changed(["format"], 2), "it has format 2, this version of intertwine reads format 1"),
    (removed(["format"]), "it has format None, this version of intertwine reads format 1"),
    (removed(["plan"]), "KeyError: 'plan'"),
    (removed(["records"]), "KeyError: 'records'"),
    (changed(["plan"], None), "its plan is None"),
    (changed(["records"], 3), "TypeError"),
    (changed(["records"], ["seed0.safetensors"]), "its record is 'seed0.safetensors'"),
    (removed(["plan", "select"]), "its plan lacks select"),
    (changed(["plan", "colour"], "blue"), "its plan has an unknown colour"),
    (removed(["records", 1, "sha256"]), "its record lacks sha256"),
    (changed(["records", 2, "colour"], "blue"), "its record has an unknown colour"),
    (changed(["plan", "architecture"], "mlp"), "the architecture of its plan is 'mlp'"),
    (changed(["plan", "select"], 1), "the select of its plan is 1"),
    (removed(["plan", "architecture", "options"]), "the architecture of its plan lacks options"),
    (removed(["plan", "data", "checksum"]), "the data of its plan lacks checksum"),
    (changed(["records", 0, "seed"], "zero"), "the seed of its record is 'zero'"),
    (changed(["records", 0, "accuracy"], "high"), "the accuracy of its record is 'high'"),
    (changed(["records", 3, "file"], None), "the file of its record is None"),
    (changed(["records", 3, "history"], [0.5]), "the history of its record is [0.5]"),
]


@pytest.mark.parametrize(("damage", "found"), DAMAGES, ids=[words for _, words in DAMAGES])
def test_a_damaged_manifest(damage: Callable[[dict[str, Any]], None], found: str, place: Path) -> None:
    manifest = entries(place)
    damage(manifest)
    write(place, manifest)
    words = (str(place / "manifest.json"), "is damaged or of another kind", found, "Restore it from a copy of the zoo")
    refused(InputError, lambda: zoo.load(place), *words)
    refused(InputError, lambda: zoo.train("mlp", seeds=[0], data="digits", out=place), *words)
    assert entries(place) == manifest  # it is not written over


CHECK_ALL = """
import json, sys
from intertwine import zoo
for folder in sys.argv[1:]:
    try:
        zoo.load(folder)
    except zoo.folder.InputError as error:
        print(json.dumps(str(error)))
"""


def test_a_damaged_manifest_outside_the_tests(trained: Path, tmp_path: Path) -> None:
    """The tests run with the package's annotations checked, which users do not have."""
    for i, (damage, _) in enumerate(DAMAGES):
        manifest = entries(trained)
        damage(manifest)
        (tmp_path / str(i)).mkdir()
        write(tmp_path / str(i), manifest)
    folders = [str(tmp_path / str(i)) for i in range(len(DAMAGES))]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, "-c", CHECK_ALL, *folders], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for line, (_, found) in zip(done.stdout.splitlines(), DAMAGES, strict=True):
        assert found in json.loads(line)


@pytest.mark.parametrize("contents", [b"", b"{", b"[1, 2]", b'"zoo"', b"\xff\xfe\x00", b"null"])
def test_a_manifest_that_is_none(contents: bytes, place: Path) -> None:
    (place / "manifest.json").write_bytes(contents)
    refused(
        InputError, lambda: zoo.load(place), "manifest.json is damaged or of another kind", "Restore it from a copy"
    )


def test_a_manifest_cut_anywhere(place: Path) -> None:
    contents = (place / "manifest.json").read_bytes()
    for size in range(0, len(contents) - 2, 97):
        (place / "manifest.json").write_bytes(contents[:size])
        refused(InputError, lambda: zoo.load(place), "is damaged or of another kind")


def test_a_manifest_of_an_architecture_that_is_not_known(place: Path) -> None:
    manifest = entries(place)
    manifest["plan"]["architecture"]["name"] = "resnet1000"
    write(place, manifest)
    refused(InputError, lambda: zoo.load(place)[0], "Unknown zoo network 'resnet1000'")


# -- weights that are not right ----------------------------------------------------------------------------------------

OTHER = ("seed2.safetensors has changed since seed 2 was trained", "sha256", "Copy it from the source")


def test_weights_of_which_one_byte_changed(place: Path) -> None:
    file = place / "seed2.safetensors"
    contents = bytearray(file.read_bytes())
    contents[-1] ^= 1
    file.write_bytes(contents)
    found = zoo.load(place)
    refused(MismatchError, lambda: found.seed(2), *OTHER, "train it again")
    refused(MismatchError, lambda: found[1], *OTHER)
    refused(MismatchError, found.evaluate, *OTHER)
    assert same(found.seed(0), place / "seed0.safetensors")  # the others are as they were


def test_weights_that_are_cut_off(place: Path) -> None:
    file = place / "seed2.safetensors"
    for size in (0, 7, 500):
        file.write_bytes(file.read_bytes()[:size])
        refused(MismatchError, lambda: zoo.load(place).seed(2), *OTHER)


def test_weights_that_are_missing(place: Path) -> None:
    (place / "seed2.safetensors").unlink()
    words = ("weights of seed 2 are missing", "seed2.safetensors", "Copy them from the source", "train it again")
    refused(InputError, lambda: zoo.load(place).seed(2), *words)


def test_weights_that_were_swapped(place: Path) -> None:
    shutil.move(place / "seed2.safetensors", place / "kept")
    shutil.move(place / "seed5.safetensors", place / "seed2.safetensors")
    shutil.move(place / "kept", place / "seed5.safetensors")
    refused(MismatchError, lambda: zoo.load(place).seed(2), *OTHER)
    refused(MismatchError, lambda: zoo.load(place).seed(5), "has changed since seed 5 was trained")


def name_in_manifest(place: Path, file: Path) -> None:
    """Let the manifest name a file as the weights of seed 2, with its true checksum."""
    manifest = entries(place)
    manifest["records"][1] |= {"file": file.name, "sha256": sha256(file)}
    write(place, manifest)


class Bomb:
    """Does something when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.mark, "it went off")


@pytest.mark.parametrize("name", ["seed2.pt", "seed2.safetensors", "seed2.pkl"])
@pytest.mark.parametrize("writer", ["torch", "pickle"])
def test_code_in_place_of_weights_is_not_run(name: str, writer: str, place: Path, tmp_path: Path) -> None:
    bomb = {"weight": torch.zeros(2), "more": Bomb(tmp_path / "mark")}
    if writer == "torch":
        torch.save(bomb, place / name)
    else:
        (place / name).write_bytes(pickle.dumps(bomb))
    name_in_manifest(place, place / name)
    with pytest.raises(InputError, match=r"is refused: reading it could run code|cannot be read as a checkpoint"):
        zoo.load(place).seed(2)
    assert not (tmp_path / "mark").exists()
    if writer == "pickle":
        pickle.loads((place / name).read_bytes())
        assert (tmp_path / "mark").exists()  # it would have


def test_weights_of_another_network_are_refused(place: Path) -> None:
    save_file(zoo.build("mlp", widths=(64, 8, 10)).state_dict(), place / "seed2.safetensors")
    name_in_manifest(place, place / "seed2.safetensors")
    words = ("seed2.safetensors do not fit Sequential", "of another shape", "(file (8, 64), model (16, 64))")
    refused(MismatchError, lambda: zoo.load(place).seed(2), *words)
