"""The core of reproduce: plans and their scales, pairs, kept work, verdicts and claims, results and their files."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import intertwine as it
from intertwine.errors import InputError
from intertwine.lab.papers import experiments
from intertwine.lab.papers import plan as plan_module
from intertwine.lab.papers.experiments import PrintedNumber, claims, lines, summary
from intertwine.lab.papers.plan import KINDS, Data, ExperimentKind, read_plan
from intertwine.lab.papers.work import PublishedNetworks, Work, groups, networks_of, pairs, read_data, trained
from intertwine.lab.zoo.group import initial
from intertwine.lab.zoo.networks.registry import build

pytestmark = pytest.mark.usefixtures("one_thread")

PLAN = """
title = "A small experiment"
rows = ["000-G57"]
kind = "{kind}"
labels = ["a", "b"]
unit = "%"
claims = [{{ says = "one is below two", rising = ["one", "two"] }}]
[data]
name = "digits"
[networks]
name = "z"
architecture = "mlp"
pool = 4
options = {{ widths = [64, 8, 10] }}
changes = {{ epochs = 1 }}
[pairs]
count = 2
choose = "disjoint"
[{kind}]
at = ["1"]
[printed]
one = [1.0, 2.0]
[gpu.pairs]
count = 1
[cpu.networks]
pool = 2
[cpu.pairs]
count = 1
"""


@dataclass(frozen=True)
class Settings:
    at: list[str] = field(default_factory=list)
    form: str = ""


def counted(work: Work) -> list[dict[str, Any]]:
    """A kind that asks both networks for one number."""

    def find(pair: Any, folder: Path) -> list[dict[str, Any]]:
        CALLS.append(pair.number)
        x = work.placed.inputs(work.placed.test_images[:4])
        with torch.no_grad():
            return [{"value": float((work.network(pair.front)(x) - work.network(pair.back)(x)).abs().mean())}]

    return work.per_pair(find)


CALLS: list[int] = []
FIGURE, CPU = experiments.plans_folder() / "csiszarik-fig2-tiny10.toml", torch.device("cpu")
KIND = ExperimentKind(
    Settings, counted, lambda plan, rows: {"one": {"a": [row["value"] for row in rows]}}, lambda plan, rows: None
)


@pytest.fixture
def plan_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plan of a kind that only this test has."""
    module = type("module", (), {"COUNTING": KIND})
    monkeypatch.setattr(plan_module, "KINDS", KINDS | {"counting": ("counting", "COUNTING")})
    real = plan_module.import_module
    monkeypatch.setattr(plan_module, "import_module", lambda name: module if name.endswith(".counting") else real(name))
    file = tmp_path / "small.toml"
    file.write_text(PLAN.format(kind="counting"))
    return file


def test_a_scale_is_put_over_the_plan(plan_file: Path) -> None:
    paper, gpu, cpu = (read_plan(plan_file, scale) for scale in ("paper", "gpu", "cpu"))
    assert [len(pairs(plan)) for plan in (paper, gpu, cpu)] == [2, 1, 1]
    assert [networks_of(plan).pool for plan in (paper, gpu, cpu)] == [4, 4, 2]
    assert gpu.printed == paper.printed == {"one": [1.0, 2.0]}
    assert (cpu.printed, cpu.claims) == ({}, ())
    assert [groups(plan)[0].folder for plan in (paper, gpu, cpu)] == ["z", "gpu/z", "cpu/z"]


