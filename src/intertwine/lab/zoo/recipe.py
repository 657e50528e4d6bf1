"""Recipes: how a network is trained, by name or as data; and lists of seeds as users write them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from math import ceil, cos, inf, pi
from numbers import Integral, Real
from typing import Any

from intertwine.errors import InputError, did_you_mean

# ----------------------------------------------------------------------------------------------------
# Recipes: how a network is trained. Those of the papers by name, and a short modern one.
#
# A recipe is data: it is written into the manifest of every zoo, and two zoos of one recipe were trained alike.


OPTIMIZERS = ("sgd", "adam", "adamw")
SCHEDULES = ("steps", "cosine", "one-cycle")
#: Entries that are whole numbers, with the least that each may be; and those that are any number.
COUNTS = {"epochs": 1, "batch": 1, "shift": 0, "crop": 0, "spawn": 0, "spawn_seed": 0}
NUMBERS = ("rate", "momentum", "weight_decay", "gamma", "warmup", "label_smoothing", "mixup", "cutmix")
FLAGS = ("nesterov", "flip")


@dataclass(frozen=True)
class Recipe:
    """How to train. Numbers of pixels, rates and fractions; see `lab/zoo/augment.py` for what the augmentations do.

    Attributes:
        optimizer: "sgd", "adam" or "adamw". rate: the learning rate at the start (of a one-cycle: at its peak).
        weight_decay: added to the gradient (adamw: to the step), on all parameters or, with `decay="weights"`, not on
            biases and normalisation.
        schedule: "steps" multiplies the rate by `gamma` before each epoch of `milestones`; "cosine" lets it fall to
            zero; "one-cycle" too, in a straight line. Both let it rise in the first `warmup` epochs.
        shift: translate by up to so many pixels, filled with the mean colour. crop: the same, filled with black.
        flip: mirror every other image. mixup, cutmix: the parameter of the Beta distribution, 0 for none; where both
            are given, each batch gets one of them.
        normalise: "data": (pixel - mean) / std of the data set; "unit": pixel / 255.
        spawn: networks of one zoo share their start and their first so many epochs, those of the seed `spawn_seed`, and
            then go on with noise of their own.
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
                raise InputError(
                    f"The recipe asks for {field}={getattr(self, field)!r}; it is one of {', '.join(allowed)}."
                )
        for field, least in COUNTS.items():
            if not isinstance(count := getattr(self, field), Integral) or count < least:
                raise InputError(f"The recipe asks for {field}={count!r}; give a whole number, {least} or more.")
        for field in NUMBERS:
            if not isinstance(number := getattr(self, field), Real) or not 0 <= float(number) < inf:
                raise InputError(f"The recipe asks for {field}={number!r}; give a number, 0 or more.")
        for field in FLAGS:
            if not isinstance(chosen := getattr(self, field), bool):
                raise InputError(f"The recipe asks for {field}={chosen!r}; give True or False.")
        if not isinstance(self.milestones, tuple) or not all(isinstance(m, Integral) for m in self.milestones):
            raise InputError(f"The recipe asks for milestones={self.milestones!r}; give epochs, such as [80, 120].")
        if self.spawn and not 0 < self.spawn < self.epochs:
            raise InputError(f"The recipe splits after epoch {self.spawn} of {self.epochs}; split in between.")
        if self.shift and self.crop:
            raise InputError("The recipe asks for both shift and crop; each translates the image, so choose one.")

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
        """A recipe from plain data, as `to_dict` writes it."""
        unknown = sorted(set(entries) - {field.name for field in fields(cls)})
        if unknown:
            raise InputError(f"A recipe has no entry {', '.join(unknown)}; see intertwine.zoo.Recipe for those it has.")
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
    """A recipe by name or as it is, with some of its entries changed.

    Milestones, warm-up and split keep their share of the training when only `epochs` changes.

    Example:
        >>> recipe("godfrey").milestones
        (12, 24, 36, 48)
        >>> recipe("godfrey", epochs=25).milestones
        (6, 12, 18, 24)
    """
    if isinstance(which, str):
        if which not in RECIPES:
            raise InputError(
                f"There is no recipe {which!r}. {did_you_mean(which, RECIPES)}The names are {', '.join(RECIPES)}."
            )
        which = RECIPES[which]
    changes = {key: value for key, value in changes.items() if value is not None}
    unknown = sorted(set(changes) - {field.name for field in fields(Recipe)})
    if unknown:
        known = ", ".join(field.name for field in fields(Recipe) if field.name not in ("name", "source"))
        raise InputError(f"The recipe was asked for {', '.join(unknown)}; its entries are {known}.")
    epochs = changes.get("epochs", which.epochs)
    share = epochs / which.epochs if isinstance(epochs, int) else 1  # what is no number is refused below
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


# ----------------------------------------------------------------------------------------------------
# Seeds as users write them, on the command line and in plans.


#: Seeds in one list: more networks than anybody trains, and few enough to write down.
MOST = 1_000_000


def seeds(text: str) -> list[int]:
    """`0:32` (32 is not among them), `7`, or several of these with commas.

    >>> seeds("0:3,7")
    [0, 1, 2, 7]
    """
    found: list[int] = []
    try:
        for part in text.split(","):
            first, colon, last = part.partition(":")
            new = range(int(first or 0), int(last)) if colon else [int(part)]
            if len(new) + len(found) > MOST:
                raise ValueError(f"more than {MOST:,}")
            found += new
    except ValueError as error:
        many = f" ({error})" if "more than" in str(error) else ""
        raise InputError(
            f"The seeds {text!r} were asked for{many}. Write 0:32 for 32 seeds from 0, or 3,5,8."
        ) from error
    if not found:
        raise InputError(
            f"The seeds {text!r} were asked for, but there is none: A:B is from A to below B. Write 0:32 for 32 seeds "
            "from 0, or 3,5,8."
        )
    return found
