"""Tests of study plans: reading, errors with line numbers, and task keys that depend on content only."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import intertwine as it
from intertwine.errors import InputError
from intertwine.lab.study.plan import Part, Plan, TomlLines, ZooPlan, plan_of, read_plan
from intertwine.lab.study.tasks import expand
from intertwine.lab.study.zoos import known_zoos

pytestmark = pytest.mark.usefixtures("one_thread")

PLAN = """\
name = "digits"   # a study

[zoos.small]
architecture = "mlp"
data = "digits"
seeds = "0:3"
epochs = 2
options = { widths = [64, 16, 10] }

[[parts]]
verb = "accuracy"

[[parts]]
verb = "barrier"
pairs = [[0, 1], [1, 2]]
options = { points = 3 }
repeats = 2

[parts.grid]
method = ["none", "weights"]
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "plan.toml"
    path.write_text(text, encoding="utf-8")
    return path


def tasks_of(plan: Plan, folder: Path) -> list[Any]:
    return expand(plan, known_zoos(plan, folder))


def test_a_file_and_dataclasses_are_equal_plans(tmp_path: Path) -> None:
    zoo = ZooPlan(None, "mlp", "digits", (0, 1, 2), None, {"widths": [64, 16, 10]}, {"epochs": 2})
    parts = (
        Part("accuracy", ("small",)),
        Part("barrier", ("small",), pairs=((0, 1), (1, 2)), options={"points": 3},
             grid={"method": ("none", "weights")}, repeats=2),
    )  # fmt: skip
    plan = read_plan(written(tmp_path, PLAN))
    assert plan == Plan("digits", {"small": zoo}, parts)
    assert plan_of(json.loads(json.dumps(plan.to_dict()))) == plan


def test_tasks_are_the_product_of_pairs_grid_and_repeats(tmp_path: Path) -> None:
    tasks = tasks_of(read_plan(written(tmp_path, PLAN)), tmp_path)
    assert len(tasks) == 3 + 2 * 2 * 2
    assert len({task.key for task in tasks}) == len(tasks)
    barriers = [task for task in tasks if task.verb == "barrier"]
    assert {(t.a, t.b) for t in barriers} == {(0, 1), (1, 2)}
    assert {t.options["method"] for t in barriers} == {"none", "weights"}
    assert all(t.options["points"] == 3 for t in barriers)
    assert {t.repeat for t in barriers} == {0, 1}
    assert barriers[0].to_dict()["a"] == "small:0"


def test_a_repeated_task_is_one_task(tmp_path: Path) -> None:
    twice = PLAN + '\n[[parts]]\nverb = "accuracy"\nnetworks = [1]\n'
    assert len(tasks_of(read_plan(written(tmp_path, twice)), tmp_path)) == 11


def test_layers_are_tasks_for_stitch_and_an_option_for_compare(tmp_path: Path) -> None:
    text = PLAN.split("[[parts]]")[0]
    text += '[[parts]]\nverb = "stitch"\npairs = "neighbours"\nlayers = ["1", "2"]\n'
    text += '[[parts]]\nverb = "compare"\npairs = [[0, 2]]\nlayers = ["1", "2"]\n'
    tasks = tasks_of(read_plan(written(tmp_path, text)), tmp_path)
    assert [(t.verb, t.a, t.b, t.layer) for t in tasks] == [
        ("stitch", 0, 1, "1"), ("stitch", 0, 1, "2"), ("compare", 0, 2, None),
    ]  # fmt: skip
    assert tasks[-1].options == {"layers": ["1", "2"]}


