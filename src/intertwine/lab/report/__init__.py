"""What a person reads: outlines of a symmetry, its picture, and self-contained HTML pages.

    report.write("studies/mine", "report.html")    # everything a study found, in one file

The name is loaded on first use: other rooms of the report need no study.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from intertwine.lazy import lazy_names

if TYPE_CHECKING:
    from intertwine.lab.report.page import write as write


__getattr__, __dir__ = lazy_names(__name__, {"write": "page"})
