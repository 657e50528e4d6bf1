"""The result store of a study: nothing is lost or counted twice, whoever writes, and whoever is killed."""

import multiprocessing
import os
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from finished_tasks import files, one, opened, program, run_script, task

from intertwine.study import journal
from intertwine.study.journal import Journal
from intertwine.study.rows import COLUMNS, Row

# -- several writers ---------------------------------------------------------------------------------------------------


def write_many(folder: str, writer: int, start: Any) -> None:
    """A writer among others: tasks of its own and shared ones, made into shards on the way."""
    store = opened(Path(folder))
    start.wait()
    for i in range(60):
        store.add(task(f"own{writer}-{i}", Row("cka", writer), Row("rv", i / 8)))
        store.add(task(f"shared{i}", Row("cka", writer), Row("rv", writer)))
        if i % 25 == 24:
            store.compact(others=True)


def test_writers_at_once_lose_and_repeat_nothing(tmp_path: Path) -> None:
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
    reader.compact(others=True)  # what the writers left
    assert files(tmp_path, "journals") == []
    assert reader.frame().sort(COLUMNS).equals(frame.sort(COLUMNS))


def test_threads_share_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that is asked for in the middle of an `add` waits for it, and loses nothing."""
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


def test_a_forked_process_writes_a_journal_of_its_own(tmp_path: Path) -> None:
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


def test_journals_left_behind_become_shards_and_running_ones_stay(tmp_path: Path) -> None:
    assert run_script("Store(sys.argv[1], 'mine', PLAN).add(one('dead'))", str(tmp_path)).returncode == 0
    running, store = opened(tmp_path), opened(tmp_path)
    running.add(one("running"))
    store.add(one("own"))
    assert len(store.compact()) == 1
    assert len(files(tmp_path, "journals")) == 2  # without being asked, only its own
    assert len(store.compact(others=True)) == 1
    assert len(files(tmp_path, "journals")) == 1
    running.add(one("later"))
    assert store.done() == {"dead", "running", "own", "later"}
    assert store.compact(others=True) == ()


def test_a_new_journal_that_was_gathered_at_once_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, real, gathered = opened(tmp_path), Journal._hold, []

    def slow(journal: Journal) -> bool | None:
        if not gathered:  # between the making of the file and its lock
            gathered.append(journal.path)
            journal.path.unlink()
        return real(journal)

    monkeypatch.setattr(Journal, "_hold", slow)
    store.add(one("a"))
    assert store.done() == {"a"}
    assert not gathered[0].exists()


@pytest.mark.parametrize("moment", ["journals", "shards", "reading"])
def test_a_journal_that_becomes_a_shard_meanwhile_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """After the journals were listed, after the shards were, and after it was seen that there is no shard of it."""
    writer, reader = opened(tmp_path), opened(tmp_path)
    files_of, entries_of = reader._files, journal.entries

    def listing(part: str) -> list[Path]:
        found = files_of(part)
        if part == moment:
            writer.compact()
        return found

    def reading(path: Path, problems: list[str]) -> Iterator[bytes]:
        monkeypatch.setattr(journal, "entries", entries_of)
        writer.compact()
        assert not path.exists()
        return entries_of(path, problems)

    monkeypatch.setattr(reader, "_files", listing)
    for key, read in (("a", reader.done), ("b", lambda: set(reader.frame()["key"])), ("c", reader.done)):
        before = reader.done()
        writer.add(one(key))
        if moment == "reading":
            monkeypatch.setattr(journal, "entries", reading)
        assert read() == before | {key}
    assert reader.frame()["key"].to_list() == ["a", "b", "c"]


# -- kills -------------------------------------------------------------------------------------------------------------


ENDLESS = """
    store, name, every = Store(sys.argv[1], "mine", PLAN), sys.argv[2], int(sys.argv[3])
    wide = tuple(Row("cka", i / 3, note=f"note {i}") for i in range(300))
    i = 0
    while True:
        key = f"{name}-{i}"
        store.add(Finished(key, {"verb": "compare"}, wide, 0.5))
        os.write(1, f"{key}\\n".encode())  # told only once add has returned
        i += 1
        if every and i % every == 0:
            store.compact(others=True)
            os.write(1, b"compacted\\n")
"""


def killed(folder: Path, name: str, every: int, after: int, moment: float) -> list[str]:
    """The keys that a writer said it had stored before it was killed at a random moment."""
    process = subprocess.Popen(**program(ENDLESS, str(folder), name, str(every)), stdout=subprocess.PIPE)
    assert process.stdout is not None
    told = [process.stdout.readline() for _ in range(after)]
    threading.Timer(moment, process.kill).start()
    told += process.stdout.read().splitlines(keepends=True)
    assert process.wait(60) == -signal.SIGKILL
    process.stdout.close()
    return [line.decode().strip() for line in told if line.endswith(b"\n")]


@pytest.mark.parametrize("every", [0, 3], ids=["add", "compact"])
def test_a_writer_killed_at_any_moment_loses_nothing(tmp_path: Path, every: int) -> None:
    draw = random.Random(every)
    told = set[str]()
    for round in range(10):
        told |= set(killed(tmp_path, f"{round}", every, draw.randrange(1, 8), draw.uniform(0, 0.03))) - {"compacted"}
        store = opened(tmp_path)
        done = store.done()
        assert told <= done
        assert len(done - told) <= round + 1  # the one it was killed in, at most
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
def test_a_kill_around_the_renaming_doubles_nothing(tmp_path: Path, moment: str, shard: str) -> None:
    """Killed when the shard is written but has no name yet; and when it has, but the journal is still there."""
    code = """
        from pathlib import Path
        store = Store(sys.argv[1], "mine", PLAN)
        store.add(one("a"))
        store.add(Finished("b", {"verb": "compare"}, (), 0.5, error="broke"))
        setattr(Path, sys.argv[2], lambda *ignored, **also: os.kill(os.getpid(), signal.SIGKILL))
        store.compact()
    """
    assert run_script(code, str(tmp_path), moment).returncode == -signal.SIGKILL
    assert len(files(tmp_path, "journals")) == 1
    (name,) = files(tmp_path, "shards")
    assert re.fullmatch(shard, name)
    if moment == "unlink":  # the shard counts, whatever becomes of the journal
        (tmp_path / "journals" / files(tmp_path, "journals")[0]).write_text("nothing of use")
    store = opened(tmp_path)
    for _ in range(2):
        assert store.done() == {"a"}
        assert len(store.frame()) == 1
        assert [failed["key"] for failed in store.errors()] == ["b"]
        assert store.problems == ()
        store.compact(others=True)
    assert files(tmp_path, "journals") == []
    assert len(files(tmp_path, "shards")) == 1
