"""Working: one task done, wherever it runs, with what it cost and what made it."""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from intertwine.study.rows import Finished
from intertwine.study.tasks import Task
from intertwine.study.verbs import VERBS, Ask
from intertwine.study.verbs.options import defaults
from intertwine.study.workbench import Workbench
from intertwine.version import VERSION


def work(task: Task, shared: Mapping[str, Any]) -> Finished:
    """Do a task.

    Args:
        shared: "folders" of the zoos, "data" of them where it need not be read, "made" of this study, "device".
    """
    bench = Workbench(shared["folders"], shared.get("data"), shared.get("device", "cpu"))
    verb = VERBS[task.verb]
    a, b = (None if seed is None else bench.network(task.zoo, seed) for seed in (task.a, task.b))
    assert a is not None  # every task has a first network
    options = {**defaults(verb.options), **task.options}
    start = time.perf_counter()
    with torch.random.fork_rng():  # tasks may run in the user's own process, whose random numbers are not ours
        torch.manual_seed(task.repeat)
        rows = tuple(verb.run(Ask(bench, task.zoo, a, b, task.layer, options, task.repeat)))
    seconds = time.perf_counter() - start
    return Finished(task.key, task.to_dict(), rows, seconds, peak_mib(), made(shared["made"], task))


def made(common: Mapping[str, str | None], task: Task) -> dict[str, str | None]:
    """Who made a result: versions, and the command that makes it again."""
    again = f"{common.get('command') or 'intertwine study run PLAN'} --only {task.key[:12]}"
    return {**common, "command": again, "made_at": datetime.now(UTC).isoformat(timespec="seconds")}


def versions() -> dict[str, str | None]:
    """Of intertwine, torch and Python, and the commit of intertwine where it runs from a checkout."""
    return {
        "version": VERSION, "torch": torch.__version__, "python": platform.python_version(), "git": _commit(),
    }  # fmt: skip


def _commit() -> str | None:
    try:
        told = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"],
            cwd=Path(__file__).parent, capture_output=True, text=True, check=False, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):  # no git
        return None
    return told.stdout.strip() or None


def peak_mib() -> float | None:
    """The most memory that this process has held so far, in MiB; None where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / 2**20 if sys.platform == "darwin" else most / 2**10
