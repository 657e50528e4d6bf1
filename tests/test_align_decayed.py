"""Units that weight decay has shrunk to 1e-38, as every network trained with Adam and BatchNorm has some."""

import pytest
import torch
from torch import Tensor, nn

import intertwine as it
from intertwine.align.objective import without_traces
from intertwine.canonical.blocks import weights_of
from intertwine.canonical.matching import match

EXAMPLE = torch.zeros(2, 3, 8, 8)


def decayed(seed: int, dead: int) -> nn.Sequential:
    """Convolutions with BatchNorm, some of whose filters are nearly zero, with running statistics of such."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.BatchNorm2d(6), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4),
    )  # fmt: skip
    with torch.no_grad():
        for i in (0, 3):
            conv, norm = model[i], model[i + 1]
            assert isinstance(conv, nn.Conv2d)
            assert isinstance(norm, nn.BatchNorm2d)
            assert conv.bias is not None
            assert norm.running_mean is not None
            assert norm.running_var is not None
            norm.running_var.uniform_(0.5, 2)
            norm.weight.uniform_(0.5, 2)
            norm.bias.normal_()
            conv.weight[:dead] *= 1e-38
            conv.bias[:dead] = 0
            norm.running_mean[:dead] = 0
            norm.running_var[:dead] = 0
    return model.eval()


def function_gap(a: nn.Module, b: nn.Module) -> float:
    x = torch.randn(4, *EXAMPLE.shape[1:], generator=torch.Generator().manual_seed(9))
    return float((a(x) - b(x)).detach().abs().max())


@pytest.mark.parametrize("method", ["weights", "scale-aware"])
def test_networks_with_decayed_units_are_aligned(method: str) -> None:
    a, b = decayed(0, 1), decayed(1, 2)
    found = it.align(a, b, EXAMPLE, method=method)
    assert found.after < found.before
    assert all(bool(t.isfinite().all()) for t in found.model.state_dict().values())
    assert function_gap(found.model, b) < 1e-5


def test_pairing_units_and_normal_forms_stay_finite() -> None:
    a, b = decayed(0, 1), decayed(1, 2)
    sym = it.symmetry(a, EXAMPLE)
    element = match(sym, weights_of(sym, a), weights_of(sym, b))
    assert all(bool(part.isfinite().all()) for move in element.moves.values() for _, part in move.items())
    canon = it.canonicalize(a, EXAMPLE)
    assert all(bool(t.isfinite().all()) for t in canon.model.state_dict().values())
    assert function_gap(canon.model, a) < 1e-5


def test_a_moved_copy_with_decayed_units_comes_back() -> None:
    a = decayed(0, 2)
    sym = it.symmetry(a, EXAMPLE)
    moved = sym.act(sym.random(seed=3), a)
    assert it.fingerprint(a, EXAMPLE) == it.fingerprint(moved, EXAMPLE)
    found = it.align(a, moved, EXAMPLE, method="scale-aware")
    assert found.after < 1e-9 * found.before


def test_traces_are_zeros_and_nothing_else_changes() -> None:
    x = torch.tensor([1e-38, -1e-35, 0.0, 1e-20, -2.0])
    (found,) = without_traces({"x": x}).values()
    assert torch.equal(found, torch.tensor([0.0, 0.0, 0.0, 1e-20, -2.0]))
    whole: Tensor = torch.randn(5)
    assert without_traces({"x": whole})["x"] is whole
    exact = torch.tensor([1e-38], dtype=torch.float64)
    assert without_traces({"x": exact})["x"] is exact
