"""The result store: the folder of one study, which any number of processes may write to and be killed at any time."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from intertwine.errors import InputError
from intertwine.files import sync_folder
from intertwine.lab.study import records
from intertwine.lab.study.records import FinishedTask, Journal

PLAN_FILE = "plan.json"
FORMAT = 1  # of everything in the folder; counts up with every change of the layout
DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
ERROR_COLUMNS = tuple(name for name in records.TASK_COLUMNS if name != "study")
T = TypeVar("T")


@dataclass(frozen=True)
class StudyIdentity:
    """The name of a study, its plan as plain data, and the hash of the plan, equal on every machine."""

    study: str
    plan: dict[str, Any]
    hash: str

    def __str__(self) -> str:
        return f"{self.study!r} (plan {self.hash[:12]})"


def identity(study: str, plan: Mapping[str, Any]) -> StudyIdentity:
    """The identity of a study.

    >>> identity("mine", {"verb": "fold", "repeats": 2}).hash == identity("mine", {"repeats": 2, "verb": "fold"}).hash
    True
    """
    try:
        text = json.dumps(plan, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"The plan of the study {study!r} is not plain data ({error}). Build it from dictionaries, lists, text, "
            "numbers and booleans."
        ) from error
    return StudyIdentity(study, json.loads(text), hashlib.sha256(text.encode()).hexdigest())


def read_identity(folder: Path) -> StudyIdentity:
    """The identity of the study in a folder."""
    path = folder / PLAN_FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        found, written, layout = identity(data["study"], data["plan"]), data["hash"], data["format"]
    except FileNotFoundError as error:
        raise InputError(f"{folder} holds no study: it has no {PLAN_FILE}. Give the folder of a study.") from error
    except OSError as error:
        raise InputError(f"Cannot read {path} ({error.strerror}). Give a folder that you may read.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} is damaged ({error}). Copy it again from its source, or give another folder."
        ) from error
    if layout != FORMAT:
        raise InputError(
            f"{folder} has results in format {layout}, but this version of intertwine reads format {FORMAT}. Read them "
            "with the version that wrote them, or give another folder."
        )
    if written != found.hash:
        raise InputError(
            f"The plan in {path} was edited: it does not match its hash. Restore the plan, or give another folder."
        )
    return found


def claim_folder(folder: Path, wanted: StudyIdentity) -> None:
    """Make a folder that of a study, unless it is already; of several processes with different plans, one succeeds."""
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / PLAN_FILE).exists():
            _refuse_other_files(folder)
            plan = {"format": FORMAT, "study": wanted.study, "hash": wanted.hash, "plan": wanted.plan}
            _write_once(folder / PLAN_FILE, json.dumps(plan, indent=1) + "\n")
    found = read_identity(folder)
    if (found.study, found.hash) != (wanted.study, wanted.hash):
        names = sorted({*found.plan, *wanted.plan})
        differ = ", ".join(name for name in names if found.plan.get(name) != wanted.plan.get(name))
        raise InputError(
            f"{folder} holds the study {found}, not {wanted}. {f'The plans differ in {differ}. ' if differ else ''}"
            "Give another folder, or run the plan of this folder."
        )
    with write_errors(folder):
        for part in ("journals", "shards"):
            (folder / part).mkdir(exist_ok=True)
            with tempfile.TemporaryFile(dir=folder / part):  # writing is a safer test than asking for permissions
                pass


@contextmanager
def write_errors(folder: Path) -> Iterator[None]:
    """Turn errors of writing to a folder into messages with advice."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            advice = "Free space on that disk, then run the same plan again: it continues where it stopped."
        elif error.errno in FORBIDDEN:
            advice = "Give a folder that you may write to, or change its permissions, then run the same plan again."
        else:
            advice = "Give another folder, or repair this one, then run the same plan again."
        raise InputError(
            f"Cannot write results to {folder} ({error.strerror}). Nothing that is already stored there is lost. "
            f"{advice}"
        ) from error


def _refuse_other_files(folder: Path) -> None:
    # Hidden files are ignored: desktops create some, and another process may be writing the plan.
    others = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    if others and not (folder / PLAN_FILE).exists():
        shown = ", ".join(others[:3]) + (", …" if len(others) > 3 else "")
        raise InputError(f"{folder} holds other files ({shown}) and no {PLAN_FILE}. Give a new or an empty folder.")


