"""Stitching as the papers state it, row by row, on small networks trained on the digits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from digit_networks import Batches, digits, perceptrons
from torch import Tensor, nn
from torch.nn import functional as F

import intertwine as it
from intertwine.errors import InputError
from intertwine.stitch.families.base import MapFamily
from intertwine.stitch.families.linear import Sparse
from intertwine.stitch.families.permutations import Birkhoff
from intertwine.stitch.result import Stitch, sparsity
from intertwine.stitch.stitch import CrossValidationResult, cross_validate, split_batches, split_samples

pytestmark = pytest.mark.usefixtures("one_thread")

#: Paper 1 trains at a tenth of this rate, on thirty times as many samples.
PAPER_1: dict[str, Any] = {"recipe": "csiszarik", "rate": 1e-2}


def batches(size: int = 64) -> Batches:
    """The training digits."""
    ((images, labels),) = digits()[0]
    return list(zip(images.split(size), labels.split(size), strict=True))


@cache
def convolutions(
    seed: int, width: int = 12, norm: bool = True, optimizer: str = "adam", turned: int = 0, epochs: int = 4
) -> nn.Sequential:
    """A small convolution network trained on the digits, which may be turned by quarters."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for i, (inputs, outputs) in enumerate(((1, width), (width, width), (width, 2 * width))):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), *([nn.BatchNorm2d(outputs)] if norm else []), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if i else []
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * width, 10))
    ((images, labels),) = digits()[0]
    images = images.rot90(turned, (2, 3))
    kinds: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "adam": lambda: torch.optim.Adam(model.parameters(), 5e-3),
        "sgd": lambda: torch.optim.SGD(model.parameters(), 0.05, momentum=0.9),
    }
    descent = kinds[optimizer]()
    for _ in range(epochs):
        for some in torch.randperm(len(images)).split(64):
            descent.zero_grad()
            F.cross_entropy(model(images[some]), labels[some]).backward()
            descent.step()
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def layers() -> dict[tuple[str, str], dict[str, Stitch]]:
    """Of two perceptrons with three hidden layers: (family, fit) → place → its stitch, scored on the fitted digits."""
    front, back = perceptrons(64, 24, 24, 24, 10, count=2)
    data, at = batches(), ["2", "4", "6"]
    options: dict[str, Any] = {"data": data, "epochs": 6, **PAPER_1}
    found = [
        *it.stitches(front, back, at, "affine", fit=("direct", "task"), **options),
        *it.stitches(front, back, at, "identity", fit="direct", **options),
    ]
    table: dict[tuple[str, str], dict[str, Stitch]] = {}
    for one in found:
        table.setdefault((one.family, one.fit), {})[one.place] = one
    return table


def known(value: float | None) -> float:
    """A number that must be there."""
    assert value is not None
    return value


# -- paper 0: training -------------------------------------------------------------------------------------------------


def test_000_G36_the_recipe_is_the_printed_one() -> None:
    """20 epochs, plain SGD without drops, rate 1e-3, for G_ReLU 1e-2 as in the code; both last and best epoch told."""
    front, back = convolutions(0), convolutions(1)
    few = batches(32)[:2]
    full, group = it.stitches(front, back, "2", ["linear", "relu:birkhoff"], data=few, recipe="godfrey")
    printed = {"epochs": 20, "optimizer": "sgd", "momentum": 0.0, "drops": False, "decay": 1e-4, "norm": "adapt"}
    for one in (full, group):
        assert printed.items() <= one.settings.items()
        scored = [row["accuracy"] for row in one.history]
        assert len(scored) == 20
        assert (one.accuracy, one.best_accuracy) == (scored[-1], max(scored))
    assert (full.settings["rate"], group.settings["rate"]) == (1e-3, 1e-2)


