"""docs/engine.md: its table of costs and its random networks are what the result files say."""

from pages import DOCS, script

PAGE = (DOCS / "engine.md").read_text(encoding="utf-8")


def test_numbers_are_what_was_measured() -> None:
    results = script("results")
    assert results.written_engine(PAGE) == PAGE, "run: python docs/results.py"
    for measured in ("| torchvision/resnet50 | 357 |", " 0 silently wrong,"):
        old = PAGE.replace(measured, measured.upper().replace("0", "1"))
        assert old != PAGE
        assert results.written_engine(old) == PAGE
