"""Networks of different widths: split units are joined exactly, copied ones share, and equal widths are matching."""

from math import lcm

import numpy as np
import pytest
import torch
from digit_networks import IMAGE, accuracy, loss, perceptrons
from networks import Net, gap
from orbits import made, mlp, residual
from scipy.optimize import linprog
from torch import Tensor, nn

import intertwine as it
from intertwine.align.align import align
from intertwine.align.widths import align_widths
from intertwine.errors import MismatchError


def spread_out(small: Net, big: Net, wires: dict[str, tuple[int, ...]], seed: int = 0) -> Net:
    """`big` filled with copies of the units of `small`. A wire: how often each of its units is copied.

    `places` of a wire are found by size: every axis of a tensor as long as the wire.
    """
    torch.manual_seed(seed)
    order = {}
    for name, times in wires.items():
        copies = torch.arange(len(times)).repeat_interleave(torch.tensor(times))
        order[name] = copies[torch.randperm(len(copies))], torch.tensor(times)
    sizes = {len(times): name for name, times in wires.items()}
    with torch.no_grad():
        for key, target in [*big.named_parameters(), *big.named_buffers()]:
            x = dict([*small.named_parameters(), *small.named_buffers()])[key]
            for axis in range(min(x.dim(), 2)):
                if x.shape[axis] in sizes:
                    copies, times = order[sizes[x.shape[axis]]]
                    if axis == 1:
                        x = x / times.view(1, -1, *[1] * (x.dim() - 2))
                    x = x.index_select(axis, copies)
            target.copy_(x)
    return big


def largest_difference(a: nn.Module, b: nn.Module) -> float:
    states = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return max(float((x.double() - y.double()).abs().max()) for x, y in states)


@pytest.mark.parametrize("times", [2, 3])
@pytest.mark.parametrize("widths", [(3, 7, 2), (3, 7, 6, 2), (3, 9, 8, 7, 2)])
def test_split_units_are_joined_and_copied_units_share(widths: tuple[int, ...], times: int) -> None:
    small = mlp(torch.nn.functional.gelu, widths).double().requires_grad_(False)
    wide = (widths[0], *(times * w for w in widths[1:-1]), widths[-1])
    big = mlp(torch.nn.functional.gelu, wide).double().requires_grad_(False)
    big = spread_out(small, big, {f"w{w}": (times,) * w for w in widths[1:-1]})
    x = torch.randn(9, widths[0], dtype=torch.float64)
    assert gap(small, big, x) < 1e-12
    assert largest_difference(align_widths(small, big, x).model, small) < 1e-14
    assert largest_difference(align_widths(big, small, x).model, big) < 1e-14


@pytest.mark.parametrize("norm", [nn.Identity, nn.BatchNorm2d])
def test_convolutions_shortcuts_and_batch_statistics(norm: type[nn.Module]) -> None:
    """One wire that enters a sum, its norms, and a wire inside the block."""
    make = (lambda n: nn.Identity()) if norm is nn.Identity else norm
    small = residual(make).double().eval().requires_grad_(False)
    with torch.no_grad():
        for name, buffer in small.named_buffers():
            if "running" in name:
                buffer.uniform_(0.5, 2)

    def forward(m: Net, x: Tensor) -> Tensor:
        return small._forward(m, x)

    parts = {"stem": nn.Conv2d(3, 8, 3), "a": nn.Conv2d(8, 12, 1), "b": nn.Conv2d(12, 8, 1), "head": nn.Linear(8, 2)}
    big = Net(forward, **parts, n0=make(8), n1=make(12), n2=make(8)).double().eval().requires_grad_(False)
    big = spread_out(small, big, {"stem": (2,) * 4, "a": (2,) * 6})
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    assert gap(small, big, x) < 1e-12
    found = align_widths(small, big, x)
    assert found.widths == {"stem": (4, 8), "a": (6, 12)}
    assert largest_difference(found.model, small) < 1e-14


def test_equal_widths_are_weight_matching() -> None:
    """With one hidden layer both are exact, so they find the same order."""
    for seed in range(3):
        torch.manual_seed(seed)
        a, b = (mlp(torch.nn.functional.gelu, (3, 7, 2)).double().requires_grad_(False) for _ in range(2))
        x = torch.zeros(1, 3, dtype=torch.float64)
        assert largest_difference(align_widths(a, b, x).model, align(a, b, x).model) < 1e-14


@pytest.mark.parametrize("seed", range(4))
def test_the_plan_of_one_wire_against_a_linear_program(seed: int) -> None:
    torch.manual_seed(seed)
    a, b = (mlp(torch.nn.functional.gelu, (3, n, 5)).double().requires_grad_(False) for n in (4, 10))
    plan = align_widths(a, b, torch.zeros(1, 3, dtype=torch.float64)).plans["a"].numpy()
    np.testing.assert_allclose(plan.sum(0), 1 / 10)
    np.testing.assert_allclose(plan.sum(1), 1 / 4)
    inwards = [torch.cat([m.a.weight, m.a.bias[:, None]], 1) for m in (a, b)]
    gain = (inwards[0] @ inwards[1].T + a.b.weight.T @ b.b.weight * 10 / 4).numpy()
    rows, columns = np.kron(np.eye(4), np.ones(10)), np.kron(np.ones(4), np.eye(10))
    sums = np.r_[np.full(4, 1 / 4), np.full(10, 1 / 10)]
    best = linprog(-gain.ravel(), A_eq=np.vstack([rows, columns]), b_eq=sums)
    assert float((plan * gain).sum()) == pytest.approx(-best.fun, rel=1e-9)


