"""Training into a folder: the same weights in any process, in any group, and after any number of kills."""

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import cache, partial
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import intertwine
from intertwine import zoo
from intertwine.errors import InputError, MismatchError
from intertwine.lab.zoo.manifest import read_manifest
from intertwine.lab.zoo.training import TrainingProgress

ROOT = Path(__file__).parents[3]
SMALL = {"widths": [64, 16, 10]}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """As the processes below have: sums are cut into as many parts as there are threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def digits() -> zoo.Dataset:
    return zoo.data("digits").subset(256, 100)


class Scaled(nn.Module):
    """Holds a buffer that no state dict has, as networks with fixed tables do."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([scale]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def own_network(channels: int = 4) -> nn.Module:
    """A user's own network, with everything that has a state or draws numbers."""
    return nn.Sequential(
        nn.Conv2d(1, channels, 3), nn.BatchNorm2d(channels), nn.ReLU(), Scaled(0.5), nn.Flatten(), nn.Dropout(0.2),
        nn.Linear(channels * 36, 10),
    )  # fmt: skip


def made(out: Path, architecture: Any = "mlp", **how: Any) -> zoo.Zoo:
    """A training of one group of two small perceptrons, unless told otherwise."""
    usual: dict[str, Any] = {"seeds": range(2), "recipe": "plain", "epochs": 3, "batch": 64, "data": digits()}
    if architecture == "mlp":
        usual["options"] = SMALL
    return zoo.train(architecture, out=out, **usual | how)


def weights(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.safetensors"))}


def tensors(folder: Path, seed: int) -> dict[str, Tensor]:
    return load_file(folder / f"seed{seed}.safetensors")


def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def known(folder: Path) -> list[dict[str, Any]]:
    """What the manifest says of every network, apart from the time it took."""
    return [asdict(replace(record, seconds=0.0, finished="")) for record in read_manifest(folder).records]


def files_in(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


# -- a process that can be killed --------------------------------------------------------------------------------------

# Trainings that are killed in the tests below.
TRAININGS: dict[str, dict[str, Any]] = {
    "perceptrons": {
        "architecture": "mlp", "options": SMALL, "seeds": [0, 1, 2, 3], "together": 2, "epochs": 4, "save_every": 2,
    },
    "adam": {"architecture": "mlp", "options": SMALL, "seeds": [0, 1], "recipe": "godfrey", "epochs": 4},
    "residual": {
        "architecture": "resnet20", "options": {"width": 0.25}, "seeds": [3, 5], "epochs": 3, "save_every": 1,
        "shift": 1, "flip": True,
    },
    "spawned": {
        "architecture": "mlp", "options": SMALL, "seeds": [0, 1], "epochs": 4, "save_every": 1, "spawn": 2,
    },
    "best": {
        "architecture": "own", "seeds": [0, 1, 2], "epochs": 4, "save_every": 1, "select": "best-on-test",
        "schedule": "steps", "milestones": [2], "gamma": 20.0,
    },
}  # fmt: skip


def perform(name: str, out: Path, report: Callable[[TrainingProgress], None] = lambda progress: None) -> zoo.Zoo:
    how = dict(TRAININGS[name])
    architecture = own_network if how["architecture"] == "own" else how["architecture"]
    del how["architecture"]
    return made(out, architecture, progress=report, **{"options": None, **how})


def serve() -> None:
    """The other process: carries out one training per line in a fork of itself, so that torch is loaded only once."""
    import torch._dynamo  # torch's optimizers import it when the first is made

    torch.set_num_threads(1)
    digits()
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            _carry_out(job)
        if job["kill_after"] is not None:
            time.sleep(job["kill_after"])
            os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.wait()[1])
        say("ended", code)


def say(*words: str | int) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def _carry_out(job: dict[str, Any]) -> None:
    def report(progress: TrainingProgress) -> None:
        place = [progress.seeds[0], progress.epoch]
        say("at", *place)
        if place == job["pause"]:
            say("paused", os.getpid())
            time.sleep(60)  # the test kills this process now

    code = 1
    try:
        perform(job["name"], Path(job["out"]), report)
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)


