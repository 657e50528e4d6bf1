"""Recipes: the papers' values by name, learning rates against torch's schedulers, changes, plain data, errors."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as torch_schedules

from intertwine.errors import InputError
from intertwine.zoo.recipe import RECIPES, Recipe, recipe

# -- papers ------------------------------------------------------------------------------------------------------------

STILL = {"shift": 0, "crop": 0, "flip": False, "mixup": 0.0, "cutmix": 0.0}
STEPS = {"schedule": "steps", "label_smoothing": 0.0}
#: As the papers and their published code have them, written out once more.
PAPERS: dict[str, dict[str, Any]] = {
    # 000-G50: StepLR every 12 of 50 epochs, which makes four drops; weight decay on weights alone.
    "godfrey": {
        **STILL, **STEPS, "optimizer": "adam", "rate": 0.001, "epochs": 50, "batch": 32, "milestones": (12, 24, 36, 48),
        "gamma": 0.5, "weight_decay": 1e-4, "decay": "weights", "shift": 2, "flip": True, "normalise": "data",
    },
    # 001-C32
    "csiszarik": {
        **STILL, **STEPS, "optimizer": "sgd", "rate": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4,
        "decay": "all", "epochs": 300, "batch": 128, "milestones": (100, 200), "gamma": 0.1, "crop": 4, "flip": True,
    },
    # 003-F15: the published code crops and does not normalise; the paper names the flip alone.
    "chen": {
        **STILL, **STEPS, "optimizer": "sgd", "rate": 0.1, "momentum": 0.9, "nesterov": False, "weight_decay": 1e-4,
        "decay": "all", "epochs": 150, "batch": 128, "milestones": (80, 120), "gamma": 0.1, "crop": 4, "flip": True,
        "normalise": "unit",
    },
    "chen-printed": {
        **STILL, **STEPS, "optimizer": "sgd", "rate": 0.1, "momentum": 0.9, "weight_decay": 1e-4, "epochs": 150,
        "batch": 128, "milestones": (80, 120), "gamma": 0.1, "flip": True, "normalise": "unit",
    },
    # 004-L03: networks split at epoch 5; no augmentation.
    "zhou": {
        **STILL, **STEPS, "optimizer": "sgd", "rate": 0.1, "momentum": 0.9, "nesterov": False, "weight_decay": 1e-4,
        "epochs": 160, "batch": 128, "milestones": (80, 120), "gamma": 0.1, "spawn": 5,
    },
    "zhou-independent": {
        **STILL, **STEPS, "optimizer": "sgd", "rate": 0.01, "momentum": 0.9, "weight_decay": 5e-4, "epochs": 200,
        "batch": 128, "spawn": 0,
    },
    "fast": {
        **STILL, "optimizer": "sgd", "nesterov": True, "momentum": 0.9, "schedule": "one-cycle", "epochs": 10,
        "batch": 128, "shift": 2, "flip": True,
    },
    "plain": {**STILL, "optimizer": "sgd", "schedule": "one-cycle", "epochs": 10, "batch": 128},
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
        ({"optimizer": "lion"}, r"asks for optimizer='lion'; it is one of sgd, adam, adamw\."),
        ({"schedule": "sine"}, r"asks for schedule='sine'; it is one of steps, cosine, one-cycle\."),
        ({"decay": "bias"}, r"asks for decay='bias'; it is one of all, weights\."),
        ({"normalise": "none"}, r"asks for normalise='none'; it is one of data, unit\."),
        ({"epochs": 0}, r"asks for epochs=0; give a whole number, 1 or more"),
        ({"rate": -1.0}, r"asks for rate=-1\.0; give a number, 0 or more"),
        ({"rate": float("nan")}, r"asks for rate=nan; give a number, 0 or more"),
        ({"batch": 0}, r"asks for batch=0; give a whole number, 1 or more"),
        ({"spawn": 50}, r"splits after epoch 50 of 50; split in between"),
        ({"spawn": -1}, r"asks for spawn=-1; give a whole number, 0 or more"),
        ({"crop": 1}, r"asks for both shift and crop; each translates the image, so choose one"),
        ({"epohcs": 3, "bath": 1}, r"was asked for bath, epohcs; its entries are optimizer, rate, epochs, batch, mom"),
    ],
)
def test_errors_say_what_to_do(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        recipe("godfrey", **changes)


def test_entries_of_a_wrong_kind() -> None:
    """In a process of its own: here, every call is checked against its annotations before the recipe can."""
    code = """
from intertwine.errors import InputError
from intertwine.zoo.recipe import recipe
for changes in ({"epochs": "3"}, {"milestones": 5}, {"milestones": ["5"]}, {"flip": "no"}):
    try:
        recipe("godfrey", **changes)
    except InputError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "The recipe asks for epochs='3'; give a whole number, 1 or more.",
        "The recipe asks for milestones=5; give epochs, such as [80, 120].",
        "The recipe asks for milestones=('5',); give epochs, such as [80, 120].",
        "The recipe asks for flip='no'; give True or False.",
    ]


def test_a_recipe_nobody_knows() -> None:
    with pytest.raises(
        InputError, match=r"no recipe 'godfry'\. Did you mean godfrey.*\? The names are godfrey, .*fast"
    ):
        recipe("godfry")
    with pytest.raises(InputError, match=r"no recipe 'xyz'\. The names are godfrey, "):
        recipe("xyz")


def test_plain_data_with_an_entry_nobody_knows() -> None:
    with pytest.raises(InputError, match=r"A recipe has no entry colour, speed; see intertwine\.zoo\.Recipe"):
        Recipe.from_dict({**RECIPES["fast"].to_dict(), "speed": 1, "colour": 2})
