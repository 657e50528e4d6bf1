"""The findings of docs/reproduction.md: where the papers are wrong or silent, each with numbers from the results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from intertwine.reproduce.experiments import Result

Finding = Callable[["Result"], str | None]


def mean(result: Result, series: str, label: str) -> float | None:
    """The mean of a number of a result; None where it was not measured."""
    values = result.numbers.get(series, {}).get(label, [])
    return fmean(values) if values else None


#: The experiment a finding rests on, and the sentences made from its result.
FINDINGS: list[tuple[str, str, Finding]] = []


def findings(found: Mapping[str, Result]) -> Iterator[str]:
    """One item per finding whose experiment was run."""
    for title, name, sentence in FINDINGS:
        said = sentence(found[name]) if name in found else None
        if said:
            yield f"- **{title}.** {said} ([{name}](#{name}))"
