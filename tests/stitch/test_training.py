"""Training stitches: many together as each alone, BatchNorm statistics of their own, targets, divergence, resuming."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import intertwine
from intertwine.errors import InputError
from intertwine.stitch import training
from intertwine.stitch.direct import LinearMap
from intertwine.stitch.families.permutations import Birkhoff
from intertwine.stitch.fitting import FitResults, FittedMap
from intertwine.stitch.network import BatchNormStatistics
from intertwine.stitch.scores import StitchScores, TrainingTargets
from intertwine.stitch.training import CudaGraphStep, StitchSettings, apply_maps, recipe_settings

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
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.uniform_(layer.bias, -0.5, 0.5)
            layer.eps = 1e-2
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
        recipe_settings(*names, {}) for names in (("godfrey", "relu"), ("godfrey", "linear"), ("csiszarik", "affine"))
    )
    assert (group.optimizer, group.momentum, group.rate, group.norm, group.epochs) == ("sgd", 0.0, 1e-2, "adapt", 20)
    assert (full.rate, full.start) == (1e-3, "random")
    assert [recipe_settings("godfrey", name, {}).rate for name in ("relu:birkhoff", "softsort", "permutation")] == [
        1e-2
    ] * 3
    assert (one.optimizer, one.rate, one.norm, one.targets, one.epochs, one.drops) == (
        "adam", 1e-3, "frozen", "soft", 30, True,
    )  # fmt: skip


def test_rates_fall_at_each_third() -> None:
    rates = [StitchSettings(epochs=30, rate=1.0).rate_at(epoch) for epoch in (0, 9, 10, 19, 20, 29)]
    assert rates == [1.0, 1.0, 0.1, 0.1, 0.01, 0.01]
    assert StitchSettings(epochs=30, rate=1.0, drops=False).rate_at(29) == 1.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"targets": "sof"}, "Unknown targets 'sof'.* Choose one of: hard, soft, both"),
        ({"rate": 0}, "rate greater than 0, but epochs is 10 and rate is 0"),
        ({"epoch": 3}, "Unknown option of stitching 'epoch'. Did you mean 'epochs'\\?"),
        ({"recipe": "godfry"}, "Unknown recipe 'godfry'. Did you mean 'godfrey'\\?"),
        ({"fit": "closed"}, "Unknown fit 'closed'. Choose one of: direct, task"),
        ({"seeds": ()}, "There is no stitch to fit"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        intertwine.stitches(network(0), network(1), "2", data=batches(1), **options)


def test_data_that_can_be_read_once_is_refused() -> None:
    with pytest.raises(InputError, match=r"can be read only once, as generators can, .* Pass a DataLoader, or list"):
        intertwine.stitch(network(0), network(1), "2", data=iter(batches()))


# -- targets ----------------------------------------------------------------------------------------------------------


def test_001_C05_hard_soft_and_both() -> None:
    """Cross-entropy with labels, with the back network's answers, and half of each, for stitches side by side."""
    outputs, own, labels = torch.randn(3 * 5, 4), torch.randn(5, 4), torch.randint(4, (5,))
    found = TrainingTargets(["hard", "soft", "both"], torch.device("cpu"))(outputs, labels, own)
    parts = outputs.double().chunk(3)
    hard = [F.cross_entropy(part, labels) for part in parts]
    soft = [-(own.double().softmax(-1) * part.log_softmax(-1)).sum(-1).mean() for part in parts]
    torch.testing.assert_close(
        found.double(), torch.stack([hard[0], soft[1], (hard[2] + soft[2]) / 2]), rtol=1e-5, atol=1e-6
    )


def test_answers_that_are_ignored_have_no_part_in_the_mean() -> None:
    outputs, labels = torch.randn(2 * 6, 4), torch.tensor([0, -100, 3, -100, 1, 2])
    found = TrainingTargets(["hard", "hard"], torch.device("cpu"))(outputs, labels, None)
    kept = labels != -100
    wanted = [-part[kept].log_softmax(-1).gather(1, labels[kept][:, None]).mean() for part in outputs.double().chunk(2)]
    torch.testing.assert_close(found.double(), torch.stack(wanted), rtol=1e-5, atol=1e-6)


