"""What the tests of pages share: the scripts under docs/ that write their tables."""

import importlib.util
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).parents[1] / "docs"


def script(name: str, folder: Path = DOCS) -> ModuleType:
    """A script of docs/, or of another folder, as a module."""
    spec = importlib.util.spec_from_file_location(f"{folder.name}_{name}", folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
