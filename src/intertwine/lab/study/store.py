"""The result store: the folder of one study, written by any number of processes and safe from kills."""

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
from intertwine.lab.study.records import (
    COLUMNS,
    SHARD_COLUMNS,
    TASK_COLUMNS,
    FinishedTask,
    Journal,
    decode,
    encode,
    entries,
    head,
    once_each,
    polars,
    read_shard,
    table,
    with_options,
    write_shard,
)

# ----------------------------------------------------------------------------------------------------
# The folder of a study: whose it is, by the plan.json inside it, and what is said when it cannot be written.


PLAN_FILE = "plan.json"
FORMAT = 1  # of everything in the folder; a later layout counts up, so that an older intertwine does not misread it
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


@dataclass(frozen=True)
class StudyIdentity:
    """A study's name, its plan as plain data, and the hash of the plan, the same on every machine."""

    study: str
    plan: dict[str, Any]
    hash: str

    def __str__(self) -> str:
        return f"{self.study!r} (plan {self.hash[:12]})"


def identity(study: str, plan: Mapping[str, Any]) -> StudyIdentity:
    """What tells one study from another.

    >>> identity("mine", {"verb": "fold", "repeats": 2}).hash == identity("mine", {"repeats": 2, "verb": "fold"}).hash
    True
    """
    try:
        text = json.dumps(plan, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"The plan of the study {study!r} was to be stored, but it is not plain data ({error}). Build it from "
            "dictionaries, lists, text, numbers and true or false only."
        ) from error
    return StudyIdentity(study, json.loads(text), hashlib.sha256(text.encode()).hexdigest())


def read_identity(folder: Path) -> StudyIdentity:
    """The study that a folder holds."""
    path = folder / PLAN_FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        found, written, made = identity(data["study"], data["plan"]), data["hash"], data["format"]
    except FileNotFoundError as error:
        raise InputError(
            f"A study was to be read from {folder}, which holds none: there is no {PLAN_FILE} in it. Give the folder that "
            "the study was run into."
        ) from error
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}). Give a folder whose files you may read."
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} was to say which study {folder} holds, but it is damaged ({error}). Copy it again from where the "
            "folder came from, or give another folder."
        ) from error
    if made != FORMAT:
        raise InputError(
            f"{folder} holds results laid out in format {made}; this intertwine reads format {FORMAT}. Read them with "
            "the version that wrote them, or give another folder."
        )
    if written != found.hash:
        raise InputError(
            f"The plan in {path} was changed by hand: it no longer has the hash that stands beside it. Put the old "
            "plan back, or give another folder."
        )
    return found


def claim_folder(folder: Path, wanted: StudyIdentity) -> None:
    """Make a folder that of a study, or see that it already is; whoever comes second with another plan is refused."""
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / PLAN_FILE).exists():
            _refuse_other_files(folder)
            _write_once(
                folder / PLAN_FILE, {"format": FORMAT, "study": wanted.study, "hash": wanted.hash, "plan": wanted.plan}
            )
    found = read_identity(folder)
    if (found.study, found.hash) != (wanted.study, wanted.hash):
        raise InputError(
            f"The study {wanted} was to be run into {folder}, which holds {found}. {_difference(found, wanted)}Give "
            "another folder, or run the plan that is in the folder."
        )
    with write_errors(folder):
        for part in ("journals", "shards"):
            (folder / part).mkdir(exist_ok=True)
            with tempfile.TemporaryFile(dir=folder / part):  # asking the system for rights is less sure than trying
                pass


