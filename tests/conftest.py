"""One thread per worker for NumPy and SciPy, a fixture for bad input, and the browser in which reports are tested.

The browser is Debian's chromium, driven by playwright. A machine without it skips those tests, and the summary of the
run says so in one line. With INTERTWINE_NEED_BROWSER=1, as in .ci/run, they fail instead.
"""

import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import jaxtyping
import pytest

NEED = "INTERTWINE_NEED_BROWSER"
SKIPPED = "browser tests skipped: "


def pytest_configure() -> None:
    """NumPy's and SciPy's BLAS start as many threads as there are cores, in each worker: they wait for each other.

    torch is held to one thread in ../conftest.py. BLAS reads the variable when it is loaded, which has happened by now,
    so the variable is for the processes that tests start, and threadpoolctl for this one.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    import scipy.linalg  # noqa: F401 - only a library that is loaded can be held
    from threadpoolctl import threadpool_limits

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    threadpool_limits(1, user_api="blas")


def missing() -> str | None:
    """What a browser test lacks on this machine, with the way to get it; None when everything is there."""
    if shutil.which("chromium") is None:
        return "no chromium on this machine (apt-get install chromium)"
    if find_spec("playwright") is None:
        return "no playwright in this environment (pip install playwright)"
    return None


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user runs the package: without the suite's own check of every annotation."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A chromium without a window; each test opens contexts of its own in it."""
    lack = missing()
    if lack is not None and os.environ.get(NEED):
        pytest.fail(f"{NEED} is set, but there is {lack}", pytrace=False)
    if lack is not None:
        pytest.skip(SKIPPED + lack)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        found = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield found
        found.close()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line for all browser tests that were skipped: a green run without them should not look complete."""
    reasons = [str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", [])]
    lines = [reason.removeprefix("Skipped: ") for reason in reasons if SKIPPED in reason]
    if lines:
        terminalreporter.write_line(f"{lines[0]}: {len(lines)} tests", yellow=True)