def test_a_note_on_claims_goes_with_the_claims(plan_file: Path) -> None:
    under = plan_file.read_text() + '\n[notes]\nall = "all"\nclaims = "why"\n'
    plan_file.write_text(under)
    same, own = plan_file.with_name("same.toml"), plan_file.with_name("own.toml")
    same.write_text('like = "small.toml"\ntitle = "the same"\n')
    own.write_text('like = "small.toml"\n[[claims]]\nsays = "it is small"\nseries = "one"\nbelow = 3\n')
    assert read_plan(same).notes == {"all": "all", "claims": "why"}
    assert read_plan(own).notes == {"all": "all"}


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('kind = "counting"', 'kind = "countin"', "Unknown kind of experiment 'countin'"),
        ("choose = \"disjoint\"", "choose = \"some\"", r"\[pairs\] Unknown choice 'some'.*: random, disjoint, self"),
        ("one = [1.0, 2.0]", "one = [1.0]", "one has 1 numbers, but there are 2 labels"),
        ("[gpu.pairs]", "[gpu.pears]", r"\[gpu\]: Unknown entry 'pears'. Did you mean 'pairs"),
        ("pool = 4", "pols = 4", r"\[networks\]: Unknown entry 'pols'"),
        ('title = "A small experiment"', "", "it lacks title"),
        ("[data]", "[data", "cannot be read"),
        ('kind = "counting"', "", "it lacks kind"),
    ],
)  # fmt: skip
def test_what_a_plan_cannot_say(plan_file: Path, old: str, new: str, says: str) -> None:
    assert old in plan_file.read_text()
    plan_file.write_text(plan_file.read_text().replace(old, new, 1))
    with pytest.raises(InputError, match=says):
        read_plan(plan_file)


def test_names_that_are_not_there(plan_file: Path) -> None:
    with pytest.raises(InputError, match=r"There is no experiment 'smal': .*does not exist. Did you mean 'small"):
        read_plan(plan_file.with_name("smal.toml"))
    with pytest.raises(InputError, match=r"Unknown scale 'tiny'. Choose one of: paper, gpu, cpu"):
        read_plan(plan_file, "tiny")


def test_too_few_networks_for_the_pairs(plan_file: Path) -> None:
    plan_file.write_text(plan_file.read_text().replace("pool = 4", "pool = 3", 1))
    with pytest.raises(InputError, match="2 pairs, chosen 'disjoint', need at least 4 networks, but the pool is 3"):
        pairs(read_plan(plan_file))


def test_an_experiment_runs_and_goes_on(plan_file: Path, tmp_path: Path) -> None:
    CALLS.clear()
    told: list[str] = []
    out = tmp_path / "out"
    plan = read_plan(plan_file)
    first = experiments.reproduce(plan, folder=out, progress=told.append)
    assert CALLS == [0, 1]
    assert [(row["pair"], row["front_seed"], row["back_seed"]) for row in first.rows] == [(0, 0, 1), (1, 2, 3)]
    zoo = it.zoo.load(out / "z")
    x = zoo.dataset().inputs(zoo.dataset().test_images[:4])
    with torch.no_grad():
        assert first.rows[0]["value"] == pytest.approx(float((zoo[0](x) - zoo[1](x)).abs().mean()), rel=1e-5)
    assert any("training 4 networks" in line for line in told)
    kept = sorted((out / "found").glob("*/rows.json"))
    kept[0].unlink()  # as if it had been stopped in between
    CALLS.clear()
    again = experiments.reproduce(plan, folder=out)
    assert len(CALLS) == 1
    assert again.rows == first.rows
    assert again.manifest["command"] == "intertwine reproduce small --scale paper"


def test_results_are_read_as_they_were_written(plan_file: Path, tmp_path: Path) -> None:
    result = experiments.reproduce(read_plan(plan_file, "gpu"), folder=tmp_path)
    file = result.save(tmp_path / "deep" / "small.gpu.json")
    again = experiments.read_result(file)
    assert again.rows == [row | {"value": float(f"{row['value']:.6g}")} for row in result.rows]
    assert [line.label for line in again.lines()] == ["a", "b"]
    assert [line.verdict for line in again.lines()][1] == "no value"
    with pytest.raises(
        InputError, match=r"none.json does not exist\. .*`intertwine reproduce none --scale paper` makes one"
    ):
        experiments.read_result(tmp_path / "none.json")
    file.write_text("{}")
    with pytest.raises(InputError, match="is not the result of an experiment"):
        experiments.read_result(file)


