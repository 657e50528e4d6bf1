"""The result store of a study: its table is what the tasks say, and damage is seen."""

import math
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from finished_tasks import files, one, opened, records_of, task

from intertwine.errors import InputError
from intertwine.study.rows import COLUMNS, Finished, Row
from intertwine.study.store import Store

# -- the table ---------------------------------------------------------------------------------------------------------


def drawn(seed: int) -> Finished:
    """A task with gaps, odd numbers and odd texts in its rows."""
    draw = random.Random(seed)
    numbers = [None, math.nan, math.inf, -0.0, 5e-324, 0.1, 1 / 3]
    texts = [None, "", "layer1.0", 'quoted "ß"\n\\', "\u2028"]
    gaps = draw.random() < 0.5

    def number() -> float | None:
        return draw.choice(numbers) if gaps else draw.random()

    rows = [
        Row("cka", number(), number(), number(), number(), draw.choice(texts), draw.choice(texts), draw.choice(texts))
        for _ in range(draw.choice([0, 1, 7, 8, 9, 40]))
    ]
    about = {"a": draw.choice(texts), "layer": draw.choice(texts), "options": {"β": 0.1, "a": [1]}, "repeat": seed % 3}
    return task(f"k{seed}", *rows, **about)


def shown(record: dict[str, Any]) -> str:
    """A record that can be compared: NaN equals NaN."""
    return repr({name: float(v) if name in {"index", "value"} and v is not None else v for name, v in record.items()})


@pytest.mark.parametrize("way", ["journal", "shard"])
def test_the_table_is_what_the_tasks_say(tmp_path: Path, way: str) -> None:
    """Against the records that a task gives of itself, which share no code with the store."""
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
    assert Store.existing(tmp_path).done() == {finished.key for finished in tasks}  # those without rows, too


SCHEMA = dict.fromkeys(COLUMNS, pl.String) | {
    **dict.fromkeys(("index", "value", "low", "high", "seconds", "peak_mib"), pl.Float64),
    "repeat": pl.Int64,
}


@pytest.mark.parametrize("compacted", [False, True])
@pytest.mark.parametrize("tasks", [[], [task("k")], [task("k", Row("cka", None, note="flat"))], [one("k")]])
def test_columns_have_their_types_whatever_is_in_them(tmp_path: Path, tasks: list[Finished], compacted: bool) -> None:
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
        store.add(task(f"k{i}", Row("cka", 0.5), Row("rv", 0.25), options=options))
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


def test_numbers_of_other_kinds_become_plain_ones(tmp_path: Path) -> None:
    store, whole = opened(tmp_path), Row("count", 0.0)
    object.__setattr__(whole, "value", 3)  # as it may be where annotations are not checked
    store.add(task("k", whole, Row("cka", np.float64(0.5)), a=0, b=[1, 2]))
    assert store.frame().select("value", "a", "b").rows() == [(3.0, "0", "[1, 2]"), (0.5, "0", "[1, 2]")]
    object.__setattr__(whole, "layer", 7)
    with pytest.raises(InputError, match=r"not plain data \(layer is NoneType, int, not text\)"):
        store.add(task("l", whole, Row("cka", 0.5)))


@pytest.mark.parametrize(
    ("finished", "said"),
    [
        (task(""), "A task has the key ''; a key is plain ASCII text"),
        (task('a"b'), "a key is plain ASCII text without quotes"),
        (task("k", options={"net": object()}), "The task k was to be stored, but what it found is not plain data"),
        (task("k", Row("cka", 0.5), error="broke"), "with an error and 1 rows. Give either"),
    ],
)
def test_what_no_table_can_hold_is_refused(tmp_path: Path, finished: Finished, said: str) -> None:
    store = opened(tmp_path)
    store.add(one("before"))
    with pytest.raises(InputError, match=said):
        store.add(finished)
    assert store.done() == {"before"}
    assert store.problems == ()


def test_broken_characters_do_not_lose_a_task(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.add(task("k", Row("cka", None, note="no file \udcff.bin")))
    assert store.frame()["note"].to_list() == ["no file ?.bin"]


# -- what is done ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compacted", [False, True])
def test_failed_tasks_are_not_done_until_they_go_well(tmp_path: Path, compacted: bool) -> None:
    first, second = opened(tmp_path), opened(tmp_path)
    first.add(task("a", error="first try", layer="7"))
    first.add(task("a", error="second try", layer="7"))
    first.add(task("b", error="unlucky"))
    first.add(one("b", 0.25))
    first.add(one("b", 0.5))  # done again: the first results stay, whatever comes later
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
def test_a_task_that_two_writers_did_counts_once(tmp_path: Path, shards: int) -> None:
    """The rows kept are all of one writer."""
    stores = [opened(tmp_path), opened(tmp_path)]
    for store, value in zip(stores, (0.25, 0.75), strict=True):
        store.add(task("same", Row("cka", value), Row("rv", value)))
        store.add(one(f"own{value}"))
        store.add(one(f"own{value}"))
    for store in stores[:shards]:
        store.compact()
    frame = stores[0].frame()
    assert len(frame) == 4
    assert frame.filter(pl.col("key") == "same")["value"].n_unique() == 1
    assert stores[1].done() == {"same", "own0.25", "own0.75"}


# -- damage ------------------------------------------------------------------------------------------------------------


def journal_of(folder: Path) -> Path:
    """The one journal of a folder."""
    (path,) = (folder / "journals").iterdir()
    return path


@pytest.mark.parametrize("compacted", [False, True])
@pytest.mark.parametrize("cut", [1, 2, 30, 10_000])
def test_a_torn_last_line_is_left_out(tmp_path: Path, cut: int, compacted: bool) -> None:
    with opened(tmp_path) as store:
        store.add(one("whole"))
        length = journal_of(tmp_path).stat().st_size
        store.add(task("torn", *(Row("cka", i / 1000, note=f"{i}") for i in range(5000))))
    os.truncate(journal_of(tmp_path), max(journal_of(tmp_path).stat().st_size - cut, length + 1))
    again = opened(tmp_path)
    if compacted:
        again.compact(others=True)
    else:
        assert again.done() == {"whole"}
    (problem,) = again.problems
    assert problem.endswith(
        ".jsonl, line 2: cut short or damaged, or being written just now. It was left out; its task counts as not done."
    )
    assert again.frame()["key"].to_list() == ["whole"]
    again.add(one("torn"))
    assert again.done() == {"whole", "torn"}


def test_every_changed_byte_is_seen(tmp_path: Path) -> None:
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
    path.write_bytes(whole[:start] + bytes(4096) + b"\n" + whole[start:])  # what a power cut may leave
    assert store.done() == {"a", "b", "c"}
    assert len(store.problems) == 1


def test_what_follows_a_write_that_failed_halfway_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_damaged_shard_is_told(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.add(one("a"))
    (shard,) = store.compact()
    shard.write_bytes(shard.read_bytes()[:-20])
    for reading in (store.done, store.errors, store.frame):
        with pytest.raises(InputError, match=r"was to be read, but it is damaged .* delete it and run the plan again"):
            reading()
    shard.unlink()
    assert store.done() == set()


def test_a_shard_with_other_columns_is_told(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.add(one("a"))
    (shard,) = store.compact()
    pl.read_parquet(shard).with_columns(repeat=pl.lit("once")).write_parquet(shard)
    with pytest.raises(InputError, match=r"no shard of a study \(its column repeat holds String instead of Int64\)"):
        store.frame()
