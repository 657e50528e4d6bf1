"""Tests of the result store: its table, damaged files, the folder, several writers, and writers that are killed."""

import json
import math
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from finished_tasks import PLAN, files, one, opened, program, records_of, run_script, task
from pages import DOCS, script

from intertwine.errors import InputError
from intertwine.lab.study import records
from intertwine.lab.study import store as folder
from intertwine.lab.study.records import COLUMNS, FinishedTask, Journal, ResultRow
from intertwine.lab.study.store import Store

# -- The table ---------------------------------------------------------------------------------------------------------


def drawn(seed: int) -> FinishedTask:
    """A task with gaps, odd numbers and odd texts in its rows."""
    draw = random.Random(seed)
    numbers = [None, math.nan, math.inf, -0.0, 5e-324, 0.1, 1 / 3]
    texts = [None, "", "layer1.0", 'quoted "ß"\n\\', "\u2028"]
    gaps = draw.random() < 0.5

    def number() -> float | None:
        return draw.choice(numbers) if gaps else draw.random()

    rows = [
        ResultRow(
            "cka", number(), number(), number(), number(), draw.choice(texts), draw.choice(texts), draw.choice(texts)
        )
        for _ in range(draw.choice([0, 1, 7, 8, 9, 40]))
    ]
    about = {"a": draw.choice(texts), "layer": draw.choice(texts), "options": {"β": 0.1, "a": [1]}, "repeat": seed % 3}
    return task(f"k{seed}", *rows, **about)


def shown(record: dict[str, Any]) -> str:
    """A record as text, in which NaN equals NaN."""
    return repr({name: float(v) if name in {"index", "value"} and v is not None else v for name, v in record.items()})


@pytest.mark.parametrize("way", ["journal", "shard"])
def test_the_table_holds_the_rows_of_the_tasks(tmp_path: Path, way: str) -> None:
    """Compared with `records_of`, which shares no code with the store."""
    tasks = [drawn(seed) for seed in range(60)]
    with opened(tmp_path) as store:
        for finished in tasks:
            store.add(finished)
        if way == "shard":
            (shard,) = store.compact()
            assert files(tmp_path, "journals") == []
            assert files(tmp_path, "shards") == [shard.name]
    frame = Store.existing(tmp_path).frame()
    wanted = [record for finished in tasks for record in records_of(finished, "mine")]
    assert list(map(shown, frame.to_dicts())) == list(map(shown, wanted))
    assert Store.existing(tmp_path).done() == {finished.key for finished in tasks}  # including those without rows


SCHEMA = dict.fromkeys(COLUMNS, pl.String) | {
    **dict.fromkeys(("index", "value", "low", "high", "seconds", "peak_mib"), pl.Float64),
    "repeat": pl.Int64,
}


@pytest.mark.parametrize("compacted", [False, True])
@pytest.mark.parametrize("tasks", [[], [task("k")], [task("k", ResultRow("cka", None, note="flat"))], [one("k")]])
def test_column_types_do_not_depend_on_values(tmp_path: Path, tasks: list[FinishedTask], compacted: bool) -> None:
    store = opened(tmp_path)
    for finished in tasks:
        store.add(finished)
    if compacted:
        store.compact()
    assert dict(store.frame().schema) == SCHEMA


def test_options_become_columns(tmp_path: Path) -> None:
    store = opened(tmp_path)
    chosen: list[dict[str, Any]] = [
        {"beta": 0.1, "width": 2, "tied": True, "name": "x", "mixed": 1, "many": [1, 2], "none": None},
        {"beta": 1, "width": 3, "tied": False, "name": "y", "mixed": "one"},
        {},
    ]
    for i, options in enumerate(chosen):
        store.add(task(f"k{i}", ResultRow("cka", 0.5), ResultRow("rv", 0.25), options=options))
    frame = store.frame(options=True)
    assert frame.columns[: len(COLUMNS)] == list(COLUMNS)
    found = {name: (frame[name].dtype, frame[name].to_list()[::2]) for name in frame.columns[len(COLUMNS) :]}
    assert found == {
        "option_beta": (pl.Float64, [0.1, 1.0, None]),
        "option_many": (pl.String, ["[1, 2]", None, None]),
        "option_mixed": (pl.String, ["1", "one", None]),
        "option_name": (pl.String, ["x", "y", None]),
        "option_none": (pl.String, [None, None, None]),
        "option_tied": (pl.Boolean, [True, False, None]),
        "option_width": (pl.Int64, [2, 3, None]),
    }
    assert frame["key"].to_list() == ["k0", "k0", "k1", "k1", "k2", "k2"]


