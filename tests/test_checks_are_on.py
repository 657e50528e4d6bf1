"""The suite's own safety nets are up: shape checking of the package, warnings as errors, fixed seeds."""

import importlib.util
import sys
import warnings
from pathlib import Path

import pytest
import torch

WRONG = '''
"""A module whose only function returns the wrong shape."""
from jaxtyping import Float
from torch import Tensor

def first(x: Float[Tensor, "rows columns"]) -> Float[Tensor, "columns"]:
    return x[:, 0]
'''


def test_the_package_is_checked_against_its_shape_annotations(tmp_path: Path) -> None:
    """A module named as if it were inside the package is instrumented, so its wrong shape is caught."""
    (tmp_path / "intertwine").mkdir()
    (tmp_path / "intertwine" / "wrong.py").write_text(WRONG)
    finder = next(f for f in sys.meta_path if type(f).__module__.startswith("jaxtyping"))
    spec = finder.find_spec("intertwine.wrong", [str(tmp_path / "intertwine")])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(Exception, match="first"):
        module.first(torch.zeros(2, 3))


def test_a_warning_is_an_error() -> None:
    with pytest.raises(UserWarning, match="look here"):
        warnings.warn("look here", stacklevel=1)


@pytest.mark.parametrize("turn", [1, 2])
def test_every_test_starts_from_the_same_seed(turn: int) -> None:
    expected = torch.rand(3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.rand(3), expected), f"turn {turn} found the global generator moved by another test"


@pytest.mark.models
@pytest.mark.parametrize("library", ["torchvision", "timm", "transformers"])
def test_model_libraries_can_be_imported(library: str) -> None:
    __import__(library)
