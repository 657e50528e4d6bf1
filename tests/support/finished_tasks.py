"""Helpers for tests of the result store: finished tasks, a store, and programs in other processes."""

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

from intertwine.lab.study.records import COLUMNS, FinishedTask, ResultRow
from intertwine.lab.study.store import Store

PLAN: dict[str, Any] = {"verb": "compare", "zoo": "digits"}
SOURCE = Path(__file__).parents[2] / "src"
MADE = {"version": "0.1", "torch": "2.13", "python": "3.11", "git": "abc", "command": "run", "made_at": "2026-01-01"}


def task(key: str, *rows: ResultRow, error: str | None = None, **about: Any) -> FinishedTask:
    """A small finished task."""
    return FinishedTask(key, {"verb": "compare", "zoo": "digits", **about}, rows, 0.5, 10.0, MADE, error)


def one(key: str, value: float = 0.5) -> FinishedTask:
    """A finished task with one number."""
    return task(key, ResultRow("cka", value))


def opened(folder: Path) -> Store:
    """A store in a folder."""
    return Store(folder, "mine", PLAN)


def files(folder: Path, part: str) -> list[str]:
    """The files in a part of the folder."""
    return sorted(file.name for file in (folder / part).iterdir())


def program(code: str, *arguments: str) -> dict[str, Any]:
    """The arguments that start a program in another process; it can use `Store`, `FinishedTask`, `one` and `PLAN`."""
    start = f"""
        import os, signal, sys
        from intertwine.lab.study.store import Store
        from intertwine.lab.study.records import COLUMNS, FinishedTask, ResultRow
        PLAN = {PLAN!r}
        def one(key): return FinishedTask(key, {{'verb': 'compare'}}, (ResultRow('cka', 0.5),), 0.5)
    """
    command = [sys.executable, "-c", textwrap.dedent(start) + textwrap.dedent(code), *arguments]
    return {"args": command, "env": {**os.environ, "PYTHONPATH": str(SOURCE)}}


def run_script(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run such a program to its end."""
    return subprocess.run(**program(code, *arguments), capture_output=True, text=True, check=False, timeout=120)


def records_of(finished: FinishedTask, study: str) -> list[dict[str, Any]]:
    """The rows of a task in the table of a study, computed independently of the store."""
    about = {name: finished.task.get(name) for name in ("verb", "zoo", "a", "b", "layer", "repeat")}
    about |= {"study": study, "key": finished.key, "seconds": finished.seconds, "peak_mib": finished.peak_mib}
    about |= {**finished.made, "options": json.dumps(finished.task.get("options") or {}, sort_keys=True)}
    found = []
    for row in finished.rows:
        record = about | {name: value for name, value in asdict(row).items() if value is not None}
        found.append({name: record.get(name) for name in COLUMNS})
    return found