def test_a_batch_whose_answers_are_all_ignored_teaches_nothing() -> None:
    """The map is the one of training without that batch; plain SGD has no memory that would move it on."""
    a, b, data = network(0), network(1), batches(2)
    blank = (batches(1, seed=1)[0][0], torch.full((16,), -100))
    options: dict[str, Any] = {"test": data, "direct_data": data, "epochs": 3, "optimizer": "sgd", "rate": 0.1}
    found, wanted = (intertwine.stitch(a, b, "2", data=some, **options) for some in ([data[0], blank, data[1]], data))
    assert found.diverged is None
    assert torch.equal(found.matrix, wanted.matrix)
    assert not torch.equal(found.matrix, intertwine.stitch(a, b, "2", "linear", "direct", data=data).matrix)


def test_targets_that_are_no_classes_are_refused() -> None:
    with pytest.raises(
        InputError, match=r"one class, an integer, per prediction .* Found outputs \(5, 4\) and targets torch\.float32"
    ):
        TrainingTargets(["hard", "hard"], torch.device("cpu"))(torch.zeros(10, 4), torch.zeros(5), None)


@pytest.mark.parametrize(
    ("shape", "axis"),
    [((6, 4), 1), ((6, 4, 5), 1), ((6, 5, 4), 2), ((6, 4, 3, 5), 1), ((6, 4, 4, 4), 1), ((6, 3, 5, 4), 3)],
)
@pytest.mark.parametrize("kinds", [["hard"], ["soft"], ["hard", "soft", "both"]])
def test_the_classes_of_dense_outputs_lie_where_the_targets_say(
    shape: tuple[int, ...], axis: int, kinds: list[str]
) -> None:
    """Classifiers, segmentation, signals and tokens: torch's own losses along the axis that has the four classes."""
    labels = torch.randint(4, shape[:axis] + shape[axis + 1 :])
    outputs, own = torch.randn(len(kinds) * shape[0], *shape[1:]), torch.randn(shape)
    found = TrainingTargets(kinds, torch.device("cpu"))(outputs, labels, own)
    first = own.double().movedim(axis, 1)
    for part, kind, loss in zip(outputs.double().chunk(len(kinds)), kinds, found, strict=True):
        logits = part.movedim(axis, 1)
        hard, soft = F.cross_entropy(logits, labels), F.cross_entropy(logits, first.softmax(1))
        wanted = {"hard": hard, "soft": soft, "both": (hard + soft) / 2}[kind]
        assert float(loss) == pytest.approx(float(wanted), rel=1e-5)


def test_answers_of_unlabelled_data_are_followed_where_the_axis_of_classes_is_known() -> None:
    soft, own = TrainingTargets(["soft"], torch.device("cpu")), torch.randn(5, 4)
    wanted = F.cross_entropy(torch.ones(5, 4).double(), own.double().softmax(1))
    assert float(soft(torch.ones(5, 4), None, own)) == pytest.approx(float(wanted), rel=1e-5)
    with pytest.raises(InputError, match=r"axis of classes in outputs \(5, 4, 4\) is unknown.* are NoneType"):
        soft(torch.zeros(5, 4, 4), None, torch.zeros(5, 4, 4))


class Segments(nn.Sequential):
    """A class per pixel."""

    def __init__(self, seed: int, classes: int) -> None:
        torch.manual_seed(seed)
        super().__init__(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1), nn.ReLU())
        self.append(nn.Conv2d(6, classes, 1)).eval()


@pytest.mark.parametrize("classes", [8, 5])
@pytest.mark.parametrize("targets", ["hard", "soft"])
def test_segmentation_is_trained_on_the_loss_it_is_scored_by(classes: int, targets: str) -> None:
    """Images of eight by eight, with as many classes as columns and with fewer; the first loss is that of the start."""
    a, b = Segments(0, classes), Segments(1, classes)
    x, y = torch.randn(8, 3, 8, 8), torch.randint(classes, (8, 8, 8))
    start = intertwine.stitch(a, b, "1", fit="direct", data=[(x, y)])
    options: dict[str, Any] = {"data": [(x, y)], "targets": targets, "optimizer": "sgd", "rate": 0.1, "drops": False}
    found = intertwine.stitch(a, b, "1", epochs=20, **options)
    with torch.no_grad():
        goal = y if targets == "hard" else b(x).softmax(1)
        first, last = (float(F.cross_entropy(one.model(x), goal)) for one in (start, found))
    assert found.history[0]["loss"] == pytest.approx(first, rel=1e-4)
    assert found.history[-1]["loss"] == pytest.approx(last, rel=0.02)
    assert last < first