def test_keys_depend_on_content_only(tmp_path: Path) -> None:
    path = written(tmp_path, PLAN)
    own = [task.key for task in tasks_of(read_plan(path), tmp_path)]
    code = (
        "import sys\nfrom pathlib import Path\nfrom intertwine.lab.study.plan import read_plan\n"
        "from intertwine.lab.study.zoos import known_zoos\nfrom intertwine.lab.study.tasks import expand\n"
        "plan = read_plan(sys.argv[1])\n"
        "print([t.key for t in expand(plan, known_zoos(plan, Path('elsewhere')))])"
    )
    other = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == str(own)
    renamed = read_plan(written(tmp_path, PLAN.replace("zoos.small", "zoos.other")))
    assert [task.key for task in tasks_of(renamed, tmp_path)] == own
    for change in (("epochs = 2", "epochs = 3"), ("64, 16, 10", "64, 17, 10"), ("points = 3", "points = 5")):
        changed = tasks_of(read_plan(written(tmp_path, PLAN.replace(*change))), tmp_path)
        assert changed[-1].key not in own


def test_networks_in_a_folder_are_identified_by_content(tmp_path: Path) -> None:
    for name, epochs in (("one", 1), ("same", 1), ("longer", 2)):
        it.zoo.train("mlp", seeds=[0], data="digits", out=tmp_path / name, epochs=epochs)
    found = {}
    for name in ("one", "same", "longer"):
        plan = Plan("p", {"z": ZooPlan(folder=str(tmp_path / name))}, (Part("accuracy", ("z",)),))
        (task,) = tasks_of(plan, tmp_path)
        found[name] = task.key
    assert found["one"] == found["same"] != found["longer"]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            'name = "digits"',
            "nme = 1",
            r"plan.toml, line 1: Unknown key 'nme'. Did you mean 'name'\? Choose one of: name,",
        ),
        ("epochs = 2", "epoch = 2", r"line 7: Unknown key 'epoch'. Did you mean 'epochs'"),
        ('seeds = "0:3"', "", "line 3: Zoo 'small' has no seeds"),
        ('architecture = "mlp"', "", "line 3: Zoo 'small' needs either a folder, or an architecture to train"),
        ("epochs = 2", "changes = { epoch = 2 }", r"line 7: Unknown key 'epoch'. Did you mean 'epochs'"),
        ("epochs = 2", 'folder = "z"', "line 3: Zoo 'small' needs either a folder, or an architecture"),
        ('architecture = "mlp"', 'folder = "z"', "line 5: Zoo 'small' is read from a folder, so data has no effect"),
        ("repeats = 2", "networks = [0]", "line 15: networks has no effect beside a list of pairs"),
        ("repeats = 2", "repeats = 0", "line 17: repeats must be at least 1, but is 0"),
        ("pairs = [[0, 1], [1, 2]]", 'pairs = "any"', "line 15: pairs must be .* but is 'any'"),
        ("pairs = [[0, 1], [1, 2]]", 'zoos = ["smal"]', r"line 15: Unknown zoo 'smal'. Did you mean 'small'\?"),
        ('method = ["none", "weights"]', 'method = "none"', "line 19: grid.method must be a list"),
        ('method = ["none", "weights"]', "method = [1 2]", "is not valid TOML: .*line 20.*Correct that line"),
    ],
)
def test_an_invalid_plan_is_refused_with_the_line(before: str, after: str, message: str, tmp_path: Path) -> None:
    assert before in PLAN
    with pytest.raises(InputError, match=message):
        read_plan(written(tmp_path, PLAN.replace(before, after)))


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ('verb = "barier"', r"Part 1 \(line 10\): Unknown verb 'barier'. Did you mean 'barrier'\?"),
        (
            'verb = "barrier"\noptions = { point = 3 }',
            r"\(line 10\): Unknown barrier option 'point'. Did you mean 'points'",
        ),
        ('verb = "barrier"\ngrid = { methods = ["none"] }', "Unknown barrier option 'methods'"),
        ('verb = "barrier"\noptions = { method = "weight" }', "Unknown method 'weight'. Did you mean 'weights'"),
        ('verb = "barrier"\noptions = { points = 1 }', "points must be an integer, 3 or more, but is 1"),
        ('verb = "barrier"\noptions = { points = true }', "points must be an integer, 3 or more, but is True"),
        ('verb = "barrier"\noptions = { reset = 1 }', "reset must be true or false, but is 1"),
        ('verb = "accuracy"\ngrid = { images = [10, 0] }', "images must be an integer, 1 or more, but is 0"),
        ('verb = "compare"\ngrid = { measure = ["linear"] }', "Unknown measure 'linear'. .*linear_cka"),
        ('verb = "compare"\noptions = { measure = ["rv", 1] }', "Unknown measure '1'"),
        (
            'verb = "connectivity"\noptions = { alphas = [2] }',
            r"alphas must be a list of numbers from 0 to 1, but is \[2\]",
        ),
        ('verb = "barrier"\noptions = { points = 2 }', "points must be an integer, 3 or more, but is 2"),
        ('verb = "complexity"\noptions = { beta = 0 }', "beta must be a number above 0 and below 1, but is 0"),
        ('verb = "complexity"\noptions = { beta = 1.0 }', "beta must be a number above 0 and below 1, but is 1.0"),
        ('verb = "fold"\noptions = { at = [0.5, 0.0] }', r"at must be a list of numbers above 0, but is \[0.5, 0.0\]"),
        (
            'verb = "compare"\noptions = { layers = ["2"] }',
            "Unknown compare option 'layers'. .*one of: measure, images",
        ),
        ('verb = "fold"\noptions = { method = "folds" }', "Unknown method 'folds'. Did you mean 'fold"),
        ('verb = "stitch"\nlayers = ["2"]\noptions = { family = "lin" }', "'lin'.*linear"),
        ('verb = "stitch"\nlayers = ["2"]\noptions = { fit = 1 }', "Unknown fit '1'. .*Choose one of: direct, task"),
        ('verb = "stitch"', r"stitch needs layers, such as layers = \[\"2\"\]"),
        ('verb = "accuracy"\nlayers = ["1"]', "accuracy takes no layers"),
        ('verb = "stitch"\nlayers = ["9"]', r"Networks of 'small' have no layer '9'. .*Their layers: 0, 1, 2"),
        ('verb = "accuracy"\nnetworks = [5]', "Zoo 'small' has no network with seed 5. Its seeds: 0, 1, 2"),
    ],
)
def test_a_part_is_checked_against_its_verb_and_networks(part: str, message: str, tmp_path: Path) -> None:
    plan = read_plan(written(tmp_path, PLAN.split("[[parts]]")[0] + "[[parts]]\n" + part))
    with pytest.raises(InputError, match=message):
        tasks_of(plan, tmp_path)


