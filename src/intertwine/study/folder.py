"""The folder of a study: whose it is, by the plan.json inside it, and what is said when it cannot be written."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from intertwine.errors import InputError
from intertwine.files import sync_folder

PLAN = "plan.json"
FORMAT = 1  # of everything in the folder; a later layout counts up, so that an older intertwine does not misread it
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


@dataclass(frozen=True)
class Identity:
    """A study's name, its plan as plain data, and the hash of the plan, the same on every machine."""

    study: str
    plan: dict[str, Any]
    hash: str

    def __str__(self) -> str:
        return f"{self.study!r} (plan {self.hash[:12]})"


def identity(study: str, plan: Mapping[str, Any]) -> Identity:
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
    return Identity(study, json.loads(text), hashlib.sha256(text.encode()).hexdigest())


def read_identity(folder: Path) -> Identity:
    """The study that a folder holds."""
    path = folder / PLAN
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        found, written, made = identity(data["study"], data["plan"]), data["hash"], data["format"]
    except FileNotFoundError as error:
        raise InputError(
            f"A study was to be read from {folder}, which holds none: there is no {PLAN} in it. Give the folder that "
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


def claim(folder: Path, wanted: Identity) -> None:
    """Make a folder that of a study, or see that it already is; whoever comes second with another plan is refused."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / PLAN).exists():
            _refuse_other_files(folder)
            _write_once(
                folder / PLAN, {"format": FORMAT, "study": wanted.study, "hash": wanted.hash, "plan": wanted.plan}
            )
    found = read_identity(folder)
    if (found.study, found.hash) != (wanted.study, wanted.hash):
        raise InputError(
            f"The study {wanted} was to be run into {folder}, which holds {found}. {_difference(found, wanted)}Give "
            "another folder, or run the plan that is in the folder."
        )
    with writing(folder):
        for part in ("journals", "shards"):
            (folder / part).mkdir(exist_ok=True)
            with tempfile.TemporaryFile(dir=folder / part):  # asking the system for rights is less sure than trying
                pass


@contextmanager
def writing(folder: Path) -> Iterator[None]:
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
    if others and not (folder / PLAN).exists():
        shown = ", ".join(others[:3]) + (", …" if len(others) > 3 else "")
        raise InputError(
            f"A study was to be run into {folder}, which holds other files ({shown}) and no {PLAN}. Give a new or an "
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


def _difference(found: Identity, wanted: Identity) -> str:
    names = sorted({*found.plan, *wanted.plan})
    differ = [name for name in names if found.plan.get(name) != wanted.plan.get(name)]
    return f"The plans differ in {', '.join(differ)}. " if differ else ""
