"""docs/reproduction.md: written from the committed results alone, with every experiment on it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pages import DOCS, script

from intertwine.lab.papers.experiments import names, read_result
from intertwine.lab.papers.plan import SCALES

PAGE = (DOCS / "reproduction.md").read_text(encoding="utf-8")
RESULTS = sorted((DOCS.parent / "experiments" / "results").glob("*.json"))
#: Rows of the list of everything the papers claim that carry an experiment; 003-F21 needs ImageNet (`ABSENT`).
WANTED = [
    *(f"000-G{i}" for i in range(57, 75)), *(f"001-C{i}" for i in (*range(12, 17), *range(24, 32))),
    *(f"002-S{i}" for i in range(17, 24)), *(f"003-F{i}" for i in (*range(15, 21), *range(22, 28))),
    "004-L03", "004-L08", "004-L09", *(f"004-L{i}" for i in range(10, 15)),
]  # fmt: skip


@pytest.fixture(scope="module")
def page() -> ModuleType:
    """The script that writes the page."""
    return script("reproduction")


def test_the_page_is_what_the_results_say(page: ModuleType) -> None:
    assert page.page(page.results()) == PAGE, "run: python docs/reproduction.py --figures"


def test_every_experiment_is_on_the_page_with_its_figure_or_the_command() -> None:
    for name in names():
        section = PAGE.partition(f"### {name}\n")[2].partition("\n### ")[0]
        assert f"intertwine reproduce {name} --scale" in section
        if "Not run" not in section:
            (picture,) = re.findall(r"\]\((images/reproduction/.*?\.(?:svg|png))\)", section)
            assert (DOCS / picture).stat().st_size > 1000


def test_wherever_something_differs_a_sentence_says_why() -> None:
    for section in re.split(r"^### ", PAGE, flags=re.MULTILINE)[1:]:
        name = section.partition("\n")[0]
        if "| **differs** |" in section:
            assert re.search(r"^- Where .+ differs?: ", section, re.MULTILINE), name
        if "| **no** |" in section:
            assert re.search(r"^- Where .+ (differ|does not hold): ", section, re.MULTILINE), name


def test_every_row_with_an_experiment_has_a_plan() -> None:
    listed = {row for line in PAGE.splitlines() if line.startswith("| [") for row in line.split("|")[2].split(", ")}
    assert not sorted(set(WANTED) - {row.strip() for row in listed})


def test_what_cannot_be_run_is_told_with_its_command(page: ModuleType) -> None:
    told = PAGE.partition("## What could not be run here\n")[2]
    assert {"003-F21", "001-C15"} <= page.ABSENT.keys()
    for row, (_, why, command) in page.ABSENT.items():
        assert f"| {row} |" in told
        assert why in told
        assert f"`{command}`" in told


@pytest.mark.parametrize("file", RESULTS, ids=[file.stem for file in RESULTS])
def test_a_committed_result_says_how_it_was_made(file: Path) -> None:
    name, _, scale = file.stem.partition(".")
    manifest = read_result(file).manifest
    assert name in names()
    assert scale in SCALES
    assert manifest["command"].startswith(f"intertwine reproduce {name}")
    assert manifest["seconds"] > 0
    assert manifest["device"].startswith(("NVIDIA", "CPU"))
    assert (manifest["plan"]["name"], manifest["plan"]["scale"]) == (name, scale)


def test_a_number_that_changes_changes_the_page(page: ModuleType) -> None:
    found: dict[str, Any] = page.results()
    result = found["godfrey-zoo-myrtle"]
    moved = json.loads(json.dumps(result.rows))
    for row in moved:
        row.update({key: value - 0.1 for key, value in row.items() if "accuracy" in key and isinstance(value, float)})
    other = page.page(found | {"godfrey-zoo-myrtle": type(result)(result.manifest, moved)})
    assert other != PAGE
    assert "| **differs** |" in other.partition("### godfrey-zoo-myrtle")[2].partition("###")[0]