def test_000_G36_one_epoch_by_hand() -> None:
    """Every step is W − rate·(∂loss/∂W + decay·W), with the loss of the two halves joined by hand."""
    front, back = perceptrons(64, 24, 24, 24, 10, count=2)
    data = batches(32)[:3]
    start, found = (
        it.stitch(front, back, "4", "linear", data=data, recipe="godfrey", epochs=epochs, norm="frozen", rate=0.1)
        for epochs in (0, 1)
    )
    weight = start.matrix.double().clone().requires_grad_()
    first, last = (copy.deepcopy(part).double() for part in (front[:5], back[5:]))  # pyrefly: ignore
    for images, labels in data:
        loss = F.cross_entropy(last(first(images.double()) @ weight.T), labels)
        (slope,) = torch.autograd.grad(loss, weight)
        weight = (weight - 0.1 * (slope + 1e-4 * weight)).detach().requires_grad_()
    torch.testing.assert_close(found.matrix.double(), weight.detach(), rtol=1e-4, atol=1e-6)
    assert not torch.allclose(found.matrix, start.matrix, atol=1e-3)


@pytest.mark.slow
def test_000_G38_sparsity_rises_with_the_penalty() -> None:
    """λ = 0.001, 0.01, 0.1 give more and more zeros. λ = 1, unstable in the paper, is recorded with the rest.

    Each step moves an entry by rate · λ, so that at λ = 1 it jumps over the threshold and never rests at zero.
    """
    front, back = convolutions(0), convolutions(1)
    strengths = (0.001, 0.01, 0.1, 1)
    found = it.stitches(
        front, back, "5", [f"sparse:{one}" for one in strengths], data=batches(), recipe="godfrey", epochs=12,
        rate=5e-3, score_every=0,
    )  # fmt: skip
    zeros = [one.sparsity for one in found]
    assert zeros[0] < zeros[1] < zeros[2]
    assert [sparsity(one.matrix, 0.0) for one in found] == zeros, "one threshold zeroes and counts"
    assert found[3].family == "sparse:1"
    assert zeros[3] < zeros[2]
    assert known(found[3].penalty) > known(found[0].penalty)


# -- paper 0: cross-validation -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [10, 53])
def test_000_G39_D20_the_parts_never_overlap_and_hold_all(samples: int) -> None:
    first, second = split_samples(samples, 0.8, seed=3)
    assert len(first) == round(0.8 * samples)
    assert sorted([*first.tolist(), *second.tolist()]) == list(range(samples))
    assert first.tolist() != list(range(len(first)))
    assert not torch.equal(first, split_samples(samples, 0.8, seed=4)[0])
    images = torch.arange(samples, dtype=torch.float32)[:, None]
    data = list(zip(images.split(8), torch.arange(samples).split(8), strict=True))
    parts = split_batches(data, 0.8, seed=3)
    seen = [torch.cat([targets for _, targets in part]) for part in parts]
    assert torch.equal(seen[0], first)
    assert torch.equal(seen[1], second)
    assert all(torch.equal(inputs[:, 0].long(), targets) for part in parts for inputs, targets in part)


def test_000_G39_the_best_on_the_samples_held_back_is_chosen_and_fitted_on_all() -> None:
    """Two α of the printed grid and a rank that cannot work, at two places."""
    front, back = convolutions(0), convolutions(1)
    candidates: list[str | MapFamily] = [Birkhoff(alpha=a, head_start=0.0) for a in (1e-3, 10.0)]
    options: dict[str, Any] = {"recipe": "godfrey", "start": "direct"}
    data = batches()[:8]
    choices = cross_validate(
        front, back, ["2", "5"], [*candidates, "lowrank:1"], data=data, test=digits()[1], trial={"epochs": 1},
        epochs=2, seed=1, **options,
    )  # fmt: skip
    assert [choice.stitch.place for choice in choices] == ["2", "5"]
    parts = split_batches(data, 0.8, seed=1)
    for choice in choices:
        assert choice.accuracies[choice.chosen] == max(choice.accuracies)
        assert choice.candidate == choice.candidates[choice.chosen]
        alone = it.stitches(
            front, back, choice.stitch.place, choice.candidate.family, data=parts[0], test=parts[1], epochs=1,
            seeds=(1,), **options,
        )  # fmt: skip
        assert choice.accuracies[choice.chosen] == alone[0].accuracy
        whole = it.stitches(
            front, back, choice.stitch.place, choice.candidate.family, data=data, epochs=2, seeds=(1,), **options
        )
        torch.testing.assert_close(choice.stitch.matrix, whole[0].matrix)
        assert choice.stitch.scores.samples == 360
        assert f"of {len(choice.candidates)} candidates" in repr(choice)


