"""`barrier` against losses computed by hand and against a plain loop over the networks of the line."""

import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import intertwine as it
from intertwine.connect.repair import correct_scales
from intertwine.data import evaluate
from intertwine.data.batchnorm import reset_statistics
from intertwine.errors import InputError, MismatchError

Batches = list[tuple[Tensor, Tensor]]


class Slope(nn.Module):
    """x ↦ w·x, for losses that can be worked out by hand."""

    def __init__(self, w: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(w, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def mlp(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return it.zoo.build("mlp", widths=(6, 16, 16, 4)).double()


def conv_net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(96, 4)
    ).double()
    for _ in range(20):
        net(torch.randn(16, 3, 6, 6, dtype=torch.float64))
    return net


def batches(*shape: int, sizes: tuple[int, ...] = (9, 7, 4), classes: int = 4) -> Batches:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(sum(sizes), *shape, generator=g, dtype=torch.float64)
    y = torch.randint(classes, (sum(sizes),), generator=g)
    return list(zip(x.split(list(sizes)), y.split(list(sizes)), strict=True))


def plain_loop(a: nn.Module, b: nn.Module, data: Batches, points: int, prepare: Callable[..., nn.Module] | None = None):
    """Loss and error by the plainest means: one network at a time, all samples at once."""
    losses, errors = [], []
    for i in range(points):
        t = i / (points - 1)
        net = it.interpolate(a, b, t)
        net = (prepare(net) if prepare else net).eval()
        with torch.no_grad():
            outputs = net(torch.cat([x for x, _ in data]))
        targets = torch.cat([y for _, y in data])
        losses.append(functional.cross_entropy(outputs, targets).item())
        errors.append((outputs.argmax(1) != targets).double().mean().item())
    return losses, errors


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_004_L01_a_quadratic_loss_by_hand() -> None:
    # L(w) = (w − 1)²·mean(x²): ends 4·14/3 and 1·14/3 at w = −1 and 2.
    data = [(torch.tensor([1.0, 2.0, 3.0]).double(), torch.tensor([1.0, 2.0, 3.0]).double())]
    found = it.barrier(Slope(-1), Slope(2), data, points=5, loss=squares)
    second = 14 / 3
    assert found.ts == (0, 0.25, 0.5, 0.75, 1)
    assert found.loss == pytest.approx([second * (3 * t - 2) ** 2 for t in found.ts], rel=1e-12)
    # Convex: below the line of the ends by t(1 − t)·9·mean(x²), and reported as it is.
    assert found.loss_barrier == pytest.approx(-9 * second * 0.25 * 0.75, rel=1e-12)
    assert found.error is None
    assert found.error_barrier is None


def test_004_L01_a_concave_loss_by_hand() -> None:
    data = [(torch.tensor([2.0]).double(), torch.tensor([0.0]).double())]
    found = it.barrier(Slope(1), Slope(4), data, points=7, loss=lambda y, z: -(y - z).square())
    # The line of the ends is subtracted, not the mean, the smaller or the larger end: 9·x²/4 in the middle.
    assert found.loss_barrier == pytest.approx(9 * 4 / 4, rel=1e-12)
    assert found.worst == 0.5


def test_004_L01_errors_by_hand() -> None:
    # Class 1 where w·x > 0.5; targets say 1 everywhere. At w = ±1 every x with |x| > 0.5 of that sign is right.
    class Sign(Slope):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([torch.full_like(x, 0.5), (self.w * x).abs()], 1)

    data = [(torch.tensor([1.0, 2.0, -3.0, 0.2]).double(), torch.ones(4).long())]
    found = it.barrier(Sign(-1), Sign(1), data, points=5)
    assert found.error == (0.25, 0.5, 1.0, 0.5, 0.25)  # |w| is 1, ½, 0; 0.5·1 is a tie, and ties go to class 0
    assert found.error_barrier == 0.75


# -- against the loop --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [0.0, 1.0, 1e-5])
def test_all_points_at_once_and_one_by_one_agree_with_a_plain_loop(
    memory: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "_group_size", evaluate._fitting)  # as on a GPU
    a, b, data = mlp(0), mlp(1), batches(6)
    found = it.barrier(a, b, data, points=9, memory=memory)
    losses, errors = plain_loop(a, b, data, 9)
    assert found.loss == pytest.approx(losses, rel=1e-12)
    assert found.error == pytest.approx(errors, abs=1e-15)
    ends = [losses[0] + (losses[-1] - losses[0]) * t for t in found.ts]
    assert found.loss_barrier == pytest.approx(max(x - y for x, y in list(zip(losses, ends, strict=True))[1:-1]))


def test_the_memory_decides_how_many_points_run_together(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    together = evaluate._together

    def counted(path: Any, batch: Any, loss: Any, points: Any) -> Tensor:
        seen.append(len(points))
        return together(path, batch, loss, points)

    monkeypatch.setattr(evaluate, "_together", counted)
    a, b, data = mlp(0), mlp(1), batches(6, sizes=(20,))
    it.barrier(a, b, data, points=9)
    it.barrier(conv_net(0), conv_net(1), batches(3, 6, 6), points=3)
    assert seen == []  # on a CPU
    monkeypatch.setattr(evaluate, "_group_size", evaluate._fitting)  # as on a GPU
    it.barrier(a, b, data, points=9)
    assert seen == [9]
    weights = sum(p.numel() * 8 for p in a.parameters())
    it.barrier(a, b, data, points=9, memory=3.5 * (weights + 4 * 20 * 16 * 8) / 2**30)
    assert seen == [9, 3, 3, 3]
    it.barrier(a, b, data, points=9, memory=0)
    assert seen == [9, 3, 3, 3]


@pytest.mark.parametrize("group", [2, 5])
def test_convolutions_with_normalisation_agree_both_ways(monkeypatch: pytest.MonkeyPatch, group: int) -> None:
    a, b, data = conv_net(0), conv_net(1), batches(3, 6, 6)
    one_by_one = it.barrier(a, b, data, points=5, reset_statistics=data)
    monkeypatch.setattr(evaluate, "_group_size", lambda path, batch, memory: group)
    monkeypatch.setattr(evaluate, "_one_by_one", None)
    together = it.barrier(a, b, data, points=5, reset_statistics=data)
    assert together.loss == pytest.approx(one_by_one.loss, rel=1e-12)
    assert together.error == one_by_one.error
    losses, errors = plain_loop(a, b, data, 5, lambda net: reset_statistics(net, data))
    assert together.loss == pytest.approx(losses, rel=1e-12)
    assert together.error == pytest.approx(errors)


def test_a_network_that_looks_at_its_values_runs_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "_group_size", evaluate._fitting)  # as on a GPU

    class Branching(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            y = super().forward(input)
            return y if y.sum() > 0 else -2 * y

    torch.manual_seed(0)
    a, b = (Branching(6, 4, dtype=torch.float64) for _ in range(2))
    data = batches(6, sizes=(12,))
    assert it.barrier(a, b, data, points=5).loss == pytest.approx(plain_loop(a, b, data, 5)[0], rel=1e-12)


@pytest.mark.parametrize("memory", [0.0, 1.0])
def test_language_models_have_classes_last_and_ignored_targets(memory: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "_group_size", evaluate._fitting)  # as on a GPU

    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Embedding(11, 5), nn.Linear(5, 11)).double()

    a, b = model(0), model(1)
    g = torch.Generator().manual_seed(0)
    tokens, targets = (torch.randint(11, (6, 7), generator=g) for _ in range(2))
    targets[0, 3:] = targets[5] = -100
    found = it.barrier(a, b, [(tokens[:4], targets[:4]), (tokens[4:], targets[4:])], points=3, memory=memory)
    with torch.no_grad():
        outputs = it.interpolate(a, b, 0.5)(tokens).flatten(0, 1)
    kept = targets.flatten() != -100
    assert found.loss[1] == pytest.approx(functional.cross_entropy(outputs, targets.flatten()).item(), rel=1e-12)
    assert found.error is not None
    assert found.error[1] == pytest.approx((outputs.argmax(1) != targets.flatten())[kept].double().mean().item())


def test_a_loss_of_ones_own_is_averaged_over_samples() -> None:
    a, b, data = mlp(0), mlp(1), batches(6)
    mean = it.barrier(a, b, data, points=3, loss=lambda y, z: functional.multi_margin_loss(y, z))
    each = it.barrier(a, b, data, points=3, loss=lambda y, z: functional.multi_margin_loss(y, z, reduction="none"))
    whole = it.barrier(a, b, [tuple(map(torch.cat, zip(*data, strict=True)))], points=3, loss=nn.MultiMarginLoss())
    assert mean.loss == pytest.approx(each.loss, rel=1e-12)
    assert mean.loss == pytest.approx(whole.loss, rel=1e-12)
    assert mean.error is not None


def test_data_is_read_once_and_nothing_is_changed() -> None:
    a, b, data = conv_net(0), conv_net(1).eval(), batches(3, 6, 6)
    before = [{n: x.clone() for n, x in m.state_dict().items()} for m in (a, b)]

    def stream() -> Iterator[tuple[Tensor, Tensor]]:
        yield from data

    found = it.barrier(a, b, stream(), points=3, reset_statistics=stream())
    assert found.loss == it.barrier(a, b, data, points=3, reset_statistics=data).loss
    assert (a.training, b.training) == (True, False)
    for model, old in zip((a, b), before, strict=True):
        assert all(torch.equal(x, old[n]) for n, x in model.state_dict().items())


# -- with and without reset --------------------------------------------------------------------------------------------


def test_004_L02_both_lines_are_reported_and_on_which_data() -> None:
    a, b, data = conv_net(0), conv_net(1), batches(3, 6, 6)
    reset = batches(3, 6, 6, sizes=(20, 10))
    plain, found = it.barrier(a, b, data, points=5), it.barrier(a, b, data, points=5, reset_statistics=reset)
    assert plain.without_reset is None
    assert found.without_reset is not None
    assert found.without_reset.loss == plain.loss
    assert found.loss == pytest.approx(plain_loop(a, b, data, 5, lambda net: reset_statistics(net, reset))[0])
    assert found.loss != plain.loss
    assert found.reset_data is not None
    assert (found.data.samples, found.reset_data.samples) == (20, 30)
    rows = found.to_rows()
    assert rows[2] == {
        "t": 0.5, "loss": found.loss[2], "error": (found.error or ())[2],
        "loss_without_reset": plain.loss[2], "error_without_reset": (plain.error or ())[2],
    }  # fmt: skip
    assert "with statistics reset on 30 samples; without reset loss barrier" in repr(found)
    assert found.to_dict()["without_reset"]["loss_barrier"] == plain.loss_barrier
    assert [len(axes.lines) for axes in found.plot().axes] == [2, 2]


def test_scales_corrected_without_data_are_a_line_of_their_own() -> None:
    a, b, data = conv_net(0), conv_net(1), batches(3, 6, 6)

    def stream() -> Iterator[tuple[Tensor, Tensor]]:
        yield from data

    plain, found = it.barrier(a, b, data, points=5), it.barrier(a, b, stream(), points=5, scales=True)
    assert found.loss == plain.loss
    assert plain.with_scales is None
    line = found.with_scales
    assert line is not None
    a.eval(), b.eval()
    by_hand = [correct_scales([a, b], data[0][0], weights=(1 - t, t)) for t in found.ts]
    assert line.loss == pytest.approx([it.barrier(m, m, data, points=3).loss[0] for m in by_hand])
    assert line.loss[0] == pytest.approx(plain.loss[0])
    assert line.loss[2] != pytest.approx(plain.loss[2])
    assert found.to_rows()[2]["loss_with_scales"] == line.loss[2]
    assert found.to_dict()["with_scales"]["loss_barrier"] == line.loss_barrier
    assert "with scales corrected loss barrier" in repr(found)
    assert [len(axes.lines) for axes in found.plot().axes] == [2, 2]
    all_three = it.barrier(a, b, data, points=5, scales=True, reset_statistics=data)
    assert (all_three.with_scales or all_three).loss == line.loss
    assert [len(axes.lines) for axes in all_three.plot().axes] == [3, 3]


def test_no_data_for_scales_is_told() -> None:
    with pytest.raises(InputError, match="The data is empty"):
        it.barrier(conv_net(0), conv_net(1), [], points=3, scales=True)


def test_the_result_reads_well() -> None:
    data = [(torch.tensor([2.0]).double(), torch.tensor([0.0]).double())]
    found = it.barrier(Slope(1), Slope(4), data, points=3, loss=lambda y, z: -(y - z).square())
    assert repr(found) == "Barrier(3 points on 1 samples; loss barrier 9 at t = 0.5)"
    assert found.to_rows()[1] == {"t": 0.5, "loss": -25.0, "error": None}
    assert found.to_dict()["error_barrier"] is None
    assert len(found.plot().axes) == 1


def test_a_plot_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    found = it.barrier(mlp(0), mlp(1), batches(6), points=3)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match=re.escape("pip install 'intertwine[plot]'")):
        found.plot()


# -- bad input ---------------------------------------------------------------------------------------------------------

X, Y = torch.randn(5, 6, dtype=torch.float64), torch.zeros(5).long()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "The data holds no samples"),
        ([(X[:0], Y[:0])], "The data holds no samples"),
        (X, "data must be an iterable of (inputs, targets) batches; found a tensor (5, 6)"),
        (3, "data must be an iterable"),
        ([X], "A batch of the data must be a pair (inputs, targets); found a tensor (5, 6)"),
        ([(X, Y, Y)], "found tuple of 3"),
        ([(X, torch.zeros(5, 4))], "found outputs float64 (5, 4) and targets float64 (5, 4). Pass loss="),
        ([(X, torch.full((5,), -100))], "Every target of the data is marked as ignored"),
        ([(X * torch.inf, Y)], "The loss is not finite at 3 of 3 points, first at t = 0, so"),
    ],
)
def test_bad_data_is_named(data: Any, words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        it.barrier(mlp(0), mlp(1), data, points=3)


def test_a_point_that_overflows_is_named() -> None:
    def pole(y: Tensor, _z: Tensor) -> Tensor:
        return 1 / y

    with pytest.raises(InputError, match=r"not finite at 1 of 5 points, first at t = 0\.5.*align the networks"):
        it.barrier(Slope(-1), Slope(1), [(torch.ones(1).double(), torch.ones(1).double())], points=5, loss=pole)


def test_other_bad_input_is_named() -> None:
    data = batches(6)
    with pytest.raises(InputError, match="points must be at least 3, both ends and one between, but is 2"):
        it.barrier(mlp(0), mlp(1), data, points=2)
    with pytest.raises(InputError, match=r"no BatchNorm layer with running statistics, .*Leave reset_statistics out"):
        it.barrier(mlp(0), mlp(1), data, points=3, reset_statistics=data)
    with pytest.raises(InputError, match="The data for the statistics holds no samples"):
        it.barrier(conv_net(0), conv_net(1), batches(3, 6, 6), points=3, reset_statistics=[])
    with pytest.raises(MismatchError, match="The two networks differ"):
        it.barrier(mlp(0), conv_net(0), data)
    with pytest.raises(InputError, match="The loss must give a tensor: one number, or one per sample; found float"):
        it.barrier(mlp(0), mlp(1), data, points=3, loss=lambda y, z: 1.0)  # pyrefly: ignore[bad-argument-type]
