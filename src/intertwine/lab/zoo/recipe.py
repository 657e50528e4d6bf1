"""Recipes: how a network is trained, as plain data, with those of the papers by name; and lists of seeds as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from math import ceil, cos, inf, pi
from numbers import Integral, Real
from typing import Any

from intertwine.errors import InputError, unknown_name

OPTIMIZERS = ("sgd", "adam", "adamw")
SCHEDULES = ("steps", "cosine", "one-cycle")
#: Integer entries with their minimum, then entries that may be any number of at least 0.
COUNTS = {"epochs": 1, "batch": 1, "shift": 0, "crop": 0, "spawn": 0, "spawn_seed": 0}
NUMBERS = ("rate", "momentum", "weight_decay", "gamma", "warmup", "label_smoothing", "mixup", "cutmix")
FLAGS = ("nesterov", "flip")
#: The largest number of seeds in one list.
MOST_SEEDS = 1_000_000


@dataclass(frozen=True)
class Recipe:
    """How to train a network. A recipe is plain data and is stored in the manifest of every zoo.

    Attributes:
        optimizer: "sgd", "adam" or "adamw". rate: the learning rate at the start (of a one-cycle: at its peak).
        weight_decay: added to the gradient (adamw: to the step), of all parameters or, with `decay="weights"`, of all
            but biases and normalisation.
        schedule: "steps" multiplies the rate by `gamma` before each epoch of `milestones`; "cosine" decays it to zero;
            "one-cycle" decays it to zero linearly. Both increase it linearly in the first `warmup` epochs.
        shift: translate by up to so many pixels and fill with the mean colour. crop: the same, filled with black.
        flip: mirror an image with probability 1/2. mixup, cutmix: the parameter of the Beta distribution, 0 for none;
            with both, each batch gets one of them.
        normalise: "data": (pixel - mean) / std of the data set; "unit": pixel / 255.
        spawn: the networks of a zoo share the initial weights and this many first epochs of the seed `spawn_seed`, and
            then continue with their own noise.
    """

    name: str
    optimizer: str
    rate: float
    epochs: int
    batch: int
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    decay: str = "all"
    schedule: str = "steps"
    milestones: tuple[int, ...] = ()
    gamma: float = 0.1
    warmup: float = 0.0
    label_smoothing: float = 0.0
    shift: int = 0
    crop: int = 0
    flip: bool = False
    mixup: float = 0.0
    cutmix: float = 0.0
    normalise: str = "data"
    spawn: int = 0
    spawn_seed: int = 0
    source: str = ""

    def __post_init__(self) -> None:
        choices = {"optimizer": OPTIMIZERS, "schedule": SCHEDULES, "decay": ("all", "weights")}
        choices["normalise"] = ("data", "unit")
        for field, allowed in choices.items():
            if getattr(self, field) not in allowed:
                raise InputError(unknown_name(field, getattr(self, field), allowed))
        for field, least in COUNTS.items():
            if not isinstance(count := getattr(self, field), Integral) or count < least:
                raise InputError(f"{field} must be an integer of at least {least}, but is {count!r}.")
        for field in NUMBERS:
            if not isinstance(number := getattr(self, field), Real) or not 0 <= float(number) < inf:
                raise InputError(f"{field} must be a number of at least 0, but is {number!r}.")
        for field in FLAGS:
            if not isinstance(flag := getattr(self, field), bool):
                raise InputError(f"{field} must be True or False, but is {flag!r}.")
        if not isinstance(self.milestones, tuple) or not all(isinstance(m, Integral) for m in self.milestones):
            raise InputError(f"milestones must be a list of epochs such as [80, 120], but is {self.milestones!r}.")
        if self.spawn and not 0 < self.spawn < self.epochs:
            raise InputError(f"spawn must be below the number of epochs, {self.epochs}, but is {self.spawn}.")
        if self.shift and self.crop:
            raise InputError("shift and crop are both set, but each of them translates the image. Choose one.")

    def rate_at(self, step: int, steps_per_epoch: int) -> float:
        """The learning rate of one step."""
        epoch = step / steps_per_epoch
        if self.schedule == "steps":
            return self.rate * self.gamma ** sum(step >= m * steps_per_epoch for m in self.milestones)
        if epoch < self.warmup:
            return self.rate * (step + 1) / ceil(self.warmup * steps_per_epoch)
        left = (self.epochs * steps_per_epoch - step) / ((self.epochs - self.warmup) * steps_per_epoch)
        return self.rate * (left if self.schedule == "one-cycle" else (1 - cos(pi * left)) / 2)

    def to_dict(self) -> dict[str, Any]:
        """The recipe as plain data."""
        return asdict(self) | {"milestones": list(self.milestones)}

    @classmethod
    def from_dict(cls, entries: Mapping[str, Any]) -> Recipe:
        """A recipe from the output of `to_dict`."""
        unknown = sorted(set(entries) - {field.name for field in fields(cls)})
        if unknown:
            raise InputError(unknown_name("entry of a recipe", unknown[0], [field.name for field in fields(cls)]))
        values: dict[str, Any] = {**entries, "milestones": tuple(entries.get("milestones", ()))}
        return cls(**values)


_GODFREY = Recipe(
    "godfrey", "adam", 1e-3, epochs=50, batch=32, weight_decay=1e-4, decay="weights", milestones=(12, 24, 36, 48),
    gamma=0.5, shift=2, flip=True, source="Godfrey et al. 2022 and its published code",
)  # fmt: skip
_CSISZARIK = Recipe(
    "csiszarik", "sgd", 0.1, epochs=300, batch=128, momentum=0.9, nesterov=True, weight_decay=1e-4,
    milestones=(100, 200), crop=4, flip=True, source="Csiszárik et al. 2021 and its published code",
)  # fmt: skip
_CHEN = Recipe(
    "chen", "sgd", 0.1, epochs=150, batch=128, momentum=0.9, weight_decay=1e-4, milestones=(80, 120), crop=4,
    flip=True, normalise="unit", source="Chen et al. 2024: its published code (the paper names the flip alone)",
)  # fmt: skip
_ZHOU = Recipe(
    "zhou", "sgd", 0.1, epochs=160, batch=128, momentum=0.9, weight_decay=1e-4, milestones=(80, 120), spawn=5,
    source="Zhou et al. 2023, spawning, as in its published code",
)  # fmt: skip
RECIPES = {
    recipe.name: recipe
    for recipe in (
        _GODFREY,
        Recipe(
            "godfrey-cct", "adamw", 55e-5, epochs=300, batch=128, weight_decay=6e-2, decay="weights",
            schedule="cosine", warmup=10.0, label_smoothing=0.1, crop=4, flip=True, mixup=0.8, cutmix=1.0,
            source="Godfrey et al. 2022, appendix on transformers; epochs and warm-up are ours",
        ),
        _CSISZARIK,
        _CHEN,
        replace(_CHEN, name="chen-printed", crop=0, source="Chen et al. 2024 as printed: flips alone"),
        _ZHOU,
        replace(
            _ZHOU, name="zhou-independent", rate=0.01, epochs=200, weight_decay=5e-4, milestones=(80, 120), spawn=0,
            source="Zhou et al. 2023, independent training, as in its published code",
        ),
        Recipe(
            "fast", "sgd", 0.2, epochs=10, batch=128, momentum=0.9, nesterov=True, weight_decay=5e-4,
            schedule="one-cycle", warmup=2.0, label_smoothing=0.1, shift=2, flip=True, source="a short modern recipe",
        ),
        Recipe(
            "plain", "sgd", 0.1, epochs=10, batch=128, momentum=0.9, nesterov=True, weight_decay=5e-4,
            schedule="one-cycle", warmup=2.0, source="the same without augmentation, for digits and the like",
        ),
    )
}  # fmt: skip


def recipe(which: str | Recipe, **changes: Any) -> Recipe:
    """A recipe by name or as given, with some of its entries changed.

    Milestones, warm-up and spawn keep their share of the training when only `epochs` changes.

    Example:
        >>> recipe("godfrey").milestones
        (12, 24, 36, 48)
        >>> recipe("godfrey", epochs=25).milestones
        (6, 12, 18, 24)
    """
    if isinstance(which, str):
        if which not in RECIPES:
            raise InputError(unknown_name("recipe", which, RECIPES))
        which = RECIPES[which]
    changes = {key: value for key, value in changes.items() if value is not None}
    known = [field.name for field in fields(Recipe)]
    for name in changes:
        if name not in known:
            raise InputError(unknown_name("entry of a recipe", name, [n for n in known if n not in ("name", "source")]))
    epochs = changes.get("epochs", which.epochs)
    share = epochs / which.epochs if isinstance(epochs, int) else 1  # other types are refused by Recipe
    if share != 1:
        scaled: dict[str, Any] = {
            "milestones": tuple(max(1, round(m * share)) for m in which.milestones),
            "warmup": which.warmup * share,
            "spawn": max(1, round(which.spawn * share)) if which.spawn else 0,
        }
        changes = scaled | changes
    if isinstance(changes.get("milestones"), list):
        changes["milestones"] = tuple(changes["milestones"])
    return replace(which, **changes)


def seeds(text: str) -> list[int]:
    """Seeds as users write them: `0:32` (without 32), `7`, or several of these separated by commas.

    >>> seeds("0:3,7")
    [0, 1, 2, 7]
    """
    found: list[int] = []
    advice = "Write 0:32 for 32 seeds from 0, or 3,5,8."
    for part in text.split(","):
        first, colon, last = part.partition(":")
        try:
            new = range(int(first or 0), int(last)) if colon else [int(part)]
        except ValueError as error:
            raise InputError(f"The seeds {text!r} are not numbers ({error}). {advice}") from error
        if len(new) + len(found) > MOST_SEEDS:
            raise InputError(f"The seeds {text!r} are more than {MOST_SEEDS:,}. {advice}")
        found += new
    if not found:
        raise InputError(f"The seeds {text!r} are an empty range: A:B runs from A to below B. {advice}")
    return found
