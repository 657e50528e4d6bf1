"""docs/engine.md: its table of costs is what the result file says."""

from pages import DOCS, script

PAGE = (DOCS / "engine.md").read_text(encoding="utf-8")


def test_the_table_is_what_was_measured() -> None:
    results = script("results")
    assert results.written_engine(PAGE) == PAGE, "run: python docs/results.py"
    old = PAGE.replace("| torchvision/resnet50 | 357 |", "| torchvision/resnet50 | 358 |")
    assert old != PAGE
    assert results.written_engine(old) == PAGE