# -- other losses -----------------------------------------------------------------------------------------------------


def regressor(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def numbers(count: int = 2) -> list[tuple[Tensor, Tensor]]:
    chance = torch.Generator().manual_seed(0)
    return [
        (torch.randn(12, 3, generator=chance).double(), torch.randn(12, 2, generator=chance).double())
        for _ in range(count)
    ]


PLAIN: dict[str, Any] = {"optimizer": "sgd", "rate": 0.1, "drops": False}


def test_a_user_loss_is_minimised_and_scored() -> None:
    """Two stitches side by side by the mean square, every step of them written out."""
    a, b, data = regressor(0), regressor(1), numbers()
    found = intertwine.stitches(
        a, b, "1", data=data, variants=({"start": "identity"}, {}), epochs=2, loss=F.mse_loss, **PLAIN
    )
    direct = intertwine.stitch(a, b, "1", fit="direct", data=data, loss=F.mse_loss)
    for one, start in zip(found, (torch.eye(5).double(), direct.matrix), strict=True):
        matrix, losses = start.clone().requires_grad_(), []
        for _ in range(2):
            means = []
            for x, y in data:
                loss = ((b[2](a[:2](x).detach() @ matrix.T) - y) ** 2).mean()
                means.append(loss.detach())
                matrix = (matrix - 0.1 * torch.autograd.grad(loss, matrix)[0]).detach().requires_grad_()
            losses.append(float(sum(means)) / 2)
        matrix = matrix.detach()
        torch.testing.assert_close(one.matrix, matrix, rtol=1e-5, atol=1e-7)
        assert [row["loss"] for row in one.history] == pytest.approx(losses, rel=1e-5)
        last = [float(((b[2](a[:2](x) @ matrix.T) - y) ** 2).mean().detach()) for x, y in data]
        assert one.scores.loss == pytest.approx(sum(last) / 2, rel=1e-5)
        assert one.accuracy is one.penalty is one.scores.unscored is None
        assert one.settings["loss_function"] == "torch.nn.functional.mse_loss"


def test_a_user_loss_with_soft_targets() -> None:
    outputs, own, labels = torch.randn(2 * 5, 4), torch.randn(5, 4), torch.randint(4, (5,))
    found = TrainingTargets(["hard", "both"], torch.device("cpu"), F.multi_margin_loss)(outputs, labels, own)
    first, second = outputs.double().chunk(2)
    soft = F.cross_entropy(second, own.double().softmax(1))
    wanted = torch.stack([F.multi_margin_loss(first, labels), (F.multi_margin_loss(second, labels) + soft) / 2])
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)


def test_a_user_loss_may_be_large_and_may_read_several_outputs() -> None:
    class Two(nn.Sequential):
        def forward(self, input: Tensor) -> Any:
            y = super().forward(input)
            return y, 2 * y

    a, b = Two(*regressor(0)), Two(*regressor(1))

    def far(outputs: Any, targets: Any) -> Tensor:
        return 1e6 * ((outputs[0] - 1) ** 2 + (outputs[1] - 2) ** 2).mean(1)

    data = [(x, None) for x, _ in numbers()]
    found = intertwine.stitch(a, b, "1", data=data, loss=far, epochs=60, optimizer="sgd", rate=1e-8, start="identity")
    with torch.no_grad():
        wanted = sum(5e6 * float(((found.model(x)[0] - 1) ** 2).mean()) for x, _ in data) / 2
    assert found.diverged is None
    assert found.scores.loss == pytest.approx(wanted, rel=1e-5)
    assert found.scores.samples == 24
    assert 1e4 < found.history[-1]["loss"] < found.history[0]["loss"]


