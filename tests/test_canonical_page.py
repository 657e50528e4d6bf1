"""docs/canonical.md: its tables are what the result files say, its examples run, its links lead somewhere."""

import re
from types import ModuleType

import pytest
from pages import DOCS, script

PAGE = (DOCS / "canonical.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def results() -> ModuleType:
    """The script that writes the tables."""
    return script("results")


def test_the_tables_are_what_was_measured(results: ModuleType) -> None:
    assert results.written_canonical(PAGE) == PAGE, "run: python docs/results.py"


def test_an_old_table_is_seen(results: ModuleType) -> None:
    old = PAGE.replace("| weight matching | 61.80 |", "| weight matching | 60.80 |")
    assert old != PAGE
    assert results.written_canonical(old) == PAGE
    with pytest.raises(SystemExit, match="has no place for 'bench'"):
        results.written_canonical("# nothing here")


def test_the_examples_run() -> None:
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.S):
        exec(block, names)
    assert "square" in names


def test_the_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", PAGE)
    assert links
    assert [link for link in links if not (DOCS / link).exists()] == []
