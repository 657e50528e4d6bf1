"""Tests of running studies: results equal those of the verbs, nothing is lost or done twice, errors are reported."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import binomtest

import intertwine as it
from intertwine.errors import InputError, IntertwineError
from intertwine.lab.study.concepts import CONCEPTS, handwriting_concepts
from intertwine.lab.study.plan import Part, Plan, ZooPlan
from intertwine.lab.study.plan import plan_of as read_plain
from intertwine.lab.study.running import StudyProgress, run
from intertwine.lab.study.store import Store
from intertwine.lab.study.tasks import peak_mib
from intertwine.lab.zoo.datasets.concepts import concept_images

pytest.importorskip("polars")
pytestmark = pytest.mark.usefixtures("one_thread")

#: Columns that differ from run to run.
COSTS = ("seconds", "peak_mib", "made_at", "git", "command")


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Any:
    place = tmp_path_factory.mktemp("zoos") / "digits"
    return it.zoo.train("mlp", seeds=range(3), data="digits", out=place, options={"widths": (64, 16, 10)}, epochs=4)


def plan_of(zoo: Any, *parts: Part) -> Plan:
    return Plan("small", {"z": ZooPlan(folder=str(zoo.folder))}, parts)


def plain(frame: Any) -> list[dict[str, Any]]:
    """Rows without their costs, sorted."""
    return sorted(frame.drop(*COSTS).to_dicts(), key=str)


def test_results_equal_those_of_the_verbs(zoo: Any, tmp_path: Path) -> None:
    part = Part("barrier", ("z",), pairs=((0, 2),), options={"method": "none", "points": 5})
    study = run(plan_of(zoo, Part("accuracy", ("z",)), part), out=tmp_path / "s")
    assert (study.tasks, study.run, study.errors) == (4, 4, {})
    frame = study.frame()
    accuracies = frame.filter(frame["quantity"] == "accuracy").sort("a")
    assert accuracies["value"].to_list() == pytest.approx([r.accuracy for r in zoo.records])
    assert accuracies["a"].to_list() == ["z:0", "z:1", "z:2"]
    found = it.barrier(zoo[0], zoo[2], zoo.dataset().batches("test", 250), points=5)
    line = frame.filter((frame["quantity"] == "error") & (frame["verb"] == "barrier")).sort("index")
    assert line["index"].to_list() == list(found.ts)
    assert line["value"].to_list() == pytest.approx(list(found.error or ()))
    row = frame.row(0, named=True)
    assert row["version"] == it.__version__
    assert row["seconds"] > 0
    assert row["peak_mib"] > 10
    assert row["study"] == "small"


def test_every_verb_gives_rows(zoo: Any, tmp_path: Path) -> None:
    pair = ((0, 1),)
    parts = (
        Part("symmetry", ("z",), networks=(0,)), Part("connectivity", ("z",), pairs=pair),
        Part("compare", ("z",), pairs=pair, layers=("1", "2"), grid={"measure": ("linear_cka", "cca")}),
        Part("stitch", ("z",), pairs=pair, layers=("2",), grid={"family": ("relu", "linear")}),
        Part("complexity", ("z",), networks=(0,)),
        Part("fold", ("z",), networks=(0,), options={"at": [0.5]}, grid={"method": ("fold_to", "prune")}),
    )  # fmt: skip
    study = run(plan_of(zoo, *parts), out=tmp_path / "s")
    assert not study.errors
    frame = study.frame()
    assert set(frame["verb"].to_list()) == {part.verb for part in parts}
    compared = frame.filter(frame["verb"] == "compare")
    assert len(compared) == 8
    own = it.compare(zoo[0], zoo[1], zoo.dataset().batches("test", 250), layers=["1", "2"], measures=("linear_cka",))
    for row in own.to_rows():
        (value,) = compared.filter(
            (compared["quantity"] == "linear_cka")
            & (compared["layer"] == row["first"])
            & (compared["other_layer"] == row["second"])
        )["value"].to_list()
        assert value == pytest.approx(row["value"], abs=1e-6)
    assert frame.filter(frame["quantity"] == "certificate_error")["value"].to_list()[0] < 1e-12
    assert frame.filter(frame["verb"] == "fold")["index"].min() <= 0.5


def test_a_finished_study_runs_nothing_again(zoo: Any, tmp_path: Path) -> None:
    plan = plan_of(zoo, Part("accuracy", ("z",)))
    first = run(plan, out=tmp_path / "s")
    again = run(plan, out=tmp_path / "s")
    assert (first.run, again.run) == (3, 0)
    assert plain(first.frame()) == plain(again.frame())
    key = first.frame()["key"].to_list()[0]
    calls: list[StudyProgress] = []
    one = run(plan, out=tmp_path / "s", only=[key[:12]], progress=calls.append)
    assert one.run == 1
    assert plain(one.frame()) == plain(first.frame())  # run twice, counted once
    assert calls[-1].done == 3


def test_invalid_runs(zoo: Any, tmp_path: Path) -> None:
    plan = plan_of(zoo, Part("accuracy", ("z",)))
    run(plan, out=tmp_path / "s")
    with pytest.raises(InputError, match="small"):
        run(plan_of(zoo, Part("accuracy", ("z",), networks=(1,))), out=tmp_path / "s")
    with pytest.raises(InputError, match="None of the 3 tasks of this plan has a key that starts with 'abc'"):
        run(plan, out=tmp_path / "s", only=["abc"])
    with pytest.raises(InputError, match="proceses"):
        run(plan, "proceses", out=tmp_path / "t")
    assert not (tmp_path / "t").exists()  # refused before anything is created


def test_other_tasks_run_after_one_that_fails(zoo: Any, tmp_path: Path) -> None:
    """No network can be folded to nothing; only the task can know that."""
    part = Part("fold", ("z",), networks=(0,), grid={"at": ((0.75,), (1e-9,))})
    study = run(plan_of(zoo, part), out=tmp_path / "s")
    assert study.tasks == 2
    ((key, error),) = study.errors.items()
    assert "Less than one of" in error
    assert set(study.frame()["key"].to_list()).isdisjoint({key})
    assert run(plan_of(zoo, part), out=tmp_path / "s").run == 1  # only the failed one runs again


def test_networks_added_to_a_zoo_and_the_random_state(tmp_path: Path) -> None:
    place = tmp_path / "z"
    plan = Plan("p", {"z": ZooPlan(folder=str(place))}, (Part("accuracy", ("z",)),))
    torch.manual_seed(3)
    before = torch.get_rng_state()
    for seeds in ([0], [0, 1]):
        it.zoo.train("mlp", seeds=seeds, data="digits", out=place, options={"widths": (64, 8, 10)}, epochs=1)
        study = run(plan, out=tmp_path / "s")
        assert not study.errors
        assert study.run == 1, "the results of the other network are kept"
        assert sorted(study.frame()["a"].to_list()) == [f"z:{seed}" for seed in seeds]
    assert torch.equal(torch.get_rng_state(), before)


def test_results_of_retrained_networks_are_not_mixed(tmp_path: Path) -> None:
    place = tmp_path / "z"
    plan = Plan("p", {"z": ZooPlan(folder=str(place))}, (Part("accuracy", ("z",)),))
    for epochs in (1, 2):
        it.zoo.train("mlp", seeds=[0], data="digits", out=place, options={"widths": (64, 8, 10)}, epochs=epochs)
        if epochs == 1:
            run(plan, out=tmp_path / "s")
            shutil.rmtree(place)
    with pytest.raises(
        InputError, match=r"holds the results of 1 tasks .* trained again, or are gone. Use another folder"
    ):
        run(plan, out=tmp_path / "s")
    assert len(run(plan, out=tmp_path / "t").frame()) == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"recipe": "plane"}, r"Zoo 'b': Unknown recipe 'plane'. Did you mean 'plain"),
        ({"data": "digts"}, r"Zoo 'b': Unknown data set 'digts'. Did you mean 'digits"),
        ({"epochs": 0}, r"Zoo 'b': epochs must be an integer of at least 1, but is 0"),
        ({"seeds": [0, 0]}, r"Zoo 'b': Seeds must be different integers .*\[0, 0\]"),
        ({"options": {"widths": [63, 8, 10]}}, r"Zoo 'b': "),
    ],
)
def test_an_impossible_training_is_refused_before_another_starts(
    wrong: dict[str, Any], message: str, tmp_path: Path
) -> None:
    zoo = {"architecture": "mlp", "data": "digits", "seeds": [0], "epochs": 1}
    plan = {"name": "p", "zoos": {"a": zoo, "b": zoo | wrong}, "parts": [{"verb": "accuracy"}]}
    with pytest.raises(IntertwineError, match=message):
        run(plan, out=tmp_path / "s")
    assert not (tmp_path / "s").exists(), "a corrected plan can use the folder"


def test_an_invalid_zoo_is_refused_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(
        'name = "p"\n\n[zoos.z]\narchitecture = "mlp"\ndata = "digits"\nseeds = "0:1"\nrecipe = "plane"\n'
        '[[parts]]\nverb = "accuracy"\n'
    )
    with pytest.raises(InputError, match=r"Zoo 'z' \(line 3\): Unknown recipe 'plane'"):
        run(file, out=tmp_path / "s")


def test_networks_trained_in_another_precision_are_used(tmp_path: Path) -> None:
    """Such as those of a GPU, when a study continues without one."""
    zoo = {"architecture": "mlp", "data": "digits", "seeds": [0, 1], "epochs": 1}
    plan = read_plain({"name": "p", "zoos": {"z": zoo}, "parts": [{"verb": "accuracy"}]})
    with Store(tmp_path, plan.name, plan.to_dict()):
        place = tmp_path / "zoos" / "z"
        it.zoo.train("mlp", seeds=[0], data="digits", out=place, epochs=1, precision="float64")
    assert not run(plan, out=tmp_path).errors
    assert (it.zoo.load(place).seeds, it.zoo.load(place).manifest.plan.precision) == ((0, 1), "float64")


def test_folders_may_have_any_name(zoo: Any, tmp_path: Path) -> None:
    plan = plan_of(zoo, Part("accuracy", ("z",)))
    place = tmp_path / "width[64] *?"
    assert run(plan, out=place).run == 3
    again = run(plan, out=place)
    assert again.run == 0
    assert len(again.frame()) == 3


def test_tasks_run_on_the_given_device(zoo: Any, tmp_path: Path) -> None:
    plan = plan_of(zoo, Part("accuracy", ("z",)))
    assert not run(plan, out=tmp_path / "here", device="cpu").errors
    for name, said in (("gpu", "Unknown device 'gpu'"), ("cuda", "torch finds none")):
        if not (name == "cuda" and torch.cuda.is_available()):
            with pytest.raises(InputError, match=said):
                run(plan, out=tmp_path / name, device=name)
            assert not (tmp_path / name).exists()
    errors = run(plan, out=tmp_path / "nowhere", device="meta").errors  # a device without numbers
    assert errors
    assert all("meta" in error for error in errors.values())


def test_the_command_of_a_result_names_the_folder(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(
        'name = "p"\n[zoos.z]\narchitecture = "mlp"\ndata = "digits"\nseeds = "0:1"\nepochs = 1\n'
        '[[parts]]\nverb = "accuracy"\n'
    )
    (command,) = run(file, out=tmp_path / "s").frame()["command"].to_list()
    assert command.startswith(f"intertwine study run {file} --out {tmp_path / 's'} --only ")


def test_missing_networks_are_trained(tmp_path: Path) -> None:
    how = ZooPlan(None, "mlp", "digits", (0, 1), None, {"widths": [64, 8, 10]}, {"epochs": 1})
    study = run(Plan("own", {"z": how}, (Part("accuracy", ("z",)),)), out=tmp_path / "s")
    assert it.zoo.load(tmp_path / "s" / "zoos" / "z").seeds == (0, 1)
    assert len(study.frame()) == 2


#: Runs a plan and kills itself: a kill from outside might come too late on a busy machine.
DRIVER = """
import json, os, signal, sys, threading, time
from pathlib import Path
from intertwine.lab.study.running import run
from intertwine.lab.study.plan import plan_of