@pytest.mark.parametrize(("rate", "epoch"), [(3.0, 5), (8.0, 1)])
def test_without_classes_the_best_epoch_is_the_one_of_the_lowest_loss(rate: float, epoch: int) -> None:
    """A rate that goes down to the end, and one that goes up from the first epoch on."""
    options: dict[str, Any] = {"data": numbers(), "loss": F.mse_loss, "epochs": 5, "start": "random", **PLAIN}
    options["rate"] = rate
    ends = [
        intertwine.stitch(regressor(0), regressor(1), "1", **options | {"epochs": number}).scores.loss
        for number in range(1, 6)
    ]
    best = intertwine.stitch(regressor(0), regressor(1), "1", select="best", **options)
    assert best.scores.loss == min(ends)
    assert min(ends) == ends[epoch - 1]


@pytest.mark.parametrize("targets", ["numbers", "none"])
def test_direct_fits_need_no_classes(targets: str) -> None:
    """The map is least squares, as ever; the scores say why they are empty, and the way they name is one."""
    a, b = regressor(0), regressor(1)
    data = [(x, y if targets == "numbers" else None) for x, y in numbers()]
    found = intertwine.stitches(a, b, "1", ["linear", "affine"], fit="direct", data=data)
    x = torch.cat([x for x, _ in data])
    wanted = torch.linalg.lstsq(a[:2](x), b[:2](x)).solution.T
    torch.testing.assert_close(found[0].matrix, wanted, rtol=1e-6, atol=1e-8)
    kind = {"numbers": r"float64 \(12, 2\)", "none": "NoneType"}[targets]
    why = rf"found outputs float64 \(12, 2\) and targets {kind}\. Pass loss=, a function of \(outputs, targets\)\."
    for one in found:
        assert one.accuracy is one.agreement is one.to_dict()["loss"] is None
        assert one.scores.samples == 24
        assert re.search(rf"not scored: Cross-entropy needs.*{why}", repr(one))
    assert re.search(why, repr(found))
    assert re.search(why, found[0].to_dict()["unscored"])
    with pytest.raises(InputError, match=rf"None of the 2 stitches .* They are not scored: .*{why}"):
        found.best("loss")
    found.plot()

    def size(outputs: Any, _targets: Any) -> Tensor:
        return outputs.abs().mean()

    scored = intertwine.stitch(a, b, "1", fit="direct", data=data, loss=size)
    assert scored.scores.loss == pytest.approx(float(scored.model(x).detach().abs().mean()), rel=1e-6)


def test_losses_that_are_refused(tmp_path: Path) -> None:
    a, b, data = regressor(0), regressor(1), numbers()
    with pytest.raises(
        InputError, match=r"Hard targets are one class.* targets torch\.float64 .*Pass loss=, a function"
    ):
        intertwine.stitch(a, b, "1", data=data)
    with pytest.raises(InputError, match=r"The loss must give a tensor.*found float"):
        intertwine.stitch(a, b, "1", data=data, loss=lambda outputs, targets: 0.5)
    intertwine.stitch(a, b, "1", data=data, loss=F.mse_loss, epochs=1, out=tmp_path)
    with pytest.raises(InputError, match="holds stitches of another plan, which differs in loss"):
        intertwine.stitch(a, b, "1", data=data, loss=F.l1_loss, epochs=1, out=tmp_path)


# -- BatchNorm --------------------------------------------------------------------------------------------------------