def test_other_types_are_converted(tmp_path: Path) -> None:
    store, whole = opened(tmp_path), ResultRow("count", 0.0)
    object.__setattr__(whole, "value", 3)  # possible if annotations are not checked
    store.add(task("k", whole, ResultRow("cka", np.float64(0.5)), a=0, b=[1, 2]))
    assert store.frame().select("value", "a", "b").rows() == [(3.0, "0", "[1, 2]"), (0.5, "0", "[1, 2]")]
    object.__setattr__(whole, "layer", 7)
    with pytest.raises(InputError, match=r"not plain data \(layer is NoneType, int, not text\)"):
        store.add(task("l", whole, ResultRow("cka", 0.5)))


@pytest.mark.parametrize(
    ("finished", "message"),
    [
        (task(""), "A task key must be printable ASCII text without quotes or backslashes, but is ''"),
        (task('a"b'), "A task key must be printable ASCII text without quotes"),
        (task("k", options={"net": object()}), "The result of task k is not plain data"),
        (task("k", ResultRow("cka", 0.5), error="broke"), "has both an error and 1 rows. Give one"),
    ],
)
def test_invalid_tasks_are_refused(tmp_path: Path, finished: FinishedTask, message: str) -> None:
    store = opened(tmp_path)
    store.add(one("before"))
    with pytest.raises(InputError, match=message):
        store.add(finished)
    assert store.done() == {"before"}
    assert store.problems == ()