def kill(folder, done, later):
    while sum(path.read_bytes().count(b"\\n") for path in folder.glob("journals/*.jsonl")) < done:
        time.sleep(0.005)
    time.sleep(later)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    plan, executor, folder, *when = sys.argv[1:]
    if when:
        threading.Thread(target=kill, args=(Path(folder), int(when[0]), float(when[1])), daemon=True).start()
    run(plan_of(json.loads(plan)), executor, out=folder)
"""


@pytest.mark.parametrize("executor", ["serial", pytest.param("processes", marks=pytest.mark.slow)])
def test_a_killed_driver_loses_and_repeats_nothing(executor: str, zoo: Any, tmp_path: Path) -> None:
    """A plan that is killed and restarted until it ends has the results of an undisturbed run."""
    parts = (
        Part("accuracy", ("z",), repeats=40),
        Part("barrier", ("z",), options={"method": "none", "points": 3}, repeats=30),
    )
    plan = plan_of(zoo, *parts)
    whole = plain(run(plan, out=tmp_path / "whole").frame())
    place, chance = tmp_path / "killed", random.Random(0)
    line = [sys.executable, "-c", DRIVER, json.dumps(plan.to_dict()), executor, str(place)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for done in (1, 40):  # killed some moments after so many tasks are stored
        command = [*line, str(done), str(chance.uniform(0, 0.05))]
        ended = subprocess.run(command, env=environment, start_new_session=True, check=False)
        assert ended.returncode == -signal.SIGKILL, "it ended before it could be killed"
        assert done <= stored(place) < len({row["key"] for row in whole})
    subprocess.run(line, env=environment, check=True)
    assert plain(Store.existing(place).frame()) == whole


def stored(folder: Path) -> int:
    """How many tasks the journals of a study hold."""
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("journals/*.jsonl"))


# -- Canonical, dissect, intervals -------------------------------------------------------------------------------------


def test_a_moved_network_is_recovered(zoo: Any, tmp_path: Path) -> None:
    """Compared with a computation by hand: weights as one vector, and the average of two sets of weights."""
    frame = run(plan_of(zoo, Part("canonical", ("z",))), out=tmp_path / "s").frame()
    assert frame.filter(frame["quantity"] == "fingerprint_equal")["value"].to_list() == [1.0] * 3
    assert len(set(frame.filter(frame["quantity"] == "fingerprint_equal")["note"].to_list())) == 3
    own = {r["quantity"]: r["value"] for r in frame.filter(frame["a"] == "z:0").to_dicts()}
    sym = it.symmetry(zoo[0], torch.zeros(1, 1, 8, 8))
    moved = sym.act(sym.random(seed=0), zoo[0])
    a, b = (torch.nn.utils.parameters_to_vector(m.parameters()).detach() for m in (zoo[0], moved))
    assert own["moved"] == pytest.approx(float((a - b).norm() / a.norm()), rel=1e-5)
    assert own["moved"] > 0.5
    torch.nn.utils.vector_to_parameters((a + b) / 2, moved.parameters())
    ((images, labels),) = zoo.dataset().batches("test", 360)
    right = float((moved(images).argmax(1) == labels).double().mean())
    assert own["average_accuracy"] == pytest.approx(right)
    assert own["average_accuracy_back"] == pytest.approx(zoo.records[0].accuracy)
    assert own["changed_predictions"] == 0
    assert own["way_back_error"] < 1e-5


def test_a_moved_network_that_is_not_recovered(zoo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("intertwine.lab.study.verbs.equivalent", lambda *args, **options: None)
    frame = run(plan_of(zoo, Part("canonical", ("z",), networks=(0,))), out=tmp_path / "s").frame()
    (row,) = frame.filter(frame["quantity"] == "way_back_error").to_dicts()
    assert (row["value"], row["note"]) == (None, "no element that maps the moved network back was found")


def test_penalties_have_wilsons_interval(zoo: Any, tmp_path: Path) -> None:
    part = Part("stitch", ("z",), pairs=((0, 1),), layers=("2",), options={"family": "identity"})
    rows = {r["quantity"]: r for r in run(plan_of(zoo, part), out=tmp_path / "s").frame().to_dicts()}
    accuracy, penalty = rows["accuracy"]["value"], rows["penalty"]
    ends = binomtest(round(accuracy * 360), 360).proportion_ci(method="wilson")
    assert penalty["high"] - penalty["value"] == pytest.approx(accuracy - ends.low, abs=1e-6)
    assert penalty["value"] - penalty["low"] == pytest.approx(ends.high - accuracy, abs=1e-6)


@pytest.fixture(scope="module")
def maps(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A network of convolutions on digits."""
    place, options = tmp_path_factory.mktemp("zoos") / "maps", {"padding": 4, "widths": (6, 8, 8, 8)}
    return it.zoo.train("lenet", seeds=[0], data="digits", out=place, options=options, epochs=1)


