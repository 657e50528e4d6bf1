"""What holds for every test, and every example in a docstring: fixed seeds, one thread per worker, and a torchvision
that can be imported on any machine.

The package is also checked against its own annotations, shapes included, while the tests run: pyproject.toml passes
`--jaxtyping-packages=intertwine,beartype.beartype` to pytest, and `tests/test_package.py` shows that it works.
"""

import os
import random
from collections.abc import Iterator

import hypothesis
import numpy as np
import pytest
import torch

# Property tests draw the same examples on every run, and a busy machine is no reason to fail.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("repeatable")


def pytest_configure() -> None:
    """Once per process, before anything of timm, torchvision or transformers is imported."""
    from intertwine.checkpoints.libraries import declare_missing_ops

    declare_missing_ops()
    if "PYTEST_XDIST_WORKER" in os.environ:  # the workers already share the cores
        torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Each test starts from the same random state, whatever ran before it in the same process."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - third-party code may draw from the global generator
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For modules whose networks are so small that they are slower on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
