"""The result store of a study: whose folder it is, no rights, a full disk, no polars; its page and its benchmark."""

import json
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from finished_tasks import PLAN, one, opened, run_script, task
from pages import DOCS, script

from intertwine.errors import InputError
from intertwine.study import folder
from intertwine.study.rows import COLUMNS
from intertwine.study.store import Store

PAGE = (DOCS / "results-table.md").read_text(encoding="utf-8")

ROOT_ONLY = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="another user's rights are taken on, which root may do"
)


# -- the folder --------------------------------------------------------------------------------------------------------


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
    said = str(refused.value)
    assert said.startswith("The study 'other' (plan ")
    assert f") was to be run into {tmp_path}, which holds 'mine' (plan " in said
    assert "The plans differ in repeats, zoo. Give another folder, or run the plan that is in the folder." in said
    with pytest.raises(InputError, match=r"The study 'renamed' .* which holds 'mine'"):
        Store(tmp_path, "renamed", PLAN)
    assert opened(tmp_path).done() == {"a"}


def claim(folder: str, writer: int, start: Any) -> None:
    """One of several with different plans and one folder."""
    start.wait()
    try:
        Store(folder, "mine", {"writer": writer}).add(one(f"{writer}"))
    except InputError:
        sys.exit(3)


def test_of_several_plans_at_once_one_gets_the_folder(tmp_path: Path) -> None:
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


def test_a_plan_that_came_a_moment_earlier_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = folder._refuse_other_files

    def meanwhile(path: Path) -> None:
        real(path)
        monkeypatch.setattr(folder, "_refuse_other_files", real)
        Store(tmp_path, "earlier", {"verb": "fold"})

    monkeypatch.setattr(folder, "_refuse_other_files", meanwhile)
    with pytest.raises(InputError, match=r"The study 'mine' .* which holds 'earlier'"):
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
    ("change", "said"),
    [
        (lambda data: None, "is damaged"),
        (lambda data: {"format": 1}, "is damaged"),
        (lambda data: {**data, "format": 2}, "laid out in format 2; this intertwine reads format 1"),
        (lambda data: {**data, "plan": {"verb": "fold"}}, "was changed by hand"),
    ],
)
def test_a_plan_that_cannot_be_trusted_is_told(tmp_path: Path, change: Any, said: str) -> None:
    store, path = opened(tmp_path), tmp_path / "plan.json"
    store.add(one("a"))
    changed = change(json.loads(path.read_text()))
    path.write_text("{" if changed is None else json.dumps(changed))
    for opening in (Store.existing, opened):
        with pytest.raises(InputError, match=said):
            opening(tmp_path)


def test_what_is_no_study_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"which holds none: there is no plan.json in it. Give the folder that"):
        Store.existing(tmp_path)
    with pytest.raises(InputError, match=r"The plan of the study 'mine' was to be stored, but it is not plain data"):
        Store(tmp_path, "mine", {"net": object()})
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"which cannot be done \(.*\). Nothing that .* Give another folder"):
        opened(tmp_path / "file" / "below")


@pytest.fixture
def nobody() -> Iterator[Path]:
    """A folder that everybody may look into, and root's rights given up by whoever says so."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)
        os.seteuid(0)


@ROOT_ONLY
def test_a_folder_that_may_not_be_written_can_be_read(nobody: Path) -> None:
    store = opened(nobody)
    store.add(one("a"))
    store.compact()
    opened(nobody).add(one("b"))
    os.seteuid(65534)
    said = (
        r"cannot be done \(Permission denied\). Nothing that is already stored .* Give a folder that you may write into"
    )
    for place in (nobody, nobody / "new"):
        with pytest.raises(InputError, match=said):
            opened(place)
    reader = Store.existing(nobody)
    assert reader.done() == {"a", "b"}
    assert len(reader.frame()) == 2
    with pytest.raises(InputError, match=said):
        reader.add(one("c"))
    with pytest.raises(InputError, match=said):
        reader.compact(others=True)
    os.seteuid(0)
    next((nobody / "journals").iterdir()).chmod(0o600)
    os.seteuid(65534)
    with pytest.raises(InputError, match=r"The results of 'mine' were to be read from .*Permission denied"):
        reader.done()


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    """The system's limit on the size of a file stands in for a full disk: writes end in the middle of a line."""
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
        assert len(store.compact()) == 2  # what could not be made into a shard before, and what came since
    """
    done = run_script(code, str(tmp_path))
    assert done.returncode == 0, done.stderr
    adding, compacting = done.stdout.splitlines()
    advice = "Nothing that is already stored there is lost. Make room on that disk, then run the same plan again"
    assert advice in adding
    assert advice in compacting
    count = int(adding.split()[0])
    assert 5 < count < 100
    assert compacting.startswith("0 ")  # no half shard takes up room
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
    assert len(store.compact()) == 1  # the journal it could not turn into a shard before
    assert store.done() == {"a", "c"}


# -- the page and the benchmark ----------------------------------------------------------------------------------------


def test_the_benchmark_runs() -> None:
    bench = script("study_store", Path(__file__).parents[1] / "bench")
    measured = bench.measure(1000)
    assert len(measured) == 4
    assert bench.table(measured).count("\n") == 6


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with what is installed; DuckDB and pandas are not."""
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