def test_missing_files_and_zoos(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"Cannot read the plan .*none.toml \(No such file"):
        read_plan(tmp_path / "none.toml")
    text = 'name = "a"\n[zoos.z]\nfolder = "FOLDER"\n[[parts]]\nverb = "accuracy"\n'
    plan = read_plan(written(tmp_path, text.replace("FOLDER", str(tmp_path / "no"))))
    with pytest.raises(InputError, match=r"is not a zoo: it holds no manifest.json"):
        known_zoos(plan, tmp_path)
    zoo = it.zoo.train("mlp", seeds=[0], data="digits", out=tmp_path / "z", epochs=1)
    manifest = json.loads((zoo.folder / "manifest.json").read_text())
    (zoo.folder / "manifest.json").write_text(json.dumps(manifest | {"records": []}))
    plan = read_plan(written(tmp_path, text.replace("FOLDER", str(tmp_path / "z"))))
    with pytest.raises(
        InputError, match=r"Zoo 'z' \(line 2\): Cannot use the networks in .*z: no network is finished yet"
    ):
        known_zoos(plan, tmp_path)


def test_lines_of_tables_in_lists_of_tables() -> None:
    lines = TomlLines('a = 1\n[[p]]\nb = 2\n[p.q]\nc = 3\n[[p]]\n[p.q]\n"c" = 4\n')
    assert [lines.of("p", i, "q", "c") for i in (0, 1)] == [5, 8]
    assert lines.of("p", 1) == 6
    assert lines.of("p", 1, "b") == 6
    assert lines.of("x") == 1