def test_000_G39_settings_are_candidates_too() -> None:
    front, back = perceptrons(64, 24, 24, 24, 10, count=2)
    (found,) = cross_validate(
        front, back, "4", ["linear"], data=batches()[:6], variants=[{"rate": 1e-3}, {"rate": 50.0}],
        trial={"epochs": 1}, epochs=1,
    )  # fmt: skip
    assert isinstance(found, CrossValidationResult)
    assert (found.chosen, found.stitch.settings["rate"]) == (0, 1e-3)
    assert str(found.candidates[1]) == "Linear(bias=False), rate=50.0"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"families": ["linear"]}, "needs at least two candidates, but has 1"),
        ({"share": 1.0}, "A share of 1.0 divides 8 samples into 8 and 0"),
        ({"seeds": (0, 1)}, "Give seed=, a number, instead of seeds="),
        ({"fit": ("direct", "task")}, "fits every candidate once, in one way"),
        ({"data": []}, "batches of two tensors, but the data has no batch. Divide it yourself with split_samples"),
        ({"data": [({"x": torch.zeros(8, 64)}, torch.zeros(8).long())]}, "but the data holds a dict"),
    ],
)
def test_cross_validation_that_is_refused(options: dict[str, Any], words: str) -> None:
    (net,) = perceptrons(64, 24, 24, 24, 10, count=2)[:1]
    few = [(torch.zeros(8, 1, 8, 8), torch.zeros(8).long())]
    given: dict[str, Any] = {"families": ["linear", "affine"], "data": few} | options
    with pytest.raises(InputError, match=words):
        cross_validate(net, net, "2", **given)


def test_cross_validation_needs_classes() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    data = [(torch.randn(20, 3), torch.randn(20, 2))]
    with pytest.raises(InputError, match="class"):
        cross_validate(net, net, "1", ["linear", "affine"], data=data, fit="direct")


# -- paper 1: what can be matched --------------------------------------------------------------------------------------


def test_001_C12_task_loss_is_as_good_as_least_squares_at_every_layer(
    layers: dict[tuple[str, str], dict[str, Stitch]],
) -> None:
    """On the fitted digits, in the cross-entropy that is trained; and it works."""
    for place, task in layers["affine", "task"].items():
        direct = layers["affine", "direct"][place]
        assert known(task.cross_entropy) < known(direct.cross_entropy)
        assert known(task.relative_accuracy) > 0.9


def test_001_C13_without_a_map_the_cross_entropy_is_worse_than_any_fit(
    layers: dict[tuple[str, str], dict[str, Stitch]],
) -> None:
    for place, plain in layers["identity", "direct"].items():
        fits = [known(layers["affine", fit][place].cross_entropy) for fit in ("direct", "task")]
        assert known(plain.cross_entropy) > 2 * max(fits)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("norm", [True, False], ids=["BatchNorm", "no BatchNorm"])
def test_001_C14_networks_match_with_and_without_norm_by_either_optimizer(norm: bool, optimizer: str) -> None:
    front, back = (convolutions(seed, norm=norm, optimizer=optimizer) for seed in (0, 1))
    at = ["2", "5"] if norm else ["1", "3"]
    found = it.stitches(
        front, back, at, "affine", data=batches(), test=digits()[1], epochs=3, **PAPER_1
    )  # fmt: skip
    assert all(known(one.back_accuracy) > 0.85 for one in found)
    assert all(known(one.relative_accuracy) > 0.9 for one in found)


def test_001_C15_networks_of_different_data_match() -> None:
    """In place of ImageNet and CelebA: the front learned digits that lie on their side, and never saw upright ones."""
    front, back = convolutions(0, turned=1), convolutions(1)
    found = it.stitches(front, back, ["2", "5"], "affine", data=batches(), test=digits()[1], epochs=4, **PAPER_1)
    assert known(found[0].front_accuracy) < 0.6
    assert known(found[0].back_accuracy) > 0.9
    assert all(known(one.relative_accuracy) > 0.8 for one in found)


