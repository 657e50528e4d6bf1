"""The test runner of bench/mutation.py: which tests call which function, and runs of them in a copy of the repository.

Every run of pytest happens in a forked child that has torch and pytest loaded but not intertwine, so a run costs about
as much as its tests. The copy comes first on the path, so tests import its source and not that of the checkout.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
OPTIONS = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow and not models", "--doctest-modules"]
OPTIONS += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of plugins that are loaded before pytest starts
#: The folders of src/intertwine that are measured, each by the docstrings in it and the tests in the folder of the same
#: name. The tests of the commands, pages and reproductions use every room and are left out.
ROOMS = (
    "graph", "symmetry", "data", "canonical", "align", "connect", "measure", "stitch", "fold", "inspect",
    "lab/zoo", "lab/study", "lab/report",
)  # fmt: skip
LEFT_OUT = ["*_page.py", "*_gpu.py", "*_ray.py"]
LONGEST_FILE = 20.0  # CPU seconds for tracing one file; its later tests are not used


@dataclass
class TracedTest:
    """A passing test: its pytest name, its duration, and the functions of the room that it calls."""

    name: str
    seconds: float
    calls: set[str] = field(default_factory=set)

    @property
    def file(self) -> str:
        """The file that holds it."""
        return self.name.partition("::")[0]


def copy_of_the_repository(folder: Path) -> Path:
    """Copy the files that git tracks, or would add, to a folder."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def in_child(work: Callable[[], int], seconds: float) -> int | None:
    """The exit status of `work` in a forked process; None after more than `seconds` of CPU time.

    CPU time does not depend on the load of the machine. A test may also wait for ever, so wall-clock time is limited to
    ten times as many seconds.
    """
    child = os.fork()
    if child == 0:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (round(seconds + 0.5), round(seconds + 5)))
        quiet = os.open(os.environ.get("MUTATION_LOG", os.devnull), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        status = 70
        try:
            status = work()
        finally:
            os._exit(status)
    until = time.monotonic() + 10 * seconds
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return None if code in (-signal.SIGXCPU, -signal.SIGKILL) else code
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def run_pytest(copy: Path, names: list[str], plugins: list[Any], *more: str) -> int:
    """Run pytest on tests of the copy, in a child process."""
    os.chdir(copy)
    os.environ["PYTHONPATH"] = f"{copy}/src"  # for the processes that tests start
    sys.path[:0] = [f"{copy}/src", f"{copy}/tests/support"]
    return int(pytest.main([*OPTIONS, *more, f"--rootdir={copy}", f"-c{copy}/pyproject.toml", *names], plugins=plugins))


class Trace:
    """A pytest plugin that writes to `out` which functions of one folder each passing test calls."""

    def __init__(self, folder: Path, out: Path) -> None:
        self.folder, self.out = f"{folder}/", out
        self.calls: set[str] = set()

    def seen(self, frame: Any, event: str, argument: Any) -> None:
        """Record a call; returning None turns line tracing off."""
        code = frame.f_code
        if code.co_filename.startswith(self.folder):
            self.calls.add(code.co_filename.removeprefix(self.folder) + ":" + code.co_qualname.partition(".<")[0])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        """Trace one test, its fixtures included."""
        self.calls, self.passed, start = set(), False, time.process_time()
        sys.settrace(self.seen)
        result = yield
        sys.settrace(None)
        if self.passed:
            seconds = time.process_time() - start
            with self.out.open("a", encoding="utf-8") as out:
                out.write(json.dumps([item.nodeid, round(seconds, 3), sorted(self.calls)]) + "\n")
        return result

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Record whether the test passed."""
        self.passed = self.passed or (report.when == "call" and report.passed)


def files_about(copy: Path, room: str) -> list[str]:
    """The folder of a room, for its docstrings, and the test files of the room."""
    files = sorted((copy / "tests" / room).glob("test_*.py"))
    kept = [file for file in files if not any(fnmatch(file.name, pattern) for pattern in LEFT_OUT)]
    return [f"src/intertwine/{room}", *(file.relative_to(copy).as_posix() for file in kept)]


def naming(copy: Path, room: str, file: str) -> list[str]:
    """The test files of a room that name a module, for functions that no traced test calls."""
    module = file.removeprefix("src/").removesuffix(".py").replace("/", ".")
    found = [name for name in files_about(copy, room) if name.endswith(".py")]
    return [name for name in found if module in (copy / name).read_text(encoding="utf-8")]


def traced(copy: Path, room: str, progress: Callable[[str], None]) -> list[TracedTest]:
    """Every test of a room with the functions it calls there; unchanged files are read from a cache."""
    kept = ROOT / "build" / "mutation" / room
    kept.mkdir(parents=True, exist_ok=True)
    tests = []
    for file in files_about(copy, room):
        held = sorted((copy / file).rglob("*.py")) if (copy / file).is_dir() else [copy / file]
        stamp = hashlib.sha256(b"".join(path.read_bytes() for path in held)).hexdigest()[:16]
        out = kept / f"{Path(file).stem}-{stamp}.jsonl"
        if not out.exists():
            plugin = Trace(copy / "src" / "intertwine" / room, out)
            out.touch()
            start = time.monotonic()
            status = in_child(lambda f=file, p=plugin: run_pytest(copy, [f], [p]), LONGEST_FILE)
            progress(f"traced {file} in {time.monotonic() - start:.0f} s, exit status of pytest {status}")
        lines = map(json.loads, out.read_text(encoding="utf-8").splitlines())
        tests += [TracedTest(name, seconds, set(calls)) for name, seconds, calls in lines]
    return tests


def chosen(tests: list[TracedTest], module: str, function: str, budget: float) -> list[str]:
    """The tests for a change in a function: those that call it, then the others of their files, fastest first.

    The others count because what a fixture or cache computes for a whole file is traced in its first test only.

    >>> calling, near = TracedTest("a::x", 2.0, {"m.py:f"}), TracedTest("a::y", 1.0)
    >>> tests = [calling, near, TracedTest("b::z", 0.1), TracedTest("b::w", 9.0, {"m.py:f"})]
    >>> chosen(tests, "m.py", "f", budget=5.0)
    ['a::x', 'b::z', 'a::y']
    """
    wanted = f"{module}:{function}" if function else ""
    direct = [test for test in tests if wanted in test.calls or (not wanted and touches(test, module))]
    files = {test.file for test in direct}
    direct_names = {test.name for test in direct}
    others = [test for test in tests if test.file in files and test.name not in direct_names]
    names, spent = [], 0.0
    for test in [*sorted(direct, key=lambda t: t.seconds), *sorted(others, key=lambda t: t.seconds)]:
        if spent + test.seconds <= budget:
            names.append(test.name)
            spent += test.seconds
    return names


def touches(test: TracedTest, module: str) -> bool:
    """Whether a test calls anything in a module."""
    return any(call.startswith(f"{module}:") for call in test.calls)
