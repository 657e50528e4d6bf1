"""Write the measured tables of the pages again: the engine, canonical forms, zoos, alignment, and so on.

They are made from the committed result files alone.

python docs/results.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from intertwine.lab.papers.experiments import ExperimentResult, read_result
from intertwine.lab.papers.nodesort import by_method, series

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "docs")]
NAMES = {"unsorted": "as trained", "ensemble": "ensemble of predictions"}


def thesis_table(result: ExperimentResult) -> str:
    """Distances and averages, method by method."""
    heads = (
        "",
        "mean distance W₁",
        "change",
        "mean distance W₂",
        "change",
        "average of 2",
        "of 10",
        "order kept at 1e-6",
    )
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    printed = {line.series: {} for line in result.lines()}
    for line in result.lines():
        printed[line.series][line.label] = line.printed
    for kind, label in (("unsorted", "printed, unsorted"), (series("nodesort 1.1"), "printed, sorted")):
        cells = [label]
        for layer in ("W₁ mean", "W₂ mean"):
            mean, base = printed[kind][layer], printed["unsorted"][layer]
            cells += [f"{mean:.2f}", f"{mean / base - 1:+.2%}" if kind != "unsorted" else ""]
        lines.append(f"| {' | '.join(cells)} | | | |")
    for method in [*by_method(result.rows, "some_pairs"), "ensemble"]:
        lines.append(f"| {' | '.join(_cells(method, result))} |")
    single = by_method(result.rows, "accuracy", networks=1)["single"]["mean"]
    return "\n".join([*lines, "", f"A single network is right on {single:.2%} of the test images, on average."])


def _cells(method: str, result: ExperimentResult) -> list[str]:
    cells, rows = [NAMES.get(method, method)], result.rows
    found = by_method(rows, "all_pairs").get(method) or by_method(rows, "some_pairs").get(method)
    for layer in ("w1", "w2"):
        cells += [f"{found[layer]['mean']:.2f}", _change(found[layer])] if found else ["", ""]
    for size in (2, 10):
        mean = by_method(rows, "accuracy", networks=size).get(method, {}).get("mean")
        cells.append(f"{mean:.2%}" if mean is not None else "")
    changed = by_method(rows, "stability", noise=1e-6).get(method, {}).get("order_changed")
    return [*cells, f"{1 - changed:.0%}" if changed is not None else ""]


def _change(numbers: dict[str, Any]) -> str:
    return f"{numbers['change']:+.2%}" if numbers.get("change") else ""


def put(page: str, name: str, text: str) -> str:
    """A page with the text between two of its markers written anew."""
    begin, end = f"<!-- {name}: begin (written by docs/results.py) -->", f"<!-- {name}: end -->"
    head, _, rest = page.partition(begin)
    if not rest or end not in rest:
        raise SystemExit(f"The page has no place for {name!r}: it needs the lines {begin} and {end}")
    return f"{head}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}"


def read(results: Path) -> dict[str, Any]:
    """What a benchmark has kept; nothing where it has not run yet."""
    return json.loads(results.read_text(encoding="utf-8")) if results.exists() else {}


def or_words(results: dict[str, Any], tables: str, script: str) -> str:
    """The tables, or that there is nothing to put into them yet."""
    return tables.strip() if any(results.values()) else f"Nothing is measured yet: `python bench/{script}` does it."


def written_canonical(page: str) -> str:
    """The page of canonical forms with both tables."""
    from canonical import RESULTS
    from canonical import page as bench_tables

    thesis = read_result(ROOT / "experiments" / "results" / "sorensen-table1.paper.json")
    page = put(page, "bench", bench_tables(json.loads(RESULTS.read_text(encoding="utf-8"))))
    return put(page, "thesis", thesis_table(thesis))


def written_engine(page: str) -> str:
    """The page of the engine with what discovery costs, and how the engine fared on random networks."""
    import discovery

    page = put(page, "bench", discovery.page(read(discovery.RESULTS)))
    return put(page, "fuzz", fuzz_words(read(ROOT / "bench" / "results" / "fuzz.json")))


#: What may come of a random network, as its result file and the page call it.
OUTCOMES = {
    "right": "right", "caught": "caught by the certificate", "crashed": "crashed", "silently_wrong": "silently wrong",
}  # fmt: skip


def fuzz_words(found: dict[str, Any]) -> str:
    """What came of random networks, in a paragraph."""
    tried, changed = found["control_tried"], found["control_changed"]
    kinds = (f"{found[name]:,} {words}" for name, words in OUTCOMES.items())
    return (
        f"Last run: {', '.join(kinds)}, mean coverage {found['mean_coverage']:.2f}, {found['seconds']:.0f} s.\n"
        f"As a control one moved parameter was put back in {tried} networks: the function changed in {changed} of "
        f"them;\nthe other {tried - changed} were not looked into one by one. Numbers in `bench/results/fuzz.json`."
    )


def written_zoo(page: str) -> str:
    """The page of zoos with its tables."""
    from zoo import RESULTS
    from zoo import page as bench_tables

    return put(page, "bench", bench_tables(read(RESULTS)).strip())


def written_alignment(page: str) -> str:
    """The page of alignment with its tables."""
    import align
    import align_transformers

    results = json.loads(align.RESULTS.read_text(encoding="utf-8"))
    transformers = json.loads(align_transformers.RESULTS.read_text(encoding="utf-8"))
    return put(page, "bench", "\n".join([align.page(results), align_transformers.page(transformers)]).strip())


def written_stitching(page: str) -> str:
    """The page of stitching with its tables."""
    from stitch_page import RESULTS
    from stitch_page import page as tables

    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
    return put(page, "bench", tables(rows).strip())


def written_folding(page: str) -> str:
    """The page of folding with its tables."""
    import fold

    results = read(fold.RESULTS)
    return put(page, "bench", or_words(results, fold.page(results), "fold.py speed"))


def written_studies(page: str) -> str:
    """The page of studies with its table."""
    import study

    results = read(study.RESULTS)
    return put(page, "bench", or_words(results, study.page(results), "study.py"))


def written_inspection(page: str) -> str:
    """The page of inspection with its tables."""
    from inspection_tables import written

    return written(page)


#: Page → what writes its measured tables anew.
PAGES: dict[str, Callable[[str], str]] = {
    "engine": written_engine,
    "canonical": written_canonical,
    "zoo": written_zoo,
    "alignment": written_alignment,
    "stitching": written_stitching,
    "folding": written_folding,
    "studies": written_studies,
    "inspection": written_inspection,
}

if __name__ == "__main__":
    for name, write in PAGES.items():
        path = ROOT / "docs" / f"{name}.md"
        path.write_text(write(path.read_text(encoding="utf-8")), encoding="utf-8")
