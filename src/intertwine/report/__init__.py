"""What a person reads: outlines of a symmetry, its picture, and self-contained HTML pages.

report.write("studies/mine", "report.html")    # everything a study found, in one file
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from intertwine.report.writing import write as write


def __getattr__(name: str) -> Any:
    if name == "write":  # loaded on first use: other rooms of the report need no study
        from intertwine.report.writing import write

        return write
    raise AttributeError(f"module 'intertwine.report' has no attribute {name!r}")


def __dir__() -> list[str]:
    return ["write"]