def test_agreement_is_two_deviations_of_both() -> None:
    def verdict(printed: float, spread: float | None, ours: list[float]) -> str:
        return PrintedNumber("s", "l", printed, spread, *summary(ours), len(ours)).verdict

    ours = [1.0, 3.0]  # mean 2, deviation √2
    assert verdict(2 + 2 * 2**0.5 - 1e-9, None, ours) == "agrees"
    assert verdict(2 + 2 * 2**0.5 + 1e-6, None, ours) == "differs"
    assert verdict(2 + 2 * 3**0.5 - 1e-9, 1.0, ours) == "agrees"
    assert verdict(2 + 2 * 3**0.5 + 1e-6, 1.0, ours) == "differs"
    assert verdict(2.0, None, [2.0]) == "agrees"
    assert verdict(2.0, None, [2.04]) == "agrees"  # 2.0 may have been printed for it
    assert verdict(2.0, None, [2.1]) == "no interval"  # one pair and no deviation in print
    assert verdict(2.0, 0.01, [2.1]) == "differs"
    assert verdict(2.0, None, [2.1, 2.1]) == "differs"
    assert verdict(2.0, 0.1, []) == "no value"


def test_lines_leave_out_what_was_not_printed() -> None:
    plan = {"labels": ["a", "b"], "printed": {"s": [None, 2.0]}, "spread": {"s": [None, 0.5]}}
    assert [(line.label, line.printed, line.printed_spread) for line in lines(plan, {})] == [("b", 2.0, 0.5)]


@pytest.mark.parametrize(
    ("claim", "holds", "seen"),
    [
        ({"rising": ["x", "y"]}, False, "at 1 of 2 places (not at b)"),
        ({"rising": ["x", "y"], "most": 1}, True, "at 1 of 2 places (not at b)"),
        ({"rising": ["x", "y"], "labels": ["a"]}, True, "at 1 of 1 places"),
        ({"series": "x", "below": 3.5}, True, "at 2 of 2 places"),
        ({"series": "x", "above": 2}, False, "at 1 of 2 places (not at a)"),
        ({"series": "y", "above": "x"}, False, "at 1 of 2 places (not at b)"),
        ({"series": "nothing", "above": "x"}, None, "no numbers to test it on: nothing has none there"),
    ],
)
def test_claims(claim: dict[str, Any], holds: bool | None, seen: str) -> None:
    numbers = {"x": {"a": [1.0, 2.0], "b": [3.0]}, "y": {"a": [2.0], "b": [1.0]}}
    (found,) = claims({"claims": [{"says": "so", **claim}]}, numbers)
    assert (found.says, found.holds, found.seen) == ("so", holds, seen)


def test_a_claim_without_a_test_is_refused() -> None:
    with pytest.raises(InputError, match=r"The claim 'so' has no test. Add rising, or a series with below or above"):
        claims({"claims": [{"says": "so", "series": "x"}]}, {})


def test_published_networks_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERTWINE_DATA", str(tmp_path))
    with pytest.raises(InputError, match=r"network tiny10 of seed 3 is missing: .* Set INTERTWINE_DATA"):
        PublishedNetworks("tiny10").seed(3)
    with pytest.raises(InputError, match=r"data folder .*elsewhere does not exist"):
        PublishedNetworks("tiny10", tmp_path / "elsewhere").seed(3)
    plan, some = read_plan(FIGURE, "gpu"), read_data(Data("digits"))
    found = trained(plan, some, tmp_path, CPU, lambda doing: None, tmp_path)
    assert found == [PublishedNetworks("tiny10", tmp_path)]


