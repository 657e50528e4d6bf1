"""docs/benchmarks.md is what the results say; its commands exist; `bench/all.py` goes on whatever happens to one."""

import doctest
import json
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from pages import DOCS, script

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import commands
import machine
from benches import BENCHES, ON_A_CPU, ON_A_GPU, Bench

ROOT = DOCS.parent
BENCH = ROOT / "bench"
PAGE = (DOCS / "benchmarks.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def benchmarks() -> ModuleType:
    """The script that writes the page."""
    return script("benchmarks")


@pytest.fixture(scope="module")
def runner() -> ModuleType:
    """bench/all.py, whose name is a word of Python."""
    return import_module("all")


def bench(words: str = "discovery.py", name: str = "mine", needs: tuple[str, ...] = ()) -> Bench:
    return Bench(name, words, 0.01, "mine.json", "mine", needs)


# -- the page ----------------------------------------------------------------------------------------------------------


def test_the_page_is_what_was_measured(benchmarks: ModuleType) -> None:
    assert benchmarks.page() == PAGE, "run: python docs/benchmarks.py"


def test_what_falls_short_has_a_reason(benchmarks: ModuleType) -> None:
    lines = [benchmarks.read(row) for rows in benchmarks.ROOMS.values() for row in rows]
    assert not [line.row.what for line in lines if line.reached is False and not line.row.why]
    names = [line.row.what for line in lines]
    assert len(set(names)) == len(names)


def test_tests_that_hold_numbers_are_there(benchmarks: ModuleType) -> None:
    for held in benchmarks.studies.HELD:
        assert (ROOT / held.test).is_file(), held.test


@pytest.mark.parametrize(
    ("value", "bar", "at", "reached", "word"),
    [
        (2.0, 2.0, "most", True, "yes"),
        (2.1, 2.0, "most", False, "**no**"),
        (2.0, 2.0, "least", True, "yes"),
        (1.9, 2.0, "least", False, "**no**"),
        (2.1, (1.0, 2.0), "within", False, "**no**"),
        (1.0, (1.0, 2.0), "within", True, "yes"),
        (1e9, float("inf"), "most", True, ""),
    ],
)
def test_bars(
    benchmarks: ModuleType, tmp_path: Path, value: float, bar: object, at: str, reached: bool, word: str
) -> None:
    (tmp_path / "discovery.json").write_text(json.dumps({"seconds": value}))
    row = benchmarks.Asked("it", "a bar", "discovery", lambda r: r["seconds"], bar, at, "{:.1f} s")
    line = benchmarks.read(row, tmp_path)
    assert (line.measured, line.reached) == (f"{value:.1f} s", reached)
    page = benchmarks.page({"Room": (row,)}, (), tmp_path)
    assert f"| it | a bar | {value:.1f} s |  | {word} | `python bench/discovery.py` |" in page
    assert ("- **it**: asked a bar; measured" in page) == (not reached)


def test_a_number_that_is_not_there_stops_the_page_by_name(benchmarks: ModuleType, tmp_path: Path) -> None:
    row = benchmarks.Asked("the speed of it", "≤ 1 s", "discovery", lambda r: r["rows"][0]["seconds"], 1.0)
    (tmp_path / "discovery.json").write_text('{"rows": []}')
    with pytest.raises(SystemExit, match=r"'the speed of it' should be in bench/results/discovery.json.*IndexError"):
        benchmarks.page({"Room": (row,)}, (), tmp_path)
    with pytest.raises(SystemExit, match=r"Run `python bench/discovery\.py`"):
        benchmarks.page({"Room": (replace(row, value=lambda r: r["none"]),)}, (), tmp_path)


def test_a_benchmark_that_never_ran_is_said_in_words(benchmarks: ModuleType, tmp_path: Path) -> None:
    row = benchmarks.Asked("it", "≤ 1 s", "discovery", lambda r: r["seconds"], 1.0)
    page = benchmarks.page({"Room": (row, replace(row, what="lost", value=None))}, (), tmp_path)
    assert "| it | ≤ 1 s | not measured yet |  | not known |" in page
    assert "| lost | ≤ 1 s | not kept |  | not known |" in page
    assert "- **lost**: asked ≤ 1 s; not kept.\n" in page


@pytest.mark.parametrize("name", ["machine", "benches", "all", "asked.row"])
def test_the_examples_in_the_docstrings_run(benchmarks: ModuleType, name: str) -> None:
    found = doctest.testmod(import_module(name))
    assert found.attempted > 0
    assert found.failed == 0


def test_rows_are_picked_or_missed_aloud(benchmarks: ModuleType) -> None:
    row = sys.modules["asked.row"]
    with pytest.raises(LookupError, match="no row with"):
        row.pick([{"a": 1}], a=2)
    with pytest.raises(LookupError, match="2 rows with"):
        row.only([{"a": 1}, {"a": 1}], a=1)
    with pytest.raises(ValueError, match="most, least or within, not 'below'"):
        benchmarks.Asked("it", "", "discovery", None, 1.0, "below")


# -- the list ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one", BENCHES.values(), ids=list(BENCHES))
def test_every_command_names_a_benchmark(one: Bench) -> None:
    assert (BENCH / one.words.split()[0]).is_file()
    assert set(one.needs) <= {"gpu", "data", "peers"}
    assert ("peers" in one.needs) == ("PEERS" in one.words.split())


def test_no_name_is_given_twice() -> None:
    assert len(BENCHES) == len(ON_A_CPU) + len(ON_A_GPU)
    assert all("gpu" in one.needs for one in ON_A_GPU)
    assert not any("gpu" in one.needs for one in ON_A_CPU)


# -- the runner --------------------------------------------------------------------------------------------------------


def test_one_that_fails_does_not_lose_the_others(runner: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    outcomes = runner.run_all(
        [bench("no-such-file.py", name="bad"), bench("all.py --list", name="good"), bench(needs=("gpu",))], None, False
    )
    assert [(one.name, one.good) for one in outcomes] == [("bad", False), ("good", True), ("mine", None)]
    assert outcomes[0].words == "failed with code 2"
    assert outcomes[2].words == "left out: needs a GPU"
    assert "python bench/discovery.py" in capfd.readouterr().out
    assert "mine                          0.0 min  left out: needs a GPU" in runner.table(outcomes)


def test_one_that_takes_too_long_is_stopped(runner: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "line_of", lambda bench, peers: [sys.executable, "-c", "import time; time.sleep(60)"])
    outcome = runner.run(bench(), None, 0.005)
    assert (outcome.good, outcome.words) == (False, "stopped: longer than 0.005 minutes")
    assert outcome.minutes < 0.5


def test_the_peers_take_their_place_in_the_command(runner: ModuleType) -> None:
    line = runner.line_of(bench("align.py speed --peers PEERS"), "/peers/bin/python")
    assert line[1:] == [str(BENCH / "align.py"), "speed", "--peers", "/peers/bin/python"]


def test_names_are_checked(runner: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert [one.name for one in runner.parser().parse_args(["--only", "fuzz,discovery"]).only] == ["fuzz", "discovery"]
    with pytest.raises(SystemExit):
        runner.parser().parse_args(["--only", "fuzz,fuss"])
    assert "no benchmark is called fuss; --list shows them all" in capsys.readouterr().err


# -- the header --------------------------------------------------------------------------------------------------------


def test_the_header_says_who_measured_and_names_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/measure.py", "--peers", "/home/me/python", str(ROOT / "zoos" / "a")])
    old = {"machine": {}, "date": "", "command": "", "version": {}}
    results = machine.stamped({"rows": [1], "made": {"pairs": old, "layers": old}}, "layers")
    assert results["rows"] == [1]
    assert results["made"]["pairs"] == old
    made = results["made"]["layers"]
    assert made["command"] == "python bench/measure.py --peers .../python zoos/a"
    assert made["machine"]["cores"] > 0
    told = machine.made_of(results, "layers", gpu=False)
    assert made["date"][:10] in told
    assert f"{made['machine']['cores']} cores, load" in told
    assert f"torch {made['version']['torch']}" in told


def test_older_results_name_their_devices() -> None:
    rows = [{"architecture": "mlp", "device": "2 CPU cores"}, {"architecture": "vgg", "device": "NVIDIA H200"}]
    assert machine.made_of({"quality": rows}, "vgg", gpu=True) == "NVIDIA H200; date not recorded"
    assert machine.made_of({"quality": rows}, "mlp widths=[1]", gpu=False) == "2 CPU cores; date not recorded"
    assert machine.made_of({"quality": rows}, "speed", gpu=False) == "machine and date not recorded"
    assert machine.made_of([{"device": "cuda"}], "all", gpu=True) == "machine and date not recorded"


# -- what a user waits for ---------------------------------------------------------------------------------------------


def test_every_command_is_asked_for_its_help(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(commands, "seconds_of", lambda words: asked.append(tuple(words)) or float(len(asked)))
    rows = list(commands.measure_help(2))
    assert rows[0] == {"command": "intertwine --help", "slowest_s": 3.0}  # the first of three calls does not count
    assert {"intertwine align --help", "intertwine demo --help"} <= {row["command"] for row in rows}
    assert asked.count(("align", "--help")) == 3