@contextmanager
def write_errors(folder: Path) -> Iterator[None]:
    """Say what to do where something cannot be written into the folder."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            advice = "Make room on that disk, then run the same plan again: it goes on where it was."
        elif error.errno in FORBIDDEN:
            advice = "Give a folder that you may write into, or have its rights changed, then run the same plan again."
        else:
            advice = "Give another folder, or mend this one, then run the same plan again."
        raise InputError(
            f"Results were to be written into {folder}, which cannot be done ({error.strerror}). Nothing that is "
            f"already stored there is lost. {advice}"
        ) from error


def _refuse_other_files(folder: Path) -> None:
    # Hidden names are left alone: desktops put some everywhere, and another process may be writing the plan just now.
    others = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    if others and not (folder / PLAN_FILE).exists():
        shown = ", ".join(others[:3]) + (", …" if len(others) > 3 else "")
        raise InputError(
            f"A study was to be run into {folder}, which holds other files ({shown}) and no {PLAN_FILE}. Give a new or an "
            "empty folder."
        )


def _write_once(path: Path, value: Mapping[str, Any]) -> None:
    """Write a file whole unless it is there by now: of several processes at once the first one wins."""
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(json.dumps(value, indent=1) + "\n")
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


def _difference(found: StudyIdentity, wanted: StudyIdentity) -> str:
    names = sorted({*found.plan, *wanted.plan})
    differ = [name for name in names if found.plan.get(name) != wanted.plan.get(name)]
    return f"The plans differ in {', '.join(differ)}. " if differ else ""


# ----------------------------------------------------------------------------------------------------
# Store: the results of a study in a folder, safe from kills and shared by any number of writers.
#
# Every writer appends to a journal of its own (`journals/NAME.jsonl`). `compact` turns a journal into one Parquet file
# (`shards/NAME.parquet`), which takes its place. A reader takes all of them together, and of a task that was done twice
# the results of one writer.


ERROR_COLUMNS = tuple(name for name in TASK_COLUMNS if name != "study")
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
        """The study that is in a folder, whatever its plan; enough to read it where nothing may be written."""
        store = cls.__new__(cls)
        store._open(Path(folder), read_identity(Path(folder)))
        return store

    def _open(self, folder: Path, own: StudyIdentity) -> None:
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

    def add(self, finished: FinishedTask) -> None:
        """Store a finished task. Once this has returned, it is there even if the process is killed the next moment."""
        line = encode(finished)
        if self._process != os.getpid():  # a fork: the journal is the parent's
            self._start_afresh()
        with self._lock, write_errors(self.folder):
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
        polars()
        with self._lock:
            self._waiting += [self._journal] if self._journal is not None else []
            self._journal = None
        written = []
        while self._waiting:  # where a full disk stops this, the rest is tried again next time
            written += self._shelve(self._waiting[0])
            self._waiting.pop(0)
        for path in self._files("journals") if others else []:
            with write_errors(self.folder):
                left = Journal.left_behind(path)
            written += self._shelve(left) if left is not None else []
        return tuple(written)

    def _shelve(self, own: Journal) -> list[Path]:
        """A held journal becomes a shard. Killed in between, the shard counts and the journal beside it does not."""
        shard, problems = self._shard(own.path.stem), list[str]()
        with write_errors(self.folder):
            new = not shard.exists()
            if new:
                write_shard(shard, self._table(entries(own.path, problems)))
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
            rows = read_shard(path, ("key", "error"))
            return set(rows.filter(rows["error"].is_null())["key"].unique())

        return set().union(*self._pieces(_done_keys, of_shard))

    def errors(self) -> list[dict[str, Any]]:
        """The tasks that failed and did not go well since: what the table says of a task, and `error`.

        >>> import tempfile
        >>> from intertwine.lab.study.records import FinishedTask
        >>> store = Store(tempfile.mkdtemp(), "mine", {"verb": "fold"})
        >>> store.add(FinishedTask("k1", {"verb": "fold"}, (), seconds=1.0, error="no such layer: 7"))
        >>> [(task["verb"], task["error"]) for task in store.errors()]
        [('fold', 'no such layer: 7')]
        """

        def of_journal(entries: Iterator[bytes]) -> list[dict[str, Any]]:
            failed = (decode(entry) for entry in entries if not head(entry)[1])
            abouts = [task["about"] | {"key": task["key"]} for task in failed]
            return [{name: about.get(name) for name in ERROR_COLUMNS} for about in abouts]

        def of_shard(path: Path) -> list[dict[str, Any]]:
            rows = read_shard(path, ERROR_COLUMNS)
            return rows.filter(rows["error"].is_not_null()).to_dicts()

        failed = {task["key"]: task for piece in self._pieces(of_journal, of_shard) for task in piece}
        done = self.done()
        return [task for key, task in failed.items() if key not in done]

    def frame(self, options: bool = False) -> Any:
        """All results as one polars frame, in the columns of `intertwine.lab.study.records.COLUMNS`.

        Args:
            options: whether to add a column `option_NAME` for each option of the tasks.
        """
        seen: set[str] = set()
        pieces = [table([], self.study)]
        for rows in self._pieces(self._table, lambda path: read_shard(path, SHARD_COLUMNS)):
            good = rows.filter(rows["error"].is_null())
            keys = set(good["key"].unique())
            if twice := keys & seen:  # two writers did the same task
                good = good.filter(~good["key"].is_in(list(twice)))
            seen |= keys
            pieces.append(good)
        whole = polars().concat(pieces)
        whole = whole.filter(whole["quantity"].is_not_null()).select(COLUMNS)
        return with_options(whole) if options else whole

    def _table(self, entries: Iterator[bytes]) -> Any:
        return table(map(decode, once_each(entries)), self.study)

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
                    found.append(of_journal(entries(self.folder / "journals" / f"{name}.jsonl", problems)))
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
    return {key for key, done in map(head, entries) if done}
