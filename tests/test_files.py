"""Files that are whole or not there: two writers of one file at once, and writers that were killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from intertwine.errors import InputError
from intertwine.files import atomic_write, write_text


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_a_second_writer_of_one_file_waits_for_the_first(tmp_path: Path) -> None:
    file, second_done = tmp_path / "a.txt", threading.Event()

    def second() -> None:
        write_text(file, "second")
        second_done.set()

    other = threading.Thread(target=second)
    with atomic_write(file) as part:
        part.write_text("fir", encoding="utf-8")
        other.start()
        assert not second_done.wait(0.3)
        part.write_text("first", encoding="utf-8")
    other.join(10)
    assert second_done.is_set()
    assert file.read_text(encoding="utf-8") == "second"
    assert names(tmp_path) == ["a.txt"]


def test_many_processes_write_one_file(tmp_path: Path) -> None:
    code = (
        "import sys; from intertwine.files import write_text\nfor _ in range(30): write_text(sys.argv[1], sys.argv[2])"
    )
    texts = [str(i) * 50_000 for i in range(4)]
    file = str(tmp_path / "a.txt")
    running = [subprocess.Popen([sys.executable, "-c", code, file, text], stderr=subprocess.PIPE) for text in texts]
    said = [process.communicate(timeout=120)[1] for process in running]
    assert [process.returncode for process in running] == [0] * 4, said
    assert Path(file).read_text(encoding="utf-8") in texts
    assert names(tmp_path) == ["a.txt"]


def test_what_a_killed_writer_left_is_no_hindrance(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from intertwine.files import atomic_write\nwith atomic_write(sys.argv[1]) as part:\n"
    )
    code += "    part.write_text('half'); os.kill(os.getpid(), signal.SIGKILL)"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.txt")], check=False)
    assert done.returncode == -signal.SIGKILL
    assert names(tmp_path) == [".a.txt.part"]
    write_text(tmp_path / "a.txt", "whole")
    assert names(tmp_path) == ["a.txt"]
    assert (tmp_path / "a.txt").read_text(encoding="utf-8") == "whole"


def test_after_a_failure_there_is_the_old_file_alone(tmp_path: Path) -> None:
    def fail() -> None:
        with atomic_write(tmp_path / "a.txt") as part:
            part.write_text("ne", encoding="utf-8")
            raise OSError(28, os.strerror(28))

    write_text(tmp_path / "a.txt", "old")
    with pytest.raises(InputError, match=r"a\.txt could not be written: No space left.*make room"):
        fail()
    assert names(tmp_path) == ["a.txt"]
    assert (tmp_path / "a.txt").read_text(encoding="utf-8") == "old"