def test_units_are_dissected_by_handwriting_concepts(maps: Any, tmp_path: Path) -> None:
    options = {"share": 0.05, "level": 0.08, "images": 300}
    part = Part("dissect", ("z",), layers=("relu1",), options=options, grid={"rotation": (0.0, 1.0)})
    study = run(plan_of(maps, part), out=tmp_path / "s")
    assert not study.errors
    data = maps.dataset()
    concepts = handwriting_concepts(data.images[:300, ..., 0] > 8)
    for power in (0.0, 1.0):
        turn = it.rotation(6, 1.0, 0).float() if power else None
        found = it.dissect(
            maps[0], "relu1", data.inputs(data.images[:300]), concepts, turn, level=0.08, share=0.05
        )  # fmt: skip
        own = [r for r in study.frame().to_dicts() if json.loads(r["options"])["rotation"] == power]
        assert {r["note"]: r["value"] for r in own if r["quantity"] == "units"} == {
            name: len(units) for name, units in found.by_concept.items()
        }
        assert [r["value"] for r in own if r["quantity"] == "fraction"] == [found.fraction]
        assert found.fraction > 0


def test_concepts_that_do_not_fit_the_data(maps: Any, tmp_path: Path) -> None:
    def part(concepts: str) -> Part:
        return Part("dissect", ("z",), layers=("relu1",), options={"concepts": concepts})

    (error,) = run(plan_of(maps, part("synthetic")), out=tmp_path / "s").errors.values()
    assert "coloured squares of at least 16×16, but the images of digits are 1×8×8" in error
    with pytest.raises(InputError, match=r"Part 1: Unknown concepts 'stroke'\. Did you mean 'strokes'\?"):
        run(plan_of(maps, part("stroke")), out=tmp_path / "t")


