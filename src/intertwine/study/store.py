"""Store: the results of a study in a folder, safe from kills and shared by any number of writers.

Every writer appends to a journal of its own (`journals/NAME.jsonl`). `compact` turns a journal into one Parquet file
(`shards/NAME.parquet`), which takes its place. A reader takes all of them together, and of a task that was done twice
the results of one writer.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from intertwine.errors import InputError
from intertwine.study import journal, shards
from intertwine.study.folder import Identity, claim, identity, read_identity, writing
from intertwine.study.journal import Journal
from intertwine.study.rows import COLUMNS, Finished

ERROR_COLUMNS = tuple(name for name in shards.TASK_COLUMNS if name != "study")
T = TypeVar("T")


class Store:
    """The results of one study.

    Args:
        folder: where they lie; made if it is not there. study: its name. plan: what it does, as plain data.

    Attributes:
        problems: what the latest reading had to leave out, in words.

    Raises:
        InputError: the folder holds another study or other files, or cannot be written.

    >>> import tempfile
    >>> from intertwine.study.rows import Finished, Row
    >>> with Store(tempfile.mkdtemp(), "mine", {"verb": "fold"}) as store:
    ...     store.add(Finished("k1", {"verb": "fold"}, (Row("penalty", 0.5),), seconds=1.0))
    >>> store.done(), store.frame()["value"].to_list()
    ({'k1'}, [0.5])
    """

    def __init__(self, folder: str | Path, study: str, plan: Mapping[str, Any]) -> None:
        self._open(Path(folder), identity(study, plan))
        claim(self.folder, self.identity)

    @classmethod
    def existing(cls, folder: str | Path) -> Store:
        """The study that is in a folder, whatever its plan; enough to read it where nothing may be written."""
        store = cls.__new__(cls)
        store._open(Path(folder), read_identity(Path(folder)))
        return store

    def _open(self, folder: Path, own: Identity) -> None:
        self.folder, self.identity = folder, own
        self.problems: tuple[str, ...] = ()
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._process, self._lock = os.getpid(), threading.Lock()
        self._journal: Journal | None = None
        self._waiting: list[Journal] = []  # to become shards

    @property
    def study(self) -> str:
        """The name of the study."""
        return self.identity.study

    @property
    def plan(self) -> dict[str, Any]:
        """Its plan as plain data."""
        return self.identity.plan

    # -- writing -------------------------------------------------------------------------------------------------------

    def add(self, finished: Finished) -> None:
        """Store a finished task. Once this has returned, it is there even if the process is killed the next moment."""
        line = journal.encode(finished)
        if self._process != os.getpid():  # a fork: the journal is the parent's
            self._start_afresh()
        with self._lock, writing(self.folder):
            if self._journal is None:
                self._journal = Journal.new(self.folder / "journals")
            self._journal.add(line)

    def compact(self, others: bool = False) -> tuple[Path, ...]:
        """Turn the journal of this store into a Parquet shard; tasks added meanwhile go to a new journal.

        Args:
            others: also the journals of writers that have ended or were killed. One that still runs is known by its
                lock; on a disk without locks between machines, ask for this only when no other machine writes.

        Returns:
            the shards written.
        """
        shards.polars()
        with self._lock:
            self._waiting += [self._journal] if self._journal is not None else []
            self._journal = None
        written = []
        while self._waiting:  # where a full disk stops this, the rest is tried again next time
            written += self._shelve(self._waiting[0])
            self._waiting.pop(0)
        for path in self._files("journals") if others else []:
            with writing(self.folder):
                left = Journal.left_behind(path)
            written += self._shelve(left) if left is not None else []
        return tuple(written)

    def _shelve(self, own: Journal) -> list[Path]:
        """A held journal becomes a shard. Killed in between, the shard counts and the journal beside it does not."""
        shard, problems = self._shard(own.path.stem), list[str]()
        with writing(self.folder):
            new = not shard.exists()
            if new:
                shards.write_shard(shard, self._table(journal.entries(own.path, problems)))
            own.close()
            own.path.unlink(missing_ok=True)
        self.problems = tuple(problems)
        return [shard] if new else []

    def close(self) -> None:
        """Let the journal go. The store may be used on; what is added then goes to a new one."""
        with self._lock:
            if self._journal is not None:
                self._journal.close()
            self._journal = None

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- reading -------------------------------------------------------------------------------------------------------

    def done(self) -> set[str]:
        """The keys of the tasks that went well; the others are for a resumed run to do."""

        def of_shard(path: Path) -> set[str]:
            rows = shards.read_shard(path, ("key", "error"))
            return set(rows.filter(rows["error"].is_null())["key"].unique())

        return set().union(*self._pieces(_done_keys, of_shard))

    def errors(self) -> list[dict[str, Any]]:
        """The tasks that failed and did not go well since: what the table says of a task, and `error`.

        >>> import tempfile
        >>> from intertwine.study.rows import Finished
        >>> store = Store(tempfile.mkdtemp(), "mine", {"verb": "fold"})
        >>> store.add(Finished("k1", {"verb": "fold"}, (), seconds=1.0, error="no such layer: 7"))
        >>> [(task["verb"], task["error"]) for task in store.errors()]
        [('fold', 'no such layer: 7')]
        """

        def of_journal(entries: Iterator[bytes]) -> list[dict[str, Any]]:
            failed = (journal.decode(entry) for entry in entries if not journal.head(entry)[1])
            abouts = [task["about"] | {"key": task["key"]} for task in failed]
            return [{name: about.get(name) for name in ERROR_COLUMNS} for about in abouts]

        def of_shard(path: Path) -> list[dict[str, Any]]:
            rows = shards.read_shard(path, ERROR_COLUMNS)
            return rows.filter(rows["error"].is_not_null()).to_dicts()

        failed = {task["key"]: task for piece in self._pieces(of_journal, of_shard) for task in piece}
        done = self.done()
        return [task for key, task in failed.items() if key not in done]

    def frame(self, options: bool = False) -> Any:
        """All results as one polars frame, in the columns of `intertwine.study.rows.COLUMNS`.

        Args:
            options: whether to add a column `option_NAME` for each option of the tasks.
        """
        seen: set[str] = set()
        pieces = [shards.table([], self.study)]
        for rows in self._pieces(self._table, lambda path: shards.read_shard(path, shards.SHARD_COLUMNS)):
            good = rows.filter(rows["error"].is_null())
            keys = set(good["key"].unique())
            if twice := keys & seen:  # two writers did the same task
                good = good.filter(~good["key"].is_in(list(twice)))
            seen |= keys
            pieces.append(good)
        whole = shards.polars().concat(pieces)
        whole = whole.filter(whole["quantity"].is_not_null()).select(COLUMNS)
        return shards.with_options(whole) if options else whole

    def _table(self, entries: Iterator[bytes]) -> Any:
        return shards.table(map(journal.decode, journal.once_each(entries)), self.study)

    def _pieces(self, of_journal: Callable[[Iterator[bytes]], T], of_shard: Callable[[Path], T]) -> list[T]:
        """Every journal and every shard, oldest first; a journal that has become a shard is left out."""
        found, problems = [], list[str]()
        # Journals are listed first: one that becomes a shard in between is then seen at least once.
        names = {path.stem for path in self._files("journals")} | {path.stem for path in self._files("shards")}
        for name in sorted(names):
            shard = self._shard(name)
            try:
                if shard.exists():
                    found.append(of_shard(shard))
                else:
                    found.append(of_journal(journal.entries(self.folder / "journals" / f"{name}.jsonl", problems)))
            except FileNotFoundError:  # it became a shard just now
                found.append(of_shard(shard))
            except OSError as error:
                raise InputError(
                    f"The results of {self.study!r} were to be read from {self.folder}, which cannot be done "
                    f"({error.filename}: {error.strerror}). Have its rights changed, or copy the folder again."
                ) from error
        self.problems = tuple(problems)
        return found

    def _files(self, part: str) -> list[Path]:
        return sorted((self.folder / part).glob("*.jsonl" if part == "journals" else "*.parquet"))

    def _shard(self, name: str) -> Path:
        return self.folder / "shards" / f"{name}.parquet"

    def __repr__(self) -> str:
        return f"Store({self.study!r}, plan {self.identity.hash[:12]}, in {self.folder})"


def _done_keys(entries: Iterator[bytes]) -> set[str]:
    return {key for key, done in map(journal.head, entries) if done}
