"""Which tests call which function, and running them in a copy of the repository: the tests of bench/mutation.py.

Every run of pytest happens in a forked child that has torch and pytest loaded but not intertwine, so a run costs about
as much as its tests. The copy stands first on the path: what is imported is its source, not the source of the checkout.
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
#: Package → the test files that are about it. The commands, pages and reproductions use every package and are left out.
FILES = {
    "graph": ["hazards_*", "user_rules", "bad_input"],
    "symmetry": ["activation_*", "elements", "intertwiner", "check_group", "hazards_*", "paper_godfrey_groups"],
    "canonical": ["canonical", "equivalence", "families", "naturality", "paper_nodesort", "lmc_rows"],
    "align": ["align_*", "check_aligner"],
    "connect": ["connect_*", "thesis_averages"],
    "features": ["features*", "compare"],
    "measure": ["measure_*", "calibrate", "compare", "check_measure", "paper_godfrey_measures"],
    "stitch": ["stitch_*"],
    "fold": ["fold_*", "complexity", "paper_feature_complexity"],
    "inspect": ["inspect_*"],
    "zoo": ["zoo_*"],
    "study": ["study_*"],
    "report": ["report_study", "wire_graph", "outline"],
}
LEFT_OUT = ["*_page", "*_gpu", "*_ray"]
LONGEST_FILE = 20.0  # seconds of the processor; what a file has not shown by then is not used


@dataclass
class TracedTest:
    """One test that passes: its name for pytest, how long it took, and the functions of the package that it called."""

    name: str
    seconds: float
    calls: set[str] = field(default_factory=set)

    @property
    def file(self) -> str:
        """The file that holds it."""
        return self.name.partition("::")[0]


def copy_of_the_repository(folder: Path) -> Path:
    """The files that git knows or would add, in a folder of their own."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def in_child(work: Callable[[], int], seconds: float) -> int | None:
    """The exit status of `work` in a forked process; None when it took longer than `seconds` of the processor.

    Seconds of the processor, because a busy machine is no reason to use fewer tests; ten times as many by the clock,
    because a test may wait for ever.
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
    """pytest on tests of the copy, whose source comes first; for a child process."""
    os.chdir(copy)
    os.environ["PYTHONPATH"] = f"{copy}/src"  # for the processes that tests start
    sys.path[:0] = [f"{copy}/src", f"{copy}/tests"]
    return int(pytest.main([*OPTIONS, *more, f"--rootdir={copy}", f"-c{copy}/pyproject.toml", *names], plugins=plugins))


class Trace:
    """A pytest plugin: the functions of one folder that each passing test calls, written down as it goes."""

    def __init__(self, folder: Path, out: Path) -> None:
        self.folder, self.out = f"{folder}/", out
        self.calls: set[str] = set()

    def seen(self, frame: Any, event: str, argument: Any) -> None:
        """A function was called; returning None keeps its lines from being traced."""
        code = frame.f_code
        if code.co_filename.startswith(self.folder):
            self.calls.add(code.co_filename.removeprefix(self.folder) + ":" + code.co_qualname.partition(".<")[0])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        """Trace one test with its set-up."""
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
        """Whether the test itself passed."""
        self.passed = self.passed or (report.when == "call" and report.passed)


def files_about(copy: Path, package: str) -> list[str]:
    """The files about a package, and the folder of its docstrings."""
    names = [path.stem.removeprefix("test_") for path in sorted((copy / "tests").glob("test_*.py"))]
    about = [n for n in names if any(fnmatch(n, pattern) for pattern in [*FILES[package], "mutants_*"])]
    kept = [name for name in about if not any(fnmatch(name, pattern) for pattern in LEFT_OUT)]
    return [f"src/intertwine/{package}", *(f"tests/test_{name}.py" for name in kept)]


def naming(copy: Path, package: str, file: str) -> list[str]:
    """The test files about a package that name a module of it, for functions that no traced test was seen to call."""
    module = file.removeprefix("src/").removesuffix(".py").replace("/", ".")
    found = [name for name in files_about(copy, package) if name.endswith(".py")]
    return [name for name in found if module in (copy / name).read_text(encoding="utf-8")]


def traced(copy: Path, package: str, tell: Callable[[str], None]) -> list[TracedTest]:
    """Every test about a package, with what it calls there; files that did not change are not traced again."""
    kept = ROOT / "build" / "mutation" / package
    kept.mkdir(parents=True, exist_ok=True)
    tests = []
    for file in files_about(copy, package):
        held = sorted((copy / file).rglob("*.py")) if (copy / file).is_dir() else [copy / file]
        stamp = hashlib.sha256(b"".join(path.read_bytes() for path in held)).hexdigest()[:16]
        out = kept / f"{Path(file).stem}-{stamp}.jsonl"
        if not out.exists():
            plugin = Trace(copy / "src" / "intertwine" / package, out)
            out.touch()
            start = time.monotonic()
            status = in_child(lambda f=file, p=plugin: run_pytest(copy, [f], [p]), LONGEST_FILE)
            tell(f"traced {file} in {time.monotonic() - start:.0f} s, pytest's status {status}")
        lines = map(json.loads, out.read_text(encoding="utf-8").splitlines())
        tests += [TracedTest(name, seconds, set(calls)) for name, seconds, calls in lines]
    return tests


def chosen(tests: list[TracedTest], module: str, function: str, budget: float) -> list[str]:
    """The tests for a change in a function: those that call it, then the others of their files; the fastest first.

    The others count because what a fixture or a cache computes for a whole file is seen in its first test only.

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
