"""Training many networks at once: against each network alone in a plain loop, taken up again, and scored."""

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import beta
from torch import Tensor, nn

from intertwine.errors import InputError
from intertwine.zoo.datasets import data as find_data
from intertwine.zoo.datasets.dataset import Dataset
from intertwine.zoo.networks.registry import build
from intertwine.zoo.optimizers import make_optimizer
from intertwine.zoo.precision import find_device, precision
from intertwine.zoo.randomness import Purpose, drawn, keyed, orders, uniform
from intertwine.zoo.recipe import Recipe
from intertwine.zoo.trainer import Trainer, score

CPU = torch.device("cpu")
EXACT = precision("float64", CPU)
SEEDS = [2, 5, 9]
TRAIN, TEST = 70, 40  # batches of 16: four full ones and one of six


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return find_data("digits").normalised([4.5], [6.0]).subset(TRAIN, TEST)


def network(seed: int, kind: str = "conv") -> nn.Module:
    torch.manual_seed(seed)
    if kind == "mlp":
        return build("mlp", widths=(64, 7, 10)).double()
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 2), nn.BatchNorm2d(6),
        nn.LeakyReLU(0.1), nn.Flatten(), nn.Dropout(0.2) if kind == "dropout" else nn.Identity(), nn.Linear(24, 10),
    ).double()  # fmt: skip


def how(**changes: Any) -> Recipe:
    entries: dict[str, Any] = {"name": "own", "optimizer": "sgd", "rate": 0.05, "epochs": 3, "batch": 16, **changes}
    return Recipe(**entries)


RECIPES = {
    "sgd": how(momentum=0.9, nesterov=True, weight_decay=1e-2, milestones=(1, 2), shift=2, flip=True),
    "adam": how(
        optimizer="adam", rate=2e-3, weight_decay=1e-2, decay="weights", milestones=(2,), gamma=0.5, crop=1, flip=True
    ),
    "adamw": how(
        optimizer="adamw", rate=3e-3, weight_decay=6e-2, decay="weights", schedule="cosine", warmup=0.7,
        label_smoothing=0.1, mixup=0.8, cutmix=1.0,
    ),
    "adamw, all": how(optimizer="adamw", rate=3e-3, weight_decay=0.2, schedule="one-cycle", warmup=1.0, cutmix=0.5),
    "plain": how(),
}  # fmt: skip


# -- one network in a plain loop ---------------------------------------------------------------------------------------


@cache
def numbers(seed: int, epoch: int, purpose: Purpose) -> list[float]:
    return uniform(drawn(torch.tensor([seed]), epoch, purpose, TRAIN))[0].tolist()


def number(seed: int, epoch: int, purpose: Purpose, place: int) -> float:
    return numbers(seed, epoch, purpose)[place]


def image(recipe: Recipe, data: Dataset, seed: int, epoch: int, place: int, which: int) -> np.ndarray:
    """One training image as the network sees it: mirrored, moved with numpy, normalised."""
    pixels = data.images[which, :, :, 0].numpy().astype(float)
    if recipe.flip and number(seed, epoch, Purpose.FLIP, place) < 0.5:
        pixels = np.fliplr(pixels)
    reach = recipe.shift or recipe.crop
    if reach:
        down, right = (
            int(number(seed, epoch, p, place) * (2 * reach + 1)) - reach
            for p in (Purpose.SHIFT_DOWN, Purpose.SHIFT_RIGHT)
        )
        wide = np.pad(pixels, reach, constant_values=data.mean[0] if recipe.shift else 0.0)
        pixels = wide[reach - down : reach - down + 8, reach - right : reach - right + 8]
    return (pixels - data.mean[0]) / data.std[0]


def mixture(recipe: Recipe, seed: int, epoch: int, step: int) -> tuple[np.ndarray, float]:
    """How much of its partner each pixel of a batch shows, and how much of the partner's label counts."""
    if not (recipe.mixup or recipe.cutmix):
        return np.zeros((8, 8)), 0.0
    cut = recipe.cutmix > 0 and (not recipe.mixup or number(seed, epoch, Purpose.MIX_KIND, step) < 0.5)
    shape = recipe.cutmix if cut else recipe.mixup
    share = float(beta.ppf(number(seed, epoch, Purpose.MIX_SHARE, step), shape, shape))
    if not cut:
        return np.full((8, 8), share), share
    box = np.zeros((8, 8))
    middle = [int(number(seed, epoch, p, step) * 8) for p in (Purpose.BOX_DOWN, Purpose.BOX_RIGHT)]
    low, high = ([max(0, round(m + side * share**0.5 * 4)) for m in middle] for side in (-1, 1))
    box[low[0] : high[0], low[1] : high[1]] = 1
    return box, float(box.mean())


