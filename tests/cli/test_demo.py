"""`intertwine demo` in small: what it prints and writes, a second run, JSON, exit codes; and that it has a plan."""

import io
import json
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import intertwine as it
from intertwine.cli import demo, main
from intertwine.cli.demo import DemoFindings
from intertwine.lab.study.plan import read_plan
from intertwine.lab.study.tasks import expand
from intertwine.lab.study.verbs import VERBS
from intertwine.lab.study.zoos import known_zoos
from intertwine.symmetry.symmetry import Symmetry

pytest.importorskip("polars")
SECTIONS = [
    *("overview", "networks", "symmetry", "canonical", "similarity", "barrier", "connectivity", "stitch", "fold"),
    *("complexity", "dissect", "tables", "plan", "commands"),
]
#: The same story on two tiny networks.
SMALL = """
name = "small"
[zoos.digits]
architecture = "lenet"
data = "digits"
seeds = "0:2"
epochs = 4
options = { padding = 4, widths = [6, 12, 24, 16] }
""" + "".join(
    f"[[parts]]\nverb = {part}\n"
    for part in (
        '"accuracy"', '"symmetry"', '"canonical"',
        '"barrier"\noptions = { points = 3, reset = false }\ngrid = { method = ["none", "activations"] }',
        '"connectivity"\noptions = { alphas = [0.5] }\ngrid = { method = ["none", "activations"] }',
        '"compare"\nlayers = ["relu1", "relu3"]\noptions = { images = 100 }',
        '"stitch"\nlayers = ["relu1"]\ngrid = { family = ["identity", "linear"] }',
        '"complexity"\nnetworks = [0]',
        '"fold"\nnetworks = [0]\noptions = { at = [0.9], method = "fold_to" }',
        '"dissect"\nnetworks = [0]\nlayers = ["relu1"]\noptions = { share = 0.05, level = 0.05, images = 200 }',
    )
)  # fmt: skip


