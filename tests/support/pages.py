"""What the tests of pages share: the scripts under docs/ that write their tables, and the examples that must run."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"


def script(name: str, folder: Path = DOCS) -> ModuleType:
    """A script of docs/, or of another folder, as a module."""
    spec = importlib.util.spec_from_file_location(f"{folder.name}_{name}", folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_example(page: str) -> dict[str, Any]:
    """The names that the first example of a page leaves behind."""
    names: dict[str, Any] = {}
    block = re.search(r"```python\n(.*?)```", page, re.S)
    assert block is not None
    exec(block.group(1), names)
    return names