def _write_once(path: Path, text: str) -> None:
    """Write a file atomically if it does not exist; of several processes, the first succeeds."""
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(part, path)
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            part.replace(path)
        sync_folder(path.parent)
    finally:
        part.unlink(missing_ok=True)


class Store:
    """The results of one study in a folder.

    Each writer appends to its own journal, `journals/NAME.jsonl`. `compact` replaces a journal by a Parquet file,
    `shards/NAME.parquet`. Readers combine all of them; of a task that two writers did, they take the results of one.

    Args:
        folder: created if it does not exist.
        study: the name of the study.
        plan: the plan as plain data.

    Attributes:
        problems: damaged lines that the latest read skipped.

    Raises:
        InputError: the folder holds another study or other files, or cannot be written.

    >>> import tempfile
    >>> from intertwine.lab.study.records import FinishedTask, ResultRow
    >>> with Store(tempfile.mkdtemp(), "mine", {"verb": "fold"}) as store:
    ...     store.add(FinishedTask("k1", {"verb": "fold"}, (ResultRow("penalty", 0.5),), seconds=1.0))
    >>> store.done(), store.frame()["value"].to_list()
    ({'k1'}, [0.5])
    """

    def __init__(self, folder: str | Path, study: str, plan: Mapping[str, Any]) -> None:
        self._open(Path(folder), identity(study, plan))
        claim_folder(self.folder, self.identity)

    @classmethod
    def existing(cls, folder: str | Path) -> Store:
        """The study in a folder, whatever its plan; the folder may be read-only."""
        store = cls.__new__(cls)
        store._open(Path(folder), read_identity(Path(folder)))
        return store

    def _open(self, folder: Path, identity: StudyIdentity) -> None:
        self.folder, self.identity = folder, identity
        self.problems: tuple[str, ...] = ()
        self._reset()

    def _reset(self) -> None:
        self._process, self._lock = os.getpid(), threading.Lock()
        self._journal: Journal | None = None
        self._to_compact: list[Journal] = []

    @property
    def study(self) -> str:
        """The name of the study."""
        return self.identity.study

    @property
    def plan(self) -> dict[str, Any]:
        """The plan as plain data."""
        return self.identity.plan

    # -- Writing -------------------------------------------------------------------------------------------------------

    def add(self, finished: FinishedTask) -> None:
        """Store a finished task. When this returns, killing the process cannot lose it."""
        line = records.encode(finished)
        if self._process != os.getpid():  # after a fork, the journal belongs to the parent
            self._reset()
        with self._lock, write_errors(self.folder):
            if self._journal is None:
                self._journal = Journal.new(self.folder / "journals")
            self._journal.add(line)

    def compact(self, others: bool = False) -> tuple[Path, ...]:
        """Replace the journal of this store by a Parquet shard; later tasks go to a new journal.

        Args:
            others: also the journals of writers that have ended or were killed. Running writers are recognised by a
                file lock; on a disk without locks between machines, use this only when no other machine writes.

        Returns:
            The new shards.
        """
        records.polars()
        with self._lock:
            self._to_compact += [self._journal] if self._journal is not None else []
            self._journal = None
        shards = []
        while self._to_compact:  # after an error, such as a full disk, the next call continues here
            shards += self._compact_journal(self._to_compact[0])
            self._to_compact.pop(0)
        for path in self._files("journals") if others else []:
            with write_errors(self.folder):
                journal = Journal.abandoned(path)
            shards += self._compact_journal(journal) if journal is not None else []
        return tuple(shards)

    def _compact_journal(self, journal: Journal) -> list[Path]:
        """Replace a locked journal by a shard. If both exist after a kill, the shard counts."""
        shard, problems = self._shard_path(journal.path.stem), list[str]()
        with write_errors(self.folder):
            new = not shard.exists()
            if new:
                records.write_shard(shard, self._journal_table(records.entries(journal.path, problems)))
            journal.close()
            journal.path.unlink(missing_ok=True)
        self.problems = tuple(problems)
        return [shard] if new else []

    def close(self) -> None:
        """Close the journal. Tasks that are added later go to a new one."""
        with self._lock:
            if self._journal is not None:
                self._journal.close()
            self._journal = None

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- Reading -------------------------------------------------------------------------------------------------------

    def done(self) -> set[str]:
        """The keys of the tasks that succeeded."""

        def of_shard(path: Path) -> set[str]:
            rows = records.read_shard(path, ("key", "error"))
            return set(rows.filter(rows["error"].is_null())["key"].unique())

        return set().union(
            *self._read_all(lambda lines: {key for key, done in map(records.head, lines) if done}, of_shard)
        )

    def errors(self) -> list[dict[str, Any]]:
        """The tasks that failed and have not succeeded since: their columns in the table, and `error`.

        >>> import tempfile
        >>> from intertwine.lab.study.records import FinishedTask
        >>> store = Store(tempfile.mkdtemp(), "mine", {"verb": "fold"})
        >>> store.add(FinishedTask("k1", {"verb": "fold"}, (), seconds=1.0, error="no such layer: 7"))
        >>> [(task["verb"], task["error"]) for task in store.errors()]
        [('fold', 'no such layer: 7')]
        """

        def of_journal(lines: Iterator[bytes]) -> list[dict[str, Any]]:
            failed = (records.decode(entry) for entry in lines if not records.head(entry)[1])
            abouts = (task["about"] | {"key": task["key"]} for task in failed)
            return [{name: about.get(name) for name in ERROR_COLUMNS} for about in abouts]

        def of_shard(path: Path) -> list[dict[str, Any]]:
            rows = records.read_shard(path, ERROR_COLUMNS)
            return rows.filter(rows["error"].is_not_null()).to_dicts()

        failed = {task["key"]: task for tasks in self._read_all(of_journal, of_shard) for task in tasks}
        done = self.done()
        return [task for key, task in failed.items() if key not in done]

    def frame(self, options: bool = False) -> Any:
        """All results as one polars data frame, with the columns `intertwine.lab.study.records.COLUMNS`.

        Args:
            options: whether to add a column `option_NAME` for each option of the tasks.
        """
        seen: set[str] = set()
        parts = [records.table([], self.study)]
        for rows in self._read_all(self._journal_table, lambda path: records.read_shard(path, records.SHARD_COLUMNS)):
            good = rows.filter(rows["error"].is_null())
            keys = set(good["key"].unique())
            if twice := keys & seen:  # two writers did the same task
                good = good.filter(~good["key"].is_in(list(twice)))
            seen |= keys
            parts.append(good)
        frame = records.polars().concat(parts)
        frame = frame.filter(frame["quantity"].is_not_null()).select(records.COLUMNS)
        return records.with_options(frame) if options else frame

    def _journal_table(self, lines: Iterator[bytes]) -> Any:
        return records.table(map(records.decode, records.once_each(lines)), self.study)

    def _read_all(self, of_journal: Callable[[Iterator[bytes]], T], of_shard: Callable[[Path], T]) -> list[T]:
        """Read every journal and every shard, oldest first; a journal with a shard is skipped."""
        found, problems = [], list[str]()
        # Journals are listed first, so that one that is compacted meanwhile is seen at least once.
        names = {path.stem for path in self._files("journals")} | {path.stem for path in self._files("shards")}
        for name in sorted(names):
            shard = self._shard_path(name)
            try:
                if shard.exists():
                    found.append(of_shard(shard))
                else:
                    found.append(of_journal(records.entries(self.folder / "journals" / f"{name}.jsonl", problems)))
            except FileNotFoundError:  # it was compacted meanwhile
                found.append(of_shard(shard))
            except OSError as error:
                raise InputError(
                    f"Cannot read the results of {self.study!r} in {self.folder} ({error.filename}: {error.strerror}). "
                    "Change its permissions, or copy the folder again."
                ) from error
        self.problems = tuple(problems)
        return found

    def _files(self, part: str) -> list[Path]:
        return sorted((self.folder / part).glob("*.jsonl" if part == "journals" else "*.parquet"))

    def _shard_path(self, name: str) -> Path:
        return self.folder / "shards" / f"{name}.parquet"

    def __repr__(self) -> str:
        return f"Store({self.study!r}, plan {self.identity.hash[:12]}, in {self.folder})"
