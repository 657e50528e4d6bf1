"""Files that are whole or not there (written beside their place, then renamed), and a lock per folder."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from intertwine.errors import InputError

try:
    import fcntl
except ImportError:  # Windows, where the folder is not held
    fcntl = None


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str] | None = None) -> str:
    """Write a safetensors file; gives its sha256."""
    part = _part(path)
    plain = {
        name: t.detach().to("cpu", memory_format=torch.contiguous_format).contiguous() for name, t in tensors.items()
    }
    save_file(plain, part, dict(about or {}))
    found = sha256(part)
    _finish(part, path)
    return found


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file."""
    part = _part(path)
    part.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    _finish(part, path)


def sha256(path: Path) -> str:
    """The checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _part(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_name(f".{path.name}.part")


def _finish(part: Path, path: Path) -> None:
    with part.open("rb") as file:  # on the disk before it gets its name: a power cut leaves the old file or the new one
        os.fsync(file.fileno())
    part.replace(path)


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
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
