"""The command line: `zoo train | list | evaluate | download`, what they print and write, and their refusals."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from hashlib import md5
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from statistics import mean, stdev
from threading import Thread
from typing import Any

import jaxtyping
import pytest
import torch
from rich.progress import Progress as Bar
from torch import nn

from intertwine import zoo
from intertwine.cli import main
from intertwine.cli.arguments import parse_option
from intertwine.cli.output import duration
from intertwine.lab.zoo.datasets.downloads import SOURCES, DownloadFile
from intertwine.lab.zoo.manifest import read_manifest
from intertwine.lab.zoo.networks.registry import architectures
from intertwine.lab.zoo.recipe import seeds

pytestmark = pytest.mark.usefixtures("one_thread")

SOURCE = Path(__file__).parents[2] / "src"
SMALL = ("--option", "widths=[64,16,10]", "--epochs", "2")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `intertwine zoo …`; gives exit code, standard output and standard error."""

    def done(*words: str | Path) -> tuple[int, str, str]:
        code = main(["zoo", *map(str, words)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return done


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("trained") / "zoo"
    assert main(["zoo", "train", "mlp", "--seeds", "0:3,7", *SMALL, "--out", str(place)]) == 0
    return place


def process(*words: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, *flags, "-m", "intertwine.cli", *words]
    return subprocess.run(line, capture_output=True, text=True, env=environment, check=False)


def own_network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


# -- train -------------------------------------------------------------------------------------------------------------


def test_the_command_of_the_readme(tmp_path: Path) -> None:
    """As a user gives it: another process, nothing of the tests in it."""
    place = str(tmp_path / "zoo")
    words = ("zoo", "train", "mlp", "--data", "digits", "--seeds", "0:4", "--epochs", "2", "--out", place)
    done = process(*words)
    assert done.returncode == 0, done.stderr
    assert sorted(file.name for file in Path(place).glob("*.safetensors")) == [f"seed{i}.safetensors" for i in range(4)]
    found = zoo.load(place)
    assert found.manifest.plan.architecture == {"name": "mlp", "options": {"widths": [64, 512, 10]}}
    lines = done.stdout.splitlines()
    assert lines[0] == found.words()
    assert lines[1].split() == ["seed", "accuracy", "loss", "best", "epoch", "seconds", "file"]
    for line, record in zip(lines[2:6], found.records, strict=True):
        best = f"{record.best_accuracy:.2%} at {record.best_epoch}"
        cells = [str(record.seed), f"{record.accuracy:.2%}", f"{record.loss:.4f}", best, f"{record.seconds:.1f}"]
        assert re.split(r"  +", line.strip()) == [*cells, record.file]
    scores = [record.accuracy for record in found.records]
    assert lines[6] == f"mean accuracy {mean(scores):.2%}, standard deviation {stdev(scores):.2%}"
    assert len(lines) == 7
    assert "Warning" not in done.stderr


def test_what_is_asked_for_is_what_is_trained(run: Run, tmp_path: Path) -> None:
    words = ("--seeds", "5,3", "--option", "widths=[64,8,10]", "--option", "activation=tanh", "--epochs", "3")
    more = ("--batch", "200", "--rate", "0.02", "--spawn", "1", "--precision", "float64", "--together", "1")
    last = (
        "--save-every",
        "2",
        "--score-every",
        "2",
        "--select",
        "best-on-test",
        "--recipe",
        "chen",
        "--device",
        "cpu",
    )
    code, _, _ = run("train", "mlp", "--out", tmp_path, *words, *more, *last)
    assert code == 0
    manifest = read_manifest(tmp_path)
    assert manifest.plan.architecture["options"] == {"widths": [64, 8, 10], "activation": "tanh"}
    asked = {"name": "chen", "epochs": 3, "batch": 200, "rate": 0.02, "spawn": 1}
    assert {name: manifest.plan.recipe[name] for name in asked} == asked
    assert (manifest.plan.precision, manifest.plan.select) == ("float64", "best-on-test")
    assert [(record.seed, record.together) for record in manifest.records] == [(3, 1), (5, 1)]
    # the shared epoch is always measured; the third is the last
    assert [score is None for score in manifest.records[0].history["accuracy"]] == [False, False, False]


def test_the_same_command_again_does_nothing_new(run: Run, trained: Path) -> None:
    times = {file.name: file.stat().st_mtime_ns for file in trained.glob("[ms]*")}
    code, said, _ = run("train", "mlp", "--seeds", "0:3,7", *SMALL, "--out", trained)
    assert code == 0
    assert "4 networks: mlp on digits by plain" in said
    assert {file.name: file.stat().st_mtime_ns for file in trained.glob("[ms]*")} == times
    code, said, err = run("train", "mlp", "--seeds", "0:3", "--epochs", "3", *SMALL[:2], "--out", trained)
    assert (code, said) == (2, "")
    assert "already holds a zoo with another training: recipe.epochs: 2 stored, 3 wanted" in err


def test_training_as_json_prints_json_alone(run: Run, tmp_path: Path) -> None:
    code, said, _ = run("train", "mlp", "--seeds", "4", *SMALL, "--out", tmp_path / "zoo", "--json")
    assert code == 0
    record = read_manifest(tmp_path / "zoo").records[0]
    network = {"seed": 4, "file": "seed4.safetensors", "accuracy": record.accuracy, "loss": record.loss}
    assert json.loads(said) == {"folder": str(tmp_path / "zoo"), "networks": [network]}


def test_the_bar_says_where_a_training_stands(monkeypatch: pytest.MonkeyPatch, run: Run, tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(Bar, "update", lambda bar, task, **fields: told.append(fields))
    run("train", "mlp", "--seeds", "0:3", "--together", "2", *SMALL, "--out", tmp_path)
    done = [fields["completed"] for fields in told]
    assert done == sorted(done)
    assert done[-1] == pytest.approx(1.0)
    assert told[0]["description"] == "seeds 0 to 1, epoch 1 of 2"
    assert told[-1]["description"] == "seed 2, epoch 2 of 2"
    accuracy = read_manifest(tmp_path).records[2].accuracy
    assert told[-1]["accuracy"] == f"accuracy {accuracy:.1%}"
    assert all(re.fullmatch(r"\d+ (s|min) left", fields["left"]) for fields in told)
    assert told[-1]["left"] == "0 s left"


def test_the_bar_is_drawn_on_standard_error(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    code, said, err = run("train", "mlp", "--seeds", "0", *SMALL, "--out", tmp_path, "--json")
    assert code == 0
    assert len(json.loads(said)["networks"]) == 1
    assert "epoch 2 of 2" in err
    assert "left" in err


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "0 s"), (99.0, "99 s"), (100.0, "2 min"), (5990.0, "100 min"), (6000.0, "1.7 h"), (86400.0, "24.0 h")],
)
def test_times_are_read_at_a_glance(seconds: float, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("text", "found"),
    [("0:3", [0, 1, 2]), (":2", [0, 1]), ("7", [7]), ("3,5,8", [3, 5, 8]), ("0:2,9,4:6", [0, 1, 9, 4, 5])],
)
def test_seeds_as_they_are_written(text: str, found: list[int]) -> None:
    assert seeds(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("width=64", ("width", 64)),
        ("width=0.5", ("width", 0.5)),
        ("norm=False", ("norm", False)),
        ("widths=[8,16]", ("widths", [8, 16])),
        ("widths=(8,16)", ("widths", (8, 16))),
        ("activation=tanh", ("activation", "tanh")),
        ("activation=leaky_relu:0.1", ("activation", "leaky_relu:0.1")),
        ("shortcut=None", ("shortcut", None)),
        ("a=b=c", ("a", "b=c")),
        ("a=", ("a", "")),
    ],
)
def test_options_as_they_are_written(text: str, found: tuple[str, Any]) -> None:
    assert parse_option(text) == found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["resnet21"],
            "Unknown zoo network 'resnet21'. Did you mean 'resnet",
        ),
        (["mlp", "--recipe", "quick"], "Unknown recipe 'quick'."),
        (["mlp", "--data", "mnits"], "Unknown data set 'mnits'. Did you mean 'mnist"),
        (["mlp", "--seeds", "a:b"], "The seeds 'a:b' are not numbers"),
        (["mlp", "--seeds", "0:"], "The seeds '0:' are not numbers"),
        (["mlp", "--seeds", "1,,2"], "The seeds '1,,2' are not numbers"),
        (["mlp", "--seeds", "5:5"], "The seeds '5:5' are an empty range"),
        (["mlp", "--seeds", "1,1"], "Seeds must be different integers from 0"),
        (["mlp", "--option", "widths"], "--option 'widths' is not of the form NAME=VALUE. Write it such as width=64."),
        (["mlp", "--option", "=3"], "--option '=3' is not of the form NAME=VALUE."),
        (["mlp", "--option", "depth=3"], "Unknown option of mlp 'depth'."),
        (["gpt"], "gpt cannot read the images of digits (1×8×8)"),
        (["mlp", "--spawn", "99"], "spawn must be below the number of epochs, 10, but is 99."),
        (["mlp", "--precision", "half"], "Unknown precision 'half'."),
        (["mlp", "--data", "folder:nowhere"], "nowhere"),
    ],
)
def test_what_cannot_be_trained(words: list[str], said: str, run: Run, tmp_path: Path) -> None:
    code, out, err = run("train", *words, "--out", tmp_path / "zoo")
    assert (code, out) == (2, "")
    assert said in err
    assert err.lstrip("\n").startswith("intertwine: ")
    assert "Traceback" not in err
    assert not (tmp_path / "zoo").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(run: Run, trained: Path, tmp_path: Path) -> None:
    said = "The device 'cuda' needs a GPU, but torch finds none. Use the device cpu."
    for words in (("train", "mlp", "--out", tmp_path / "zoo"), ("evaluate", trained)):
        code, out, err = run(*words, "--device", "cuda")
        assert (code, out) == (2, "")
        assert said in err
    assert not (tmp_path / "zoo").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train"], "the following arguments are required: NAME, --out"),
        (["train", "mlp", "--out", "zoo", "--epochs", "0"], "0 is not 1 or more"),
        (["train", "mlp", "--out", "zoo", "--together", "-1"], "-1 is not 1 or more"),
        (
            ["train", "mlp", "--out", "zoo", "--select", "best"],
            "Unknown value 'best' for --select. Did you mean 'best-on-test",
        ),
        (["train", "mlp", "--out", "zoo", "--rate", "x"], "'x' is not a number"),
        (["evaluate"], "the following arguments are required: DIR"),
        (["forget"], "Unknown value 'forget' for COMMAND. "),
    ],
)
def test_a_line_that_is_no_command(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["zoo", *words])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_a_training_that_is_stopped_by_hand(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*words: object, **named: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Bar, "update", stop)
        code, out, err = run("train", "mlp", "--seeds", "0:2", *SMALL, "--out", tmp_path)
    assert (code, out) == (130, "")
    assert "intertwine: stopped" in err
    code, out, _ = run("list", tmp_path)
    goes_on = "no network is finished yet; run the same `intertwine zoo train` again to continue"
    assert (code, out) == (0, f"0 networks: mlp on digits by plain, in {tmp_path}: {goes_on}\n")
    code, _, err = run("evaluate", tmp_path)
    assert code == 2
    assert f", {goes_on}." in err
    assert run("train", "mlp", "--seeds", "0:2", *SMALL, "--out", tmp_path)[0] == 0
    assert len(read_manifest(tmp_path).records) == 2


