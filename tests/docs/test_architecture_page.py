"""docs/architecture.md names files, folders and tables of the source; each is there."""

import re
from importlib import import_module
from pathlib import Path

from pages import DOCS

PAGE = (DOCS / "architecture.md").read_text(encoding="utf-8")
SOURCE = DOCS.parent / "src" / "intertwine"


def places() -> set[str]:
    """Everything in back ticks that looks like a file or a folder."""
    found = {text for text in re.findall(r"`([\w/.-]+)`", PAGE) if text.endswith((".py", "/", ".md", ".toml"))}
    return {text for text in found if "NAME" not in text}


def test_every_file_that_is_named_is_there() -> None:
    named = places()
    assert len(named) > 50
    around = [SOURCE, DOCS.parent, *{(SOURCE / name).parent for name in named if "/" in name}]
    assert [name for name in sorted(named) if not any((place / name).exists() for place in around)] == []


def test_the_tables_that_take_a_line_are_where_the_page_says() -> None:
    found = re.findall(r"`([A-Z]+)` of `([\w/]+)\.py`", PAGE)
    assert len(found) == 5
    for name, file in found:
        module = f"intertwine.{file.replace('/', '.').removesuffix('.__init__')}"
        assert len(getattr(import_module(module), name)) > 3


def test_a_room_that_is_not_named_is_missed(tmp_path: Path) -> None:
    rooms = {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert not {room for room in rooms if f"`{room}/" not in PAGE}, "say what is in it"