class Server:
    """The other process, seen from the tests."""

    def __init__(self) -> None:
        places = [str(ROOT), str(ROOT / "tests" / "support"), str(ROOT / "src")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", f"import {__name__} as tests; tests.serve()"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=environment, **pipes)
        self.paused: int | None = None

    def start(self, name: str, out: Path, pause: tuple[int, int] | None = None, kill: float | None = None) -> None:
        assert self.process.stdin is not None
        job = {"name": name, "out": str(out), "pause": pause, "kill_after": kill}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()

    def read(self) -> list[Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the process of the trainings has ended"
        return json.loads(line)

    def wait(self) -> tuple[int, list[tuple[int, int]]]:
        """Until the training has ended: its exit code, and the (first seed, epoch) that it reported."""
        seen: list[tuple[int, int]] = []
        while (said := self.read())[0] != "ended":
            if said[0] == "paused":
                self.paused = said[1]
                return 0, seen
            seen.append((said[1], said[2]))
        return said[1], seen

    def kill(self) -> None:
        assert self.paused is not None
        os.kill(self.paused, signal.SIGKILL)
        self.paused = None
        assert self.wait()[0] == -signal.SIGKILL

    def killed(self, name: str, out: Path, at: tuple[int, int]) -> list[tuple[int, int]]:
        """Start a training and kill it when it reports the given first seed and epoch; gives what it reported."""
        self.start(name, out, pause=at)
        seen = self.wait()[1]
        self.kill()
        assert seen[-1] == at
        return seen

    def finished(self, name: str, out: Path) -> list[tuple[int, int]]:
        self.start(name, out)
        code, seen = self.wait()
        assert code == 0
        return seen

    def close(self) -> None:
        if self.paused is not None:
            os.kill(self.paused, signal.SIGKILL)
        self.process.communicate(timeout=30)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a training that nobody stopped; made in this process, while the others are made in another."""

    @cache
    def folder(name: str) -> Path:
        place = tmp_path_factory.mktemp(name) / "zoo"
        perform(name, place)
        return place

    return folder


def assert_same_zoo(folder: Path, other: Path) -> None:
    assert weights(folder) == weights(other)
    assert known(folder) == known(other)
    assert read_manifest(folder).plan == read_manifest(other).plan
    assert files_in(folder) == files_in(other) == {".lock", "manifest.json", *weights(other)}
    assert not (folder / "training").exists()


# -- the same weights every time ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRAININGS)
def test_the_same_call_gives_the_same_bytes_in_another_process(
    name: str, server: Server, whole: Callable[[str], Path], tmp_path: Path
) -> None:
    server.finished(name, tmp_path / "zoo")
    assert_same_zoo(tmp_path / "zoo", whole(name))


def test_the_same_call_gives_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    made(tmp_path / "a", own_network)
    torch.manual_seed(99)  # what was drawn before does not matter
    again = made(tmp_path / "b", own_network)
    assert weights(tmp_path / "a") == weights(tmp_path / "b")
    assert known(tmp_path / "a") == known(tmp_path / "b")
    assert again.records[0].sha256 != again.records[1].sha256
    assert apart(tensors(tmp_path / "a", 0), tensors(tmp_path / "a", 1)) > 0.01
    assert torch.initial_seed() == 99  # and the user's own random numbers are left alone
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(99)))


def test_a_data_set_by_its_name_is_the_data_set_itself(tmp_path: Path) -> None:
    made(tmp_path / "named", data="digits", epochs=1)
    made(tmp_path / "given", data=zoo.data("digits"), epochs=1)
    assert weights(tmp_path / "named") == weights(tmp_path / "given")
    assert read_manifest(tmp_path / "named").plan == read_manifest(tmp_path / "given").plan


@pytest.mark.parametrize("architecture", ["mlp", own_network], ids=["perceptron", "convolutions, norm and dropout"])
def test_a_network_does_not_feel_who_is_beside_it(architecture: Any, tmp_path: Path) -> None:
    how: dict[str, Any] = {"seeds": range(4), "precision": "float64"}
    made(tmp_path / "alone", architecture, together=1, **how)
    crowd = made(tmp_path / "crowd", architecture, together=4, **how)
    assert [record.together for record in crowd.records] == [4] * 4
    for seed in range(4):
        alone = tensors(tmp_path / "alone", seed)
        assert alone["1.weight"].dtype == torch.float64
        assert apart(alone, tensors(tmp_path / "crowd", seed)) < 1e-10
    ours, theirs = known(tmp_path / "alone"), known(tmp_path / "crowd")
    assert [r["history"] for r in ours] == [r["history"] for r in theirs]


def test_new_seeds_leave_the_old_networks_alone(tmp_path: Path) -> None:
    made(tmp_path, seeds=[0, 1])
    before = weights(tmp_path)
    times = {name: (tmp_path / name).stat().st_mtime_ns for name in before}
    old = known(tmp_path)
    seen: list[TrainingProgress] = []
    grown = made(tmp_path, seeds=[3, 1, 0, 2], progress=seen.append)
    assert grown.seeds == (0, 1, 2, 3)
    assert {seed for progress in seen for seed in progress.seeds} == {2, 3}
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in before} == times
    assert {name: data for name, data in weights(tmp_path).items() if name in before} == before
    assert known(tmp_path)[:2] == old
    made(tmp_path / "alone", seeds=[2])
    assert apart(tensors(tmp_path, 2), tensors(tmp_path / "alone", 2)) < 1e-5
    seen.clear()
    made(tmp_path, seeds=[2], progress=seen.append)  # nothing is left to do
    assert (seen, len(weights(tmp_path))) == ([], 4)


def test_the_manifest_says_what_was_asked_for(tmp_path: Path) -> None:
    options = {"widths": (64, 16, 10), "activation": "tanh"}
    found = made(tmp_path, options=options, rate=0.05, milestones=[2], schedule="steps", seeds=[7]).manifest
    plan = read_manifest(tmp_path).plan
    assert plan == found.plan
    assert plan.architecture == {"name": "mlp", "options": {"widths": [64, 16, 10], "activation": "tanh"}}
    asked = {"name": "plain", "rate": 0.05, "epochs": 3, "batch": 64, "milestones": [2], "schedule": "steps"}
    assert {key: plan.recipe[key] for key in asked} == asked
    assert (plan.precision, plan.select) == ("float32", "last")
    assert (plan.data["name"], plan.data["checksum"]) == ("digits[:256, :100]", digits().checksum)
    record = found.records[0]
    assert (record.seed, record.file, record.device, record.epoch) == (7, "seed7.safetensors", "cpu", 3)
    # as they are imported: a checkout on the path is not installed
    assert record.versions == {
        "python": platform.python_version(), "intertwine": intertwine.__version__, "torch": torch.__version__,
        "numpy": np.__version__,
    }  # fmt: skip
    assert record.seconds > 0
    with safe_open(tmp_path / record.file, "pt") as file:
        assert file.metadata() == {"seed": "7"}


def test_what_was_trained_otherwise_is_not_mixed_in(tmp_path: Path) -> None:
    made(tmp_path, seeds=[0])
    before = files_in(tmp_path)
    others: dict[str, dict[str, Any]] = {
        "recipe.rate: 0.1 stored, 0.05 wanted": {"rate": 0.05},
        r"architecture.options.widths: \[64, 16, 10\] stored, \[64, 8, 10\] wanted": {
            "options": {"widths": [64, 8, 10]}
        },
        "architecture.options.activation: None stored, tanh wanted": {"options": {**SMALL, "activation": "tanh"}},
        "data.checksum: .* stored, .* wanted": {"data": zoo.data("digits")},
        "precision: float32 stored, float64 wanted": {"precision": "float64"},
        "select: last stored, best-on-test wanted": {"select": "best-on-test"},
    }
    for words, how in others.items():
        with pytest.raises(MismatchError, match=rf"already holds a zoo.*{words}.*Give another folder") as caught:
            made(tmp_path, **{"seeds": [1], **how})
        assert str(tmp_path) in str(caught.value)
    assert files_in(tmp_path) == before
    made(tmp_path, seeds=[1], recipe=replace(zoo.Recipe.from_dict(read_manifest(tmp_path).plan.recipe), name="mine"))
    assert len(weights(tmp_path)) == 2  # a recipe is what it does, whatever its name is


# -- a user's own network ----------------------------------------------------------------------------------------------


def test_a_network_of_the_users_own(tmp_path: Path) -> None:
    trained = made(tmp_path, own_network)
    name = f"{own_network.__module__}.own_network"
    assert trained.manifest.plan.architecture == {"name": name, "options": {}, "own": True}
    assert set(tensors(tmp_path, 0)) == set(own_network().state_dict())
    with pytest.raises(InputError, match=rf"networks of your own function {name}.*zoo.load\(folder, factory\)"):
        zoo.load(tmp_path)
    again = zoo.load(tmp_path, own_network)
    inputs = digits().inputs(digits().test_images)
    for a, b in zip(trained, again, strict=True):
        assert not a.training
        assert torch.equal(a(inputs), b(inputs))
    assert again.evaluate(digits()).accuracy.tolist() == [record.accuracy for record in again.records]
    with pytest.raises(InputError, match=r"options apply to a named architecture only.*Set them in the function"):
        made(tmp_path / "new", own_network, options={"channels": 8})


class Maker:
    """Builds networks, and has no name of its own."""

    def __call__(self) -> nn.Module:
        return own_network()


def test_a_function_with_some_of_its_arguments_given_keeps_its_name(tmp_path: Path) -> None:
    made(tmp_path / "a", partial(own_network, channels=2), epochs=1)
    grown = made(tmp_path / "a", partial(own_network, channels=2), epochs=1, seeds=[2])
    assert len(grown) == 3
    assert grown.manifest.plan.architecture["options"] == {"channels": 2}
    with pytest.raises(MismatchError, match=r"architecture.options.channels: 2 stored, 3 wanted"):
        made(tmp_path / "a", partial(own_network, channels=3), epochs=1, seeds=[3])
    built = made(tmp_path / "b", Maker(), epochs=1, seeds=[0])
    assert built.manifest.plan.architecture["name"] == f"{Maker.__module__}.Maker"
    assert len(made(tmp_path / "b", Maker(), epochs=1, seeds=[1])) == 2


# -- spawning ----------------------------------------------------------------------------------------------------------


def test_spawned_networks_share_their_first_epochs(tmp_path: Path) -> None:
    made(tmp_path, seeds=range(3), epochs=4, spawn=2)
    first, *others = (record["history"] for record in known(tmp_path))
    for other in others:
        assert other["train_loss"][:2] == first["train_loss"][:2]
        assert other["accuracy"][:2] == first["accuracy"][:2]
        assert other["train_loss"][2] != first["train_loss"][2]
        assert other["train_loss"][3] != first["train_loss"][3]


@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize("spawn", [1, 2])
def test_spawned_networks_are_copies_at_first(spawn: int, together: int, tmp_path: Path) -> None:
    """From epoch 2 on the rate is zero: the weights are those after two epochs, shared or not."""
    how: dict[str, Any] = {"epochs": 3, "schedule": "steps", "milestones": [2], "gamma": 0.0}
    made(tmp_path / "spawned", seeds=[0, 4], together=together, spawn=spawn, spawn_seed=9, **how)
    made(tmp_path / "parent", seeds=[9], **how)
    first, second = (tensors(tmp_path / "spawned", seed) for seed in (0, 4))
    assert (apart(first, second) == 0) == (spawn == 2)
    assert (apart(first, tensors(tmp_path / "parent", 9)) < 1e-6) == (spawn == 2)


def test_the_parent_of_spawned_networks_is_the_network_of_its_seed(tmp_path: Path) -> None:
    how: dict[str, Any] = {"epochs": 4, "precision": "float64"}
    made(tmp_path / "spawned", own_network, seeds=[5, 6], spawn=2, spawn_seed=5, **how)
    made(tmp_path / "plain", own_network, seeds=[5, 6], **how)
    assert apart(tensors(tmp_path / "spawned", 5), tensors(tmp_path / "plain", 5)) < 1e-10
    assert apart(tensors(tmp_path / "spawned", 6), tensors(tmp_path / "plain", 6)) > 0.01
    assert known(tmp_path / "spawned")[0]["history"] == known(tmp_path / "plain")[0]["history"]


# -- which weights are kept, and when things are measured and saved ----------------------------------------------------

# A training that gets worse in its last epochs, so that the best weights are not the last ones.
WORSE: dict[str, Any] = {"schedule": "steps", "milestones": [2], "gamma": 20.0, "epochs": 4, "seeds": range(4)}


@pytest.mark.parametrize("spawn", [0, 2])
def test_the_best_weights_on_the_test_part_are_kept(spawn: int, tmp_path: Path) -> None:
    best = made(tmp_path / "best", select="best-on-test", spawn=spawn, **WORSE)
    last = made(tmp_path / "last", spawn=spawn, **WORSE)
    for record, other in zip(best.records, last.records, strict=True):
        scores = [score for score in record.history["accuracy"] if score is not None]
        assert record.history == other.history
        assert record.accuracy == record.best_accuracy == other.best_accuracy == pytest.approx(max(scores), abs=1e-6)
        assert record.epoch == record.best_epoch == other.best_epoch == 1 + scores.index(max(scores)) < 4
        assert (other.epoch, other.accuracy) == (4, pytest.approx(scores[-1], abs=1e-6))
        assert other.accuracy < record.accuracy
    assert best.evaluate(digits()).accuracy.tolist() == [record.accuracy for record in best.records]
    assert last.evaluate(digits()).accuracy.tolist() == [record.accuracy for record in last.records]
    assert best.evaluate(digits()).loss.tolist() == pytest.approx([r.loss for r in best.records], rel=1e-5)


def test_tests_are_taken_as_often_as_asked(tmp_path: Path) -> None:
    record = made(tmp_path, epochs=5, seeds=[0], score_every=2, select="best-on-test").records[0]
    assert [score is not None for score in record.history["accuracy"]] == [False, True, False, True, True]
    assert record.epoch in (2, 4, 5)
    assert len(record.history["train_loss"]) == 5


@pytest.mark.parametrize(("epochs", "asked", "every"), [(5, 2, 2), (5, 1, 1), (20, None, 2), (4, None, 1)])
def test_states_are_written_as_often_as_asked(epochs: int, asked: int | None, every: int, tmp_path: Path) -> None:
    saved: list[int] = []

    def look(progress: TrainingProgress) -> None:
        for state in (tmp_path / "training").glob("*"):
            with safe_open(state, "pt") as file:
                saved.append(int(file.metadata()["epoch"]))
            return
        saved.append(0)

    made(tmp_path, epochs=epochs, save_every=asked, score_every=epochs, seeds=[0], progress=look)
    wanted = [0, *(epoch if epoch == epochs else epoch - epoch % every for epoch in range(1, epochs + 1))]
    assert sorted(set(saved)) == sorted(set(wanted))


# -- killed and taken up again -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "moment", "saved"),
    [
        ("perceptrons", (0, 0), (0, 0)),  # in the first epoch: there is a manifest and nothing else
        ("perceptrons", (0, 2), (0, 2)),  # just after a state was written
        ("perceptrons", (0, 3), (0, 2)),  # an epoch after it
        ("perceptrons", (0, 4), (0, 4)),  # trained, but not in the zoo yet
        ("perceptrons", (2, 1), (2, 0)),  # the first group is done, the second has no state
        ("perceptrons", (2, 3), (2, 2)),
        ("adam", (0, 1), (0, 1)),
        ("adam", (0, 3), (0, 3)),
        ("residual", (3, 1), (3, 1)),
        ("residual", (3, 2), (3, 2)),
        ("spawned", (0, 3), (0, 3)),
        ("best", (0, 1), (0, 1)),
        ("best", (0, 3), (0, 3)),
    ],
)
def test_a_killed_training_ends_with_the_same_weights(
    name: str,
    moment: tuple[int, int],
    saved: tuple[int, int],
    server: Server,
    whole: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "zoo"
    server.killed(name, folder, moment)
    states = [file for file in files_in(folder) if file.startswith("training")]
    assert len(states) == (saved[1] > 0)
    assert len(read_manifest(folder).records) == len(weights(folder)) == (2 if moment[0] == 2 else 0)
    seen = server.finished(name, folder)
    epochs = TRAININGS[name]["epochs"]
    if saved[1] < epochs:
        assert next(place for place in seen if place != saved) == (
            saved[0],
            saved[1] + 1,
        )  # what was saved is not redone
    assert_same_zoo(folder, whole(name))


def test_a_training_killed_again_and_again(server: Server, whole: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "zoo"
    reached = [server.killed("perceptrons", folder, at) for at in ((0, 1), (0, 3), (0, 4), (2, 2), (2, 3), (2, 4))]
    assert [seen[-2:-1] for seen in reached[3:]] == [[(2, 1)], [(2, 2)], [(2, 3)]]
    server.finished("perceptrons", folder)
    assert_same_zoo(folder, whole("perceptrons"))


def test_a_training_killed_at_any_moment(server: Server, whole: Callable[[str], Path], tmp_path: Path) -> None:
    """Not where it waits for us, but in the middle of whatever it does, the writing of files included."""
    folder = tmp_path / "zoo"
    for delay in (0.01, 0.05, 0.08, 0.11, 0.03, 0.14, 0.17, 0.07, 0.2):
        server.start("perceptrons", folder, kill=delay)
        assert server.wait()[0] in (0, -signal.SIGKILL)
    server.finished("perceptrons", folder)
    assert weights(folder) == weights(whole("perceptrons"))
    assert known(folder) == known(whole("perceptrons"))


class Stopped(Exception):
    """Raised by a report, to leave a training in the middle."""


def stop_at(epoch: int) -> Callable[[TrainingProgress], None]:
    def report(progress: TrainingProgress) -> None:
        if progress.epoch == epoch:
            raise Stopped

    return report


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """The folder of a training that has done two of its three epochs, with the state of both."""
    with pytest.raises(Stopped):
        made(tmp_path / "stopped", save_every=2, progress=stop_at(2))
    return tmp_path / "stopped"


def test_what_a_killed_writer_left_behind_does_no_harm(stopped: Path, tmp_path: Path) -> None:
    made(tmp_path / "whole")
    (state,) = (stopped / "training").iterdir()
    for name in (".manifest.json.part", ".seed0.safetensors.part", ".seed1.safetensors.part"):
        (stopped / name).write_bytes(b"half of a fi")
    (stopped / "training" / f".{state.name}.part").write_bytes(b"half of a st")
    made(stopped)
    assert_same_zoo(stopped, tmp_path / "whole")


def test_without_its_state_a_training_begins_anew(stopped: Path, tmp_path: Path) -> None:
    made(tmp_path / "whole")
    shutil.rmtree(stopped / "training")
    seen: list[TrainingProgress] = []
    made(stopped, progress=seen.append)
    assert seen[0].epoch == 0
    assert_same_zoo(stopped, tmp_path / "whole")


def test_a_state_that_cannot_be_read(stopped: Path) -> None:
    (state,) = (stopped / "training").iterdir()
    state.write_bytes(state.read_bytes()[:100])
    with pytest.raises(InputError, match=r"training state of the seeds \[0, 1\] in .*cannot be read.*Delete it"):
        made(stopped)
    state.unlink()
    assert len(made(stopped)) == 2


@pytest.mark.parametrize(
    "how",
    [
        {"rate": 0.05},
        {"options": {**SMALL, "activation": "tanh"}},
        {"data": lambda: digits().normalised([8], [4])},
        {"data": lambda: zoo.data("digits").subset(200, 100)},
        {"precision": "float64"},
        {"select": "best-on-test"},
        {"seeds": [1, 0]},
    ],
    ids=["recipe", "architecture", "normalisation", "data", "precision", "selection", "seeds"],
)
def test_the_state_of_another_training_is_not_taken_up(how: dict[str, Any], stopped: Path, tmp_path: Path) -> None:
    how = {name: value() if callable(value) else value for name, value in how.items()}
    (stopped / "manifest.json").unlink()  # which would refuse most of these
    made(tmp_path / "fresh", **how)
    seen: list[TrainingProgress] = []
    made(stopped, progress=seen.append, **how)
    assert seen[0].epoch == 0
    assert weights(stopped) == weights(tmp_path / "fresh")


def test_a_second_training_into_one_folder_is_refused(
    server: Server, whole: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "zoo"
    server.start("perceptrons", folder, pause=(0, 2))
    server.wait()
    before = files_in(folder)
    with pytest.raises(InputError, match=r"Another process is writing into .*zoo. Wait until it has ended"):
        perform("perceptrons", folder)
    assert files_in(folder) == before
    server.kill()  # and the lock with it
    perform("perceptrons", folder)
    assert_same_zoo(folder, whole("perceptrons"))


# -- progress ----------------------------------------------------------------------------------------------------------


def test_progress_grows_to_the_end(tmp_path: Path) -> None:
    seen: list[TrainingProgress] = []
    made(tmp_path, seeds=range(3), together=2, progress=seen.append)
    done = [progress.done for progress in seen]
    assert done == sorted(done)
    assert 0 < done[0] < done[-1] == pytest.approx(1.0)
    ends = [(p.seeds, p.epoch, pytest.approx(p.done)) for p in seen if p.epoch]
    shares = [(2 / 9, 4 / 9, 6 / 9), (7 / 9, 8 / 9, 1.0)]
    assert ends == [
        (group, epoch, share[epoch - 1])
        for group, share in zip([(0, 1), (2,)], shares, strict=True)
        for epoch in (1, 2, 3)
    ]
    assert all(progress.left is not None and isfinite(progress.left) and progress.left >= -1e-9 for progress in seen)
    assert seen[-1].left == pytest.approx(0, abs=1e-6)
    assert all(progress.epochs == 3 for progress in seen)
    assert all(progress.accuracy is not None and 0 <= progress.accuracy <= 1 for progress in seen[1:])
    means = read_manifest(tmp_path).records[2].history["accuracy"]
    assert [p.accuracy for p in seen if p.seeds == (2,) and p.epoch] == pytest.approx(means, abs=1e-6)


def test_progress_goes_on_where_it_was(stopped: Path) -> None:
    seen: list[TrainingProgress] = []
    made(stopped, seeds=range(4), together=2, progress=seen.append)
    assert 4 / 12 < seen[0].done < 6 / 12  # two epochs of two networks, of three epochs of four, and a little more
    assert seen[-1].done == pytest.approx(1.0)
    assert all(progress.left is not None and isfinite(progress.left) for progress in seen)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"seeds": []}, r"There are no seeds. Give at least one, such as seeds=range\(8\)"),
        ({"seeds": [1, 2, 1]}, r"different integers from 0 .*but are \[1, 2, 1\]"),
        ({"seeds": [0, -3]}, r"different integers from 0 .*but are \[0, -3\]"),
        ({"seeds": [2**63]}, r"below 2\^63"),
        ({"seeds": (seed / 2 for seed in range(3))}, r"Seeds must be integers.*float"),
        ({"together": 0}, "together must be at least 1, but is 0"),
        ({"together": -1}, "together must be at least 1, but is -1"),
        ({"save_every": 0}, "save_every must be at least 1, but is 0"),
        ({"score_every": -1}, "score_every must be at least 1, but is -1"),
        ({"select": "best"}, "Unknown value of select 'best'. .*one of: last, best-on-test"),
        ({"precision": "half"}, "Unknown precision 'half'. .*one of: float64, float32, tf32, bfloat16"),
        ({"precision": "tf32", "device": "cpu"}, "tf32 needs a GPU, but the device is cpu. Use float32"),
        ({"device": "toaster"}, "Unknown device 'toaster'. Use a device of torch such as cpu, cuda"),
        ({"recipe": "plane"}, r"Unknown recipe 'plane'. Did you mean 'plain'\? Choose one of: godfrey"),
        ({"speed": 3}, "Unknown entry of a recipe 'speed'. .*one of: optimizer, rate"),
        ({"data": "digit"}, r"Unknown data set 'digit'. Did you mean 'digits"),
        ({"options": {"width": 3}}, "Unknown option of mlp 'width'. Did you mean 'widths'"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_written(
    how: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=words):
        made(tmp_path / "zoo", **how)
    assert not (tmp_path / "zoo").exists()


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"Unknown zoo network 'resnet21'. Did you mean 'resnet"):
        made(tmp_path / "zoo", "resnet21")


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a letter")
    for place in (tmp_path / "file", tmp_path / "file" / "zoo"):
        with pytest.raises(InputError, match=r"cannot be written into .*file.* \(.*Choose another folder"):
            made(place)
    assert (tmp_path / "file").read_text() == "a letter"


# -- fitting an architecture to the data -------------------------------------------------------------------------------


def images(channels: int, side: int, classes: int) -> zoo.Dataset:
    pairs = [(torch.zeros(4, side, side, channels, dtype=torch.uint8), torch.arange(4) % classes) for _ in range(2)]
    names = [f"class {i}" for i in range(classes)]
    return zoo.Dataset.of("blank", pairs[0], pairs[1], [0] * channels, [255] * channels, names)


@pytest.mark.parametrize(
    ("name", "data", "options", "fitted"),
    [
        ("mlp", images(3, 5, 4), {}, {"widths": [75, 512, 4]}),
        ("mlp", images(3, 5, 4), {"widths": (75, 7, 4)}, {"widths": [75, 7, 4]}),
        ("lenet", images(1, 28, 10), {}, {}),
        ("lenet", images(3, 20, 10), {}, {"in_channels": 3, "side": 20}),
        ("resnet20", images(1, 9, 7), {"width": 0.25}, {"in_channels": 1, "classes": 7, "width": 0.25}),
        ("resnet20", images(3, 32, 10), {"width": 0.25}, {"width": 0.25}),
    ],
)
def test_channels_classes_and_size_are_taken_from_the_data(
    name: str, data: zoo.Dataset, options: dict[str, Any], fitted: dict[str, Any], tmp_path: Path
) -> None:
    found = made(tmp_path, name, data=data, options=options, seeds=[0], epochs=1, batch=4)
    assert found.manifest.plan.architecture == {"name": name, "options": fitted}
    assert found[0](data.inputs(data.images)).shape == (4, len(data.classes))


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("myrtle", {"width": 4}, r"myrtle cannot read the images of digits.* \(1×8×8\): its forward raised Runtime"),
        ("gpt", {}, r"gpt cannot read the images of digits.* \(1×8×8\): .*Give it options that fit, or choose another"),
        ("lenet", {}, r"Images of side=8 with padding=2 are too small"),
        (
            "mlp",
            {"widths": [64, 5, 3]},
            r"does not fit the 10 classes of .*returns \(2, 3\) instead of \(2, 10\)",
        ),
        ("mlp", {"widths": [50, 10]}, "mlp cannot read the images of digits"),
        ("mlp", {"activation": nn.ReLU}, r"The option activation=<class .*ReLU.*manifest. Give a name"),
        ("mlp", {"widths": torch.tensor([64, 10])}, r"The option widths=tensor.*or pass a function that"),
    ],
)
def test_an_architecture_that_does_not_fit_is_refused(
    name: str, options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=words):
        made(tmp_path / "zoo", name, options=options)
    assert not (tmp_path / "zoo").exists()


def test_an_own_network_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"for two images it returns tuple instead of \(2, 10\)"):
        made(tmp_path / "zoo", two_answers)


def two_answers() -> nn.Module:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x

    return Two()


def test_a_training_that_diverges_is_written_down_as_such(tmp_path: Path) -> None:
    """JSON has no word for what the loss becomes; the manifest stays readable by anyone."""
    made(tmp_path, seeds=[0], recipe="plain", epochs=2, rate=1e20)

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    text = (tmp_path / "manifest.json").read_text(encoding="utf-8")
    record = json.loads(text, parse_constant=refuse)["records"][0]
    assert record["loss"] == 1e30
    assert zoo.load(tmp_path).records[0].accuracy < 0.3