# -- list --------------------------------------------------------------------------------------------------------------


def test_the_names_are_listed(run: Run) -> None:
    code, said, _ = run("list")
    assert code == 0
    lines = said.splitlines()
    rows = {line.split()[0]: line for line in lines if line.strip()}
    assert lines[0].split() == ["architecture", "parameters", "what", "it", "is"]
    for name in architectures():
        assert name in rows
    assert re.split(r"  +", rows["lenet"].strip())[:2] == ["lenet", "61.7 k"]
    assert "269.7 k" in rows["resnet20"]
    assert rows["godfrey"].split()[1:5] == ["50", "32", "adam", "0.001"]
    assert "Godfrey et al. 2022" in rows["godfrey"]
    assert lines[-1] == "data sets: digits, mnist, fashion-mnist, cifar10, imagefolder"


def test_the_names_as_json(run: Run) -> None:
    code, said, _ = run("list", "--json")
    found = json.loads(said)
    assert code == 0
    assert found["architectures"] == list(architectures())
    assert {"godfrey", "csiszarik", "chen", "zhou", "fast", "plain"} <= set(found["recipes"])
    assert found["data"][0] == "digits"


def test_a_zoo_is_listed(run: Run, trained: Path) -> None:
    code, said, err = run("list", trained)
    assert (code, err) == (0, "")
    lines = said.splitlines()
    assert lines[0].startswith("4 networks: mlp on digits by plain, accuracy ")
    assert [line.split()[0] for line in lines[2:6]] == ["0", "1", "2", "7"]
    assert "in the manifest" not in said
    code, said, _ = run("list", trained, "--json")
    found = json.loads(said)
    assert [row["seed"] for row in found["networks"]] == [0, 1, 2, 7]
    assert [row["accuracy"] for row in found["networks"]] == [r.accuracy for r in read_manifest(trained).records]


