"""The kernels for stacks on a GPU, run by triton's interpreter on any machine, against torch in double precision."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from kernel_check import CASES

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, float]]:
    """The errors of every case; triton reads the variable when it is imported, so this takes a process of its own."""
    script, environment = Path(__file__).with_name("kernel_check.py"), {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)["results"]


@pytest.mark.parametrize("case", CASES)
def test_kernels(results: dict[str, dict[str, float]], case: str) -> None:
    allowed = CASES[case][1]
    assert results[case]
    assert {name: error for name, error in results[case].items() if not error <= allowed} == {}
