"""docs/measures.md: its table is what the code declares, its examples run."""

import json
import re

from pages import DOCS, script

import intertwine as it
from intertwine.measure.result import Result

PAGE = (DOCS / "measures.md").read_text(encoding="utf-8")


def test_the_table_is_what_the_code_declares() -> None:
    module = script("measures")
    assert module.written(PAGE) == PAGE, "run: python docs/measures.py"
    assert set(module.COSTS) <= {m.name for m in it.measures()}, "a cost of a measure that is gone"
    assert set(module.PEERS) <= set(module.COSTS)


def test_the_times_are_what_was_measured() -> None:
    bench = script("measure", DOCS.parent / "bench")
    results = json.loads(bench.RESULTS.read_text(encoding="utf-8"))
    table = bench.page(results["rows"] + results["layers"])
    assert table in PAGE, "write the table of `python bench/measure.py page` into docs/measures.md"
    gpu = script("measure_gpu", DOCS.parent / "bench")
    table = gpu.page(json.loads(gpu.RESULTS.read_text(encoding="utf-8")))
    assert table in PAGE, "write the table of `python bench/measure_gpu.py` into docs/measures.md"


def test_the_examples_run() -> None:
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.S):
        exec(block, names)
    found = names["found"]
    assert isinstance(found, Result)
    assert abs(found.value - 1) < 1e-6


def test_the_files_it_names_are_there() -> None:
    for path in re.findall(r"`(measure/\w+\.py)`", PAGE):
        assert (DOCS.parent / "src" / "intertwine" / path).exists()