def test_a_zoo_of_own_networks_is_listed_but_cannot_be_tested(run: Run, tmp_path: Path) -> None:
    zoo.train(own_network, seeds=[3], data="digits", out=tmp_path, epochs=1)
    code, said, _ = run("list", tmp_path)
    assert code == 0
    assert "1 network: " in said
    assert "own_network on digits" in said
    assert "standard deviation" not in said  # of one number
    code, said, err = run("evaluate", tmp_path)
    assert (code, said) == (2, "")
    assert "own_network. Load it with that function: zoo.load(folder, factory)." in err


@pytest.mark.parametrize("verb", ["list", "evaluate"])
def test_a_folder_that_is_no_zoo(verb: str, run: Run, tmp_path: Path) -> None:
    code, said, err = run(verb, tmp_path)
    assert (code, said) == (2, "")
    assert f"intertwine: {tmp_path} is not a zoo: it holds no manifest.json." in err
    (tmp_path / "manifest.json").write_text("{")
    code, said, err = run(verb, tmp_path, "--json")
    assert (code, said) == (2, "")
    assert "is damaged or of another kind" in err


# -- evaluate ----------------------------------------------------------------------------------------------------------


def test_a_zoo_is_tested_again(run: Run, trained: Path) -> None:
    records = read_manifest(trained).records
    code, said, _ = run("evaluate", trained)
    assert code == 0
    lines = said.splitlines()
    assert lines[1].endswith("in the manifest")
    for line, record in zip(lines[2:6], records, strict=True):
        cells = re.split(r"  +", line.strip())
        assert cells[1] == cells[-1] == f"{record.accuracy:.2%}"
    code, said, _ = run("evaluate", trained, "--json", "--device", "cpu")
    assert code == 0
    assert [row["accuracy"] for row in json.loads(said)["networks"]] == [record.accuracy for record in records]