@pytest.mark.slow
def test_001_C16_relative_accuracy_rises_with_width() -> None:
    means = []
    for width in (2, 6, 12):
        found = [
            it.stitch(
                convolutions(a, width), convolutions(b, width), "5", "affine", data=batches(), test=digits()[1],
                epochs=3, **PAPER_1,
            )
            for a, b in ((0, 1), (1, 0))
        ]  # fmt: skip
        means.append(sum(known(one.relative_accuracy) for one in found) / 2)
    assert means[0] < means[-1]
    assert means[1] <= means[2] + 0.01


# -- paper 1: what the maps are like -----------------------------------------------------------------------------------


def test_001_C28_task_loss_beats_reduced_rank_regression_at_every_rank() -> None:
    front, back = convolutions(0), convolutions(1)
    options: dict[str, Any] = {"data": batches(), "test": digits()[1], "epochs": 6, **PAPER_1}
    ranks = ["lowrank:2", "lowrank:4", "lowrank:8"]
    direct = it.stitches(front, back, "5", ranks, fit="direct", **options)
    task = it.stitches(front, back, "5", ranks, **options)
    for one, other in zip(direct, task, strict=True):
        assert known(other.cross_entropy) < known(one.cross_entropy)
        assert known(other.relative_accuracy) >= known(one.relative_accuracy)
        assert one.rank <= int(one.family.partition(":")[2])
        assert other.rank <= int(other.family.partition(":")[2])


def test_001_C29_least_squares_is_the_steady_start() -> None:
    """Stitches from least squares are all good; random starts are worse in the mean, and further apart."""
    front, back = convolutions(0), convolutions(1)
    runs = {"direct": [], "random": []}
    for start, found in runs.items():
        for order in range(3):
            data = batches()
            shuffled = [data[i] for i in torch.randperm(len(data), generator=torch.Generator().manual_seed(order))]
            found += it.stitches(
                front, back, "5", "affine", data=shuffled, test=digits()[1], epochs=2, start=start,
                seeds=(order,), **PAPER_1,
            )  # fmt: skip
    values = {start: torch.tensor([known(one.cross_entropy) for one in found]) for start, found in runs.items()}
    assert float(values["direct"].max()) < float(values["random"].min())
    assert float(values["direct"].std()) < float(values["random"].std())
    assert min(known(one.relative_accuracy) for one in runs["direct"]) > 0.9


def test_001_C31_at_high_sparsity_task_loss_keeps_what_direct_matching_loses() -> None:
    """Entries up to 1e-4 are zero, as in paper 1. With at least 80 % of zeros, the trained map is the better one."""
    front, back = convolutions(0), convolutions(1)
    strong: list[str | MapFamily] = [Sparse(one, threshold=1e-4, bias=True) for one in (0.01, 0.04, 0.08)]
    weak: list[str | MapFamily] = [Sparse(one, threshold=1e-4, bias=True) for one in (0.01, 0.03, 0.1)]
    options: dict[str, Any] = {"data": batches(), "test": digits()[1], "epochs": 9, **PAPER_1}
    direct = it.stitches(front, back, "5", strong, fit="direct", **options)
    task = it.stitches(front, back, "5", weak, **options)
    points = [[(sparsity(one.matrix, 1e-4), known(one.relative_accuracy)) for one in kind] for kind in (direct, task)]
    for kind in points:
        assert kind == sorted(kind, key=lambda point: point[0]), "more penalty, more zeros"
    high = [[accuracy for zeros, accuracy in kind if zeros >= 0.8] for kind in points]
    assert high[0]
    assert high[1]
    assert min(high[1]) > 0.8
    assert max(high[0]) < 0.2


# -- theorem 4.2 -------------------------------------------------------------------------------------------------------

