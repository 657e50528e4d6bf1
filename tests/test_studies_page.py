"""docs/studies.md and the example plan: the example runs, every verb and option is named, the plan is a plan."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pages import DOCS

from intertwine.study.plan import plan_of, read_plan
from intertwine.study.tasks import expand
from intertwine.study.verbs import VERBS
from intertwine.study.zoos import known_zoos

PAGE = (DOCS / "studies.md").read_text(encoding="utf-8")
EXAMPLE = DOCS.parent / "examples" / "digits-study.toml"
pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_python_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("polars")
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    names: dict[str, Any] = {}
    exec(block, names)
    assert set(names["study"].frame()["verb"].to_list()) == {"accuracy", "barrier"}


def test_the_plan_of_the_page_is_a_plan() -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", PAGE, re.S)
    plan = plan_of(tomllib.loads(block))
    assert plan.parts[0].grid == {"method": ("none", "weights")}


def test_every_verb_and_every_option_is_on_the_page() -> None:
    table = PAGE.partition("| verb | of |")[2].partition("\n\n")[0]
    rows = {line.split("|")[1].strip(" `"): line for line in table.splitlines()[2:]}
    assert set(rows) == set(VERBS)
    for name, verb in VERBS.items():
        for option in verb.options:
            assert f"`{option}`" in rows[name] or option == "layers", (name, option)


def test_the_example_plan_has_all_verbs(tmp_path: Path) -> None:
    plan = read_plan(EXAMPLE)
    tasks = expand(plan, known_zoos(plan, tmp_path))
    assert {task.verb for task in tasks} == set(VERBS)
    assert 20 < len(tasks) < 60