def test_invalid_characters_do_not_lose_a_task(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.add(task("k", ResultRow("cka", None, note="no file \udcff.bin")))
    assert store.frame()["note"].to_list() == ["no file ?.bin"]


# -- Done and failed tasks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compacted", [False, True])
def test_failed_tasks_are_not_done_until_they_succeed(tmp_path: Path, compacted: bool) -> None:
    first, second = opened(tmp_path), opened(tmp_path)
    first.add(task("a", error="first try", layer="7"))
    first.add(task("a", error="second try", layer="7"))
    first.add(task("b", error="unlucky"))
    first.add(one("b", 0.25))
    first.add(one("b", 0.5))  # run again: the first results are kept, whatever comes later
    first.add(task("b", error="done before"))
    first.add(task("c", error="elsewhere"))
    second.add(one("c", 0.75))
    if compacted:
        first.compact()
        second.compact()
    assert first.done() == {"b", "c"}
    (failed,) = first.errors()
    assert failed["error"] == "second try"
    assert (failed["key"], failed["verb"], failed["layer"], failed["options"]) == ("a", "compare", "7", "{}")
    assert sorted(first.frame().select("key", "value").rows()) == [("b", 0.25), ("c", 0.75)]


@pytest.mark.parametrize("shards", [0, 1, 2])
def test_a_task_of_two_writers_counts_once(tmp_path: Path, shards: int) -> None:
    """All rows are of one writer."""
    stores = [opened(tmp_path), opened(tmp_path)]
    for store, value in zip(stores, (0.25, 0.75), strict=True):
        store.add(task("same", ResultRow("cka", value), ResultRow("rv", value)))
        store.add(one(f"own{value}"))
        store.add(one(f"own{value}"))
    for store in stores[:shards]:
        store.compact()
    frame = stores[0].frame()
    assert len(frame) == 4
    assert frame.filter(pl.col("key") == "same")["value"].n_unique() == 1
    assert stores[1].done() == {"same", "own0.25", "own0.75"}


# -- Damage ------------------------------------------------------------------------------------------------------------


def journal_of(folder: Path) -> Path:
    """The one journal of a folder."""
    (path,) = (folder / "journals").iterdir()
    return path


@pytest.mark.parametrize("compacted", [False, True])
@pytest.mark.parametrize("cut", [1, 2, 30, 10_000])
def test_an_incomplete_last_line_is_skipped(tmp_path: Path, cut: int, compacted: bool) -> None:
    with opened(tmp_path) as store:
        store.add(one("whole"))
        length = journal_of(tmp_path).stat().st_size
        store.add(task("torn", *(ResultRow("cka", i / 1000, note=f"{i}") for i in range(5000))))
    os.truncate(journal_of(tmp_path), max(journal_of(tmp_path).stat().st_size - cut, length + 1))
    again = opened(tmp_path)
    if compacted:
        again.compact(others=True)
    else:
        assert again.done() == {"whole"}
    (problem,) = again.problems
    assert problem.endswith(
        ".jsonl, line 2 is damaged, incomplete, or still being written. It is skipped; its task counts as not done."
    )
    assert again.frame()["key"].to_list() == ["whole"]
    again.add(one("torn"))
    assert again.done() == {"whole", "torn"}


def test_every_changed_byte_is_detected(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        for key in ("a", "b", "c"):
            store.add(one(key))
    path = journal_of(tmp_path)
    whole = path.read_bytes()
    start = whole.index(b"\n") + 1
    for at in range(start, whole.index(b"\n", start), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert store.done() == {"a", "c"}
        assert len(store.problems) == 1
    path.write_bytes(whole[:start] + bytes(4096) + b"\n" + whole[start:])  # possible after a power cut
    assert store.done() == {"a", "b", "c"}
    assert len(store.problems) == 1


def test_tasks_after_a_partial_write_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)
    store.add(one("before"))
    real, calls = os.write, iter([30])

    def failing(handle: int, data: memoryview) -> int:
        if (some := next(calls, None)) is None:
            raise OSError(28, "No space left on device")
        return real(handle, data[:some])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", failing)
        with pytest.raises(
            InputError, match=r"No space left on device\). Nothing that is already stored there is lost"
        ):
            store.add(one("lost"))
    store.add(one("after"))
    assert store.done() == {"before", "after"}
    assert len(store.problems) == 1


def test_long_lines_are_written_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: real(handle, data[:11]))
    store = opened(tmp_path)
    store.add(one("a"))
    store.add(one("b"))
    assert (store.done(), store.problems) == ({"a", "b"}, ())


def test_a_damaged_shard_is_an_error(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.add(one("a"))
    (shard,) = store.compact()
    shard.write_bytes(shard.read_bytes()[:-20])
    for reading in (store.done, store.errors, store.frame):
        with pytest.raises(InputError, match=r"is damaged or not a shard .* delete it and run the plan again"):
            reading()
    shard.unlink()
    assert store.done() == set()


def test_a_shard_with_another_column_type_is_an_error(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.add(one("a"))
    (shard,) = store.compact()
    pl.read_parquet(shard).with_columns(repeat=pl.lit("once")).write_parquet(shard)
    with pytest.raises(InputError, match=r"not a shard of a study \(its column repeat holds String instead of Int64\)"):
        store.frame()


PAGE = (DOCS / "results-table.md").read_text(encoding="utf-8")

ROOT_ONLY = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can take on the rights of another user"
)


# -- The folder --------------------------------------------------------------------------------------------------------


def test_the_same_plan_opens_the_same_folder(tmp_path: Path) -> None:
    opened(tmp_path / "new" / "deep").add(one("a"))
    turned = dict(reversed(PLAN.items()))
    assert Store(tmp_path / "new" / "deep", "mine", turned).done() == {"a"}
    store = Store.existing(tmp_path / "new" / "deep")
    assert (store.study, store.plan) == ("mine", PLAN)
    assert repr(store).startswith("Store('mine', plan ")


def test_another_plan_is_refused(tmp_path: Path) -> None:
    opened(tmp_path).add(one("a"))
    with pytest.raises(InputError) as refused:
        Store(tmp_path, "other", {**PLAN, "zoo": "cifar", "repeats": 2})
    message = str(refused.value)
    assert message.startswith(f"{tmp_path} holds the study 'mine' (plan ")
    assert "), not 'other' (plan " in message
    assert "The plans differ in repeats, zoo. Give another folder, or run the plan of this folder." in message
    with pytest.raises(InputError, match=r"holds the study 'mine' .* not 'renamed'"):
        Store(tmp_path, "renamed", PLAN)
    assert opened(tmp_path).done() == {"a"}


def claim(folder: str, writer: int, start: Any) -> None:
    """One of several processes with different plans for one folder."""
    start.wait()
    try:
        Store(folder, "mine", {"writer": writer}).add(one(f"{writer}"))
    except InputError:
        sys.exit(3)


def test_one_of_several_plans_gets_the_folder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(4)
    writers = [context.Process(target=claim, args=(str(tmp_path), i, start)) for i in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    codes = [writer.exitcode for writer in writers]
    assert sorted(codes, key=str) == [0, 3, 3, 3]
    winner = codes.index(0)
    assert Store.existing(tmp_path).plan == {"writer": winner}
    assert Store.existing(tmp_path).done() == {f"{winner}"}
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []


def test_a_plan_written_a_moment_earlier_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = folder._refuse_other_files

    def meanwhile(path: Path) -> None:
        real(path)
        monkeypatch.setattr(folder, "_refuse_other_files", real)
        Store(tmp_path, "earlier", {"verb": "fold"})

    monkeypatch.setattr(folder, "_refuse_other_files", meanwhile)
    with pytest.raises(InputError, match=r"holds the study 'earlier' .* not 'mine'"):
        opened(tmp_path)
    assert Store.existing(tmp_path).study == "earlier"


def test_a_disk_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*paths: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    opened(tmp_path).add(one("a"))
    assert opened(tmp_path).done() == {"a"}


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    for name in ("thesis.tex", "a.txt", "b.txt", "c.txt"):
        (tmp_path / name).touch()
    with pytest.raises(InputError, match=r"holds other files \(a.txt, b.txt, c.txt, …\) and no plan.json. Give a new"):
        opened(tmp_path)
    assert len(os.listdir(tmp_path)) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: None, "is damaged"),
        (lambda data: {"format": 1}, "is damaged"),
        (lambda data: {**data, "format": 2}, "results in format 2, but this version of intertwine reads format 1"),
        (lambda data: {**data, "plan": {"verb": "fold"}}, "was edited"),
    ],
)
def test_an_invalid_plan_file_is_an_error(tmp_path: Path, change: Any, message: str) -> None:
    store, path = opened(tmp_path), tmp_path / "plan.json"
    store.add(one("a"))
    changed = change(json.loads(path.read_text()))
    path.write_text("{" if changed is None else json.dumps(changed))
    for opening in (Store.existing, opened):
        with pytest.raises(InputError, match=message):
            opening(tmp_path)