def test_D2_batch_statistics_are_taken_for_each_stitch_apart() -> None:
    model = network(0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x, y = torch.randn(8, 1, 6, 6), 3 * torch.randn(8, 1, 6, 6)
    statistics = BatchNormStatistics(model, copies=2)
    with statistics.applied("batch"):
        found = model(torch.cat([x, y]))
    plain = copy.deepcopy(model).train()
    torch.testing.assert_close(found, torch.cat([plain(x), plain(y)]))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_collected_statistics_are_averages_over_batches() -> None:
    model, data = network(0), [x for x, _ in batches(3)]
    statistics = BatchNormStatistics(model)
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


def test_stitches_side_by_side_collect_and_use_statistics_of_their_own() -> None:
    model, x = network(0), batches(1)[0][0]
    both = torch.cat([x, 3 * x + 1])
    statistics = BatchNormStatistics(model, copies=2)
    with statistics.applied("collect"):
        model(both)
    with statistics.applied("own"):
        found = model(both)
    for number, part in enumerate(both.chunk(2)):
        plain = copy.deepcopy(model).train()
        for layer in plain.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.momentum = 1.0  # the last batch alone
        plain(part)
        torch.testing.assert_close(found.chunk(2)[number], plain.eval()(part))
        with BatchNormStatistics(model).load(statistics.of(number)).applied("own"):
            torch.testing.assert_close(model(part), found.chunk(2)[number])


def test_statistics_are_used_after_the_network_was_moved() -> None:
    """Moving a network gives its buffers other tensors; the layers are still known."""
    model = network(0)
    statistics, x = BatchNormStatistics(model), batches(1)[0][0]
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
            a, b, one.point.back, one.family, data=data, seed=one.settings["seed"], rate=one.settings["rate"],
            optimizer=one.settings["optimizer"], **options,
        )  # fmt: skip
        torch.testing.assert_close(one.matrix, alone.matrix, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(one.model(data[0][0]), alone.model(data[0][0]), rtol=1e-3, atol=1e-4)
        assert one.accuracy == alone.accuracy
        assert len(one.history) == 3
    assert not torch.allclose(found[0].matrix, found[1].matrix, atol=1e-2)  # of two seeds


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
    options: dict[str, Any] = {"data": batches(), "epochs": 6, "start": "random", "rate": 0.3, "score_every": 1}
    options["drops"] = False
    last = intertwine.stitch(network(0), network(1), "2", "linear", **options)
    best = intertwine.stitch(network(0), network(1), "2", "linear", select="best", **options)
    scored = [row["accuracy"] for row in last.history]
    assert last.accuracy == scored[-1]
    assert last.best is not None
    assert last.best.accuracy == max(scored)
    assert best.accuracy == max(scored)
    epoch = scored.index(max(scored)) + 1
    assert epoch < 6
    alone = intertwine.stitch(network(0), network(1), "2", "linear", **options | {"epochs": epoch})
    assert torch.equal(best.matrix, alone.matrix)  # the map of that epoch, not of a later one


def test_of_equally_good_epochs_the_first_is_the_best() -> None:
    results = FitResults()
    for number, right in enumerate((1, 3, 3, 2)):
        score = StitchScores(4, right / 4, 1.0, 1.0, right, 4 - right, 0, 0)
        results.update({0: FittedMap(LinearMap(torch.full((1, 1), float(number))), score, None)})
    assert (float(results.best[0].map.matrix), float(results.last[0].map.matrix)) == (1.0, 3.0)


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
    assert found[0].diverged.endswith("(rate 1e+30); the map of epoch 0 is kept")
    direct = intertwine.stitch(a, b, "2", "linear", "direct", data=data)
    torch.testing.assert_close(found[0].matrix, direct.matrix.float())
    assert found[0].history == ()
    assert len(found[1].history) == 4
    alone = intertwine.stitch(a, b, "2", "linear", data=data, epochs=4, optimizer="sgd", rate=1e-2, drops=False)
    assert found[1].diverged is None
    torch.testing.assert_close(found[1].matrix, alone.matrix, rtol=1e-4, atol=1e-6)


def test_a_loss_that_is_finite_and_far_too_large_is_a_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "EXPLODED", 1e-3)
    found = intertwine.stitch(network(0), network(1), "2", "linear", data=batches(1), epochs=2)
    assert found.diverged is not None
    assert found.diverged.startswith("in epoch 1 its loss grew to 1e+00 (rate 0.001)")


