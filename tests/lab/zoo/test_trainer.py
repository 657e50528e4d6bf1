"""Recipes by name, as data and changed; the trainer of a stack against a plain loop; resuming, scores."""

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import beta
from torch import Tensor, nn
from torch.optim import lr_scheduler as torch_schedules

from intertwine.errors import InputError
from intertwine.lab.zoo.datasets.dataset import Dataset
from intertwine.lab.zoo.datasets.loading import data as find_data
from intertwine.lab.zoo.networks.registry import build
from intertwine.lab.zoo.precision import find_device, precision
from intertwine.lab.zoo.randomness import Purpose, drawn, keyed, orders, uniform
from intertwine.lab.zoo.recipe import RECIPES, Recipe, recipe
from intertwine.lab.zoo.trainer import StackTrainer, make_optimizer, score

# -- papers ------------------------------------------------------------------------------------------------------------

PLAIN = {"shift": 0, "crop": 0, "flip": False, "mixup": 0.0, "cutmix": 0.0}
STEPS = {"schedule": "steps", "label_smoothing": 0.0}
#: As the papers and their published code have them, written out once more.
PAPERS: dict[str, dict[str, Any]] = {
    # 000-G50: StepLR every 12 of 50 epochs, which makes four drops; weight decay on weights alone.
    "godfrey": {
        **PLAIN, **STEPS, "optimizer": "adam", "rate": 0.001, "epochs": 50, "batch": 32, "milestones": (12, 24, 36, 48),
        "gamma": 0.5, "weight_decay": 1e-4, "decay": "weights", "shift": 2, "flip": True, "normalise": "data",
    },
    # 001-C32
    "csiszarik": {
        **PLAIN, **STEPS, "optimizer": "sgd", "rate": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4,
        "decay": "all", "epochs": 300, "batch": 128, "milestones": (100, 200), "gamma": 0.1, "crop": 4, "flip": True,
    },
    # 003-F15: the published code crops and does not normalise; the paper names the flip alone.
    "chen": {
        **PLAIN, **STEPS, "optimizer": "sgd", "rate": 0.1, "momentum": 0.9, "nesterov": False, "weight_decay": 1e-4,
        "decay": "all", "epochs": 150, "batch": 128, "milestones": (80, 120), "gamma": 0.1, "crop": 4, "flip": True,
        "normalise": "unit",
    },
    "chen-printed": {
        **PLAIN, **STEPS, "optimizer": "sgd", "rate": 0.1, "momentum": 0.9, "weight_decay": 1e-4, "epochs": 150,
        "batch": 128, "milestones": (80, 120), "gamma": 0.1, "flip": True, "normalise": "unit",
    },
    # 004-L03: networks split at epoch 5; no augmentation.
    "zhou": {
        **PLAIN, **STEPS, "optimizer": "sgd", "rate": 0.1, "momentum": 0.9, "nesterov": False, "weight_decay": 1e-4,
        "epochs": 160, "batch": 128, "milestones": (80, 120), "gamma": 0.1, "spawn": 5,
    },
    "zhou-independent": {
        **PLAIN, **STEPS, "optimizer": "sgd", "rate": 0.01, "momentum": 0.9, "weight_decay": 5e-4, "epochs": 200,
        "batch": 128, "spawn": 0,
    },
    "fast": {
        **PLAIN, "optimizer": "sgd", "nesterov": True, "momentum": 0.9, "schedule": "one-cycle", "epochs": 10,
        "batch": 128, "shift": 2, "flip": True,
    },
    "plain": {**PLAIN, "optimizer": "sgd", "schedule": "one-cycle", "epochs": 10, "batch": 128},
}  # fmt: skip


@pytest.mark.parametrize("name", PAPERS)
def test_recipes_of_papers(name: str) -> None:
    found = recipe(name)
    assert {entry: getattr(found, entry) for entry in PAPERS[name]} == PAPERS[name]
    assert found.name == name
    assert found.source


def test_000_G50_four_drops() -> None:
    found = recipe("godfrey")
    assert len({found.rate_at(epoch * 7, 7) for epoch in range(50)}) == 5
    assert found.rate_at(49 * 7, 7) == pytest.approx(1e-3 / 16)


def test_001_C32_drops_after_each_third() -> None:
    found = recipe("csiszarik")
    assert [found.rate_at(epoch, 1) for epoch in (99, 100, 199, 200)] == pytest.approx([0.1, 0.01, 0.01, 0.001])


# -- learning rates ----------------------------------------------------------------------------------------------------