def test_sweeps_only_gain() -> None:
    torch.manual_seed(0)
    a, b = (mlp(torch.nn.functional.gelu, (3, *w, 2)).double() for w in ((12, 9, 6), (16, 12, 15)))
    a.requires_grad_(False)
    b.requires_grad_(False)
    found = align_widths(a, b, torch.zeros(1, 3, dtype=torch.float64))
    assert all(y >= x for x, y in zip(found.history, found.history[1:], strict=False))
    assert found.history[-1] > found.history[0]
    value = sum(
        float((p * q).sum())
        for (name, p), q in zip(a.named_parameters(), found.model.parameters(), strict=True)
        if name != "d.bias"
    )
    assert found.history[-1] == pytest.approx(value, rel=1e-12)
    assert repr(found).startswith("WidthAlignment(a: 16 → 12, b: 12 → 9, c: 15 → 6; ")
    assert found.to_dict()["history"] == list(found.history)


def by_length(model: nn.Module, width: int) -> nn.Module:
    """The baseline: only the units with the largest product of incoming and outgoing length."""
    first, bias, second, last = (p.detach() for p in model.parameters())
    kept = (first.norm(dim=1) * second.norm(dim=0)).topk(width).indices
    cut = it.zoo.build("mlp", widths=(64, width, 10)).eval().requires_grad_(False)
    for p, q in zip(cut.parameters(), (first[kept], bias[kept], second[:, kept], last), strict=True):
        p.copy_(q)
    return cut


def test_trained_networks_into_other_widths() -> None:
    """A narrow network widens almost for free. A wide one loses by narrowing, more than by leaving units out: its units
    are mixed towards those of another network, which is what a merge needs and not the best small network."""
    narrow, wide = perceptrons(64, 40, 10), perceptrons(64, 64, 10)
    widened = [align_widths(b, a, IMAGE).model for a, b in zip(narrow, wide, strict=True)]
    narrowed = [align_widths(a, b, IMAGE).model for a, b in zip(narrow, wide, strict=True)]
    cut = [by_length(b, 40) for b in wide]

    def means(models: list[nn.Module] | tuple[nn.Module, ...]) -> tuple[float, float]:
        return sum(map(accuracy, models)) / 4, sum(map(loss, models)) / 4

    assert means(widened)[0] > means(narrow)[0] - 0.005
    assert means(narrowed)[0] > 0.945
    assert means(narrowed)[1] > means(cut)[1]
    middles = [it.interpolate(a, b, 0.5) for a, b in zip(narrow, narrowed, strict=True)]
    stretched = [it.interpolate(b, a, 0.5) for a, b in zip(widened, wide, strict=True)]
    assert means(middles)[0] > 0.95
    assert means(stretched)[0] > 0.955


def test_what_is_refused() -> None:
    a = mlp(torch.tanh)
    x = torch.zeros(1, 3)
    with pytest.raises(MismatchError, match=r"'c.weight' has shape \(2, 4\) in the first network and \(3, 4\) in the"):
        align_widths(a, mlp(torch.tanh, (3, 5, 4, 3)), x)
    with pytest.raises(MismatchError, match="differ in more than their widths"):
        align_widths(a, mlp(torch.nn.functional.gelu), x)
    model, inputs = made("attention")
    with pytest.raises(it.InputError, match="is nested in another one, so its units cannot be mixed"):
        align_widths(model, model, *inputs)
    linear = nn.Linear(3, 2)
    with pytest.raises(it.InputError, match="nothing to align: no wire acts"):
        align_widths(linear, linear, x)
    model, inputs = made("depthwise convolution")
    with pytest.raises(it.InputError, match=r"'b.weight' belongs to a Conv2d, whose input axis is not known"):
        align_widths(model, model, *inputs)


def test_units_that_no_layer_reads_are_refused() -> None:
    """One attention head: queries and keys meet each other, and a sum over twice the units is another number."""

    def forward(m: Net, x: Tensor) -> Tensor:
        return m.out((m.q(x) @ m.k(x).mT).softmax(-1) @ x)

    model = Net(forward, q=nn.Linear(3, 4), k=nn.Linear(3, 4), out=nn.Linear(3, 2))
    with pytest.raises(it.InputError, match="No layer reads the units of the wire"):
        align_widths(model, model, torch.zeros(1, 5, 3))


def test_widths_without_a_common_divisor() -> None:
    a, b = (mlp(torch.tanh, (3, n, 2)).double().requires_grad_(False) for n in (70, 61))
    assert lcm(70, 61) > 4096, "too many copies for an assignment, so the linear program is used"
    plan = align_widths(a, b, torch.zeros(1, 3, dtype=torch.float64)).plans["a"]
    torch.testing.assert_close(plan.sum(1), torch.full((70,), 1 / 70, dtype=torch.float64))
    torch.testing.assert_close(plan.sum(0), torch.full((61,), 1 / 61, dtype=torch.float64))