def test_a_last_step_that_leaves_no_numbers_is_a_divergence() -> None:
    """The loss of the epoch is finite still: it was taken before the step."""
    found = intertwine.stitch(
        network(0), network(1), "2", "linear", data=batches(1), epochs=1, optimizer="sgd", start="identity", rate=1e38,
        decay=1e5,
    )  # fmt: skip
    assert found.diverged is not None
    assert found.diverged.startswith("in epoch 1 its loss became NaN or infinite")
    assert torch.equal(found.matrix, torch.eye(8))


class Spoiled:
    """Batches that are NaN from an epoch on; records the epochs."""

    def __init__(self, data: list[tuple[Tensor, Tensor]], last: int) -> None:
        self.data, self.last, self.epochs = data, last, [0]

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        spoiled = self.epochs[-1] > self.last
        return iter([(x * float("nan") if spoiled else x, y) for x, y in self.data])


def test_what_is_kept_is_the_map_of_the_last_epoch_before_the_divergence(tmp_path: Path) -> None:
    a, b, data = network(0), network(1), batches()
    options: dict[str, Any] = {"at": "2", "direct_data": data, "test": data, "rate": 0.01, "drops": False}
    wanted = intertwine.stitches(a, b, data=data, epochs=2, **options)[0]
    spoiled = Spoiled(data, last=1)
    found = intertwine.stitches(a, b, data=spoiled, epochs=5, **options)[0]
    assert spoiled.epochs[1:] == [0, 1, 2, 3, 4]
    assert found.diverged is not None
    assert found.diverged.endswith("the map of epoch 2 is kept")
    assert torch.equal(found.matrix, wanted.matrix)
    assert [row["epoch"] for row in found.history] == [1, 2]

    def stop(doing: str, part: float) -> None:
        if "epoch 5" in doing:
            raise Killed

    with pytest.raises(Killed):
        intertwine.stitches(a, b, data=Spoiled(data, last=1), epochs=5, out=tmp_path, progress=stop, **options)
    again = intertwine.stitches(a, b, data=Spoiled(data, last=1), epochs=5, out=tmp_path, **options)[0]
    assert again.diverged == found.diverged
    assert torch.equal(again.matrix, found.matrix)


# -- each step by hand ------------------------------------------------------------------------------------------------


def similarity(x: Tensor, y: Tensor) -> Tensor:
    """Biased linear CKA by Gram matrices, as printed."""
    k, m = (z @ z.T for z in (x, y))
    k, m = (z - z.mean(0) - z.mean(1, keepdim=True) + z.mean() for z in (k, m))
    return (k * m).sum() / ((k * k).sum() * (m * m).sum()).sqrt()