def test_the_concepts_of_a_seven() -> None:
    drawn = ["#####", "....#", "...#.", "..#..", ".#..."]
    ink = torch.tensor([[letter == "#" for letter in line] for line in drawn])[None]
    found = handwriting_concepts(ink)
    masks = dict(zip(found.names, next(iter(found.batches))[0], strict=True))
    assert masks["level stroke"].nonzero().tolist() == [[0, column] for column in range(5)]
    assert masks["rising stroke"].nonzero().tolist() == [[1, 4], [2, 3], [3, 2], [4, 1]]
    assert masks["tip"].nonzero().tolist() == [[0, 0], [4, 1]]
    assert not masks["hole"].any()
    assert masks["top edge"][0].all()


def test_synthetic_concepts_for_coloured_images() -> None:
    data = concept_images(30, seed=0, size=16).dataset(10)
    inputs, concepts = CONCEPTS["synthetic"](data, 20)
    assert inputs.shape == (20, 3, 16, 16)
    assert "red" in concepts.names
    with pytest.raises(
        InputError, match=r"Images of concepts have 3 channels, but concepts = .strokes. needs grey images"
    ):
        CONCEPTS["strokes"](data, None)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_most_memory_is_that_of_the_system() -> None:
    status = Path("/proc/self/status").read_text()
    most = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    assert peak_mib() == pytest.approx(most / 1024, rel=0.02)