def test_published_networks_come_from_the_first_folder_that_has_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, seeds in (("none", ()), ("first", (10, 2)), ("second", (0,))):
        (tmp_path / folder / "tiny10").mkdir(parents=True)
        for seed in seeds:
            save_file(build("tiny10").state_dict(), tmp_path / folder / "tiny10" / f"seed{seed}.safetensors")
    monkeypatch.setenv("INTERTWINE_DATA", os.pathsep.join(str(tmp_path / name) for name in ("none", "first", "second")))
    assert list(PublishedNetworks("tiny10").files) == [2, 10]
    assert not PublishedNetworks("tiny10").seed(2).training
    with pytest.raises(InputError, match=r"no tiny10/seed0.safetensors in .*none, .*first, .*second"):
        PublishedNetworks("tiny10").seed(0)


def test_enlarged_images_repeat_their_pixels() -> None:
    small, large = (read_data(Data("digits", enlarge=enlarge, train=8, test=4)) for enlarge in (1, 4))
    assert large.images.shape[1:3] == (32, 32)
    assert torch.equal(large.images[:, ::4, ::4], small.images)
    assert torch.equal(large.images[:, 3::4, 3::4], small.images)
    assert len(large.labels) == 8


def test_turned_images_are_the_same_ones_turned() -> None:
    straight, turned = (read_data(Data("digits", turns=turns, train=8, test=4)) for turns in (0, 1))
    for before, after in zip(straight.images, turned.images, strict=True):
        assert np.array_equal(np.rot90(before[:, :, 0].numpy()), after[:, :, 0].numpy())
    assert torch.equal(straight.labels, turned.labels)
    assert straight.checksum != turned.checksum


TRAINED_ON = """
[networks.trained_on]
"Digits" = { name = "digits", train = 64, test = 32 }
"Digits, turned" = { name = "digits", train = 64, test = 32, turns = 1 }
"nothing" = {}
"""


def test_fronts_that_were_trained_on_other_data(plan_file: Path, tmp_path: Path) -> None:
    text = plan_file.read_text().replace('choose = "disjoint"', 'choose = "into-first"')
    plan_file.write_text(text.replace("[pairs]", f"{TRAINED_ON}[pairs]", 1))
    plan = read_plan(plan_file, "gpu")
    work = Work(plan, tmp_path, CPU)
    assert [group.folder for group in groups(plan)] == ["gpu/z-digits", "gpu/z-digits-turned", "gpu/z-nothing"]
    assert [(pair.front, pair.back) for pair in pairs(plan)] == [((i, 0), (0, 1)) for i in range(3)]
    straight, turned, nothing = (work.network((place, 0)).state_dict() for place in range(3))
    start = nothing["1.weight"]
    assert torch.equal(start, initial(lambda: it.zoo.build("mlp", widths=[64, 8, 10]), 0).state_dict()["1.weight"])
    assert not torch.equal(straight["1.weight"], turned["1.weight"])
    assert (straight["1.weight"] - start).norm() > 0, "trained, from the same start"
    assert it.zoo.load(tmp_path / "gpu/z-digits-turned").manifest.plan.data["checksum"] != work.data.checksum
    rows = counted(work)
    assert [row["front_group"] for row in rows] == ["Digits", "Digits, turned", "nothing"]
    assert len({row["value"] for row in rows}) == 3, "no two fronts share what was kept"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (
            'vary = { width = [1] }\n[networks.trained_on]\n"a" = {}',
            "varies width, trained_on, but one thing at a time",
        ),
        (
            '[networks.trained_on]\n"a" = { name = "digits", turned = 1 }',
            "'a': Unknown entry 'turned'. Did you mean 'turns",
        ),
    ],
)
def test_what_trained_on_cannot_say(plan_file: Path, more: str, says: str) -> None:
    plan_file.write_text(plan_file.read_text().replace("[pairs]", f"{more}\n[pairs]", 1))
    with pytest.raises(InputError, match=says):
        read_plan(plan_file)


def test_json_is_plain(plan_file: Path) -> None:
    assert json.loads(json.dumps(read_plan(plan_file).to_dict()))["networks"]["pool"] == 4
