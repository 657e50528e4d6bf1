"""The worked examples (add a rule, a measure, a stitching family) read as the library does, or run when put in place.

Files are put where the page says into a copy of the package, with nothing else changed, and their tests run there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pages import DOCS

ROOT = DOCS.parent
PAGES = ("add-a-rule.md", "add-a-measure.md", "add-a-stitching-family.md")
PAGE = "\n".join((DOCS / name).read_text(encoding="utf-8") for name in PAGES)
SHOWN = re.compile(r"From `([\w/.]+\.py)`:\n\n```python\n(.*?)^```$", re.M | re.S)
WHOLE = re.compile(r"(?<!From )`((?:src|tests)/[\w/]+\.py)`:\n\n```python\n(.*?)^```$", re.M | re.S)
#: Run beside the tests of the page: the copy is what is imported, and both examples are known in it.
KNOWN = """
from pathlib import Path
import intertwine
from intertwine.stitch.families.names import families
from intertwine.testing.measure import check_measure

def test_known():
    assert Path(__file__).parents[2] in Path(intertwine.__file__).parents
    assert "diagonal" in families()
    assert "laws hold" in str(check_measure("distance_correlation"))
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package as it is, and the files of the page in their places."""
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for path, text in WHOLE.findall(PAGE):
        assert not (ROOT / path).exists(), f"{path} is in the library now: say 'From' on the page"
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    registry = tmp_path / "src" / "intertwine" / "measure" / "measure.py"
    listed = registry.read_text(encoding="utf-8")
    assert listed.count("MODULES = (") == 1
    registry.write_text(listed.replace("MODULES = (", 'MODULES = ("distance_correlation", '), encoding="utf-8")
    return tmp_path


def test_what_is_shown_of_the_library_is_in_it() -> None:
    shown = SHOWN.findall(PAGE)
    assert [path for path, _ in shown] == ["src/intertwine/graph/rules/reduce.py", "tests/graph/test_ops.py"]
    for path, text in shown:
        assert text in (ROOT / path).read_text(encoding="utf-8"), path


def test_the_examples_run_where_the_page_puts_them(copy: Path) -> None:
    paths = [path for path, _ in WHOLE.findall(PAGE)]
    assert [path.startswith("tests/") for path in paths] == [False, True, False, True], "a file and its test, twice"
    (copy / "tests" / "test_known.py").write_text(KNOWN, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "tests"]
    found = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stdout + found.stderr
    assert re.search(r"^\d+ passed", found.stdout, re.M), found.stdout
