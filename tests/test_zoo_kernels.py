"""The kernels for stacks on a GPU, run by triton's interpreter on any machine, against torch in double precision."""

import json
import os
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from kernel_check import CASES

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


#: Whole networks take the interpreter longest; one of each kind is enough for the suite.
SLOW = {"stack, myrtle, odd sizes", "stack, myrtle, no BN", "stack, resnet20, B", "stack, tiny10"}


@cache
def errors(slow: bool) -> dict[str, dict[str, float]]:
    """The errors of all cases of a tier; triton reads the variable when it is imported, so a process of its own."""
    names = [name for name in CASES if (name in SLOW) is slow]
    script, environment = Path(__file__).with_name("kernel_check.py"), {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(script), *names], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)["results"]


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow) if c in SLOW else c for c in CASES])
def test_kernels(case: str) -> None:
    results, allowed = errors(case in SLOW), CASES[case][1]
    assert results[case]
    assert {name: error for name, error in results[case].items() if not error <= allowed} == {}