def rates(how: Recipe, steps_per_epoch: int) -> list[float]:
    return [how.rate_at(step, steps_per_epoch) for step in range(how.epochs * steps_per_epoch)]


def torch_rates(rate: float, steps: int, make: Callable[[torch.optim.Optimizer], Any], every: int = 1) -> list[float]:
    """What one of torch's schedulers gives for each step, when it is asked after every so many of them."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=rate)
    schedule, found = make(optimizer), []
    for step in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if (step + 1) % every == 0:
            schedule.step()
    return found


def test_000_G50_steps_are_those_of_StepLR() -> None:
    expected = torch_rates(1e-3, 50 * 3, lambda o: torch_schedules.StepLR(o, 12, 0.5), every=3)
    assert rates(recipe("godfrey"), 3) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["csiszarik", "chen", "zhou"])
def test_steps_are_those_of_MultiStepLR(name: str) -> None:
    how = recipe(name)
    expected = torch_rates(
        how.rate, how.epochs * 2, lambda o: torch_schedules.MultiStepLR(o, list(how.milestones), how.gamma), every=2
    )
    assert rates(how, 2) == pytest.approx(expected)


def test_cosine_is_that_of_torch_step_by_step() -> None:
    how = Recipe("own", "sgd", 0.3, epochs=6, batch=1, schedule="cosine")
    expected = torch_rates(0.3, 30, lambda o: torch_schedules.CosineAnnealingLR(o, 30))
    assert rates(how, 5) == pytest.approx(expected)


def test_a_one_cycle_falls_in_a_straight_line() -> None:
    how = Recipe("own", "sgd", 0.3, epochs=6, batch=1, schedule="one-cycle")
    expected = torch_rates(0.3, 30, lambda o: torch_schedules.LinearLR(o, 1.0, 0.0, total_iters=30))
    assert rates(how, 5) == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["cosine", "one-cycle"])
def test_the_rate_rises_and_then_falls_to_zero(schedule: str) -> None:
    """Warm-up is a straight line from the first step to the peak, then the fall takes the rest of the training."""
    found = rates(Recipe("own", "sgd", 0.4, epochs=10, batch=1, schedule=schedule, warmup=2.0), 5)
    assert found[:10] == pytest.approx([0.4 * (step + 1) / 10 for step in range(10)])
    assert found[10] == pytest.approx(0.4)
    without = rates(Recipe("own", "sgd", 0.4, epochs=8, batch=1, schedule=schedule), 5)
    assert found[10:] == pytest.approx(without)
    assert 0 < found[-1] < 0.05 * 0.4


def test_warm_up_may_end_within_an_epoch() -> None:
    found = rates(Recipe("own", "sgd", 1.0, epochs=4, batch=1, schedule="one-cycle", warmup=0.5), 3)
    assert found[:2] == [0.5, 1.0]
    assert max(found) == 1.0
    assert found[2:] == sorted(found[2:], reverse=True)
    assert found[-1] > 0


# -- changes -----------------------------------------------------------------------------------------------------------


def test_shares_of_the_training_are_kept() -> None:
    short = recipe("zhou", epochs=32)
    assert (short.milestones, short.spawn, short.epochs) == ((16, 24), 1, 32)
    assert recipe("csiszarik", epochs=30).milestones == (10, 20)
    assert recipe("fast", epochs=5).warmup == 1.0
    assert recipe("godfrey-cct", epochs=30).warmup == 1.0
    assert recipe("zhou-independent", epochs=20).spawn == 0
    double = recipe("chen", epochs=300)
    assert double.milestones == (160, 240)


def test_a_short_training_keeps_its_schedule() -> None:
    """The rates of a tenth of the training are every tenth of its rates."""
    assert rates(recipe("csiszarik", epochs=30), 1) == pytest.approx(rates(recipe("csiszarik"), 1)[::10])


def test_what_is_given_is_not_scaled() -> None:
    assert recipe("csiszarik", epochs=30, milestones=[5]).milestones == (5,)
    assert recipe("fast", epochs=5, warmup=0.5).warmup == 0.5
    assert recipe("zhou", epochs=16, spawn=7).spawn == 7
    assert recipe("godfrey", batch=64) == replace(RECIPES["godfrey"], batch=64)


def test_a_recipe_is_taken_as_it_is() -> None:
    own = Recipe("own", "adam", 0.01, epochs=4, batch=8, milestones=(2,))
    assert recipe(own) is not None
    assert recipe(own) == own
    assert recipe(own, epochs=None, rate=None) == own  # options nobody gave
    assert recipe(own, epochs=8).milestones == (4,)


def test_changes_leave_the_named_recipe_alone() -> None:
    recipe("godfrey", epochs=1, flip=False)
    assert recipe("godfrey") == RECIPES["godfrey"]
    assert RECIPES["godfrey"].epochs == 50


# -- plain data --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_comes_back_from_plain_data(name: str) -> None:
    written = json.loads(json.dumps(RECIPES[name].to_dict()))
    assert Recipe.from_dict(written) == RECIPES[name]
    assert RECIPES[name].name == name


def test_entries_that_are_missing_have_their_usual_values() -> None:
    few = {"name": "own", "optimizer": "sgd", "rate": 0.1, "epochs": 2, "batch": 4}
    assert Recipe.from_dict(few) == Recipe("own", "sgd", 0.1, epochs=2, batch=4)


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": "lion"}, r"Unknown optimizer 'lion'\. .*one of: sgd, adam, adamw\."),
        ({"schedule": "sine"}, r"Unknown schedule 'sine'\. .*one of: steps, cosine, one-cycle\."),
        ({"decay": "bias"}, r"Unknown decay 'bias'\. .*one of: all, weights\."),
        ({"normalise": "none"}, r"Unknown normalise 'none'\. .*one of: data, unit\."),
        ({"epochs": 0}, r"epochs must be an integer of at least 1, but is 0"),
        ({"rate": -1.0}, r"rate must be a number of at least 0, but is -1\.0"),
        ({"rate": float("nan")}, r"rate must be a number of at least 0, but is nan"),
        ({"batch": 0}, r"batch must be an integer of at least 1, but is 0"),
        ({"spawn": 50}, r"spawn must be below the number of epochs, 50, but is 50"),
        ({"spawn": -1}, r"spawn must be an integer of at least 0, but is -1"),
        ({"crop": 1}, r"shift and crop are both set, but each of them translates the image\. Choose one"),
        (
            {"epohcs": 3, "bath": 1},
            r"Unknown entry of a recipe 'epohcs'\. Did you mean 'epochs'.* optimizer, rate, epochs",
        ),
    ],
)
def test_errors_say_what_to_do(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        recipe("godfrey", **changes)


def test_entries_of_a_wrong_kind() -> None:
    """In a process of its own: here, every call is checked against its annotations before the recipe can."""
    code = """