@dataclass(frozen=True)
class Ran:
    """A demo that has run: its exit code, what it printed, and where."""

    code: int
    told: str
    out: Path


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    """The demo with the small plan, which stays in place for the tests that run it again."""
    folder, printed = tmp_path_factory.mktemp("demo"), io.StringIO()
    (folder / "demo.toml").write_text(SMALL, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(demo, "PLAN", folder / "demo.toml")
        with redirect_stdout(printed):
            code = main(["demo", "--out", str(folder / "out")])
        yield Ran(code, printed.getvalue(), folder / "out")


def test_the_demo_tells_the_story_and_its_last_line_is_where_the_report_is(ran: Ran) -> None:
    told, out = ran.told, ran.out
    assert ran.code == 0
    assert told.splitlines()[-1] == f"the report is {out / 'report.html'}: open it in a browser"
    assert told.startswith("one of the networks · ")
    assert "✓ certified" in told
    assert "small: 16 of 16 tasks in " in told
    networks = it.zoo.load(out / "study" / "zoos" / "digits")
    for name, record in zip("AB", networks.records, strict=True):
        assert re.search(rf"accuracy of network {name} +{record.accuracy:.1%}\n", told)
    right = sum(
        int((it.interpolate(networks[0], networks[1], 0.5)(x).argmax(1) == y).sum())
        for x, y in networks.dataset().batches("test")
    )
    assert re.search(rf"average of A and B +{right / 360:.1%}\n", told)
    assert re.search(rf"average of A and A moved, brought back +{networks.records[0].accuracy:.1%}\n", told)
    assert (out / "demo.toml").read_text(encoding="utf-8") == SMALL
    svg = ElementTree.fromstring((out / "symmetry.svg").read_bytes())
    assert {g.get("data-wire") for g in svg.iter() if g.get("data-wire")} == {"conv1", "conv2", "fc1", "fc2"}


def test_the_report_has_every_section_and_links_every_number(ran: Ran) -> None:
    out = ran.out
    text = (out / "report.html").read_text(encoding="utf-8")
    assert re.findall(r'<section id="([a-z]+)"', text) == SECTIONS
    assert f"intertwine study run {out / 'demo.toml'} --out {out / 'study'} --only " in text
    assert "✓</strong> The symmetry holds for 2 networks" in text
    assert "Every network has the fingerprint of its moved copy, and 2 networks have 2 fingerprints" in text


def test_a_second_run_does_nothing_again_and_its_json_is_one_document(
    ran: Ran, capsys: pytest.CaptureFixture[str]
) -> None:
    out, threads = ran.out, torch.get_num_threads()
    (out / "report.html").unlink()
    assert main(["demo", "--out", str(out), "--json"]) == 0
    assert torch.get_num_threads() == threads
    told = json.loads(capsys.readouterr().out)
    assert (told["tasks"], told["run"], told["failed"], told["certified"]) == (16, 0, 0, True)
    assert Path(told["report"]).is_file()
    assert Path(told["picture"]).is_file()
    accuracy = it.zoo.load(out / "study" / "zoos" / "digits").records[0].accuracy
    assert told["found"]["accuracy of network A"] == pytest.approx(accuracy)
    assert main(["demo", "--out", str(out)]) == 0
    assert f"all 16 tasks were done before; delete {out} to start anew" in capsys.readouterr().out


def test_a_folder_of_another_plan_is_refused_and_left_alone(
    ran: Ran, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "demo.toml"
    other.write_text(SMALL.replace("epochs = 4", "epochs = 1"), encoding="utf-8")
    monkeypatch.setattr(demo, "PLAN", other)
    assert main(["demo", "--out", str(ran.out)]) == 2
    assert "The plans differ in zoos. Give another folder" in capsys.readouterr().err
    assert (ran.out / "demo.toml").read_text(encoding="utf-8") == SMALL


def test_a_failed_certificate_or_task_exits_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No network can be folded to nothing, which only the task finds out."""
    parts = '[[parts]]\nverb = "accuracy"\n[[parts]]\nverb = "symmetry"\nnetworks = [0]\n'
    head = 'name = "tiny"\n[zoos.digits]\narchitecture = "mlp"\ndata = "digits"\nseeds = "0:2"\nepochs = 1\n'
    (tmp_path / "a.toml").write_text(head + parts, encoding="utf-8")
    failing = '[[parts]]\nverb = "fold"\nnetworks = [0]\noptions = { at = [1e-9] }\n'
    (tmp_path / "b.toml").write_text(head + parts + failing, encoding="utf-8")
    monkeypatch.setattr(demo, "PLAN", tmp_path / "b.toml")
    assert main(["demo", "--out", str(tmp_path / "b")]) == 1
    assert "failed: intertwine.errors.InputError: Less than one of" in capsys.readouterr().out
    monkeypatch.setattr(demo, "PLAN", tmp_path / "a.toml")
    honest = Symmetry.certify
    monkeypatch.setattr(Symmetry, "certify", lambda *args, **kwargs: replace(honest(*args, **kwargs), ok=False))
    assert main(["demo", "--out", str(tmp_path / "a")]) == 1
    assert "✗ not a symmetry" in capsys.readouterr().out
    assert "The symmetry does not hold for digits:0" in (tmp_path / "a" / "report.html").read_text(encoding="utf-8")


def test_the_plan_of_the_demo_has_all_verbs_and_three_networks(tmp_path: Path) -> None:
    plan = read_plan(Path(demo.__file__).with_name("demo.toml"))
    known = known_zoos(plan, tmp_path)
    assert {task.verb for task in expand(plan, known)} == set(VERBS)
    (networks,) = known.values()
    assert networks.seeds == (0, 1, 2)


def record(verb: str, quantity: str, value: float | None, **about: Any) -> dict[str, Any]:
    options = json.dumps(about.pop("options", {}))
    row = {"verb": verb, "quantity": quantity, "value": value, "a": "z:0", "b": None, "options": options}
    return row | {"index": None, "layer": None, "other_layer": None, "note": None} | about


def test_findings_are_those_of_the_first_pair() -> None:
    rows = [record("accuracy", "accuracy", 0.9), record("accuracy", "accuracy", 0.8, a="z:1")]
    for b, error in (("z:1", 0.75), ("z:2", 0.5)):
        for index in (0.4, 0.5):
            options = {"method": "none", "reset": False, "points": 11}
            rows.append(record("barrier", "error", error + index / 10, b=b, index=index, options=options))
    rows += [record("fold", "accuracy", v, index=i, options={"method": "fold_to"}) for i, v in
             ((1.0, 0.9), (0.7, 0.895), (0.5, 0.88))]  # fmt: skip
    told = {f.name: str(f) for f in DemoFindings(rows).all()}
    assert told == {
        "accuracy of network A": "90.0%", "accuracy of network B": "80.0%", "average of A and B": "20.0%",
        "accuracy of A folded to 70% of its parameters": "89.5%",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("errors", "held"),
    [
        ([], False), ([(1e-16, None)], True), ([(1e-16, None), (0.1, "the certificate failed")], False),
        ([(None, "the value is inf")], False),
    ],
)  # fmt: skip
def test_certificates_hold_when_all_do(errors: list[tuple[float | None, str | None]], held: bool) -> None:
    rows = [record("symmetry", "certificate_error", value, note=note) for value, note in errors]
    assert DemoFindings(rows).certified() is held


def test_the_time_left_is_told() -> None:
    told: list[tuple[str, float]] = []
    tell = demo.with_time_left(lambda doing, part: told.append((doing, part)))
    tell("training", 0.0)
    tell("training", 0.5)
    assert told[0] == ("training", 0.0)
    assert re.fullmatch(r"training, \d+ s left", told[1][0])