def test_what_is_measured_now_stands_beside_what_was(run: Run, trained: Path, tmp_path: Path) -> None:
    """A manifest that says something else is not repeated."""
    manifest = json.loads((trained / "manifest.json").read_text())
    manifest["records"] = manifest["records"][:2]
    true = [record["accuracy"] for record in manifest["records"]]
    for record in manifest["records"]:
        (tmp_path / record["file"]).write_bytes((trained / record["file"]).read_bytes())
        record["accuracy"] = 0.125
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    _, said, _ = run("evaluate", tmp_path)
    rows = [re.split(r"  +", line.strip()) for line in said.splitlines()[2:4]]
    assert [(row[1], row[-1]) for row in rows] == [(f"{value:.2%}", "12.50%") for value in true]
    _, said, _ = run("evaluate", tmp_path, "--json")
    assert [row["accuracy"] for row in json.loads(said)["networks"]] == pytest.approx(true)
    (tmp_path / "seed1.safetensors").write_bytes(b"something else")
    code, said, err = run("evaluate", tmp_path)
    assert (code, said) == (2, "")
    assert "has changed since seed 1 was trained" in err


# -- download ----------------------------------------------------------------------------------------------------------

CONTENTS = bytes(range(256))


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """A server on this machine with one small file in place of CIFAR-10; gives its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(CONTENTS)))
            self.end_headers()
            self.wfile.write(CONTENTS)

        def log_message(self, format: str, *args: object) -> None:
            pass

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    server = HTTPServer(("127.0.0.1", 0), Handler)
    address = f"http://127.0.0.1:{server.server_port}/file.bin"
    sums = md5(CONTENTS, usedforsecurity=False).hexdigest()
    monkeypatch.setitem(SOURCES, "cifar10", (DownloadFile("deep/file.bin", sums, len(CONTENTS), (address,)),))
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield address
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_data_set_is_fetched(offered: str, run: Run, tmp_path: Path) -> None:
    code, said, err = run("download", "cifar10", "--folder", tmp_path / "data")
    assert (code, said) == (0, f"{tmp_path / 'data'}\n")
    assert (tmp_path / "data" / "deep" / "file.bin").read_bytes() == CONTENTS
    assert "file.bin is complete" in err
    code, _, err = run("download", "CIFAR-10", "--folder", tmp_path / "data")
    assert code == 0
    assert "file.bin is there already" in err
    code, said, _ = run("download", "cifar10")
    assert code == 0
    assert str(tmp_path / "cache") in said
    assert (Path(said.strip()) / "deep" / "file.bin").is_file()


def test_a_data_set_that_cannot_be_fetched(
    offered: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = DownloadFile("deep/file.bin", "0" * 32, len(CONTENTS), (offered,))
    monkeypatch.setitem(SOURCES, "cifar10", (source,))
    code, said, err = run("download", "cifar10", "--folder", tmp_path / "data")
    assert (code, said) == (2, "")
    assert "intertwine: file.bin could not be downloaded." in err
    assert not (tmp_path / "data" / "deep" / "file.bin").exists()
    for name, words in (("digits", "digits cannot be downloaded: it comes with scikit-learn"), ("cfar", "cifar10")):
        code, said, err = run("download", name)
        assert (code, said) == (2, "")
        assert words in err


# -- the process -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [("zoo", "--help"), ("zoo", "train", "--help")], ids=" ".join)
def test_help_does_not_import_torch(words: tuple[str, ...]) -> None:
    done = process(*words, flags=("-X", "importtime"))
    assert done.returncode == 0
    assert "usage: intertwine zoo" in done.stdout
    lines = (line for line in done.stderr.splitlines() if line.startswith("import time:"))
    loaded = {line.rpartition("|")[2].strip().split(".")[0] for line in lines}
    assert "intertwine" in loaded
    assert not loaded & {"torch", "numpy", "scipy", "sklearn", "safetensors", "rich", "triton"}


def test_every_option_of_a_training_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["zoo", "train", "--help"])
    assert caught.value.code == 0
    said = capsys.readouterr().out
    for name in ("data", "data-folder", "seeds", "out", "recipe", "epochs", "batch", "rate", "spawn", "option"):
        assert re.search(rf"--{name} \S+\s+\w", said), name
    for name in ("device", "precision", "together", "save-every", "score-every", "select", "json"):
        assert f"--{name}" in said


def test_a_refusal_in_a_process_of_its_own(tmp_path: Path) -> None:
    done = process("zoo", "evaluate", str(tmp_path / "nowhere"), "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"intertwine: {tmp_path / 'nowhere'} is not a zoo")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "mlp", "--out", "{new}", "--seeds", "3:1"], "The seeds '3:1' are an empty range"),
        (["train", "mlp", "--out", "{new}", "--data", "imagefolder"], "Name it as folder:PATH"),
        (
            ["train", "mlp", "--out", "{new}", "--option", "widths=abc"],
            "widths must be a list of integers such as (784, 512, 10), but is 'abc'",
        ),
        (["download", "foo"], "Unknown data set 'foo'. Choose one of: mnist, fashion-mnist, cifar10."),
    ],
)
def test_refusals_in_the_words_of_the_command_line(
    run: Run, tmp_path: Path, words: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as a user runs it
    code, out, err = run(*(word.format(new=tmp_path / "zoo") for word in words))
    assert (code, out) == (2, "")
    assert err.startswith("intertwine: ")  # no empty line before it, where there is no terminal
    assert said in err


def test_evaluation_stands_beside_the_manifest(run: Run, tmp_path: Path) -> None:
    run("train", "mlp", "--seeds", "0", *SMALL, "--out", tmp_path)
    record = read_manifest(tmp_path).records[0]
    (row,) = json.loads(run("evaluate", tmp_path, "--json")[1])["networks"]
    assert row["manifest"] == {"accuracy": record.accuracy, "loss": record.loss}
    assert (row["accuracy"], row["loss"]) == pytest.approx((record.accuracy, record.loss), rel=1e-4)
    assert zoo.load(tmp_path).to_rows()[0]["accuracy"] == record.accuracy