from intertwine.errors import InputError
from intertwine.lab.zoo.recipe import recipe
for changes in ({"epochs": "3"}, {"milestones": 5}, {"milestones": ["5"]}, {"flip": "no"}):
    try:
        recipe("godfrey", **changes)
    except InputError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "epochs must be an integer of at least 1, but is '3'.",
        "milestones must be a list of epochs such as [80, 120], but is 5.",
        "milestones must be a list of epochs such as [80, 120], but is ('5',).",
        "flip must be True or False, but is 'no'.",
    ]


def test_a_recipe_nobody_knows() -> None:
    with pytest.raises(
        InputError, match=r"Unknown recipe 'godfry'\. Did you mean 'godfrey.*\? Choose one of: godfrey, .*fast"
    ):
        recipe("godfry")
    with pytest.raises(InputError, match=r"Unknown recipe 'xyz'\. Choose one of: godfrey, "):
        recipe("xyz")


def test_plain_data_with_an_entry_nobody_knows() -> None:
    with pytest.raises(InputError, match=r"Unknown entry of a recipe 'colour'\. .*Choose one of: name, optimizer"):
        Recipe.from_dict({**RECIPES["fast"].to_dict(), "speed": 1, "colour": 2})


# -- training many networks at once -----------------------------------------------------------------------------------

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


TRAININGS = {
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


def trained(models: list[nn.Module], seeds: list[int], data: Dataset, recipe: Recipe) -> tuple[StackTrainer, Tensor]:
    """All epochs; the trainer, and the losses (epochs, networks)."""
    trainer = StackTrainer(models, seeds, data, recipe, EXACT)
    return trainer, torch.stack([trainer.run_epoch() for _ in range(recipe.epochs)])


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((t.double() - expected[name].double()).abs().max()) for name, t in found.items())


@pytest.mark.parametrize("case", TRAININGS)
@pytest.mark.parametrize("kind", ["conv", "mlp"])
def test_networks_trained_together_are_those_trained_alone(digits: Dataset, case: str, kind: str) -> None:
    recipe, models = TRAININGS[case], [network(seed, kind) for seed in SEEDS]
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
    together, losses = trained([network(seed, kind) for seed in SEEDS], SEEDS, digits, TRAININGS[case])
    alone, own = trained([network(SEEDS[1], kind)], SEEDS[1:2], digits, TRAININGS[case])
    assert distance(together.stack.state(1), alone.stack.state(0)) < 1e-9
    assert torch.allclose(losses[:, 1:2], own, rtol=1e-9)


