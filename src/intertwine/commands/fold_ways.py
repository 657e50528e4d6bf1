"""The ways in which `intertwine fold` makes a network smaller, and which options go with each."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from intertwine.commands.networks import Images, need_data, set_apart
from intertwine.commands.progress import Tell
from intertwine.errors import InputError
from intertwine.fold.activations import fold_activations
from intertwine.fold.budget import fold_to
from intertwine.fold.fold import fold, fold_groups
from intertwine.fold.folded import Fold
from intertwine.fold.kmeans import fold_kmeans
from intertwine.fold.options import CHOICES, PAPER_CODE, PRINTED, Options
from intertwine.fold.widths import check_share
from intertwine.models import Loaded
from intertwine.stitch.passes import accuracy_of
from intertwine.zoo.datasets.dataset import Batches

PRESETS: Mapping[str | None, Mapping[str, Any]] = {None: {}, "printed": PRINTED, "paper-code": PAPER_CODE}
#: Ways by name → the options that go with them, and what asks for the way.
GOES_WITH = {
    "iterative": (("method", "beta", *CHOICES, "bias", "max_ratio", "preset"), "folding by --beta"),
    "sized": (("parameters", "floor", "how", "with_data"), "--parameters or --floor"),
    "kmeans": (("method", "widths"), "--method kmeans"),
    "activations": (("method", "beta", "widths"), "--method activations"),
}
#: How options are written that are not written as they are called.
FLAGS = {"bias": "--no-bias"}


@dataclass(frozen=True, eq=False)
class Folded:
    """A folding. `seen`: training images that it, or a reset of statistics, may look at.

    `reset`: whether its BatchNorm statistics were reset already. `held_out`: how many images an accuracy was kept on,
    and the accuracies on them; None where there was none to keep.
    """

    fold: Fold
    seen: Batches | None
    reset: bool = False
    held_out: Mapping[str, float | int | None] | None = None


@dataclass(frozen=True)
class Way:
    """What was asked for: `settings` as they are told, and how to carry it out."""

    settings: Mapping[str, Any]
    carry_out: Callable[[Loaded, Images | None, Tell], Folded]

    def __call__(self, loaded: Loaded, images: Images | None, tell: Tell) -> Folded:
        return self.carry_out(loaded, images, tell)


def way_of(options: Namespace) -> Way:
    """The way that the options ask for; those that do not go together, or need data, are refused."""
    sized = options.parameters is not None or options.floor is not None
    name = "sized" if sized else options.method or "iterative"
    _refuse_others(options, name)
    return {"iterative": _iterative, "sized": _sized, "kmeans": _kmeans, "activations": _activations}[name](options)


def _refuse_others(options: Namespace, way: str) -> None:
    allowed, asked_by = GOES_WITH[way]
    every = dict.fromkeys(option for names, _ in GOES_WITH.values() for option in names)
    for option in every:
        if getattr(options, option) is not None and option not in allowed:
            others = " and ".join(words for names, words in GOES_WITH.values() if option in names)
            flag = FLAGS.get(option, f"--{option.replace('_', '-')}")
            raise InputError(f"{flag} was given beside {asked_by}; it goes with {others}. Leave one of them out.")


# -- one function per way ----------------------------------------------------------------------------------------------


def _iterative(options: Namespace) -> Way:
    """The options of `fold`: those of the preset, and over them those that were written."""
    names = (*CHOICES, "bias", "max_ratio")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    beta = per_layer("--beta", options.beta or ["0.1"], float)
    settings: dict[str, Any] = {"beta": beta, **PRESETS[options.preset], **given}
    Options(**settings)

    def carry_out(loaded: Loaded, images: Images | None, tell: Tell) -> Folded:
        return Folded(fold(loaded.model, *loaded.args, **settings, **loaded.kwargs), _train(images))

    return Way(settings, carry_out)


def _sized(options: Namespace) -> Way:
    """To a number of parameters, or to an accuracy on training images that are set apart."""
    how, floor = options.how or "absorb", options.floor
    if options.parameters is not None and floor is not None:
        raise InputError("--parameters and --floor were both given. Leave one of them out: either decides the size.")
    if options.with_data and how == "merge":
        raise InputError("--with-data was given beside --how merge, which compares weights alone. Leave it out.")
    if options.data is None:
        if floor is not None:
            need_data("--floor is an accuracy on images")
        if options.with_data:
            need_data("--with-data looks at training images")
    reset = bool(options.reset) and floor is not None  # the search then wants the accuracy with statistics reset
    looks = bool(options.with_data) or (reset and how == "absorb")
    asked = {"parameters": options.parameters} if floor is None else {"floor": floor}

    def carry_out(loaded: Loaded, images: Images | None, tell: Tell) -> Folded:
        seen, held = (_train(images), None) if floor is None or images is None else set_apart(images)
        found = fold_to(
            loaded.model, *loaded.args, **asked, held_out=held, how=how, data=seen if looks or reset else None,
            statistics="reset" if reset else "keep", progress=tell, **loaded.kwargs,
        )  # fmt: skip
        if held is None:
            return Folded(found, seen)
        accuracies = {name: accuracy_of(m, held) for name, m in (("before", loaded.model), ("after", found.model))}
        return Folded(found, seen, reset, {"images": len(held.dataset.test_labels), **accuracies})

    return Way({**asked, "how": how, "with_data": looks}, carry_out)


def _kmeans(options: Namespace) -> Way:
    if options.widths is None:
        raise InputError("--method kmeans needs to know how many features stay. Add --widths 0.5, or LAYER=NUMBER.")
    widths = _widths(options)

    def carry_out(loaded: Loaded, images: Images | None, tell: Tell) -> Folded:
        return Folded(fold_kmeans(loaded.model, *loaded.args, widths=widths, **loaded.kwargs), _train(images))

    return Way({"method": "kmeans", "widths": widths}, carry_out)


def _activations(options: Namespace) -> Way:
    if options.data is None:
        need_data("--method activations compares what features give on training images")
    if options.beta and options.widths:
        raise InputError("--beta and --widths were both given. Leave one of them out: either says when to stop.")
    if options.widths:
        limit = {"widths": _widths(options)}
    else:
        limit = {"beta": per_layer("--beta", options.beta or ["0.1"], float)}
        Options(**limit)

    def carry_out(loaded: Loaded, images: Images | None, tell: Tell) -> Folded:
        assert images is not None  # asked for above
        groups = fold_activations(loaded.model, images.train, **limit).groups
        # merged again on the inputs of the other ways, so that FLOPs and times are those of one image too
        return Folded(fold_groups(loaded.model, *loaded.args, groups=groups, **loaded.kwargs), images.train)

    return Way({"method": "activations", **limit}, carry_out)


def _train(images: Images | None) -> Batches | None:
    return None if images is None else images.train


# -- numbers for layers ------------------------------------------------------------------------------------------------


def per_layer(flag: str, texts: list[str], number: Callable[[str], float | int]) -> Any:
    """`0.1`, or `conv1=0.2` once for every layer.

    >>> per_layer("--beta", ["0.2"], float), per_layer("--beta", ["conv1=0.2", "conv2=0.1"], float)
    (0.2, {'conv1': 0.2, 'conv2': 0.1})
    """
    pairs = [text.rpartition("=")[::2] for text in texts]
    try:
        found = {name: number(text) if name else float(text) for name, text in pairs}
    except ValueError as error:
        of = " for one layer" if number is float else ", a whole number of features, for one layer"
        raise InputError(
            f"{flag} {' '.join(texts)} was asked for. Write a number such as 0.1, or LAYER=NUMBER{of}."
        ) from error
    if len(found) < len(texts) or ("" in found and len(found) > 1):
        raise InputError(
            f"{flag} was given {len(texts)} times ({' '.join(texts)}). Give one number for all layers, or LAYER=NUMBER "
            "once for each."
        )
    return found.get("", found)


def _widths(options: Namespace) -> Any:
    widths = per_layer("--widths", options.widths, int)
    check_share(widths)
    return widths