#: Architecture → options, shape of one input (None: tokens), activations outside residual blocks.
SMALL: dict[str, tuple[dict[str, Any], tuple[int, ...] | None, list[str]]] = {
    "mlp": ({"widths": (64, 12, 10, 10)}, (1, 8, 8), ["2", "4"]),
    "lenet": ({}, (1, 28, 28), ["relu1", "relu2", "relu3", "relu4"]),
    "myrtle": ({"widths": (6, 8, 8, 10)}, (3, 32, 32), ["2", "5", "9", "13"]),
    "tiny10": ({"width": 0.25}, (3, 32, 32), ["relu1", "relu3", "relu8"]),
    "resnet20": ({"width": 0.25}, (3, 8, 8), ["relu", "layer1.0.relu2", "layer2.0.relu2", "layer3.2.relu2"]),
    "resnet18": ({"width": 1 / 16}, (3, 8, 8), ["relu", "layer1.1.relu2", "layer4.0.relu2", "layer4.1.relu2"]),
    "resnet50": ({"width": 1 / 32}, (3, 8, 8), ["relu", "layer1.0.relu3", "layer4.2.relu3"]),
    "vgg11": ({"width": 1 / 16}, (3, 32, 32), ["features.1", "features.9", "features.19"]),
    "vgg11_bn": ({"width": 1 / 16}, (3, 32, 32), ["features.2", "features.13"]),
    "cct": ({"dim": 8, "depth": 2, "heads": 2, "side": 8}, (3, 8, 8), ["relu"]),
    "vit": ({"dim": 8, "depth": 2, "heads": 2, "side": 8}, (3, 8, 8), []),
    "gpt": ({"vocab": 16, "context": 8, "dim": 8, "depth": 2, "heads": 2}, None, []),
}
OUTSIDE = [name for name, (_, _, at) in SMALL.items() if at]
#: Architecture → an activation inside a residual block, and the family of its group.
INSIDE = {"resnet20": ("layer1.0.relu1", "relu"), "resnet18": ("layer2.0.relu1", "relu")}
INSIDE |= {"resnet50": ("layer1.0.relu2", "relu")}
INSIDE |= dict.fromkeys(("cct", "vit", "gpt"), ("blocks.0.act", "permutation"))


@cache
def moved_copy(name: str) -> tuple[nn.Module, nn.Module, Batches]:
    """A network in double precision with statistics of its own, a copy moved by a random element, and data."""
    options, shape, _ = SMALL[name]
    torch.manual_seed(0)
    model = it.zoo.build(name, **options).double().eval()
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.running_mean, -0.2, 0.2)  # pyrefly: ignore
            nn.init.uniform_(layer.running_var, 0.5, 1.5)  # pyrefly: ignore
    x = torch.randint(16, (24, 8)) if shape is None else torch.randn(24, *shape, dtype=torch.float64)
    symmetry = it.symmetry(model, x)
    targets = torch.randint(10, tuple(x.shape) if shape is None else (24,))
    return model, symmetry.act(symmetry.random(seed=1), model), [(x, targets)]


@torch.no_grad()
def error(stitched: nn.Module, model: nn.Module, data: Batches) -> float:
    """The largest difference of outputs, as a share of the largest output."""
    wanted: Tensor = model(data[0][0])
    return float((stitched(data[0][0]) - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("name", OUTSIDE)
def test_000_G27_theorem_4_2_a_moved_copy_is_stitched_exactly(name: str) -> None:
    """The group's own family, fitted directly, gives back the network: outputs to 1e-9, penalty exactly 0."""
    model, moved, data = moved_copy(name)
    found = it.stitches(moved, model, SMALL[name][2], ["relu", "identity"], fit="direct", data=data)
    for one in found.select(family="relu"):
        assert one.point.skip == "none"
        assert error(one.model, model, data) < 1e-9
        assert one.penalty == 0.0
    assert all(error(one.model, model, data) > 1e-6 for one in found.select(family="identity"))


@pytest.mark.parametrize("name", INSIDE)
def test_000_G19_E56_inside_a_block_the_skip_of_the_front_is_not_moved_back(name: str) -> None:
    """With the front's values around the cut the stitch fails though the map is exact; with the back's it does not."""
    model, moved, data = moved_copy(name)
    at, family = INSIDE[name]
    by_back, by_front = (
        it.stitch(moved, model, at, family, "direct", data=data, skip=skip) for skip in ("back", "front")
    )
    assert error(by_back.model, model, data) < 1e-9
    assert error(by_front.model, model, data) > 1e-3
    torch.testing.assert_close(by_back.matrix, by_front.matrix)