def test_a_folder_without_a_study_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no study: it has no plan.json. Give the folder of a study"):
        Store.existing(tmp_path)
    with pytest.raises(InputError, match=r"The plan of the study 'mine' is not plain data"):
        Store(tmp_path, "mine", {"net": object()})
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"Cannot write results to .* \(.*\). Nothing that .* Give another folder"):
        opened(tmp_path / "file" / "below")


@pytest.fixture
def nobody() -> Iterator[Path]:
    """A folder that everybody may read; a test that gives up root's rights gets them back at the end."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)
        os.seteuid(0)


@ROOT_ONLY
def test_a_read_only_folder_can_be_read(nobody: Path) -> None:
    store = opened(nobody)
    store.add(one("a"))
    store.compact()
    opened(nobody).add(one("b"))
    os.seteuid(65534)
    message = r"\(Permission denied\). Nothing that is already stored .* Give a folder that you may write to"
    for place in (nobody, nobody / "new"):
        with pytest.raises(InputError, match=message):
            opened(place)
    reader = Store.existing(nobody)
    assert reader.done() == {"a", "b"}
    assert len(reader.frame()) == 2
    with pytest.raises(InputError, match=message):
        reader.add(one("c"))
    with pytest.raises(InputError, match=message):
        reader.compact(others=True)
    os.seteuid(0)
    next((nobody / "journals").iterdir()).chmod(0o600)
    os.seteuid(65534)
    with pytest.raises(InputError, match=r"Cannot read the results of 'mine' in .*Permission denied"):
        reader.done()


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    """A limit on the size of files replaces a full disk: writes end in the middle of a line."""
    code = """
        import resource
        from intertwine.errors import InputError
        store, stored = Store(sys.argv[1], "mine", PLAN), []
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.RLIM_INFINITY))
        try:
            while len(stored) < 1000:
                store.add(one(f"{len(stored)}"))
                stored.append(len(stored))
        except InputError as error:
            print(len(stored), error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        try:
            store.compact()
        except InputError as error:
            print(len(os.listdir(sys.argv[1] + "/shards")), error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        store.add(one("after"))
        assert len(store.done()) == len(stored) + 1
        assert len(store.compact()) == 2  # the journal that could not be compacted before, and the new one
    """
    done = run_script(code, str(tmp_path))
    assert done.returncode == 0, done.stderr
    adding, compacting = done.stdout.splitlines()
    advice = "Nothing that is already stored there is lost. Free space on that disk, then run the same plan again"
    assert advice in adding
    assert advice in compacting
    count = int(adding.split()[0])
    assert 5 < count < 100
    assert compacting.startswith("0 ")  # no partial shard takes up space
    assert len(opened(tmp_path).frame()) == count + 1


def test_tasks_are_stored_without_polars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "polars", None)
        store.add(one("a"))
        store.add(task("b", error="broke"))
        assert opened(tmp_path).done() == {"a"}
        assert [failed["error"] for failed in store.errors()] == ["broke"]
        for call in (store.frame, store.compact):
            with pytest.raises(
                InputError, match=r"pip install 'intertwine\[frames\]'. Tasks run and are stored without"
            ):
                call()
    store.add(one("c"))
    assert len(store.compact()) == 1  # the journal that could not be compacted before
    assert store.done() == {"a", "c"}


# -- The page and the benchmark ----------------------------------------------------------------------------------------


def test_the_benchmark_runs() -> None:
    bench = script("study_store", Path(__file__).parents[3] / "bench")
    measured = bench.measure(1000)
    assert len(measured) == 4
    assert bench.table(measured).count("\n") == 6


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those without DuckDB and pandas, which are not installed."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert len(blocks) == 5
    for block in blocks:
        if "duckdb" not in block and "pandas" not in block:
            exec(block, names)
    assert names["means"].rows() == [("cka", 0.625)]
    assert names["direct"].sort(COLUMNS).equals(names["table"].sort(COLUMNS))
    assert [failed["key"] for failed in names["study"].errors()] == ["task2"]


def test_the_page_names_every_column() -> None:
    section = PAGE.partition("## Columns")[2].partition("\n## ")[0]
    assert re.findall(r"`([a-z_]+)`", " ".join(re.findall(r"^\| (.*?) \|", section, re.M))) == [*COLUMNS, "error"]


# -- Several writers ---------------------------------------------------------------------------------------------------


def write_many(folder: str, writer: int, start: Any) -> None:
    """One of several writers: adds its own tasks and shared ones, and compacts now and then."""
    store = opened(Path(folder))
    start.wait()
    for i in range(60):
        store.add(task(f"own{writer}-{i}", ResultRow("cka", writer), ResultRow("rv", i / 8)))
        store.add(task(f"shared{i}", ResultRow("cka", writer), ResultRow("rv", writer)))
        if i % 25 == 24:
            store.compact(others=True)


def test_concurrent_writers_lose_and_repeat_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(4)
    writers = [context.Process(target=write_many, args=(str(tmp_path), i, start)) for i in range(3)]
    for writer in writers:
        writer.start()
    start.wait(60)
    reader, before = opened(tmp_path), set[str]()
    while any(writer.is_alive() for writer in writers):  # read while they write
        done = reader.done()
        assert before <= done
        assert len(reader.frame()) >= 2 * len(done)
        before = done
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    own = {f"own{writer}-{i}" for writer in range(3) for i in range(60)}
    assert reader.done() == own | {f"shared{i}" for i in range(60)}
    assert reader.problems == ()
    frame = reader.frame()
    assert len(frame) == 2 * 240
    shared = frame.filter(pl.col("key").str.starts_with("shared")).group_by("key").agg(pl.col("value").unique())
    assert shared["value"].list.len().unique().to_list() == [1]
    reader.compact(others=True)  # the journals of the ended writers
    assert files(tmp_path, "journals") == []
    assert reader.frame().sort(COLUMNS).equals(frame.sort(COLUMNS))


def test_threads_share_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`compact` during an `add` waits for it, and loses nothing."""
    store, real, adding = opened(tmp_path), Journal.add, threading.Event()
    store.add(one("before"))

    def slow(journal: Journal, line: bytes) -> None:
        adding.set()
        time.sleep(0.2)
        real(journal, line)

    monkeypatch.setattr(Journal, "add", slow)
    with ThreadPoolExecutor(2) as pool:
        added = pool.submit(store.add, one("during"))
        assert adding.wait(10)
        pool.submit(store.compact).result()
        added.result()
    assert store.done() == {"before", "during"}
    assert len(store.frame()) == 2


def test_a_forked_process_writes_its_own_journal(tmp_path: Path) -> None:
    code = """
        store = Store(sys.argv[1], "mine", PLAN)
        store.add(one("parent"))
        if (child := os.fork()) == 0:
            store.add(one("child"))
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        store.add(one("later"))
    """
    done = run_script(code, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert opened(tmp_path).done() == {"parent", "child", "later"}
    assert len(files(tmp_path, "journals")) == 2


def test_abandoned_journals_are_compacted_and_active_ones_kept(tmp_path: Path) -> None:
    assert run_script("Store(sys.argv[1], 'mine', PLAN).add(one('dead'))", str(tmp_path)).returncode == 0
    running, store = opened(tmp_path), opened(tmp_path)
    running.add(one("running"))
    store.add(one("own"))
    assert len(store.compact()) == 1
    assert len(files(tmp_path, "journals")) == 2  # by default, only its own
    assert len(store.compact(others=True)) == 1
    assert len(files(tmp_path, "journals")) == 1
    running.add(one("later"))
    assert store.done() == {"dead", "running", "own", "later"}
    assert store.compact(others=True) == ()


def test_a_new_journal_that_is_compacted_before_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, real, removed = opened(tmp_path), Journal._lock, []

    def slow(journal: Journal) -> bool | None:
        if not removed:  # between the creation of the file and its lock
            removed.append(journal.path)
            journal.path.unlink()
        return real(journal)

    monkeypatch.setattr(Journal, "_lock", slow)
    store.add(one("a"))
    assert store.done() == {"a"}
    assert not removed[0].exists()


@pytest.mark.parametrize("moment", ["journals", "shards", "reading"])
def test_a_journal_that_is_compacted_during_a_read_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """After the journals were listed, after the shards were listed, or after its shard was found missing."""
    writer, reader = opened(tmp_path), opened(tmp_path)
    files_of, entries_of = reader._files, records.entries

    def listing(part: str) -> list[Path]:
        found = files_of(part)
        if part == moment:
            writer.compact()
        return found

    def reading(path: Path, problems: list[str]) -> Iterator[bytes]:
        monkeypatch.setattr(records, "entries", entries_of)
        writer.compact()
        assert not path.exists()
        return entries_of(path, problems)

    monkeypatch.setattr(reader, "_files", listing)
    for key, read in (("a", reader.done), ("b", lambda: set(reader.frame()["key"])), ("c", reader.done)):
        before = reader.done()
        writer.add(one(key))
        if moment == "reading":
            monkeypatch.setattr(records, "entries", reading)
        assert read() == before | {key}
    assert reader.frame()["key"].to_list() == ["a", "b", "c"]


# -- Kills -------------------------------------------------------------------------------------------------------------


ENDLESS = """
    store, name, every = Store(sys.argv[1], "mine", PLAN), sys.argv[2], int(sys.argv[3])
    wide = tuple(ResultRow("cka", i / 3, note=f"note {i}") for i in range(300))
    i = 0
    while True:
        key = f"{name}-{i}"
        store.add(FinishedTask(key, {"verb": "compare"}, wide, 0.5))
        os.write(1, f"{key}\\n".encode())  # printed after add has returned
        i += 1
        if every and i % every == 0:
            store.compact(others=True)
            os.write(1, b"compacted\\n")
"""


def killed(folder: Path, name: str, every: int, after: int, moment: float) -> list[str]:
    """The keys that a writer printed as stored before it was killed at a random moment."""
    process = subprocess.Popen(**program(ENDLESS, str(folder), name, str(every)), stdout=subprocess.PIPE)
    assert process.stdout is not None
    printed = [process.stdout.readline() for _ in range(after)]
    threading.Timer(moment, process.kill).start()
    printed += process.stdout.read().splitlines(keepends=True)
    assert process.wait(60) == -signal.SIGKILL
    process.stdout.close()
    return [line.decode().strip() for line in printed if line.endswith(b"\n")]


@pytest.mark.parametrize("every", [0, 3], ids=["add", "compact"])
def test_a_writer_killed_at_any_moment_loses_nothing(tmp_path: Path, every: int) -> None:
    draw = random.Random(every)
    printed = set[str]()
    for round in range(10):
        printed |= set(killed(tmp_path, f"{round}", every, draw.randrange(1, 8), draw.uniform(0, 0.03))) - {"compacted"}
        store = opened(tmp_path)
        done = store.done()
        assert printed <= done
        assert len(done - printed) <= round + 1  # at most the one during which it was killed
        frame = store.frame()
        assert set(frame["key"]) == done
        assert len(frame) == 300 * len(done)
    store.compact(others=True)
    assert files(tmp_path, "journals") == []
    assert [name for name in os.listdir(tmp_path / "shards") if not name.endswith(".parquet")] == []
    assert store.frame().sort("key", "note").equals(frame.sort("key", "note"))


@pytest.mark.parametrize(
    ("moment", "shard"), [("replace", r"\..*\.parquet\.part"), ("unlink", r"\d.*\.parquet")], ids=["before", "between"]
)
def test_a_kill_during_compaction_repeats_nothing(tmp_path: Path, moment: str, shard: str) -> None:
    """Killed before the shard is renamed, or between the renaming and the removal of the journal."""
    code = """
        from pathlib import Path
        store = Store(sys.argv[1], "mine", PLAN)
        store.add(one("a"))
        store.add(FinishedTask("b", {"verb": "compare"}, (), 0.5, error="broke"))
        setattr(Path, sys.argv[2], lambda *ignored, **also: os.kill(os.getpid(), signal.SIGKILL))
        store.compact()
    """
    assert run_script(code, str(tmp_path), moment).returncode == -signal.SIGKILL
    assert len(files(tmp_path, "journals")) == 1
    (name,) = files(tmp_path, "shards")
    assert re.fullmatch(shard, name)
    if moment == "unlink":  # the shard counts, not the journal
        (tmp_path / "journals" / files(tmp_path, "journals")[0]).write_text("damaged")
    store = opened(tmp_path)
    for _ in range(2):
        assert store.done() == {"a"}
        assert len(store.frame()) == 1
        assert [failed["key"] for failed in store.errors()] == ["b"]
        assert store.problems == ()
        store.compact(others=True)
    assert files(tmp_path, "journals") == []
    assert len(files(tmp_path, "shards")) == 1
