"""Training stitches: many together as each alone, BatchNorm of their own, targets, divergence, taking up again."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import intertwine
from intertwine.errors import InputError
from intertwine.stitch.families.birkhoff import Birkhoff
from intertwine.stitch.settings import Settings, of_recipe
from intertwine.stitch.statistics import Statistics
from intertwine.stitch.targets import Targets

pytestmark = pytest.mark.usefixtures("one_thread")


def network(seed: int, width: int = 8) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 4),
    )  # fmt: skip
    for layer in model:
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.running_mean, -0.2, 0.2)  # pyrefly: ignore
            nn.init.uniform_(layer.running_var, 0.5, 1.5)  # pyrefly: ignore
    return model.eval()


def batches(count: int = 4, size: int = 16, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    chance = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 1, 6, 6, generator=chance), torch.randint(4, (size,), generator=chance))
        for _ in range(count)
    ]


# -- settings ---------------------------------------------------------------------------------------------------------


def test_D1_recipes_of_the_papers() -> None:
    """Paper 0: plain SGD, 1e-2 for its group and 1e-3 for others, BatchNorm adapts. Paper 1: Adam, frozen, soft."""
    group, full, one = (
        of_recipe(*names, {}) for names in (("godfrey", "relu"), ("godfrey", "linear"), ("csiszarik", "affine"))
    )
    assert (group.optimizer, group.momentum, group.rate, group.norm, group.epochs) == ("sgd", 0.0, 1e-2, "adapt", 20)
    assert (full.rate, full.start) == (1e-3, "random")
    assert (one.optimizer, one.rate, one.norm, one.targets, one.epochs, one.drops) == (
        "adam", 1e-3, "frozen", "soft", 30, True,
    )  # fmt: skip


def test_rates_fall_at_each_third() -> None:
    rates = [Settings(epochs=30, rate=1.0).rate_at(epoch) for epoch in (0, 9, 10, 19, 20, 29)]
    assert rates == [1.0, 1.0, 0.1, 0.1, 0.01, 0.01]
    assert Settings(epochs=30, rate=1.0, drops=False).rate_at(29) == 1.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"targets": "sof"}, "targets='sof' was asked for; it is one of hard, soft, both"),
        ({"rate": 0}, "a rate is greater than 0"),
        ({"epoch": 3}, "The option 'epoch' was given to stitching. Did you mean epochs\\?"),
        ({"recipe": "godfry"}, "The recipe 'godfry' was asked for. Did you mean godfrey\\?"),
        ({"fit": "closed"}, "fitted by 'closed'; it is fitted by direct or task"),
        ({"seeds": ()}, "No stitch was asked for"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        intertwine.stitches(network(0), network(1), "2", data=batches(1), **options)


def test_data_that_can_be_read_once_is_refused() -> None:
    with pytest.raises(InputError, match=r"can be read only once, as generators can\. Pass a DataLoader, or list"):
        intertwine.stitch(network(0), network(1), "2", data=iter(batches()))


# -- targets ----------------------------------------------------------------------------------------------------------


def test_001_C05_hard_soft_and_both() -> None:
    """Cross-entropy with labels, with the back network's answers, and half of each, for stitches side by side."""
    outputs, own, labels = torch.randn(3 * 5, 4), torch.randn(5, 4), torch.randint(4, (5,))
    found = Targets(["hard", "soft", "both"], torch.device("cpu"))(outputs, labels, own)
    parts = outputs.double().chunk(3)
    hard = [F.cross_entropy(part, labels) for part in parts]
    soft = [-(own.double().softmax(-1) * part.log_softmax(-1)).sum(-1).mean() for part in parts]
    torch.testing.assert_close(
        found.double(), torch.stack([hard[0], soft[1], (hard[2] + soft[2]) / 2]), rtol=1e-5, atol=1e-6
    )


def test_targets_that_are_no_classes_are_refused() -> None:
    with pytest.raises(
        InputError, match=r"one class per answer of the back network, of 4 classes; found torch\.float32"
    ):
        Targets(["hard"], torch.device("cpu"))(torch.zeros(5, 4), torch.zeros(5), None)