def nearest_rotation(matrix: Tensor) -> Tensor:
    u, _, v = torch.linalg.svd(matrix)
    return u @ v


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("linear", {}),
        ("linear", {"norm": "adapt"}),
        ("linear", {"targets": "soft", "drops": True, "rate": 5.0}),
        ("linear", {"targets": "both", "momentum": 0.9}),
        ("affine", {"decay": 0.3}),
        ("linear", {"cka": 2.0}),
        ("sparse:0.05", {}),
        ("orthogonal", {"rate": 1.0}),
    ],
)
def test_every_step_is_the_one_written_out(family: str, options: dict[str, Any]) -> None:
    """Three epochs of SGD from the identity, in double precision, with the halves joined by hand."""
    data = [(x.double(), y) for x, y in batches(2)]
    a, b = network(0).double(), network(1).double()
    how: dict[str, Any] = {"rate": 0.5, "drops": False, "momentum": 0.0, "decay": 0.0, "targets": "hard", "cka": 0.0}
    how |= options
    found = intertwine.stitch(a, b, "2", family, data=data, epochs=3, optimizer="sgd", start="identity", **how)
    adapts = how.get("norm") == "adapt"
    front, back, tail = (copy.deepcopy(part) for part in (a[:3], b[:3], b[3:]))
    for part in (front, tail):
        part.train(adapts)
    own = copy.deepcopy(b)
    matrix, bias = torch.eye(8).double().requires_grad_(), torch.zeros(8).double().requires_grad_()
    memory = torch.zeros(8, 8).double()
    losses = []
    for epoch in range(3):
        rate, total = how["rate"] * (0.1**epoch if how["drops"] else 1), 0.0
        for x, y in data:
            moved = torch.einsum("oc,nchw->nohw", matrix, front(x).detach()) + bias[:, None, None]
            logits = tail(moved)
            hard = F.cross_entropy(logits, y)
            soft = -(own(x).detach().softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
            loss = {"hard": hard, "soft": soft, "both": (hard + soft) / 2}[how["targets"]]
            total += loss.item() / len(data)
            if how["cka"]:
                rows = (z.movedim(1, -1).flatten(0, 2) for z in (moved, back(x).detach()))
                loss = loss + how["cka"] * similarity(*rows)
            if family == "sparse:0.05":
                loss = loss + 0.05 * matrix.abs().sum()
            slopes = torch.autograd.grad(loss, (matrix, bias))
            memory = how["momentum"] * memory + slopes[0] + how["decay"] * matrix.detach()
            new = matrix.detach() - rate * memory
            matrix = (nearest_rotation(new) if family == "orthogonal" else new).requires_grad_()
            if family == "affine":
                bias = (bias.detach() - rate * slopes[1]).requires_grad_()
        losses.append(total)
    kept = matrix.detach()
    kept = torch.where(kept.abs() > 1e-3, kept, 0.0) if family == "sparse:0.05" else kept
    torch.testing.assert_close(found.matrix, kept, rtol=1e-4, atol=1e-4)
    assert [row["loss"] for row in found.history] == pytest.approx(losses, rel=1e-4)
    if family == "affine":
        torch.testing.assert_close(found.map.bias, bias.detach(), rtol=1e-4, atol=1e-4)
    assert float((kept - torch.eye(8)).abs().max()) > 0.02


def test_data_for_training_for_direct_fits_and_for_scores_are_kept_apart() -> None:
    a, b = network(0).double(), network(1).double()
    train, still, test = ([(x.double() + seed, y) for x, y in batches(2, seed=seed)] for seed in range(3))
    found = intertwine.stitches(
        a, b, ["2", "5"], "affine", data=train, direct_data=still, test=test, fit="direct", norm="adapt"
    )
    x, y = (torch.cat(side) for side in zip(*test, strict=True))
    with torch.no_grad():
        for one, n in zip(found, (3, 6), strict=True):
            rows, wanted = (
                torch.cat([net[:n](z).movedim(1, -1).flatten(0, 2) for z, _ in still]) for net in (a, b)
            )  # the direct fit is by the networks as they are
            design = torch.cat([rows, torch.ones(len(rows), 1).double()], 1)
            oracle = torch.linalg.lstsq(design, wanted).solution
            torch.testing.assert_close(one.matrix, oracle[:-1].T, rtol=1e-5, atol=1e-6)
            front, tail = copy.deepcopy(a[:n]).train(), copy.deepcopy(b[n:]).train()
            middle = nn.Conv2d(8, 8, 1).double()
            middle.weight.copy_(oracle[:-1].T[:, :, None, None])
            assert middle.bias is not None
            middle.bias.copy_(oracle[-1])
            joined = nn.Sequential(front, middle, tail)
            for layer in joined.modules():
                if isinstance(layer, nn.BatchNorm2d):
                    layer.reset_running_stats()
                    layer.momentum = None
            for z, _ in still:
                joined(z)
            logits = joined.eval()(x)
            torch.testing.assert_close(one.model(x), logits, rtol=1e-4, atol=1e-5)
            assert one.accuracy == pytest.approx(float((logits.argmax(-1) == y).double().mean()))
            soft = -(b(x).softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
            assert one.cross_entropy == pytest.approx(float(soft), rel=1e-4)
        right = [float((net(x).argmax(-1) == y).double().mean()) for net in (a, b)]
    assert right[0] != right[1]
    assert (found[0].front_accuracy, found[0].back_accuracy) == pytest.approx(tuple(right))
    assert found[0].scores.back_accuracy == pytest.approx(right[1])


def test_scoring_after_every_epoch_changes_nothing_at_the_end() -> None:
    """Statistics are averaged anew each time."""
    often, once = (
        intertwine.stitch(network(0), network(1), "2", "linear", data=batches(), epochs=3, norm="adapt", score_every=n)
        for n in (1, 0)
    )
    x = batches()[0][0]
    assert torch.equal(often.matrix, once.matrix)
    torch.testing.assert_close(often.model(x), once.model(x))


def test_families_get_the_completed_share_of_the_training() -> None:
    scales = [
        intertwine.stitch(
            network(0), network(1), "2", Birkhoff(head_start=share), data=batches(), epochs=2, start="identity",
            rate=0.01,
        ).matrix.sum(1)
        for share in (0.5, 1.0)
    ]  # fmt: skip
    assert not torch.equal(scales[0], torch.ones(8))
    assert torch.equal(scales[1], torch.ones(8))


def test_maps_with_and_without_bias_pass_in_one_product() -> None:
    rows = torch.randn(3, 5, 4)
    first, second, bias = torch.randn(2, 4), torch.randn(2, 4), torch.randn(2)
    found = apply_maps(rows, [LinearMap(first), LinearMap(second, bias)])
    assert found.shape == (6, 5, 2)
    torch.testing.assert_close(found[:3], rows @ first.T)
    torch.testing.assert_close(found[3:], rows @ second.T + bias)


def test_half_precision_is_near_to_single_precision_and_not_the_same() -> None:
    half, single = (
        intertwine.stitch(network(0), network(1), "2", "linear", data=batches(), epochs=2, precision=precision)
        for precision in ("bfloat16", "float32")
    )
    losses = [[row["loss"] for row in one.history] for one in (half, single)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert losses[0] != losses[1]


# -- taking up again --------------------------------------------------------------------------------------------------


class Killed(Exception):
    """Stands for the end of a process."""


def test_a_killed_run_resumes(tmp_path: Path) -> None:
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
    activities: list[str] = []
    with pytest.raises(InputError, match="holds stitches of another plan, which differs in jobs"):
        intertwine.stitches(a, b, out=tmp_path, **options | {"families": ["linear", Birkhoff(alpha=3.0)]})
    again = intertwine.stitches(a, b, out=tmp_path, progress=lambda doing, part: activities.append(doing), **options)
    assert not any("epoch 1 " in doing or "epoch 2 " in doing for doing in activities)
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


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"front": 2}, "front"), ({"back": 2}, "back"), ({"at": "5"}, "cuts"), ({"seeds": (3,)}, "jobs"),
        ({"families": "affine"}, "jobs"), ({"rate": 0.5}, "settings"),
    ],
)  # fmt: skip
def test_a_plan_is_the_networks_the_places_the_jobs_and_the_settings(
    tmp_path: Path, changes: dict[str, Any], what: str
) -> None:
    def run(front: int = 0, back: int = 1, **options: Any) -> None:
        given: dict[str, Any] = {"at": "2", "families": "linear", "seeds": (0,)} | options
        intertwine.stitches(network(front), network(back), data=batches(1), epochs=1, out=tmp_path, **given)

    run()
    run()  # the same again goes on from what is there
    with pytest.raises(InputError, match=rf"which differs in {what}\. Give another folder"):
        run(**changes)


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
    own = intertwine.stitches(
        network(0), network(0), ["2", "5"], data=batches(1), epochs=1, start="identity", trace_every=1
    )
    assert [one.history[0]["r2"] for one in own] == pytest.approx([1.0, 1.0])  # each at its own cut


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


def test_a_recorded_step_takes_batches_of_its_own_kind_alone() -> None:
    """A recording on a GPU is made for one shape; whether a batch fits is asked before it is replayed."""
    step = CudaGraphStep(lambda call, targets: None, torch.device("cpu"))
    step.buffers = [torch.zeros(4, 3), 2, torch.zeros(4)]
    assert step._fits([torch.ones(4, 3), 2, torch.ones(4)])
    others = (
        [torch.ones(4, 3), 2],
        [torch.ones(4, 3), 2, torch.ones(4), 1],
        [torch.ones(3, 3), 2, torch.ones(3)],
        [torch.ones(4, 3), 3, torch.ones(4)],
        [torch.ones(4, 3), 2, torch.ones(4).long()],
    )
    assert not any(step._fits(other) for other in others)
