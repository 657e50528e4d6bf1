"""Every Python file of the project opens with a docstring that says what it is for."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "tests", "bench", "docs", "examples", "experiments")
FILES = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))


def purpose(code: str) -> str:
    """The docstring of a module, or nothing."""
    return (ast.get_docstring(ast.parse(code)) or "").strip()


def test_the_files_are_found() -> None:
    assert Path(__file__) in FILES
    assert ROOT / "src" / "intertwine" / "__init__.py" in FILES


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_opens_with_its_purpose(file: Path) -> None:
    assert len(purpose(file.read_text(encoding="utf-8")).split()) >= 3, "begin the file with a line on what it is for"


@pytest.mark.parametrize("code", ["", "x = 1", "# a comment", '"""  """'])
def test_a_silent_file_is_seen(code: str) -> None:
    assert purpose(code) == ""