def torch_optimizer(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    weights = [p for p in model.parameters() if p.dim() > 1 or recipe.decay == "all"]
    others = [p for p in model.parameters() if p.dim() <= 1 and recipe.decay == "weights"]
    groups = [{"params": weights, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    match recipe.optimizer:
        case "sgd":
            return torch.optim.SGD(groups, lr=1.0, momentum=recipe.momentum, nesterov=recipe.nesterov)
        case "adam":
            return torch.optim.Adam(groups, lr=1.0)
        case _:
            return torch.optim.AdamW(groups, lr=1.0)


def plain_training(model: nn.Module, seed: int, data: Dataset, recipe: Recipe) -> list[float]:
    """Train one network with nothing of the package but its random numbers; gives the mean loss of every epoch."""
    optimizer, losses = torch_optimizer(recipe, model.train()), []
    steps = -(-TRAIN // recipe.batch)
    for epoch in range(recipe.epochs):
        order, total = orders(torch.tensor([seed]), epoch, TRAIN)[0].tolist(), 0.0
        for step in range(steps):
            places = range(step * recipe.batch, min((step + 1) * recipe.batch, TRAIN))
            images = np.stack([image(recipe, data, seed, epoch, place, order[place]) for place in places])
            labels = data.labels[[order[place] for place in places]]
            mask, share = mixture(recipe, seed, epoch, step)
            inputs = torch.tensor((1 - mask) * images + mask * images[::-1])[:, None]
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate_at(epoch * steps + step, steps)
            logits = model(inputs)
            first, second = (
                F.cross_entropy(logits, wanted, label_smoothing=recipe.label_smoothing)
                for wanted in (labels, labels.flip(0))
            )
            loss = (1 - share) * first + share * second
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(places)
        losses.append(total / TRAIN)
    return losses


def trained(models: list[nn.Module], seeds: list[int], data: Dataset, recipe: Recipe) -> tuple[Trainer, Tensor]:
    """All epochs; the trainer, and the losses (epochs, networks)."""
    trainer = Trainer(models, seeds, data, recipe, EXACT)
    return trainer, torch.stack([trainer.run_epoch() for _ in range(recipe.epochs)])


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((t.double() - expected[name].double()).abs().max()) for name, t in found.items())


@pytest.mark.parametrize("case", RECIPES)
@pytest.mark.parametrize("kind", ["conv", "mlp"])
def test_networks_trained_together_are_those_trained_alone(digits: Dataset, case: str, kind: str) -> None:
    recipe, models = RECIPES[case], [network(seed, kind) for seed in SEEDS]
    trainer, losses = trained(models, SEEDS, digits, recipe)
    moved = 0.0
    for i, (seed, model) in enumerate(zip(SEEDS, models, strict=True)):
        start = copy.deepcopy(model.state_dict())
        alone = plain_training(model, seed, digits, recipe)
        assert distance(trainer.stack.state(i), dict(model.state_dict())) < 1e-9
        assert losses[:, i].tolist() == pytest.approx(alone, rel=1e-9)
        moved = max(moved, distance(start, dict(model.state_dict())))
    assert moved > 0.01


@pytest.mark.parametrize("kind", ["conv", "dropout"])
@pytest.mark.parametrize("case", ["sgd", "adamw"])
def test_neighbours_change_nothing(digits: Dataset, case: str, kind: str) -> None:
    together, losses = trained([network(seed, kind) for seed in SEEDS], SEEDS, digits, RECIPES[case])
    alone, own = trained([network(SEEDS[1], kind)], SEEDS[1:2], digits, RECIPES[case])
    assert distance(together.stack.state(1), alone.stack.state(0)) < 1e-9
    assert torch.allclose(losses[:, 1:2], own, rtol=1e-9)


def test_seeds_decide_the_training(digits: Dataset) -> None:
    """One start: the same seed ends in the same bits, another seed does not."""
    trainer, _ = trained([network(0) for _ in range(3)], [1, 1, 2], digits, RECIPES["sgd"])
    assert distance(trainer.stack.state(0), trainer.stack.state(1)) < 1e-12
    assert distance(trainer.stack.state(0), trainer.stack.state(2)) > 1e-3
    again, _ = trained([network(0) for _ in range(3)], [1, 1, 2], digits, RECIPES["sgd"])
    assert all(torch.equal(t, trainer.stack.tensors[name]) for name, t in again.stack.tensors.items())


def test_dropout_is_drawn_anew_in_every_step(digits: Dataset) -> None:
    trainer = Trainer([network(0, "dropout")], [4], digits, how(), EXACT)
    seen: list[Tensor] = []
    run = trainer.stack.__class__.__call__

    class Watched(trainer.stack.__class__):
        def __call__(self, *inputs: Tensor) -> Any:
            assert self.keys is not None
            seen.append(self.keys.clone())
            return run(self, *inputs)

    trainer.stack.__class__ = Watched
    for _ in range(2):
        trainer.run_epoch()
    expected = [keyed(torch.tensor([4]), int(Purpose.DROPOUT), step) for step in range(2 * 5)]
    assert torch.equal(torch.stack(seen), torch.stack(expected))
    assert len({int(keys) for keys in seen}) == 10


def test_a_batch_larger_than_the_data(digits: Dataset) -> None:
    recipe = how(batch=100, epochs=2, mixup=0.5)
    trainer, _ = trained([network(3)], [3], digits, recipe)
    model = network(3)
    plain_training(model, 3, digits, recipe)
    assert trainer.steps == 1
    assert distance(trainer.stack.state(0), dict(model.state_dict())) < 1e-9


def test_the_training_learns(digits: Dataset) -> None:
    recipe = how(epochs=12, momentum=0.9, schedule="one-cycle", warmup=1.0)
    trainer, losses = trained([network(seed) for seed in SEEDS], SEEDS, digits, recipe)
    assert (losses[-1] < 0.3 * losses[0]).all()
    assert (trainer.score().accuracy > 0.5).all()


def test_an_epoch_tells_how_far_it_is(digits: Dataset) -> None:
    heard: list[float] = []
    Trainer([network(0)], [0], digits, how(), EXACT).run_epoch(heard.append)
    assert heard == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


# -- taken up again ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", RECIPES)
def test_a_run_that_is_taken_up_again_ends_with_the_same_bits(digits: Dataset, case: str) -> None:
    recipe = replace(RECIPES[case], epochs=5)
    models = [network(seed, "dropout") for seed in SEEDS]
    whole = Trainer(models, SEEDS, digits, recipe, EXACT)
    for _ in range(2):
        whole.run_epoch()
    saved = {name: t.detach().clone() for name, t in whole.state().items()}
    rest = [whole.run_epoch() for _ in range(3)]

    fresh = Trainer([network(seed + 100, "dropout") for seed in SEEDS], SEEDS, digits, recipe, EXACT)
    fresh.restore(saved, 2)
    assert fresh.epoch == 2
    again = [fresh.run_epoch() for _ in range(3)]
    assert torch.equal(torch.stack(rest), torch.stack(again))
    ends = [trainer.state() for trainer in (whole, fresh)]
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(t, ends[1][name]) for name, t in ends[0].items())


def test_a_state_is_all_that_training_depends_on(digits: Dataset) -> None:
    trainer = Trainer([network(0), network(1)], [0, 1], digits, RECIPES["adam"], EXACT)
    assert {name.split(":")[0] for name in trainer.state()} == {"network"}
    trainer.run_epoch()
    state = trainer.state()
    kinds = {name.rpartition(":")[2] for name in state if name.startswith("optimizer:")}
    assert kinds == {"step", "exp_avg", "exp_avg_sq"}
    assert {name for name in state if name.startswith("network:")} == {f"network:{n}" for n in trainer.stack.tensors}
    assert len([name for name in state if name.endswith(":exp_avg")]) == len(trainer.stack.parameters)


def test_what_was_restored_is_a_copy(digits: Dataset) -> None:
    first = Trainer([network(0)], [0], digits, RECIPES["sgd"], EXACT)
    first.run_epoch()
    state = {name: t.detach().clone() for name, t in first.state().items()}
    kept = copy.deepcopy(state)
    second = Trainer([network(0)], [0], digits, RECIPES["sgd"], EXACT)
    second.restore(state, 1)
    second.run_epoch()
    assert all(torch.equal(t, kept[name]) for name, t in state.items())


# -- optimizers --------------------------------------------------------------------------------------------------------


def test_decay_on_weights_spares_biases_and_normalisation() -> None:
    parameters = {
        name: torch.randn(2, *p.shape, requires_grad=True) for name, p in network(0).named_parameters()
    }  # stacked
    for decay, spared in (("weights", 6 + 1), ("all", 0)):
        optimizer = make_optimizer(how(weight_decay=0.1, decay=decay), parameters, 0.1)
        counts = {group["weight_decay"]: len(group["params"]) for group in optimizer.param_groups}
        assert counts == ({0.1: len(parameters) - spared, 0.0: spared} if spared else {0.1: len(parameters)})


# -- scores ------------------------------------------------------------------------------------------------------------


def test_scores_against_a_plain_loop(digits: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _ = trained([network(seed) for seed in SEEDS], SEEDS, digits, RECIPES["sgd"])
    before = {name: t.detach().clone() for name, t in trainer.stack.tensors.items()}
    found = trainer.score()
    for i in range(len(SEEDS)):
        model, right, loss = trainer.stack.module(i), 0, 0.0
        for pixels, label in zip(digits.test_images.numpy(), digits.test_labels, strict=True):
            inputs = torch.tensor((pixels.astype(float) - 4.5) / 6.0).permute(2, 0, 1)[None]
            logits = model(inputs)[0]
            right += int(logits.argmax() == label)
            loss -= float(logits.log_softmax(0)[label].detach())
        assert float(found.accuracy[i]) == pytest.approx(right / TEST)
        assert float(found.loss[i]) == pytest.approx(loss / TEST, rel=1e-9)
    assert len(set(found.loss.tolist())) == 3
    assert all(torch.equal(t, before[name]) for name, t in trainer.stack.tensors.items())  # statistics stay
    assert trainer.stack.training
    monkeypatch.setattr("intertwine.zoo.trainer.TEST_IMAGES", 3 * 7)  # batches of seven, the last one smaller
    again = score(trainer.stack, digits, EXACT)
    assert torch.equal(again.accuracy, found.accuracy)
    assert torch.allclose(again.loss, found.loss, rtol=1e-12)


# -- precision ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_training_in_less_precision(digits: Dataset, name: str) -> None:
    """Weights stay in single precision, and the first epoch's loss is that of the exact training, roughly."""
    how_precise = precision(name, CPU)
    assert not how_precise.fast
    models = [network(seed) for seed in SEEDS]
    exact = Trainer(models, SEEDS, digits, RECIPES["sgd"], EXACT).run_epoch()
    trainer = Trainer(models, SEEDS, digits, RECIPES["sgd"], how_precise)
    loss = trainer.run_epoch()
    assert {t.dtype for t in trainer.stack.parameters.values()} == {torch.float32}
    assert loss.dtype == torch.float32
    gap = float((loss - exact).abs().max())
    assert gap < (1e-5 if name == "float32" else 0.1)
    assert (gap > 1e-5) == (name == "bfloat16")


def test_precision_by_name() -> None:
    assert precision(None, CPU).name == "float32"
    assert precision(None, torch.device("cuda")).name == "bfloat16"
    assert precision("float64", CPU).dtype == precision("float64", CPU).features == torch.float64
    assert precision("bfloat16", CPU).features == torch.bfloat16
    with pytest.raises(
        InputError, match=r"precision 'half' was asked for; it is one of float64, float32, tf32, bfloat"
    ):
        precision("half", CPU)
    with pytest.raises(InputError, match=r"tf32 was asked for on cpu, but only GPUs have it. Use float32 there"):
        precision("tf32", CPU)


def test_devices_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device(None) == find_device("cpu") == CPU
    with pytest.raises(InputError, match=r"device 'gpu' was asked for; torch knows cpu, cuda"):
        find_device("gpu")
    with pytest.raises(InputError, match=r"'cuda' was asked for, but torch finds no GPU here. Use the device cpu"):
        find_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert find_device(None) == torch.device("cuda")