# -- BatchNorm --------------------------------------------------------------------------------------------------------


def test_D2_batch_statistics_are_taken_for_each_stitch_apart() -> None:
    model = network(0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x, y = torch.randn(8, 1, 6, 6), 3 * torch.randn(8, 1, 6, 6)
    statistics = Statistics(model, copies=2)
    with statistics.applied("batch"):
        found = model(torch.cat([x, y]))
    plain = copy.deepcopy(model).train()
    torch.testing.assert_close(found, torch.cat([plain(x), plain(y)]))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_collected_statistics_are_averages_over_batches() -> None:
    model, data = network(0), [x for x, _ in batches(3)]
    statistics = Statistics(model)
    for x in data:
        with statistics.applied("collect"):
            model(x)
    plain = copy.deepcopy(model).train()
    for layer in plain.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.reset_running_stats()
            layer.momentum = None  # torch's own plain average
    for x in data:
        plain(x)
    with statistics.applied("own"):
        found = model(data[0])
    torch.testing.assert_close(found, plain.eval()(data[0]))


def test_statistics_are_used_after_the_network_was_moved() -> None:
    """Moving a network gives its buffers other tensors; the layers are still known."""
    model = network(0)
    statistics, x = Statistics(model), batches(1)[0][0]
    with statistics.applied("collect"):
        model(x)
    with statistics.applied("own"):
        before = model(x)
    model.double().float()
    with statistics.applied("own"):
        after = model(x)
    assert torch.equal(before, after)
    assert not torch.allclose(before, model(x), atol=1e-3)


def test_copies_of_a_stitched_network_keep_its_statistics_and_share_the_networks() -> None:
    a, b, data = network(0), network(1).double().float(), batches()
    found = intertwine.stitch(a, b, "2", "relu", "direct", data=data, norm="adapt").model
    copied, x = copy.deepcopy(found), data[0][0]
    assert torch.equal(copied(x), found(x))
    with torch.no_grad():
        for tensor in copied.statistics.buffers():  # pyrefly: ignore
            tensor.fill_(1.0)
    assert not torch.allclose(copied(x), found(x))
    layer = copied.statistics.back._layers[0][1]  # pyrefly: ignore
    assert layer is b[1]


def test_networks_in_double_precision_are_stitched_in_it() -> None:
    a, b = network(0).double(), network(1).double()
    data = [(x.double(), y) for x, y in batches()]
    for norm in ("frozen", "adapt"):
        found = intertwine.stitch(a, b, "2", "affine", data=data, norm=norm, epochs=2)
        assert found.matrix.dtype == found.model(data[0][0]).dtype == torch.float64


# -- many at once -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["frozen", "adapt"])
def test_stitches_together_are_as_each_alone(norm: str) -> None:
    """Cuts, families, seeds and options in one run: each comes out as when it is the only one."""
    a, b, data = network(0), network(1), batches()
    options = {"epochs": 3, "start": "random", "norm": norm}
    found = intertwine.stitches(
        a, b, ["2", "5"], ["linear", "lowrank:2"], data=data, seeds=(0, 1),
        variants=({"rate": 1e-2}, {"optimizer": "sgd"}), **options,
    )  # fmt: skip
    assert len(found) == 16
    for one in found:
        alone = intertwine.stitch(
            a, b, one.cut.back, one.family, data=data, seed=one.settings["seed"], rate=one.settings["rate"],
            optimizer=one.settings["optimizer"], **options,
        )  # fmt: skip
        torch.testing.assert_close(one.matrix, alone.matrix, rtol=1e-3, atol=1e-5)
        assert one.accuracy == alone.accuracy
        assert len(one.history) == 3


def test_training_lowers_the_loss_and_leaves_both_networks_alone() -> None:
    a, b, data = network(0), network(1), batches()
    before = [copy.deepcopy(model.state_dict()) for model in (a, b)]
    found = intertwine.stitch(a, b, "2", "affine", data=data, epochs=8, start="random", rate=1e-2, norm="adapt")
    losses = [row["loss"] for row in found.history]
    assert losses[-1] < losses[0]
    for model, held in zip((a, b), before, strict=True):
        assert all(torch.equal(tensor, held[name]) for name, tensor in model.state_dict().items())
        assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
        assert not model.training


def test_000_G34_the_kept_network_has_the_statistics_it_was_scored_with() -> None:
    """Where BatchNorm adapts, the outcome's own network gives the accuracy that is reported."""
    a, b, data = network(0), network(1), batches()
    found = intertwine.stitch(a, b, "2", "relu", "direct", data=data, norm="adapt")
    with torch.no_grad():
        right = sum(int((found.model(x).argmax(-1) == y).sum()) for x, y in data)
    assert found.accuracy == right / 64
    frozen = intertwine.stitch(a, b, "2", "relu", "direct", data=data)
    x = data[0][0]
    assert not torch.allclose(found.model(x), frozen.model(x), atol=1e-3)


def test_D21_last_and_best_epoch() -> None:
    options: dict[str, Any] = {"data": batches(), "epochs": 6, "start": "random", "rate": 0.05, "score_every": 1}
    last = intertwine.stitch(network(0), network(1), "2", "linear", **options)
    best = intertwine.stitch(network(0), network(1), "2", "linear", select="best", **options)
    scored = [row["accuracy"] for row in last.history]
    assert last.accuracy == scored[-1]
    assert last.best is not None
    assert last.best.accuracy == max(scored)
    assert best.accuracy == max(scored)


def test_divergence_is_recorded_with_what_was_kept() -> None:
    """A rate that explodes, beside one that does not: the first is named and rests, the second is untouched."""
    a, b, data = network(0), network(1), batches()
    found = intertwine.stitches(
        a,
        b,
        "2",
        "linear",
        data=data,
        epochs=4,
        optimizer="sgd",
        variants=({"rate": 1e30}, {"rate": 1e-2}),
        drops=False,
    )
    assert found[0].diverged is not None
    assert found[0].diverged.startswith("in epoch 1 its loss ")
    assert found[0].diverged.endswith("(rate 1e+30); the map of epoch 0 was kept")
    assert found[0].matrix.isfinite().all()
    alone = intertwine.stitch(a, b, "2", "linear", data=data, epochs=4, optimizer="sgd", rate=1e-2, drops=False)
    assert found[1].diverged is None
    torch.testing.assert_close(found[1].matrix, alone.matrix, rtol=1e-4, atol=1e-6)


# -- taking up again --------------------------------------------------------------------------------------------------


class Killed(Exception):
    """Stands for the end of a process."""


def test_a_killed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    a, b, data = network(0), network(1), batches()
    options: dict[str, Any] = {
        "data": data, "epochs": 4, "families": ["linear", "relu:birkhoff"], "at": ["2", "5"],
        "variants": ({}, {"optimizer": "sgd", "momentum": 0.9}),
    }  # fmt: skip
    whole = intertwine.stitches(a, b, **options)

    def stop(doing: str, part: float) -> None:
        if "epoch 3" in doing:
            raise Killed

    with pytest.raises(Killed):
        intertwine.stitches(a, b, out=tmp_path, progress=stop, **options)
    told: list[str] = []
    with pytest.raises(InputError, match="holds those of another plan, which differs in jobs"):
        intertwine.stitches(a, b, out=tmp_path, **options | {"families": ["linear", Birkhoff(alpha=3.0)]})
    again = intertwine.stitches(a, b, out=tmp_path, progress=lambda doing, part: told.append(doing), **options)
    assert not any("epoch 1 " in doing or "epoch 2 " in doing for doing in told)
    for one, other in zip(again, whole, strict=True):
        torch.testing.assert_close(one.matrix, other.matrix, rtol=1e-5, atol=1e-7)
        assert [row["epoch"] for row in one.history] == [1, 2, 3, 4]


@pytest.mark.parametrize("norm", ["frozen", "adapt"])
def test_a_killed_run_remembers_its_best_epoch_and_its_steps(tmp_path: Path, norm: str) -> None:
    a, b, data = network(0), network(1), batches()
    options: dict[str, Any] = {
        "data": data, "epochs": 6, "at": "2", "families": "linear", "start": "random", "rate": 0.3, "select": "best",
        "trace_every": 3, "norm": norm, "drops": False,
    }  # fmt: skip
    whole = intertwine.stitches(a, b, **options)[0]
    best = max(range(6), key=lambda epoch: [row["accuracy"] for row in whole.history if "epoch" in row][epoch])

    def stop(doing: str, part: float) -> None:
        if f"epoch {min(best + 2, 6)} of" in doing:
            raise Killed

    with pytest.raises(Killed):
        intertwine.stitches(a, b, out=tmp_path, progress=stop, **options)
    again = intertwine.stitches(a, b, out=tmp_path, **options)[0]
    assert again.accuracy == whole.accuracy
    assert again.best == whole.best
    torch.testing.assert_close(again.matrix, whole.matrix)
    torch.testing.assert_close(again.model(data[0][0]), whole.model(data[0][0]))
    assert [row["step"] for row in again.history if "step" in row] == [0, 3, 6, 9, 12, 15, 18, 21]


def test_a_folder_of_another_plan_is_refused(tmp_path: Path) -> None:
    a, b, data = network(0), network(1), batches(1)
    intertwine.stitches(a, b, "2", data=data, epochs=1, out=tmp_path)
    with pytest.raises(InputError, match=r"which differs in settings\. Give another folder"):
        intertwine.stitches(a, b, "2", data=data, epochs=2, out=tmp_path)


def test_progress_runs_from_0_to_1() -> None:
    parts: list[float] = []
    intertwine.stitches(
        network(0), network(1), ["2", "5"], data=batches(), epochs=2, progress=lambda doing, part: parts.append(part)
    )
    assert parts == sorted(parts)
    assert parts[0] >= 0
    assert parts[-1] == pytest.approx(1.0)


def test_batches_stay_as_they_are_where_the_first_layer_works_in_place() -> None:
    a, b = (nn.Sequential(nn.ReLU(inplace=True), *network(seed)) for seed in (0, 1))
    data = batches()
    before = [x.clone() for x, _ in data]
    found = intertwine.stitches(
        a, b, ["3", "6"], ["relu", "linear"], data=data, epochs=2, targets="soft", norm="adapt", fit=("direct", "task")
    )
    found[0].model(data[0][0])
    assert all(torch.equal(x, held) for (x, _), held in zip(data, before, strict=True))


# -- papers' experiments in small -------------------------------------------------------------------------------------


def test_001_C24_similarities_are_traced_while_training() -> None:
    found = intertwine.stitch(
        network(0), network(1), "2", "linear", data=batches(), epochs=2, targets="soft", trace_every=2
    )
    steps = [row for row in found.history if "step" in row]
    assert [row["step"] for row in steps] == [0, 2, 4, 6]
    assert {"linear_cka", "r2", "cca"} <= set(steps[0])
    assert steps[0]["r2"] != steps[-1]["r2"]


def test_001_C25_a_penalty_on_cka_lowers_it() -> None:
    """Self-stitch from the identity: CKA starts at 1 and falls where it is penalised."""
    model, data = network(0), batches()
    shared: dict[str, Any] = {
        "data": data,
        "epochs": 6,
        "start": "identity",
        "targets": "soft",
        "trace_every": 4,
        "rate": 1e-2,
    }
    free, pressed = (intertwine.stitch(model, model, "2", "linear", cka=w, **shared) for w in (0.0, 5.0))
    first, kept, low = (
        next(row["linear_cka_biased"] for row in order if "step" in row)
        for order in (free.history, reversed(free.history), reversed(pressed.history))
    )
    assert first == pytest.approx(1.0)
    assert low < kept - 0.05
