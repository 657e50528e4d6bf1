"""Files that are whole or not there (written beside their place, then renamed), and a lock per folder."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from intertwine.errors import InputError

try:
    import fcntl
except ImportError:  # Windows, where the folder is not held
    fcntl = None


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str] | None = None) -> str:
    """Write a safetensors file; gives its sha256."""
    plain = {
        name: t.detach().to("cpu", memory_format=torch.contiguous_format).contiguous() for name, t in tensors.items()
    }
    with atomic_write(path) as part:
        save_file(plain, part, dict(about or {}))
        return sha256(part)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def write_text(path: str | Path, text: str) -> None:
    """Write a text file."""
    with atomic_write(path) as part:
        part.write_text(text, encoding="utf-8")


def sha256(path: Path) -> str:
    """The checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """A place to write what shall lie at `path`, whose folders are made; where that fails it is the user's to know.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, atomic_write(f"{folder}/new/note.txt") as place:
    ...     _ = place.write_text("hello")
    """
    file = Path(path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_replace(file) as part:
            part.touch()  # not every writer of files says why it could not
            yield part
    except (OSError, SafetensorError) as error:  # the latter where a disk is full
        reason = "it is a folder" if file.is_dir() else getattr(error, "strerror", None) or error
        raise InputError(f"{path} could not be written: {reason}. Choose another place, or make room.") from error


@contextmanager
def atomic_replace(path: Path) -> Iterator[Path]:
    """A place beside `path` to write to, which becomes `path` when all of it is on the disk; gone after a failure.

    A second writer of the same path waits until the first is done.
    """
    file = path.resolve()  # a link stays a link to the new file
    if file.exists() and not file.is_file():  # a device such as /dev/stdout is no file to be replaced
        yield file
        return
    part = file.with_name(f".{file.name}.part")
    with _only_writer_of(part):
        try:
            yield part
            with part.open("rb") as held:  # on the disk before it gets its name: a power cut leaves the old or the new
                os.fsync(held.fileno())
            part.replace(file)
            sync_folder(file.parent)
        except BaseException:
            part.unlink(missing_ok=True)  # on a full disk it takes the room that others need
            raise


@contextmanager
def _only_writer_of(part: Path) -> Iterator[None]:
    """Hold a file for one writer. It is let go with its handle, also when the process is killed."""
    if fcntl is None:
        yield
        return
    while True:
        with part.open("ab") as held:
            with suppress(OSError):  # a file system without locks: go on without one
                fcntl.flock(held, fcntl.LOCK_EX)
            if _is_still(part, held):  # else the writer before has given it its name, and a new one is needed
                yield
                return


def _is_still(path: Path, held: IO[bytes]) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(held.fileno()))
    except FileNotFoundError:
        return False


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk, as `fsync` has the contents of a file."""
    if os.name == "nt":  # Windows cannot open a folder, and keeps names without being asked
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold a folder: a second run into it is told to wait, instead of mixing its files with ours."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise InputError(
            f"Results were to be written into {folder}, which cannot be done ({error.strerror}). Give another folder."
        ) from error
    with lock as file:
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                f"Another process is writing into {folder}. Wait until it has ended, or give another folder."
            ) from error
        except OSError:  # a file system without locks: go on without one
            pass
        yield  # the system lets the lock go with the file, also when the process is killed
