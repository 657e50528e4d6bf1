"""Atomic writes (to a file beside the target, which is then renamed), checksums, and a lock per folder."""

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
except ImportError:  # Windows, where folders are not locked
    fcntl = None


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str] | None = None) -> str:
    """Write a safetensors file; returns its sha256."""
    form = torch.contiguous_format
    plain = {name: t.detach().to("cpu", memory_format=form).contiguous() for name, t in tensors.items()}
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
    """A temporary file that becomes `path` at the end; folders are created, and failures are an `InputError`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, atomic_write(f"{folder}/new/note.txt") as place:
    ...     _ = place.write_text("hello")
    """
    file = Path(path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_replace(file) as part:
            part.touch()  # not every writer gives a reason when it fails
            yield part
    except (OSError, SafetensorError) as error:  # the latter where a disk is full
        reason = "it is a folder" if file.is_dir() else getattr(error, "strerror", None) or error
        raise InputError(f"{path} could not be written: {reason}. Choose another place, or make room.") from error


@contextmanager
def atomic_replace(path: Path) -> Iterator[Path]:
    """A file beside `path`, which becomes `path` once it is complete on the disk; after a failure it is removed.

    A second writer of the same path waits until the first is done.
    """
    file = path.resolve()  # a link stays a link to the new file
    if file.exists() and not file.is_file():  # a device such as /dev/stdout cannot be replaced
        yield file
        return
    part = file.with_name(f".{file.name}.part")
    with _only_writer_of(part):
        try:
            yield part
            with part.open("rb") as held:  # first on the disk, then renamed: a power cut leaves the old or the new
                os.fsync(held.fileno())
            part.replace(file)
            sync_folder(file.parent)
        except BaseException:
            part.unlink(missing_ok=True)  # frees its space on a full disk
            raise


@contextmanager
def _only_writer_of(part: Path) -> Iterator[None]:
    """Lock a file for one writer. The lock ends with its handle, also when the process is killed."""
    if fcntl is None:
        yield
        return
    while True:
        with part.open("ab") as held:
            with suppress(OSError):  # a file system without locks: go on without one
                fcntl.flock(held, fcntl.LOCK_EX)
            if _is_same_file(part, held):  # else the writer before has renamed it, and a new one is needed
                yield
                return


def _is_same_file(path: Path, held: IO[bytes]) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(held.fileno()))
    except FileNotFoundError:
        return False


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk, as `fsync` does the contents of a file."""
    if os.name == "nt":  # Windows cannot open a folder, and keeps names anyway
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Lock a folder: a second run into it raises `InputError` instead of mixing its files with ours."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise InputError(
            f"Results cannot be written into {folder} ({error.strerror}). Choose another folder."
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
        yield  # the lock ends with the file, also when the process is killed