def test_seeds_decide_the_training(digits: Dataset) -> None:
    """One start: the same seed ends in the same bits, another seed does not."""
    trainer, _ = trained([network(0) for _ in range(3)], [1, 1, 2], digits, TRAININGS["sgd"])
    assert distance(trainer.stack.state(0), trainer.stack.state(1)) < 1e-12
    assert distance(trainer.stack.state(0), trainer.stack.state(2)) > 1e-3
    again, _ = trained([network(0) for _ in range(3)], [1, 1, 2], digits, TRAININGS["sgd"])
    assert all(torch.equal(t, trainer.stack.tensors[name]) for name, t in again.stack.tensors.items())


def test_dropout_is_drawn_anew_in_every_step(digits: Dataset) -> None:
    trainer = StackTrainer([network(0, "dropout")], [4], digits, how(), EXACT)
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
    StackTrainer([network(0)], [0], digits, how(), EXACT).run_epoch(heard.append)
    assert heard == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


# -- taken up again ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", TRAININGS)
def test_a_run_that_is_taken_up_again_ends_with_the_same_bits(digits: Dataset, case: str) -> None:
    recipe = replace(TRAININGS[case], epochs=5)
    models = [network(seed, "dropout") for seed in SEEDS]
    whole = StackTrainer(models, SEEDS, digits, recipe, EXACT)
    for _ in range(2):
        whole.run_epoch()
    saved = {name: t.detach().clone() for name, t in whole.state().items()}
    rest = [whole.run_epoch() for _ in range(3)]

    fresh = StackTrainer([network(seed + 100, "dropout") for seed in SEEDS], SEEDS, digits, recipe, EXACT)
    fresh.restore(saved, 2)
    assert fresh.epoch == 2
    again = [fresh.run_epoch() for _ in range(3)]
    assert torch.equal(torch.stack(rest), torch.stack(again))
    ends = [trainer.state() for trainer in (whole, fresh)]
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(t, ends[1][name]) for name, t in ends[0].items())


def test_a_state_is_all_that_training_depends_on(digits: Dataset) -> None:
    trainer = StackTrainer([network(0), network(1)], [0, 1], digits, TRAININGS["adam"], EXACT)
    assert {name.split(":")[0] for name in trainer.state()} == {"network"}
    trainer.run_epoch()
    state = trainer.state()
    kinds = {name.rpartition(":")[2] for name in state if name.startswith("optimizer:")}
    assert kinds == {"step", "exp_avg", "exp_avg_sq"}
    assert {name for name in state if name.startswith("network:")} == {f"network:{n}" for n in trainer.stack.tensors}
    assert len([name for name in state if name.endswith(":exp_avg")]) == len(trainer.stack.parameters)


def test_what_was_restored_is_a_copy(digits: Dataset) -> None:
    first = StackTrainer([network(0)], [0], digits, TRAININGS["sgd"], EXACT)
    first.run_epoch()
    state = {name: t.detach().clone() for name, t in first.state().items()}
    kept = copy.deepcopy(state)
    second = StackTrainer([network(0)], [0], digits, TRAININGS["sgd"], EXACT)
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
    trainer, _ = trained([network(seed) for seed in SEEDS], SEEDS, digits, TRAININGS["sgd"])
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
    monkeypatch.setattr("intertwine.lab.zoo.trainer.TEST_IMAGES", 3 * 7)  # batches of seven, the last one smaller
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
    exact = StackTrainer(models, SEEDS, digits, TRAININGS["sgd"], EXACT).run_epoch()
    trainer = StackTrainer(models, SEEDS, digits, TRAININGS["sgd"], how_precise)
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
    with pytest.raises(InputError, match=r"Unknown precision 'half'\. .*one of: float64, float32, tf32, bfloat"):
        precision("half", CPU)
    with pytest.raises(InputError, match=r"tf32 needs a GPU, but the device is cpu. Use float32 there"):
        precision("tf32", CPU)


def test_devices_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device(None) == find_device("cpu") == CPU
    with pytest.raises(InputError, match=r"Unknown device 'gpu'. Use a device of torch such as cpu, cuda"):
        find_device("gpu")
    with pytest.raises(InputError, match=r"'cuda' needs a GPU, but torch finds none. Use the device cpu"):
        find_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert find_device(None) == torch.device("cuda")
